"""Generate text with a trained model, loaded as in training: adapters on their base, with the same quantisation.

Long prompts are prefilled in chunks. In a conversation, the KV cache of the prefix that two successive prompts share
is reused, if no layer has a sliding window or a recurrent state. The cache of such layers cannot be truncated. Keys
with rotary frequencies of another length (``dynamic``, ``longrope``) are not reused either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.engine.hf_names import STREAMER, hf_internal
from streamtune.errors import ArgumentError
from streamtune.models import all_eos_token_ids, load_tokenizer
from streamtune.programs.export.source import TrainedModel, find_trained, load_trained
from streamtune.programs.generate.prompt_files import Prompt, ToolPrompt
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.run.device import choose_device, prepare_libraries
from streamtune.tasks.rollout import GenerationStopped, Sampling, TransformersGenerator
from streamtune.tasks.task import image_folder

PREFILL_CHUNK = 2048
"""Number of prompt tokens that are prefilled at a time."""
TEMPERATURE = 0.7
"""Sampling temperature if neither the user nor the model's generation config sets one."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of text generation."""

    checkpoint: str | None = None
    """Checkpoint of the run to load; None means its final model."""
    base: str | None = None
    """Base model of the adapters; None means the base model that the run records."""
    device: str = "auto"
    dtype: str | None = None
    """Dtype of the weights. None: the dtype of the stored weights, or of the adapters' base model in training."""
    max_new_tokens: int = 512
    temperature: float | None = None
    """Sampling temperature; 0 is greedy decoding. None means the generation config's temperature, or 0.7."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    system: str | None = None
    """System message; None means the default of the run's recipe."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    raw: bool = False
    """True to continue prompts as plain text, without the chat template."""
    split_special_tokens: bool = False
    """True to encode special tokens in a prompt as plain text."""

    def with_recipe_defaults(self, recipe: TrainedTokenKeys) -> GenerateOptions:
        """Return the options with the recipe's chat settings; a system message and variables that are set are kept."""
        return replace(
            self,
            system=recipe.default_system if self.system is None else self.system,
            variables={**recipe.chat_template_kwargs, **self.variables},
            split_special_tokens=recipe.split_special_tokens,
        )


@dataclass(frozen=True)
class Answer:
    """A generated answer, with token counts and times."""

    text: str
    prompt_tokens: int
    read_tokens: int
    """Number of prompt tokens that were prefilled; the other prompt tokens were in the KV cache."""
    tokens: int
    finished: bool
    """True if the model generated an end token; False if the answer was truncated or stopped."""
    stopped: bool
    """True if the user stopped the answer."""
    prompt_seconds: float
    """Seconds until the first token."""
    seconds: float
    """Seconds from the first to the last token."""

    @property
    def rate(self) -> float:
        """Generated tokens per second, after the first token; 0 if unknown."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else 0.0


class _Printer(hf_internal(STREAMER)):  # type: ignore[misc]
    """Streamer that shows generated text; a character may need several tokens, and is shown when complete."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        self.tokenizer, self.show = tokenizer, show
        self.written: list[int] = []
        self.first = self.last = time.perf_counter()
        self._is_prompt = True
        self._line: list[int] = []
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Receive the next token ids; transformers passes the prompt first, then each generated token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.last = time.perf_counter()
        self.first = self.first if self.written else self.last
        self.written += value.reshape(-1).tolist()
        self._line += value.reshape(-1).tolist()
        self._show_complete(is_end=False)

    def end(self) -> None:
        self._show_complete(is_end=True)
        self._is_prompt = True

    def _show_complete(self, *, is_end: bool) -> None:
        text = self.tokenizer.decode(self._line, skip_special_tokens=True)
        if not is_end and (text.endswith("\ufffd") or not text.startswith(self._shown)):
            return
        if new := text[len(self._shown) :]:
            self.show(new)
        self._shown = text
        if text.endswith("\n"):  # later tokens do not change the spelling of a complete line
            # The line's end stays: SentencePiece removes a space at the beginning of a decoded text.
            self._line = self._line[-1:]
            self._shown = self.tokenizer.decode(self._line, skip_special_tokens=True)


