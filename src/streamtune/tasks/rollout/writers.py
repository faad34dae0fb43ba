"""Generation of completions: the interface, an implementation with ``generate`` of ``transformers``, and vLLM.

With ``transformers`` the prefill of a prompt is computed once for all of its completions. All prompt tokens but the
last go through the decoder without the head, ``prefill_chunk_size`` tokens at a time. Their keys and values are then
repeated for each completion, and ``generate`` continues from the prompt's last token. A prompt with images is repeated
for each completion instead, and its prefill is not divided into chunks.

Rotary frequencies may depend on the longest position of a call (``dynamic``, ``longrope``). Then each chunk gets the
frequencies of the whole prompt, and all prompts of a batch have the same length.

Layers with a recurrent state instead of keys and values do not allow this. Their caches cannot be repeated, and many of
them lose the state if a second chunk has more than one token. For such models the prompt is repeated, and all prompts
of a batch have the same length, because padding would change the state.

vLLM runs in this process on the same device, with its own copy of the model, and gets the policy's weights before each
batch. It is optional, and imported only if a recipe uses it. Its rounding differs from the policy's, so the trainer
computes old log-probs itself.
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
from streamtune.base.model_facts import decoder_of, model_device
from streamtune.data import ImageFile, ImageProcessor
from streamtune.engine.hf_names import (
    LINEAR_CACHE,
    cache_keyword,
    forget_image_positions,
    hf_internal,
    is_stateful,
)
from streamtune.engine.image_tower import find_image_tower, stays_on_host
from streamtune.engine.rotary import LengthRotary, RowLengths, longest_unscaled_length
from streamtune.errors import ArgumentError
from streamtune.models.generation import copy_with_generation_config

Images = Sequence[ImageFile]
"""Images of a prompt, in the order of their tokens."""


@dataclass(frozen=True)
class Sampling:
    """Settings with which completions are sampled. The defaults sample from the model's own distribution."""

    max_completion_length: int
    """Maximum number of tokens of a completion, including its end token."""
    temperature: float = 1.0
    """Temperature by which logits are divided; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus sampling: total probability of the most probable tokens, from which to sample; 1: all tokens."""
    top_k: int = 0
    """Number of most probable tokens from which to sample; 0: all tokens."""
    min_p: float = 0.0
    """Minimum probability of a token to sample, as a fraction of the largest probability."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative logits, of tokens that prompt or completion already have."""


@dataclass(frozen=True)
class Completion:
    """A completion: the tokens that the model generated after a prompt."""

    token_ids: list[int]
    """At least one token id. If an end token was generated, it is the last."""
    truncated: bool
    """True if the completion was cut off at the maximum length, without an end token."""


class GenerationStopped(Exception):  # noqa: N818 (not an error: a stop was requested)
    """Raised if a stop was requested while completions were generated."""


class Writer(Protocol):
    """Protocol of objects that generate completions with the policy's current weights."""

    def write(
        self,
        prompts: Sequence[list[int]],
        count: int | Sequence[int],
        sampling: Sampling,
        images: Sequence[Images] | None = None,
    ) -> list[list[Completion]]:
        """Generate completions and return a list of them for each prompt.

        Args:
            prompts: Token ids of each prompt, at least one.
            count: Number of completions, either one for all prompts or one per prompt.
            sampling: Sampling settings. Random numbers come from torch's global generators, so a resumed run samples
                the same completions.
            images: Images of each prompt, in the order of their tokens; None without images.

        Raises:
            GenerationStopped: A stop was requested before the last token.
        """
        ...


def cut_at_end_token(token_ids: Sequence[int], end_token_ids: frozenset[int]) -> Completion:
    """Return the tokens up to the first end token as a completion. Later tokens are padding."""
    for index, token in enumerate(token_ids):
        if token in end_token_ids:
            return Completion(list(token_ids[: index + 1]), truncated=False)
    return Completion(list(token_ids), truncated=True)


