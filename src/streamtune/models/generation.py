"""Generate text with a model, and read or extend its EOS tokens.

The generation config of a model is never changed in place: another thread may be writing the config to a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.data import ChatOptions, PromptRenderer
from streamtune.engine.inspect_model import autocast_of_mixed_dtypes
from streamtune.errors import ArgumentError, DataError
from streamtune.models.positions import position_table_limit

if TYPE_CHECKING:
    from peft import PeftModel


def eos_token_ids(generation_config: GenerationConfig | None) -> list[int]:
    """Return the EOS token ids of a generation config; an empty list for None."""
    ends: Any = getattr(generation_config, "eos_token_id", None)
    return [int(token) for token in (ends if isinstance(ends, list | tuple) else [ends]) if token is not None]


def all_eos_token_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the EOS token ids of the tokenizer and of the model's generation config, ascending."""
    configured = eos_token_ids(getattr(base_of(model), "generation_config", None))
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


def add_eos_token_ids(model: nn.Module, token_ids: Sequence[int]) -> list[int]:
    """Add EOS token ids to a copy of the model's generation config; return the ids that the config did not have."""
    base: Any = base_of(model)
    known = eos_token_ids(getattr(base, "generation_config", None))
    new = [token_id for token_id in token_ids if token_id not in known]
    if new:
        settings = copy.deepcopy(base.generation_config) if base.generation_config is not None else GenerationConfig()
        settings.eos_token_id = [*known, *new] if len(known) + len(new) > 1 else new[0]
        settings._from_model_config = False  # else transformers may rebuild it from the model's configuration
        base.generation_config = settings
    return new


def copy_with_generation_config(model: Any, generation_config: GenerationConfig) -> Any:
    """Return a shallow copy of ``model`` with another generation config; modules, weights and hooks are shared.

    Passing ``generation_config`` to ``generate`` is not enough: ``generate`` takes unset options from the model's
    config.
    """
    copied = object.__new__(type(model))
    vars(copied).update(vars(model))
    vars(copied)["generation_config"] = generation_config
    vars(copied).pop("generate", None)  # the ``generate`` of a streamed model is bound to ``model``
    return copied


@dataclass(frozen=True)
class Decoding:
    """Options of text generation."""

    max_new_tokens: int
    """Largest number of tokens to generate; an EOS token ends generation sooner."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    synced_gpus: bool = False
    """True if ranks shard the weights: then all ranks compute every token, even after their own text has ended."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: ChatOptions) -> list[int]:
    """Return the token ids of a prompt: as a user message if the tokenizer has a chat template, else as plain text."""
    query: str | list[dict[str, Any]] = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    try:
        return PromptRenderer(tokenizer, chat=chat)(query, None, "")
    except DataError as error:
        raise ArgumentError(error.what, where="sample", fix="change the prompt or the chat_template") from error


def sample_text(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    decoding: Decoding,
    *,
    chat: ChatOptions | None = None,
) -> str:
    """Return the text that the model generates for ``prompt``, without special tokens.

    If the tokenizer has a chat template, the prompt is a user message, rendered with the options ``chat``. The model,
    streamed or not, is left in evaluation mode. The global generator state does not change.
    """
    ids = encode_prompt(tokenizer, prompt, chat or ChatOptions())
    ends, pad = all_eos_token_ids(model, tokenizer), tokenizer.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(decoding.seed)
        generated = _generate(model, ids, decoding, ends, pad, {})
    return tokenizer.decode(generated, skip_special_tokens=True)


def generate_greedily(
    model: PreTrainedModel | PeftModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    eos: Sequence[int],
    pad: int | None,
    synced_gpus: bool = False,
    images: Mapping[str, torch.Tensor] | None = None,
) -> list[int]:
    """Return the token ids of the greedy continuation of the token ids ``prompt``, including a final EOS.

    ``images`` are the model's inputs for the images of the prompt. The model is left in evaluation mode. Its generation
    config does not count, such as a repetition penalty.
    """
    return _generate(model, prompt, Decoding(max_new_tokens, synced_gpus=synced_gpus), eos, pad, images or {})


def _generate(
    model: Any,
    prompt: Sequence[int],
    decoding: Decoding,
    eos: Sequence[int],
    pad: int | None,
    images: Mapping[str, torch.Tensor],
) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model_device(model))
    limit = position_table_limit(base_of(model))
    if limit is not None and len(prompt) >= limit:
        raise ArgumentError(
            f"the prompt has {len(prompt):,} tokens, but the model's position table has only {limit:,}",
            where="sample",
            fix="shorten the prompt",
        )
    model.eval()
    sampling: dict[str, Any] = {"do_sample": True, "temperature": decoding.temperature}
    if decoding.temperature <= 0:
        model, sampling = copy_with_generation_config(base_of(model), GenerationConfig(do_sample=False)), {}
    with torch.no_grad(), autocast_of_mixed_dtypes(model):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{name: value.to(ids.device) for name, value in images.items()},
            **sampling,
            max_new_tokens=min(decoding.max_new_tokens, limit - len(prompt) if limit else decoding.max_new_tokens),
            synced_gpus=decoding.synced_gpus,
            eos_token_id=list(eos) or None,
            pad_token_id=pad,
        )
    return output[0, len(prompt) :].tolist()