class _ReusingWriter(TransformersGenerator):
    """Generates completions, and reuses the KV cache of the prefix that two successive prompts share."""

    cache: DynamicCache | None = None
    known: list[int] = []  # noqa: RUF012 (replaced, never changed)
    read_tokens = 0
    reading: Callable[[int, int], None] = staticmethod(lambda done, total: None)

    def _prefill(
        self, ids_PT: Tensor, mask_PT: Tensor, cache: DynamicCache | None = None, done: int = 0
    ) -> DynamicCache:
        ids = ids_PT[0].tolist()
        same = 0
        if self.cache is not None and self._can_truncate(self.cache) and self._has_fixed_rotation(self.cache, len(ids)):
            cache = self.cache
            known = self.known[: cache.get_seq_length()]
            while same < min(len(known), len(ids) - 1) and known[same] == ids[same]:
                same += 1
            if same < cache.get_seq_length():
                cache.crop(same - cache.get_seq_length())
        self.cache, self.known = None, ids
        self.read_tokens = len(ids) - same
        self.cache = super()._prefill(ids_PT, mask_PT, cache if same else None, same)
        return self.cache

    @staticmethod
    def _can_truncate(cache: DynamicCache) -> bool:
        """Return True if no layer has a sliding window, whose cache has already dropped its first tokens."""
        return all(not getattr(layer, "is_sliding", False) for layer in cache.layers)

    def _has_fixed_rotation(self, cache: DynamicCache, length: int) -> bool:
        """Return True if a prompt of ``length`` tokens has the rotary frequencies of the keys in the cache."""
        return self.unscaled_length is None or max(length, cache.get_seq_length() + 1) <= self.unscaled_length

    def on_prefill(self, done: int, total: int) -> None:
        self.reading(done, total)