class TransformersGenerator:
    """Generates completions with a model of ``transformers``, streamed or not, with or without adapters.

    Args:
        model: Policy, which is in evaluation mode while it generates, and in its former mode afterwards.
        end_token_ids: Ids of the tokens that end a completion.
        pad_token_id: Id of the token that pads shorter and finished rows. Padding is never returned.
        prefill_chunk_size: Number of prompt tokens per chunk of the prefill.
        max_rows: Maximum number of completions that are generated at a time, with their keys and values in memory.
        compute_context: Function that returns a context for all that the model computes, such as autocast.
        should_stop: Function called before each token; generation stops if it returns True.
        streamer: Streamer for ``generate``, which gets the tokens of a single row as they are generated.
        max_over_ranks: Function that returns the maximum of a number over all ranks, if the weights are sharded. All
            ranks call it together and have the same number of prompts. None if each rank generates alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        end_token_ids: Sequence[int],
        pad_token_id: int,
        prefill_chunk_size: int,
        max_rows: int,
        compute_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        should_stop: Callable[[], bool] = lambda: False,
        streamer: Any = None,
        max_over_ranks: Callable[[int], int] | None = None,
    ) -> None:
        self.model: PreTrainedModel = base_of(model)
        self.end_token_ids = frozenset(end_token_ids)
        self.pad_token_id = pad_token_id
        self.prefill_chunk_size = prefill_chunk_size
        self.max_rows = max_rows
        self.compute_context, self.should_stop = compute_context, should_stop
        self.max_over_ranks, self.streamer = max_over_ranks, streamer
        self.shares_prompts = _can_repeat_cache(self.model)
        """True if a prompt's prefill is computed once for all of its completions; False if once per completion."""
        self.unscaled_length = longest_unscaled_length(self.model.config)
        """Length above which rotary frequencies depend on the length; None if they never do."""
        self.image_processor: ImageProcessor | None = None
        """Processor of the images of prompts. If it is set, tokens in place of images are never generated."""
        self._prefilled_length: int | None = None
        """Length of the prompts while they are prefilled, otherwise None."""

    def write(
        self,
        prompts: Sequence[list[int]],
        count: int | Sequence[int],
        sampling: Sampling,
        images: Sequence[Images] | None = None,
    ) -> list[list[Completion]]:
        """Generate completions, a list for each prompt. On a CPU, the same random state gives identical completions.

        The prefill of a prompt with images is computed once per completion, and not divided into chunks.
        """
        written: list[list[Completion]] = [[] for _ in prompts]
        shown: Sequence[Images] = [()] * len(prompts) if images is None else images
        counts = [count] * len(prompts) if isinstance(count, int) else list(count)
        # A repetition penalty would count padding tokens, and short prompts would get the frequencies of longer ones.
        may_pad = sampling.repetition_penalty == 1.0 and self.unscaled_length is None
        padded = self.max_over_ranks is not None or (self.shares_prompts and may_pad)
        with torch.no_grad(), self._generation_mode(sampling) as model, self.compute_context():
            # Ranks that share the weights have the same number of batches, whichever rank has images.
            alike = [self.max_over_ranks is not None or not files for files in shown]
            for batch in _batch_prompts(prompts, counts, alike, max_rows=self.max_rows, padded=padded):
                repeats = [prompt_count for _, prompt_count in batch]
                asked, files = [prompts[index] for index, _ in batch], [shown[index] for index, _ in batch]
                rows = iter(self._write_batch(model, asked, repeats, files))
                for index, prompt_count in batch:
                    written[index] += islice(rows, prompt_count)
        return written

    def _write_batch(
        self, model: PreTrainedModel, prompts: Sequence[list[int]], repeats: Sequence[int], images: Sequence[Images]
    ) -> list[Completion]:
        forget_image_positions(self.model)  # of the batch before
        ids_PT, mask_PT = self._pad_prompts(prompts)
        is_prefilled = self.shares_prompts and ids_PT.shape[1] > 1 and not self._any_rank(any(images))
        cache = self._prefill(ids_PT, mask_PT) if is_prefilled else None
        generate_arguments: dict[str, Any] = {}
        repeats_P: Any = torch.tensor(repeats, device=ids_PT.device)
        if cache is not None:
            if max(repeats) > 1:
                cache.batch_repeat_interleave(repeats[0] if len(set(repeats)) == 1 else repeats_P)
            generate_arguments |= cache_keyword(type(self.model).prepare_inputs_for_generation, cache)
        ids_NT, mask_NT = ids_PT.repeat_interleave(repeats_P, dim=0), mask_PT.repeat_interleave(repeats_P, dim=0)
        if any(images):
            assert self.image_processor is not None, "prompts with images have a processor"
            files = [each for each, count in zip(images, repeats, strict=True) for _ in range(count)]
            inputs = self.image_processor.model_inputs(files, ids_NT.cpu())
            reads_host = find_image_tower(self.model) is not None
            generate_arguments = {
                name: x if reads_host and stays_on_host(name, x) else x.to(ids_NT.device) for name, x in inputs.items()
            }
        output: Any = model.generate(
            input_ids=ids_NT,
            attention_mask=mask_NT,
            # Ranks that share weights compute until all of them are done, so no rank may stop early.
            stopping_criteria=StoppingCriteriaList(
                [_StopRequested(self.should_stop)] if self.max_over_ranks is None else []
            ),
            synced_gpus=self.max_over_ranks is not None,
            streamer=self.streamer,
            **generate_arguments,
        )
        if self._any_rank(self.should_stop()):  # after the same batch on all ranks that share the weights
            raise GenerationStopped
        return [cut_at_end_token(row, self.end_token_ids) for row in output[:, ids_PT.shape[1] :].tolist()]

    def _any_rank(self, value: bool) -> bool:
        """Return True if ``value`` is true on this rank, or on another rank that shares the weights."""
        return value if self.max_over_ranks is None else self.max_over_ranks(int(value)) > 0

    def _pad_prompts(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return token ids ``[P, T]``, padded on the left, and their mask."""
        length = max(map(len, prompts))
        if self.max_over_ranks is not None:
            length = self.max_over_ranks(length)
        ids = [[self.pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = model_device(self.model)
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _prefill(
        self, ids_PT: Tensor, mask_PT: Tensor, cache: DynamicCache | None = None, done: int = 0
    ) -> DynamicCache:
        """Return a cache with the keys and values of all tokens of each prompt but its last token.

        Args:
            ids_PT: Token ids ``[P, T]``.
            mask_PT: Mask ``[P, T]``, 0 at padding.
            cache: Cache that already has the first ``done`` tokens; None makes a new one.
            done: Number of tokens in the cache.
        """
        decoder: Any = decoder_of(self.model)
        takes_positions = "position_ids" in inspect.signature(type(decoder).forward).parameters
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        positions_PT = (mask_PT.cumsum(dim=1) - 1).clamp_min(0)
        last = ids_PT.shape[1] - 1
        self._prefilled_length = int(positions_PT.max()) + 1
        try:
            for start in range(done, last, self.prefill_chunk_size):
                if self.max_over_ranks is None and self.should_stop():
                    raise GenerationStopped
                self.on_prefill(start, last)
                stop = min(start + self.prefill_chunk_size, last)
                position_arguments = {"position_ids": positions_PT[:, start:stop]} if takes_positions else {}
                # Ranks that share the weights gather those outside of the layers only in a call of the whole model.
                forward = decoder if self.max_over_ranks is None else partial(self.model, logits_to_keep=1)
                forward(
                    input_ids=ids_PT[:, start:stop],
                    attention_mask=mask_PT[:, :stop],
                    use_cache=True,
                    **position_arguments,
                    **cache_keyword(type(decoder).forward, cache),
                )
        finally:
            self._prefilled_length = None
        self.on_prefill(last, last)
        return cache

    def _row_lengths(self, position_ids: Tensor) -> RowLengths | None:
        """Return the lengths of the prompts during the prefill; None for the longest position of the call."""
        if self._prefilled_length is None:
            return None
        each_BT = torch.full_like(position_ids, self._prefilled_length)
        return RowLengths(each_BT, each_BT)

    def on_prefill(self, done: int, total: int) -> None:
        """Do nothing; subclasses may show progress. Called with token counts before each chunk and at the end."""

    @contextmanager
    def _generation_mode(self, sampling: Sampling) -> Iterator[PreTrainedModel]:
        """Put the model in evaluation mode inside the ``with`` block; yield a copy that generates with ``sampling``."""
        sampling_settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        settings = GenerationConfig(
            max_new_tokens=sampling.max_completion_length,
            do_sample=sampling.temperature > 0,
            **(sampling_settings if sampling.temperature > 0 else {}),
            **({"min_p": sampling.min_p} if sampling.temperature > 0 and sampling.min_p > 0 else {}),
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(self.end_token_ids) or None,
            pad_token_id=self.pad_token_id,
            # Such a token in a completion would have no image when its log-probs are computed.
            suppress_tokens=None if self.image_processor is None else [self.model.config.image_token_id],
            use_cache=True,
        )
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        rotations = LengthRotary.install_in_model(self.model, self._row_lengths)
        try:
            yield copy_with_generation_config(self.model, settings)
        finally:
            for rotation in rotations:
                rotation.remove()
            for module, training in modes:
                module.training = training


class _StopRequested(StoppingCriteria):
    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self.should_stop = should_stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.should_stop(), dtype=torch.bool, device=input_ids.device)


def _batch_prompts(
    prompts: Sequence[list[int]], counts: Sequence[int], kinds: Sequence[bool], *, max_rows: int, padded: bool
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (index of a prompt, number of its completions), with at most ``max_rows`` completions.

    The longest prompts come first. Prompts of a batch have the same kind, and the same length unless ``padded``. A
    batch has no more prompts than would fit if all had the mean number of completions. A prompt may be in several
    batches.
    """
    batch: list[tuple[int, int]] = []
    at_a_time = max(1, max_rows * len(prompts) // max(1, sum(counts)))
    for index in sorted(range(len(prompts)), key=lambda index: (kinds[index], -len(prompts[index]), index)):
        for part in _split_count(counts[index], max_rows):
            full = len(batch) == at_a_time or sum(count for _, count in batch) + part > max_rows
            first = batch[0][0] if batch else index
            joins = kinds[index] == kinds[first] and (padded or len(prompts[index]) == len(prompts[first]))
            if batch and (full or not joins):
                yield batch
                batch = []
            batch.append((index, part))
    if batch:
        yield batch


def _split_count(count: int, max_count: int) -> Iterator[int]:
    for start in range(0, count, max_count):
        yield min(max_count, count - start)


def _can_repeat_cache(model: PreTrainedModel) -> bool:
    """Return True if the model's cache has only keys and values, which can be repeated for several completions."""
    if is_stateful(model):
        return False
    layers = DynamicCache(config=model.config).layers
    return all(
        hasattr(layer, "batch_repeat_interleave") and not isinstance(layer, hf_internal(LINEAR_CACHE))
        for layer in layers
    )


def require_vllm(device: torch.device) -> None:
    """Raise ``ArgumentError`` if vLLM is not installed, or ``device`` is not a CUDA device."""
    if find_spec("vllm") is None:
        raise ArgumentError(
            "'use_vllm: true' needs vLLM, which is not installed",
            where="use_vllm",
            fix="pip install vllm, or delete use_vllm: completions are then generated by transformers",
        )
    if device.type != "cuda":
        raise ArgumentError(
            f"'use_vllm: true' needs a CUDA device, but this run is on {device.type}",
            where="use_vllm",
            fix="delete use_vllm: completions are then generated by transformers",
        )


class VllmGenerator:
    """Generates completions with vLLM.

    Args:
        model: Policy. vLLM gets its weights at each call, with adapters merged into a copy.
        folder: Folder with configuration and tokenizer in Hugging Face format, from which vLLM is started.
        end_token_ids: Ids of the tokens that end a completion.
        max_length: Maximum number of tokens of a prompt plus its completion.
        memory_fraction: Fraction of the device memory that vLLM may use; the rest is for training.

    Raises:
        ArgumentError: vLLM is not installed, or the model is not on a CUDA device.
    """

    def __init__(
        self, model: nn.Module, folder: Path, *, end_token_ids: Sequence[int], max_length: int, memory_fraction: float
    ) -> None:
        require_vllm(model_device(model))
        # Otherwise vLLM runs in another process, to which the weights would have to be copied.
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
        self,
        prompts: Sequence[list[int]],
        count: int | Sequence[int],
        sampling: Sampling,
        images: Sequence[Images] | None = None,
    ) -> list[list[Completion]]:
        """Generate completions, a list for each prompt. vLLM's seed is drawn from torch's generator."""
        assert not any(images or ()), "prompts with images are refused for vLLM"
        with torch.no_grad():
            weights = policy_weights(self.model)
            self._engine.apply_model(lambda module: module.load_weights(weights) and None)
        self._engine.reset_prefix_cache()  # cached keys and values belong to the previous weights
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
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        parameters = (
            self._parameters(n=count, **common)
            if isinstance(count, int)
            else [self._parameters(n=prompt_count, **common) for prompt_count in count]
        )
        answers = self._engine.generate(requests, parameters, use_tqdm=False)
        return [
            [cut_at_end_token(list(output.token_ids), self.end_token_ids) for output in answer.outputs]
            for answer in answers
        ]


def policy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name as in a checkpoint, weight) for all weights of the base model. Adapters are merged into copies.

    Merging in place and undoing it would leave rounding errors in the frozen weights.
    """
    base: nn.Module = base_of(model)
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in base.named_parameters():
        adapted_module = next((prefix for prefix in adapted if name.startswith(f"{prefix}.")), None)
        if adapted_module is None:
            yield name, parameter.detach()
            continue
        rest = name.removeprefix(f"{adapted_module}.")
        if not rest.startswith("base_layer."):
            continue  # the adapter itself
        layer: Any = adapted[adapted_module]
        weight = parameter.detach()
        if rest == "base_layer.weight":
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        yield f"{adapted_module}.{rest.removeprefix('base_layer.')}", weight
