"""Keys and values of one layer over the whole sequence, and the face of them that a chunk's forward sees.

A decoder layer knows one way to meet a prefix: ``past_key_values.update(k, v, layer_idx)`` stores the chunk's keys and
values and returns those of prefix and chunk together. :class:`ChunkCache` answers it, once for each of three walks:

    store    forward: write k_i, v_i into the buffers and return views of them
    project  backward, first: the same, then leave the layer at once (nothing behind the last update is needed)
    replay   backward: return [prefix | own] where the prefix is a leaf, so its gradient can be asked for

Shape suffixes: B batch, G key/value heads, S tokens of prefix and chunk, D head dimension.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from streamtune.errors import UnsupportedModelError

__all__ = ["ChunkCache", "KeysAndValues", "ProjectionDone"]

Walk = Literal["store", "project", "replay"]


class ProjectionDone(BaseException):
    """The layer's last key/value update is done; the rest of its forward is not needed."""


class KeysAndValues:
    """K, V and dK, dV of one layer call, ``[B, G, length, D]`` each, one pair for every ``update`` the layer makes.

    Args:
        length: Tokens T of the sequence.
        widen: Sum dK, dV in fp32 where K, V are narrower.
    """

    def __init__(self, length: int, widen: bool = True) -> None:
        self.length = length
        self.widen = widen
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.grads: list[tuple[Tensor, Tensor]] = []
        self.updates = 0
        """Calls of ``update`` a forward of the layer makes; known once one chunk has been stored."""

    def write(self, index: int, chunk: slice, k: Tensor, v: Tensor) -> None:
        """Store a chunk's keys and values of the ``index``-th update; the first chunk makes the buffers."""
        if index == len(self.pairs):
            self.pairs.append((self._buffer(k), self._buffer(v)))
            self.updates = max(self.updates, len(self.pairs))
        for buffer, own in zip(self.pairs[index], (k, v), strict=True):
            buffer[:, :, chunk] = own

    def _buffer(self, own: Tensor) -> Tensor:
        return own.new_empty((*own.shape[:2], self.length, own.shape[3]))

    def _zeros(self, tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32) if self.widen else tensor.dtype
        return torch.zeros_like(tensor, dtype=dtype)

    def release(self) -> None:
        """Free the buffers; a ``project`` walk fills them again."""
        self.pairs.clear()

    def prefix(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Views ``[B, G, S, D]`` of the keys and values at the given positions."""
        k, v = self.pairs[index]
        return k[:, :, keys], v[:, :, keys]

    def grad(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Views of dK and dV at the given positions, to read or to add to; zero before anything was added."""
        if not self.grads:
            self.grads = [(self._zeros(k), self._zeros(v)) for k, v in self.pairs]
        grad_k, grad_v = self.grads[index]
        return grad_k[:, :, keys], grad_v[:, :, keys]


class _NoLayers(list[Any]):
    """What a layer finds that looks into the cache for its own part of it: a chunk's cache has only one."""

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedModelError(
            "a layer of this model keeps a state of its own kind in its cache, which is not streamed in this release",
            mend="train it without streaming, or choose a model whose layers are attention layers",
        )


class ChunkCache(Cache):
    """The cache one chunk of one layer sees.

    Args:
        kv: The layer's keys and values.
        chunk: The chunk's positions.
        first_key: The first position the chunk can see (later than 0 under a sliding window).
        walk: Which of the three walks asks.
    """

    def __init__(self, kv: KeysAndValues, chunk: slice, first_key: int, walk: Walk) -> None:
        super().__init__(layers=_NoLayers())
        self.kv, self.chunk, self.first_key, self.walk = kv, chunk, min(first_key, chunk.start), walk
        self.leaves: list[Tensor] = []
        self.own: list[Tensor] = []
        self.updates = 0

    @property
    def prefix_keys(self) -> slice:
        """Positions of the prefix the chunk can see."""
        return slice(self.first_key, self.chunk.start)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store or join, by walk; returns keys and values ``[B, G, S, D]`` of prefix and chunk."""
        index, self.updates = self.updates, self.updates + 1
        key_states, value_states = _attended_dtype(key_states), _attended_dtype(value_states)
        if self.walk != "replay":
            self.kv.write(index, self.chunk, key_states, value_states)
            if self.walk == "project" and self.updates == self.kv.updates:
                raise ProjectionDone
            return self.kv.prefix(index, slice(self.first_key, self.chunk.stop))
        self.own += [key_states, value_states]
        if self.chunk.start == 0:
            return key_states, value_states
        joined = []
        views = zip(self.kv.prefix(index, self.prefix_keys), (key_states, value_states), strict=True)
        for position, (prefix, own) in enumerate(views):
            leaf = prefix.detach().requires_grad_()
            self.leaves.append(leaf)
            buffer = self.kv.pairs[index][position]
            joined.append(_Join.apply(leaf, own, (buffer, self.first_key, self.chunk)))
        return tuple(joined)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """The same for the keys ``[B, S, D]`` by which a layer chooses whom it attends to: one head, no values."""
        keys = indexer_key_states[:, None]
        joined, _ = self.update(keys, keys[..., :0], layer_idx)
        return joined[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the chunk."""
        return self.chunk.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of what the chunk attends to."""
        return self.chunk.stop - self.first_key, self.first_key

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the chunk's first token."""
        return self.chunk.start

    def _recurrent(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            "a layer of this model keeps a recurrent or convolutional state, which is not streamed in this release",
            mend="train it without streaming, or choose a model whose layers are attention layers",
        )

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _recurrent
    has_previous_state = _recurrent


def _attended_dtype(x: Tensor) -> Tensor:
    """Autocast lets rotary embeddings widen the keys and narrows them again in the attention: keep them narrow."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _Join(torch.autograd.Function):
    """``cat([prefix, own], dim=2)`` without a copy: both already lie side by side in the layer's buffer."""

    @staticmethod
    def forward(ctx: Any, prefix: Tensor, own: Tensor, place: tuple[Tensor, int, slice]) -> Tensor:
        buffer, first_key, chunk = place  # in a tuple, so that autograd does not take the result for a view of an input
        ctx.split = prefix.shape[2]
        buffer[:, :, chunk] = own
        return buffer[:, :, first_key : chunk.stop]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[:, :, : ctx.split], grad[:, :, ctx.split :], None
