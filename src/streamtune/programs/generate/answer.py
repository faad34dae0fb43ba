"""Answer prompts with a trained model: as it trained, adapters on their base, quantised as it was.

A long prompt is read in chunks (:mod:`streamtune.tasks.rollout.generate`). In a conversation what was read stays: the
keys and values of the longest common beginning are used again, where the model keeps nothing else of a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.engine.hf_names import STREAMER, inside
from streamtune.errors import ArgumentError
from streamtune.models import end_tokens, load_tokenizer
from streamtune.programs.export.source import find_trained, load_trained
from streamtune.programs.generate.prompt_files import Asked, ToolPrompt
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.run.device import choose_device, prepare_libraries
from streamtune.tasks.rollout import Sampling, TransformersWriter, WritingStopped

PREFILL_CHUNK = 2048
"""Tokens of a prompt that are read at a time."""
TEMPERATURE = 0.7
"""Taken if neither the user nor the model's generation config gives one."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Settings of a model that answers."""

    checkpoint: str | None = None
    """Of a run, in place of its final model."""
    base: str | None = None
    """Of adapters, in place of the base that the run names."""
    device: str = "auto"
    dtype: str | None = None
    """Of the weights; None is what they trained in."""
    max_new_tokens: int = 512
    temperature: float | None = None
    """0 takes the likeliest token each time; None is what the model's generation config has, or 0.7."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    system: str | None = None
    """A system message before each conversation; None is the one that the recipe of a run puts there, if it does."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template; of a run those of its recipe."""
    raw: bool = False
    """Continue prompts as text, without the chat template."""
    split_special_tokens: bool = False
    """Special tokens that a prompt spells stay text; of a run as its recipe says."""

    def trained_by(self, recipe: TrainedTokenKeys) -> GenerateOptions:
        """Return the options with what a recipe gives to the chat template, where they say nothing else."""
        return replace(
            self,
            system=recipe.default_system if self.system is None else self.system,
            variables={**recipe.chat_template_kwargs, **self.variables},
            split_special_tokens=recipe.split_special_tokens,
        )


@dataclass(frozen=True)
class Answer:
    """The text that follows a prompt, and what it took."""

    text: str
    prompt_tokens: int
    read_tokens: int
    """Tokens of the prompt that were computed: the others were known from before."""
    tokens: int
    finished: bool
    """True if the model ended it; False where the longest length or the user did."""
    stopped: bool
    """True if the user did."""
    prompt_seconds: float
    """Until the first token was there."""
    seconds: float
    """For all tokens after the first."""

    @property
    def rate(self) -> float:
        """Tokens a second, of those after the first."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else 0.0


class _Printer(inside(STREAMER)):  # type: ignore[misc]
    """Hands on the text of tokens as they come, and counts them.

    A character may be made of several tokens: text is handed on when it is whole.
    """

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.written: list[int] = []
        self.first = self.last = time.perf_counter()
        self._is_prompt = True
        self._line: list[int] = []
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """See ``transformers``: the prompt comes first, then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.last = time.perf_counter()
        self.first = self.first if self.written else self.last
        self.written += value.reshape(-1).tolist()
        self._line += value.reshape(-1).tolist()
        self._hand_on(whole=False)

    def end(self) -> None:
        """Hand on what is left."""
        self._hand_on(whole=True)
        self._is_prompt = True

    def _hand_on(self, *, whole: bool) -> None:
        text = self.tokenizer.decode(self._line, skip_special_tokens=True)
        if not whole and (text.endswith("\ufffd") or not text.startswith(self._shown)):
            return
        if new := text[len(self._shown) :]:
            self.show(new)
        self._shown = text
        if text.endswith("\n"):  # what comes later does not change how a line is spelled
            self._line, self._shown = [], ""


class _ReusingWriter(TransformersWriter):
    """A writer that keeps what it has read, for a prompt that begins in the same way."""

    cache: DynamicCache | None = None
    known: list[int] = []  # noqa: RUF012 (replaced, never changed)
    read_tokens = 0
    reading: Callable[[int, int], None] = staticmethod(lambda done, total: None)

    def _read(self, ids_PT: Tensor, mask_PT: Tensor, cache: DynamicCache | None = None, done: int = 0) -> DynamicCache:
        ids = ids_PT[0].tolist()
        same = 0
        if self.cache is not None and self._can_cut(self.cache):
            cache = self.cache
            known = self.known[: cache.get_seq_length()]
            while same < min(len(known), len(ids) - 1) and known[same] == ids[same]:
                same += 1
            if same < cache.get_seq_length():
                cache.crop(same - cache.get_seq_length())
        self.cache, self.known = None, ids
        self.read_tokens = len(ids) - same
        self.cache = super()._read(ids_PT, mask_PT, cache if same else None, same)
        return self.cache

    @staticmethod
    def _can_cut(cache: DynamicCache) -> bool:
        """Return True if the last tokens can be taken off: a layer with a window has dropped the first ones."""
        return all(not getattr(layer, "is_sliding", False) for layer in cache.layers)

    def on_read(self, done: int, total: int) -> None:
        self.reading(done, total)


