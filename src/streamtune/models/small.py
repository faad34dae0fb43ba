"""A small model of the same configuration, for trials where the model itself is sharded over several ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamtune.adapters import base_of

__all__ = ["small_like"]


def small_like(model: Any, layers: Sequence[nn.Module], *, seed: int) -> PreTrainedModel:
    """Build a model of the first layers of ``model``, enough to have one of each kind, with random weights.

    Args:
        model: With or without adapters, which are left out; its weights are not read.
        layers: Its decoder layers.
        seed: Of the weights. The caller's random state is left as it was.
    """
    base = base_of(model)
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    count = _until_all_kinds(text, layers)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, key, value[:count])
    text.num_hidden_layers = count
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: PreTrainedModel = type(base)._from_config(config, dtype=base.dtype)
    return made.train()


def _until_all_kinds(text: Any, layers: Sequence[nn.Module]) -> int:
    """Return the smallest number of layers, from the first on, that has a layer of every kind."""
    types = getattr(text, "layer_types", None) or [""] * len(layers)
    kinds = [
        (type(layer), kind, tuple((name, tuple(x.shape)) for name, x in layer.named_parameters()))
        for layer, kind in zip(layers, types, strict=False)
    ]
    return max((kinds.index(kind) for kind in kinds), default=0) + 1
