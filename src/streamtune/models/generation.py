"""Generate text with a model, and read or extend its end tokens (EOS).

The generation config of a model is never changed in place: another thread may be writing it into a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.data import ChatOptions, PromptRenderer
from streamtune.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from peft import PeftModel


def ends_of(settings: GenerationConfig | None) -> list[int]:
    """Return the EOS token ids of a generation config; an empty list for None."""
    ends: Any = getattr(settings, "eos_token_id", None)
    return [int(token) for token in (ends if isinstance(ends, list | tuple) else [ends]) if token is not None]


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the EOS token ids of the tokenizer and of the model's generation config, ascending."""
    configured = ends_of(getattr(base_of(model), "generation_config", None))
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


def add_ends(model: nn.Module, tokens: Sequence[int]) -> list[int]:
    """Add EOS token ids to a model's generation config; return the ids that it did not have before.

    The model gets a changed copy of its generation config: another thread may be writing the old config to a file.
    """
    base: Any = base_of(model)
    known = ends_of(getattr(base, "generation_config", None))
    new = [token for token in tokens if token not in known]
    if new:
        settings = copy.deepcopy(base.generation_config) if base.generation_config is not None else GenerationConfig()
        settings.eos_token_id = [*known, *new] if len(known) + len(new) > 1 else new[0]
        settings._from_model_config = False  # else transformers may rebuild it from the model's configuration
        base.generation_config = settings
    return new


def with_generation(model: Any, settings: GenerationConfig) -> Any:
    """Return a shallow copy of ``model`` whose generation config is ``settings``.

    Both share modules, weights and hooks; ``model`` keeps its own generation config. Passing ``settings`` to
    ``generate`` would not be enough: the model's config supplies every option that they leave unset.
    """
    seen = object.__new__(type(model))
    vars(seen).update(vars(model))
    vars(seen)["generation_config"] = settings
    vars(seen).pop("generate", None)  # a streamed model has its own, bound to ``model``
    return seen


@dataclass(frozen=True)
class Decoding:
    """Decoding options."""

    max_new_tokens: int
    """Most tokens to generate; an EOS token ends generation sooner."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Sampling seed."""
    in_step: bool = False
    """True if ranks shard the weights: then all compute each token together, even after their own text has ended."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: ChatOptions) -> list[int]:
    """Return the token ids of a prompt: as a user message if the tokenizer has a chat template, else as plain text."""
    asked: str | list[dict[str, Any]] = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    try:
        return PromptRenderer(tokenizer, chat=chat)(asked, None, "")
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
    """Return the model's answer to ``prompt``, or the continuation of it, without special tokens.

    If the tokenizer has a chat template, the prompt is a user message, rendered with the options ``chat``. The model,
    streamed or not, is left in evaluation mode. The caller's random state does not change.
    """
    ids = encode_prompt(tokenizer, prompt, chat or ChatOptions())
    ends, pad = end_tokens(model, tokenizer), tokenizer.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(decoding.seed)
        generated = _generate(model, ids, decoding, ends, pad)
    return tokenizer.decode(generated, skip_special_tokens=True)


def likeliest_tokens(
    model: PreTrainedModel | PeftModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    pad: int | None,
    in_step: bool = False,
) -> list[int]:
    """Return the token ids of the greedy continuation of ``prompt``, including a final EOS.

    The model is left in evaluation mode.
    """
    return _generate(model, prompt, Decoding(max_new_tokens, in_step=in_step), ends, pad)


def _generate(model: Any, prompt: Sequence[int], decoding: Decoding, ends: Sequence[int], pad: int | None) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model_device(model))
    sampling = {"do_sample": True, "temperature": decoding.temperature} if decoding.temperature > 0 else {}
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{"do_sample": False, **sampling},
            max_new_tokens=decoding.max_new_tokens,
            synced_gpus=decoding.in_step,
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
        )
    return output[0, len(prompt) :].tolist()