class PromptEncoder:
    """Renders prompts as training does.

    Args:
        tokenizer: The model's tokenizer, with or without a chat template.
        options: Say how.
    """

    def __init__(self, tokenizer: Any, options: GenerateOptions) -> None:
        self._templated, self._raw = bool(tokenizer.chat_template) and not options.raw, options.raw
        chat = data.ChatOptions(
            default_system=options.system,
            variables=options.variables,
            split_special_tokens=options.split_special_tokens,
        )
        self._render = data.PromptRenderer(tokenizer, chat=chat)

    def __call__(self, asked: Asked) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ArgumentError: Messages, and no chat template; or a prompt without tokens.
            DataError: The chat template refuses the messages.
        """
        if not self._templated and not isinstance(asked, str):
            raise ArgumentError(
                "messages need a chat template, and the tokenizer of this model has none"
                if not self._raw
                else "--raw continues text, and these are messages",
                where="--file",
                mend="give the prompt as text",
            )
        if not asked:
            raise ArgumentError("the prompt has no tokens", where="--prompt", mend="write something")
        if isinstance(asked, str):
            given: str | list[dict[str, Any]] = [{"role": "user", "content": asked}] if self._templated else asked
            return self._render(given, None, "--prompt")
        if isinstance(asked, ToolPrompt):
            return self._render(asked.messages, asked.tools, "--file", asked.variables)
        return self._render(asked, None, "--file")


class Answerer:
    """A model that answers, from :func:`load_answerer`.

    Attributes:
        stopping: Set to True, from a signal handler, to end the answer that is being written.
    """

    def __init__(self, model: Any, tokenizer: Any, options: GenerateOptions, description: str) -> None:
        self.model, self.tokenizer, self.options, self.description = model, tokenizer, options, description
        self.stopping = False
        self._encoder = PromptEncoder(tokenizer, options)
        base = base_of(model)
        self._writer = _ReusingWriter(
            model,
            end_token_ids=end_tokens(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            prefill_chunk_size=PREFILL_CHUNK,
            max_rows=1,
            stop=lambda: self.stopping,
        )
        self.sampling = _sampling(base.generation_config, options)
        self.vocabulary: int = base.get_input_embeddings().weight.shape[0]
        self.positions = models.position_limit(base.config)
        self.ends = _ends(base, self.positions)
        """True if there is no position after those."""
        torch.manual_seed(options.seed)

    def encode(self, asked: Asked) -> list[int]:
        """Return the token ids of a prompt, rendered by the chat template where there is one.

        Raises:
            ArgumentError: Messages, and no chat template; or a prompt without tokens.
        """
        ids = self._encoder(asked)
        if max(ids) >= self.vocabulary:
            raise ArgumentError(
                f"the tokenizer writes token {max(ids):,}, and the model knows {self.vocabulary:,}",
                where="MODEL",
                mend="use the tokenizer that belongs to the model",
            )
        return ids

    def answer(
        self,
        asked: Asked,
        show: Callable[[str], None] = lambda text: None,
        reading: Callable[[int, int], None] = lambda done, total: None,
    ) -> Answer:
        """Answer a prompt.

        Args:
            asked: The prompt.
            show: Called with each piece of text as it comes.
            reading: Called while a prompt is read, with the tokens that are done and all of them.

        Raises:
            ArgumentError: See :meth:`encode`.
        """
        ids = self.encode(asked)
        sampling = self._sampling_after(len(ids))
        printer = _Printer(self.tokenizer, show)
        writer = self._writer
        writer.streamer, writer.reading, writer.read_tokens = printer, reading, len(ids)
        self.stopping = False
        started = time.perf_counter()
        try:
            [[completion]] = writer.write([ids], 1, sampling)
            finished, stopped = not completion.truncated, False
        except WritingStopped:
            printer.end()
            finished, stopped = False, True
        writer.known = [*ids, *printer.written]
        return Answer(
            text=self.tokenizer.decode(printer.written, skip_special_tokens=True),
            prompt_tokens=len(ids),
            read_tokens=writer.read_tokens,
            tokens=len(printer.written),
            finished=finished,
            stopped=stopped,
            prompt_seconds=printer.first - started if printer.written else time.perf_counter() - started,
            seconds=printer.last - printer.first,
        )

    def _sampling_after(self, length: int) -> Sampling:
        """Return the settings for an answer after a prompt of ``length`` tokens, which ends where the positions end.

        Raises:
            ArgumentError: The model has a table of positions, and the prompt fills it.
        """
        if not self.ends or not isinstance(self.positions, int):
            return self.sampling
        if length >= self.positions:
            raise ArgumentError(
                f"the prompt has {length:,} tokens; the model's table of positions ends at {self.positions:,}",
                where="--prompt",
                mend="shorten it, or /reset the conversation",
            )
        return replace(
            self.sampling, max_completion_length=min(self.sampling.max_completion_length, self.positions - length)
        )

    def forget(self) -> None:
        """Drop what was read: the next conversation begins anew."""
        self._writer.cache, self._writer.known = None, []

    def check_length(self, asked: Sequence[Asked]) -> str | None:
        """Return a warning where a prompt is longer than the positions that the model was made for, else None."""
        longest = max(len(self.encode(each)) for each in asked)
        if (
            self.ends
            or not isinstance(self.positions, int)
            or longest + self.sampling.max_completion_length <= self.positions
        ):
            return None
        return (
            f"prompt and answer may have {longest + self.sampling.max_completion_length:,} tokens; the model was made "
            f"for {self.positions:,} (max_position_embeddings)"
        )


def _ends(base: Any, positions: Any) -> bool:
    """Return True if a model looks its positions up in a table, which ends."""
    try:
        models.check_positions(base, positions + 1 if isinstance(positions, int) else 0, training=False)
    except ArgumentError:
        return True
    return False


def _sampling(configured: Any, options: GenerateOptions) -> Sampling:
    """Return how tokens are drawn: as asked, else as the model's generation config says where it draws."""
    draws = bool(getattr(configured, "do_sample", False))

    def chosen(asked: Any, name: str, otherwise: Any) -> Any:
        found = getattr(configured, name, None) if draws else None
        return asked if asked is not None else found if found is not None else otherwise

    return Sampling(
        max_completion_length=options.max_new_tokens,
        temperature=float(chosen(options.temperature, "temperature", TEMPERATURE)),
        top_p=float(chosen(options.top_p, "top_p", 1.0)),
        top_k=int(chosen(options.top_k, "top_k", 0)),
    )


