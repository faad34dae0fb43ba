"""Layers that are handed their state as an argument and give it back, not through a cache: xLSTM and RWKV.

    xLSTM   ``x, (c, n, m) = layer(x, state=(c, n, m))``
    RWKV    ``state[i][:, :, layer_id]`` is read and written for i = 0..4, tensors of all layers

Both are what the tokens before leave: the states of :class:`~streamtune.engine.cache.ChunkCache`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.cache import ChunkCache
from streamtune.errors import UnsupportedModelError

__all__ = ["STATE", "state_after", "state_before"]

STATE = "state"
"""What both call the argument."""

XLSTM_STATES, RWKV_STATES = 3, 5
NOTHING = -1e30
"""The largest exponent RWKV has met where it has met none."""


def state_before(layer: nn.Module, cache: ChunkCache, hidden: Tensor) -> Any:
    """Return the argument for a chunk: what the chunk before left.

    Args:
        layer: The layer.
        cache: The chunk's.
        hidden: The chunk's hidden states ``[B, T, C]``.

    Raises:
        UnsupportedModelError: RWKV's CUDA kernel is loaded, whose backward drops the gradient of the state.
    """
    if not hasattr(layer, "layer_id"):
        parts = [cache.get_recurrent_state(0, index) for index in range(XLSTM_STATES)]
        return None if parts[0] is None else tuple(parts)
    if hidden.is_cuda and getattr(sys.modules[type(layer).__module__], "rwkv_cuda_kernel", None) is not None:
        raise UnsupportedModelError(
            "the CUDA kernel of RWKV gives no gradient of the state that it begins with",
            where=type(layer).__name__,
            mend="train this model without streaming",
        )
    known = [cache.get_recurrent_state(0, index) for index in range(RWKV_STATES)]
    alone = hidden.shape[1] == 1  # then the last token takes the place of a shifted sequence [B, T, C]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    attended = int(layer.attention.attention_hidden_size)  # type: ignore[union-attr, arg-type]
    sizes = [(hidden.shape[2], hidden.dtype)] * 2 + [(attended, wide)] * 3
    begin = [hidden.new_zeros((hidden.shape[0], size), dtype=dtype) for size, dtype in sizes]
    begin[4] = begin[4] + NOTHING
    columns = [new if old is None else old for old, new in zip(known, begin, strict=True)]
    return [_Column(x[:, None] if alone and index < 2 else x) for index, x in enumerate(columns)]


def state_after(layer: nn.Module, cache: ChunkCache, given: Any, out: Any) -> Any:
    """Keep what a chunk left, and return its output without it.

    Args:
        layer: The layer.
        cache: The chunk's.
        given: What :func:`state_before` returned.
        out: What the layer returned: hidden states, state, and more.

    Raises:
        UnsupportedModelError: It returned no state.
    """
    parts = [column.x for column in given] if isinstance(given, list) else out[1]
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
        raise UnsupportedModelError(
            f"{type(layer).__name__} does not give back its state, which the next chunk needs",
            mend="set config.mode = 'inference', which computes the same and returns it",
        )
    for index, part in enumerate(parts):
        cache.update_recurrent_state(part, 0, index)
    return (out[0], None, *out[2:])


class _Column:
    """One layer's part of a tensor ``[B, C, layers]``, read and written whole, without an operation in place."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, key: Any) -> Tensor:
        return self.x

    def __setitem__(self, key: Any, x: Tensor) -> None:
        self.x = x
