"""The generation config of a model: the tokens it ends at, and another one to write with.

It is never changed in place: another thread may be writing a checkpoint, which has the model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import GenerationConfig

from streamtune.base.adapters import base_of


def ends_of(settings: GenerationConfig | None) -> list[int]:
    """Return the tokens that a generation config ends at; none without one."""
    found: Any = getattr(settings, "eos_token_id", None)
    return [int(token) for token in (found if isinstance(found, list | tuple) else [found]) if token is not None]


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end token, and the tokens that the model's generation config ends at."""
    configured = ends_of(getattr(base_of(model), "generation_config", None))
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


def add_ends(model: nn.Module, tokens: Sequence[int]) -> list[int]:
    """Let a model's generation end at more tokens; return those at which it did not end before.

    The model gets a changed copy of its generation config: another thread may be writing the old one.
    """
    base: Any = base_of(model)
    known = ends_of(getattr(base, "generation_config", None))
    new = [token for token in tokens if token not in known]
    if new:
        settings = copy.deepcopy(base.generation_config) if base.generation_config is not None else GenerationConfig()
        settings.eos_token_id = [*known, *new] if len(known) + len(new) > 1 else new[0]
        settings._from_model_config = False  # else transformers may make it again from the model's configuration
        base.generation_config = settings
    return new


def with_generation(model: Any, settings: GenerationConfig) -> Any:
    """Return a model that generates by ``settings`` alone, and is ``model`` in all else.

    Both are the same modules, weights and hooks; ``model`` keeps its own generation config. Settings that are handed to
    ``generate`` would not do: what they leave open is filled from the model's own.
    """
    seen = object.__new__(type(model))
    vars(seen).update(vars(model))
    vars(seen)["generation_config"] = settings
    vars(seen).pop("generate", None)  # a streamed model has one of its own, which is bound to ``model``
    return seen
