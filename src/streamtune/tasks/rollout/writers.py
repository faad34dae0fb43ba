"""Writers complete prompts: the interface, ``generate`` of ``transformers``, and vLLM.

With ``transformers`` a prompt is read once for all of its completions. Its trunk, ``prompt[:-1]``, goes through the
decoder once, ``prefill_chunk_size`` tokens at a time and without the head. Its keys and values are then repeated for
the G completions, and ``generate`` goes on from the prompt's last token.

Layers that keep a state instead of keys and values do not allow that: their caches cannot be repeated, and many of them
lose the state where a second chunk has more than one token. There the prompt is repeated, in batches of one length,
because padding would run through the state.

vLLM runs in this process and on this device, with the policy's weights handed over before each batch. It keeps its own
copy of the model and is optional: it is imported only where it is asked for. It rounds differently from the policy, so
a token's old log-prob is never taken from it; the trainer computes its own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.engine.hf_names import LINEAR_CACHE, cache_by_name, inside, is_stateful
from streamtune.errors import ArgumentError
from streamtune.models.generation import with_generation


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing the next token. The defaults draw from the model's own distribution."""

    max_completion_length: int
    """Tokens of a completion at most, its end token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1 is all of them."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens; 0 is all of them."""
    min_p: float = 0.0
    """Leave out tokens less likely than this fraction of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen before, in prompt or completion, are divided by it (multiplied where negative)."""


@dataclass(frozen=True)
class Completion:
    """The tokens written after a prompt."""

    token_ids: list[int]
    """At least one; the end token, where one was written, is the last."""
    truncated: bool
    """True if it was cut off at the longest length allowed: no end token was written."""


class WritingStopped(Exception):  # noqa: N818 (nothing is wrong: somebody asked for it)
    """Writing was stopped early, on request."""


