"""Generated text, and the tokens at which generation ends.

The generation config of a model is never changed in place: another thread may be writing a checkpoint with it.
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
    """Return the end tokens of a generation config; an empty list without one."""
    ends: Any = getattr(settings, "eos_token_id", None)
    return [int(token) for token in (ends if isinstance(ends, list | tuple) else [ends]) if token is not None]


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end token and the end tokens of the model's generation config."""
    configured = ends_of(getattr(base_of(model), "generation_config", None))
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


def add_ends(model: nn.Module, tokens: Sequence[int]) -> list[int]:
    """Let a model's generation end at more tokens; return the tokens at which it did not end before.

    The model gets a changed copy of its generation config: another thread may be writing the old one.
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
    """Return a model that generates by ``settings`` alone, and is ``model`` in all else.

    Both are the same modules, weights and hooks; ``model`` keeps its own generation config. Settings passed to
    ``generate`` would not do: the model's own config fills what they leave open.
    """
    seen = object.__new__(type(model))
    vars(seen).update(vars(model))
    vars(seen)["generation_config"] = settings
    vars(seen).pop("generate", None)  # a streamed model has its own, bound to ``model``
    return seen


@dataclass(frozen=True)
class Decoding:
    """Settings of generated text."""

    max_new_tokens: int
    """Most tokens; generation stops sooner at an end token."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Seed of the sampling."""
    in_step: bool = False
    """True if ranks share the weights and compute each token together, also a rank that is done."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: ChatOptions) -> list[int]:
    """Return the token ids of a prompt: a user message if there is a chat template, else plain text."""
    asked: str | list[dict[str, Any]] = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    try:
        return PromptRenderer(tokenizer, chat=chat)(asked, None, "")
    except DataError as error:
        raise ArgumentError(error.what, where="sample", fix="give another prompt, or another chat_template") from error


def sample_text(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    decoding: Decoding,
    *,
    chat: ChatOptions | None = None,
) -> str:
    """Return the model's answer to ``prompt``, or its continuation, without special tokens.

    With a chat template, by the options ``chat``, the prompt is a user message. The model, streamed or not, stays in
    evaluation mode. The caller's random state is left as it was.
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
    """Return the token ids of the greedy continuation of ``prompt``, a final end token included.

    The model stays in evaluation mode.
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