def load_answerer(
    given: str,
    options: GenerateOptions,
    *,
    notify: Callable[[str], None] = lambda text: None,
    doing: Callable[[str], AbstractContextManager[Any]] = lambda text: nullcontext(),
) -> Answerer:
    """Load the model of a run, a checkpoint, a folder or the hub.

    Args:
        given: Its name.
        options: See there.
        notify: Called with messages for the user.
        doing: Returns a context that shows a message while something takes long.

    Raises:
        ArgumentError: It cannot be loaded.
    """
    device = choose_device(options.device)
    prepare_libraries(device)
    with doing("looking for the model"):
        trained = find_trained(given, checkpoint=options.checkpoint, hub=True, notify=notify)
    with doing("loading the model"):
        model, tokenizer = load_trained(
            trained,
            device=str(device),
            base=options.base,
            dtype=options.dtype,
            quantization=trained.quantization,
            trust_remote_code=trained.trusts_code,
            notify=notify,
        )
    if trained.loaded is not None:
        options = options.trained_by(trained.loaded.recipe)
    base = base_of(model)
    kind = f", linear layers in {trained.quantization}" if trained.quantization else ""
    adapters = ", with adapters" if trained.adapters else ""
    dtype = str(base.dtype).removeprefix("torch.")
    description = f"{trained.describe()}: {type(base).__name__}{adapters}, {dtype}{kind} on {device}"
    return Answerer(model, tokenizer, options, description)


def check_vllm() -> None:
    """Refuse where vLLM is not installed.

    Raises:
        ArgumentError: It is not.
    """
    if find_spec("vllm") is None:
        raise ArgumentError(
            "--vllm needs vLLM, which is not installed",
            where="--vllm",
            mend="pip install vllm, or leave --vllm out: transformers writes the answer then",
        )


def answer_with_vllm(given: str, asked: Sequence[Asked], options: GenerateOptions) -> list[dict[str, Any]]:
    """Answer prompts by vLLM, all of them together.

    Args:
        given: A run or a model with all of its weights.
        asked: The prompts.
        options: How to answer.

    Returns:
        For each prompt ``text``, ``prompt_tokens``, ``tokens`` and ``finished``.

    Raises:
        ArgumentError: vLLM is not installed, or the model holds adapters.
    """
    check_vllm()
    trained = find_trained(given, checkpoint=options.checkpoint, hub=True)
    if trained.adapters:
        raise ArgumentError(
            f"{trained.folder} holds adapters, and vLLM gets whole models here",
            where="--vllm",
            mend=f"`streamtune export {given} OUT` merges them; then `streamtune generate OUT --vllm`",
        )
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = vllm.LLM(model=trained.folder, dtype=options.dtype or "auto", seed=options.seed)
    settings = engine.get_default_sampling_params()
    settings.max_tokens = options.max_new_tokens
    for name in ("temperature", "top_p", "top_k"):
        if getattr(options, name) is not None:
            setattr(settings, name, getattr(options, name))
    if trained.loaded is not None:
        options = options.trained_by(trained.loaded.recipe)
    encode = PromptEncoder(load_tokenizer(trained.folder, trust_remote_code=trained.trusts_code), options)
    outputs: Any = engine.generate([{"prompt_token_ids": encode(each)} for each in asked], settings)
    return [
        {
            "text": output.outputs[0].text,
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": len(output.outputs[0].token_ids),
            "finished": output.outputs[0].finish_reason == "stop",
        }
        for output in outputs
    ]