class Writer(Protocol):
    """Completes prompts with the model as it is now."""

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``count`` completions of each prompt.

        Args:
            prompts: Token ids, each at least one.
            count: Completions of each prompt: the same number, or one number for each.
            sampling: Settings for drawing. Random numbers come from torch's global generators: a resumed run draws the
                same.

        Raises:
            WritingStopped: A stop was requested before the last token.
        """
        ...


def ended(token_ids: Sequence[int], end_token_ids: frozenset[int]) -> Completion:
    """Return the completion up to its first end token. All tokens after that are padding."""
    for index, token in enumerate(token_ids):
        if token in end_token_ids:
            return Completion(list(token_ids[: index + 1]), truncated=False)
    return Completion(list(token_ids), truncated=True)


class TransformersWriter:
    """Writes completions with a model of ``transformers``, streamed or not, with or without adapters.

    Args:
        model: The policy. It is in evaluation mode while it writes and in its own mode afterwards.
        pad_token_id: Fills rows that are shorter or done; never in what is returned.
        prefill_chunk_size: Tokens of prompts read at a time.
        max_rows: Completions written at a time: their keys and values are in memory together.
        computing: A context for everything the model computes, such as autocast.
        stop: Called before each token; True stops the writing early, as completions may take minutes.
        streamer: Gets the tokens of a single row as they are written, as ``generate`` passes them.
        longest: The largest of a number over the ranks, where ranks share the weights. All ranks call it together and
            have as many prompts each. None where each rank writes by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        end_token_ids: Sequence[int],
        pad_token_id: int,
        prefill_chunk_size: int,
        max_rows: int,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
        stop: Callable[[], bool] = lambda: False,
        streamer: Any = None,
        longest: Callable[[int], int] | None = None,
    ) -> None:
        self.model: PreTrainedModel = base_of(model)
        self.end_token_ids = frozenset(end_token_ids)
        self.pad_token_id = pad_token_id
        self.prefill_chunk_size = prefill_chunk_size
        self.max_rows = max_rows
        self.computing, self.stop, self.longest, self.streamer = computing, stop, longest, streamer
        self.shares_prompts = _keeps_only_keys(self.model)
        """True if a prompt is read once; False if it is repeated for each of its completions."""

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``count`` completions of each prompt. Bit for bit the same on the CPU from the same random state."""
        written: list[list[Completion]] = [[] for _ in prompts]
        counts = [count] * len(prompts) if isinstance(count, int) else list(count)
        # A penalty on what stands in a row already would count its padding.
        padded = self.longest is not None or (self.shares_prompts and sampling.repetition_penalty == 1.0)
        with torch.no_grad(), self._writing(sampling) as model, self.computing():
            for batch in _batches(prompts, counts, max_rows=self.max_rows, padded=padded):
                repeats = [own for _, own in batch]
                rows = iter(self._rows(model, [prompts[index] for index, _ in batch], repeats))
                for index, own in batch:
                    written[index] += islice(rows, own)
        return written

    def _rows(self, model: PreTrainedModel, prompts: Sequence[list[int]], repeats: Sequence[int]) -> list[Completion]:
        """Return so many completions of each prompt, completions of one prompt next to each other."""
        ids_PT, mask_PT = self._padded(prompts)
        cache = self._read(ids_PT, mask_PT) if self.shares_prompts and ids_PT.shape[1] > 1 else None
        given: dict[str, Any] = {}
        repeats_P: Any = torch.tensor(repeats, device=ids_PT.device)
        if cache is not None:
            if max(repeats) > 1:
                cache.batch_repeat_interleave(repeats[0] if len(set(repeats)) == 1 else repeats_P)
            given |= cache_by_name(type(self.model).prepare_inputs_for_generation, cache)
        ids_NT, mask_NT = ids_PT.repeat_interleave(repeats_P, dim=0), mask_PT.repeat_interleave(repeats_P, dim=0)
        output: Any = model.generate(
            input_ids=ids_NT,
            attention_mask=mask_NT,
            # In step, a rank whose rows are done goes on computing and asks nobody.
            stopping_criteria=StoppingCriteriaList([_WhenAsked(self.stop)] if self.longest is None else []),
            synced_gpus=self.longest is not None,
            streamer=self.streamer,
            **given,
        )
        if self.stop():
            raise WritingStopped
        return [ended(row, self.end_token_ids) for row in output[:, ids_PT.shape[1] :].tolist()]

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return ``[P, T]`` token ids padded on the left, and their mask."""
        length = max(map(len, prompts))
        if self.longest is not None:
            length = self.longest(length)
        ids = [[self.pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = model_device(self.model)
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _read(self, ids_PT: Tensor, mask_PT: Tensor, cache: DynamicCache | None = None, done: int = 0) -> DynamicCache:
        """Return a cache with the keys and values of all tokens but the last.

        Args:
            mask_PT: 0 at padding.
            cache: A cache that has the first ``done`` tokens; None makes one.
        """
        decoder: Any = getattr(self.model, self.model.base_model_prefix)
        takes_positions = "position_ids" in inspect.signature(type(decoder).forward).parameters
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        positions_PT = (mask_PT.cumsum(dim=1) - 1).clamp_min(0)
        last = ids_PT.shape[1] - 1
        for start in range(done, last, self.prefill_chunk_size):
            if self.longest is None and self.stop():
                raise WritingStopped
            self.on_read(start, last)
            stop = min(start + self.prefill_chunk_size, last)
            given = {"position_ids": positions_PT[:, start:stop]} if takes_positions else {}
            # Where ranks share the weights, those outside of the layers are whole only in a call of the whole model.
            reads = decoder if self.longest is None else partial(self.model, logits_to_keep=1)
            reads(
                input_ids=ids_PT[:, start:stop],
                attention_mask=mask_PT[:, :stop],
                use_cache=True,
                **given,
                **cache_by_name(type(decoder).forward, cache),
            )
        self.on_read(last, last)
        return cache

    def on_read(self, done: int, total: int) -> None:
        """Do nothing; called before each chunk of prompts and after the last, with the tokens read so far and all."""

    @contextmanager
    def _writing(self, sampling: Sampling) -> Iterator[PreTrainedModel]:
        """Put the model in evaluation mode; yield it with our settings in place of its own."""
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_completion_length,
            do_sample=sampling.temperature > 0,
            **(drawn if sampling.temperature > 0 else {}),
            **({"min_p": sampling.min_p} if sampling.temperature > 0 and sampling.min_p > 0 else {}),
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(self.end_token_ids) or None,
            pad_token_id=self.pad_token_id,
            use_cache=True,
        )
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield with_generation(self.model, settings)
        finally:
            for module, training in modes:
                module.training = training


class _WhenAsked(StoppingCriteria):
    def __init__(self, stop: Callable[[], bool]) -> None:
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.stop(), dtype=torch.bool, device=input_ids.device)