class PromptEncoder:
    """Renders and tokenizes prompts as in training."""

    def __init__(
        self, tokenizer: Any, options: GenerateOptions, load_images: Callable[[], data.ImageProcessor] | None = None
    ) -> None:
        self._load_images = load_images
        self._templated, self._raw = bool(tokenizer.chat_template) and not options.raw, options.raw
        chat = data.ChatOptions(
            default_system=options.system,
            variables=options.variables,
            split_special_tokens=options.split_special_tokens,
        )
        self._render = data.PromptRenderer(tokenizer, chat=chat)

    def __call__(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises:
            ArgumentError: Messages are given without a chat template, or the prompt is empty.
            DataError: The chat template rejects the messages.
        """
        if not self._templated and not isinstance(prompt, str):
            raise ArgumentError(
                "messages need a chat template, but this model's tokenizer has none"
                if not self._raw
                else "--raw needs plain text, found messages",
                where="--file",
                fix="give the prompt as text",
            )
        if not prompt:
            raise ArgumentError("the prompt is empty", where="--prompt", fix="write a prompt")
        if isinstance(prompt, str):
            given: str | list[dict[str, Any]] = [{"role": "user", "content": prompt}] if self._templated else prompt
            return self._render(given, None, "--prompt")
        if isinstance(prompt, ToolPrompt):
            expand = partial(self._expand, prompt, self.images) if prompt.images else None
            return self._render(prompt.messages, prompt.tools, prompt.origin, prompt.variables, expand)
        return self._render(prompt, None, "--file")

    @staticmethod
    def _expand(prompt: ToolPrompt, processor: data.ImageProcessor, text: str) -> str:
        _, images = processor.read_cells(prompt.images, prompt.origin)
        return processor.expand(text, images, prompt.origin).text

    def image_files(self, prompt: Prompt) -> list[data.ImageFile]:
        if not isinstance(prompt, ToolPrompt) or not prompt.images:
            return []
        return self.images.read_cells(prompt.images, prompt.origin)[0]

    @cached_property
    def images(self) -> data.ImageProcessor:
        """Processor of the model's images.

        Raises:
            ArgumentError: The model takes no images.
        """
        if self._load_images is None:
            raise ArgumentError(
                "this model takes no images", where="--image", fix="use a vision-language model, or give text only"
            )
        return self._load_images()


class Answerer:
    """A loaded model that answers prompts.

    Set ``stopping`` to True, such as in a signal handler, to end the current answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        options: GenerateOptions,
        description: str,
        load_images: Callable[[], data.ImageProcessor] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.options, self.description = model, tokenizer, options, description
        self.stopping = False
        self._encoder = PromptEncoder(tokenizer, options, load_images)
        base = base_of(model)
        self._writer = _ReusingWriter(
            model,
            end_token_ids=all_eos_token_ids(model, tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            prefill_chunk_size=PREFILL_CHUNK,
            max_rows=1,
            should_stop=lambda: self.stopping,
        )
        self.sampling = _sampling_settings(base.generation_config, options)
        self.vocabulary: int = base.get_input_embeddings().weight.shape[0]
        self.positions = models.position_limit(base.config)
        self.has_position_table = models.position_table_limit(base) is not None
        """True if the model has a position table, which limits the length."""
        torch.manual_seed(options.seed)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, rendered by the chat template if there is one.

        Raises:
            ArgumentError: Messages are given without a chat template, the prompt is empty, or the tokenizer does not
                belong to the model.
        """
        ids = self._encoder(prompt)
        if max(ids) >= self.vocabulary:
            raise ArgumentError(
                f"the tokenizer produces token id {max(ids):,}, but the model has {self.vocabulary:,} embeddings",
                where="MODEL",
                fix="use the tokenizer that belongs to the model",
            )
        return ids

    def answer(
        self,
        prompt: Prompt,
        show: Callable[[str], None] = lambda text: None,
        reading: Callable[[int, int], None] = lambda done, total: None,
    ) -> Answer:
        """Generate the answer to a prompt.

        Args:
            show: Called with each part of the text as it is generated.
            reading: Called during the prefill with the number of prefilled tokens and the number of all tokens.
        """
        ids = self.encode(prompt)
        sampling = self._sampling_for_prompt(len(ids))
        printer = _Printer(self.tokenizer, show)
        writer = self._writer
        writer.streamer, writer.reading, writer.read_tokens = printer, reading, len(ids)
        if images := self._encoder.image_files(prompt):
            writer.image_processor = self._encoder.images
            self.clear_cache()
        self.stopping = False
        started = time.perf_counter()
        try:
            [[completion]] = writer.write([ids], 1, sampling, [images])
            finished, stopped = not completion.truncated, False
        except GenerationStopped:
            printer.end()
            finished, stopped = False, True
        writer.known = [] if images else [*ids, *printer.written]
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

    def _sampling_for_prompt(self, prompt_length: int) -> Sampling:
        """Return the sampling settings; a position-embedding table of fixed length limits the length of the answer.

        Raises:
            ArgumentError: The prompt is longer than the table.
        """
        if not self.has_position_table or not isinstance(self.positions, int):
            return self.sampling
        if prompt_length >= self.positions:
            raise ArgumentError(
                f"the prompt has {prompt_length:,} tokens, but the model's position table has only {self.positions:,}",
                where="--prompt",
                fix="shorten the prompt, or start a new conversation with /reset",
            )
        longest = min(self.sampling.max_completion_length, self.positions - prompt_length)
        return replace(self.sampling, max_completion_length=longest)

    def clear_cache(self) -> None:
        self._writer.cache, self._writer.known = None, []

    def context_length_warning(self, prompts: Sequence[Prompt]) -> str | None:
        """Return a warning if prompt plus answer may exceed ``max_position_embeddings``, otherwise None."""
        longest = max(len(self.encode(each)) for each in prompts)
        if (
            self.has_position_table
            or not isinstance(self.positions, int)
            or longest + self.sampling.max_completion_length <= self.positions
        ):
            return None
        return (
            f"prompt and answer may reach {longest + self.sampling.max_completion_length:,} tokens, beyond the model's "
            f"limit of {self.positions:,} (max_position_embeddings)"
        )


def _sampling_settings(configured: Any, options: GenerateOptions) -> Sampling:
    """Return the settings from ``options``, else from the generation config if it samples, else defaults."""
    draws = bool(getattr(configured, "do_sample", False))

    def chosen(requested: Any, name: str, default: Any) -> Any:
        found = getattr(configured, name, None) if draws else None
        return requested if requested is not None else found if found is not None else default

    return Sampling(
        max_completion_length=options.max_new_tokens,
        temperature=float(chosen(options.temperature, "temperature", TEMPERATURE)),
        top_p=float(chosen(options.top_p, "top_p", 1.0)),
        top_k=int(chosen(options.top_k, "top_k", 0)),
    )


def load_answerer(
    model_name_or_path: str,
    options: GenerateOptions,
    *,
    notify: Callable[[str], None] = lambda text: None,
    doing: Callable[[str], AbstractContextManager[Any]] = lambda text: nullcontext(),
) -> Answerer:
    """Load the model of a run, a checkpoint, a folder or the hub.

    Args:
        notify: Called with each note to show to the user.
        doing: Called with a message before slow work; returns a context manager that shows the message.

    Raises:
        ArgumentError: The model cannot be loaded.
    """
    device = choose_device(options.device)
    prepare_libraries(device)
    with doing("looking for the model"):
        trained = find_trained(model_name_or_path, checkpoint=options.checkpoint, hub=True, notify=notify)
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
    _check_system(options, tokenizer)
    if trained.loaded is not None:
        options = options.with_recipe_defaults(trained.loaded.recipe)
    base = base_of(model)
    kind = f", linear layers in {trained.quantization}" if trained.quantization else ""
    adapters = ", with adapters" if trained.adapters else ""
    dtype = str(base.dtype).removeprefix("torch.")
    description = f"{trained.describe()}: {type(base).__name__}{adapters}, {dtype}{kind} on {device}"
    return Answerer(model, tokenizer, options, description, _image_loader(trained, base, tokenizer))


def _image_loader(trained: TrainedModel, base: Any, tokenizer: Any) -> Callable[[], data.ImageProcessor] | None:
    """Return a function that loads the processor of a model's images; None if the model takes none."""
    if not models.is_vision_language(base.config):
        return None
    recipe = None if trained.loaded is None else trained.loaded.recipe
    options = data.ImageOptions(
        base.config.name_or_path or base.config.model_type,
        image_folder(),
        trained.trusts_code,
        None if recipe is None else recipe.max_pixels,
        None if recipe is None else recipe.min_pixels,
        files=None if base.config.name_or_path else models.processor_files(base.config),
    )
    return partial(data.ImageProcessor, options, tokenizer)


def _check_system(options: GenerateOptions, tokenizer: Any) -> None:
    """Raise an ArgumentError if a system message is given that no chat template would render."""
    if options.system is not None and (options.raw or not tokenizer.chat_template):
        why = "--raw leaves it out" if options.raw else "this model's tokenizer has none"
        raise ArgumentError(
            f"a system message needs the chat template, but {why}",
            where="--system",
            fix="leave --system out, and write its text into the prompt",
        )


def require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ArgumentError(
            "--vllm needs vLLM, which is not installed",
            where="--vllm",
            fix="pip install vllm, or leave --vllm out to generate with transformers",
        )


def answer_with_vllm(
    model_name_or_path: str, prompts: Sequence[Prompt], options: GenerateOptions
) -> list[dict[str, Any]]:
    """Answer prompts with vLLM in one batch; return ``text``, ``prompt_tokens``, ``tokens`` and ``finished`` of each.

    Raises:
        ArgumentError: vLLM is not installed, or the model has adapters.
    """
    require_vllm()
    trained = find_trained(model_name_or_path, checkpoint=options.checkpoint, hub=True)
    if trained.adapters:
        raise ArgumentError(
            f"--vllm needs a merged model, but {trained.folder} has adapters",
            where="--vllm",
            fix=f"merge them with `streamtune export {model_name_or_path} OUT`, then run "
            "`streamtune generate OUT --vllm`",
        )
    tokenizer = load_tokenizer(trained.folder, trust_remote_code=trained.trusts_code)
    _check_system(options, tokenizer)
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = vllm.LLM(model=trained.folder, dtype=options.dtype or "auto", seed=options.seed)
    settings = engine.get_default_sampling_params()
    settings.max_tokens = options.max_new_tokens
    for name in ("temperature", "top_p", "top_k"):
        if getattr(options, name) is not None:
            setattr(settings, name, getattr(options, name))
    if trained.loaded is not None:
        options = options.with_recipe_defaults(trained.loaded.recipe)
    encode = PromptEncoder(tokenizer, options)
    if any(isinstance(each, ToolPrompt) and each.images for each in prompts):
        raise ArgumentError("--vllm takes no images", where="--vllm", fix="leave --vllm out")
    outputs: Any = engine.generate([{"prompt_token_ids": encode(each)} for each in prompts], settings)
    return [
        {
            "text": output.outputs[0].text,
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": len(output.outputs[0].token_ids),
            "finished": output.outputs[0].finish_reason == "stop",
        }
        for output in outputs
    ]