def _batches(
    prompts: Sequence[list[int]], counts: Sequence[int], *, max_rows: int, padded: bool
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of at most ``max_rows`` rows: numbers of prompts, each with how many of its completions.

    The longest prompts come first. Prompts of a batch have one length unless ``padded``, and there are no more than fit
    if all have the mean count. A prompt may be in several batches.
    """
    batch: list[tuple[int, int]] = []
    at_a_time = max(1, max_rows * len(prompts) // max(1, sum(counts)))
    for index in sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index)):
        for part in _parts(counts[index], max_rows):
            full = len(batch) == at_a_time or sum(own for _, own in batch) + part > max_rows
            if batch and (full or not (padded or len(prompts[index]) == len(prompts[batch[0][0]]))):
                yield batch
                batch = []
            batch.append((index, part))
    if batch:
        yield batch


def _parts(count: int, at_most: int) -> Iterator[int]:
    for start in range(0, count, at_most):
        yield min(at_most, count - start)


def _keeps_only_keys(model: PreTrainedModel) -> bool:
    """Return True if the model keeps nothing of a token but keys and values in the ordinary cache."""
    if is_stateful(model):
        return False
    layers = DynamicCache(config=model.config).layers
    return all(
        hasattr(layer, "batch_repeat_interleave") and not isinstance(layer, inside(LINEAR_CACHE)) for layer in layers
    )


def check_vllm(device: torch.device) -> None:
    """Raise an error if vLLM is not installed or has no accelerator."""
    if find_spec("vllm") is None:
        raise ArgumentError(
            "'use_vllm: true' needs vLLM, which is not installed",
            where="use_vllm",
            fix="pip install vllm, or delete the line: transformers writes the completions then",
        )
    if device.type != "cuda":
        raise ArgumentError(
            f"'use_vllm: true' needs a CUDA device, and this run is on {device.type}",
            where="use_vllm",
            fix="delete the line: transformers writes the completions then",
        )


class VllmWriter:
    """Writes with vLLM.

    Args:
        model: The policy; its weights, with adapters merged into a copy, are handed over at each call.
        folder: Configuration and tokenizer in Hugging Face format; positions are the configuration's.
        max_length: Tokens of a prompt and its completion together.
        memory_fraction: Part of the device's memory that vLLM may take; the rest is for training.

    Raises:
        ArgumentError: vLLM is not installed, or there is no accelerator.
    """

    def __init__(
        self, model: nn.Module, folder: Path, *, end_token_ids: Sequence[int], max_length: int, memory_fraction: float
    ) -> None:
        check_vllm(model_device(model))
        # Otherwise the engine runs in a process of its own, which the weights would have to be copied to by hand.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.model, self.end_token_ids = model, frozenset(end_token_ids)
        self._parameters = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            model=str(folder),
            load_format="dummy",  # the weights are handed over before each use
            max_model_len=max_length,
            gpu_memory_utilization=memory_fraction,
        )

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``count`` completions of each prompt. The seed comes from torch's generator."""
        with torch.no_grad():
            weights = policy_weights(self.model)
            self._engine.apply_model(lambda module: module.load_weights(weights) and None)
        self._engine.reset_prefix_cache()  # what it remembers of prompts is of the weights before
        common: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": sampling.max_completion_length,
            "stop_token_ids": sorted(self.end_token_ids),
            "seed": int(torch.randint(2**31 - 1, ())),
        }
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        each = (
            self._parameters(n=count, **common)
            if isinstance(count, int)
            else [self._parameters(n=own, **common) for own in count]
        )
        answers = self._engine.generate(asked, each, use_tqdm=False)
        return [[ended(list(one.token_ids), self.end_token_ids) for one in answer.outputs] for answer in answers]


def policy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names as in a checkpoint, and weights with the adapters' update added to a copy; the model is left as it is.

    Merging in place and taking it back would leave the frozen weights rounded.
    """
    base: nn.Module = base_of(model)
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in base.named_parameters():
        inside = next((prefix for prefix in adapted if name.startswith(f"{prefix}.")), None)
        if inside is None:
            yield name, parameter.detach()
            continue
        rest = name.removeprefix(f"{inside}.")
        if not rest.startswith("base_layer."):
            continue  # the adapter itself
        layer: Any = adapted[inside]
        weight = parameter.detach()
        if rest == "base_layer.weight":
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        yield f"{inside}.{rest.removeprefix('base_layer.')}", weight
