"""Tensors that a chunk passes on to later chunks: keys and values, and states of recurrent layers.

A call may follow earlier tokens, whose keys and values come from a filled cache or from an adapter. Prefix tuning (Li
and Liang, arXiv 2101.00190) trains these keys and values. If a prompt was read under ``torch.no_grad()``, they have no
gradient. In both cases every chunk attends to them first: the layer's keys are ``[past | sequence]``. The gradient of
the past is the sum of its dK, dV over the chunks.

Shape suffixes: B batch, G key/value heads, P tokens before the call, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import CACHE
from streamtune.engine.memory.tiers import Block, Tier
from streamtune.engine.observe import notify_tensors
from streamtune.engine.rows import PackedRows
from streamtune.errors import ArgumentError, UnsupportedModelError


class KeysAndValues:
    """Keys, values and their gradients of one layer call, each ``[B, G, length, D]``.

    A layer that updates its cache more than once in a forward has one pair of keys and values for each update.

    Args:
        length: Number of keys: the tokens of the sequence and of ``past``.
        sum_in_fp32: True sums the gradients in fp32 if keys and values have a narrower dtype.
        past: Keys and values of tokens before the sequence; None if there are none.
    """

    def __init__(self, length: int, sum_in_fp32: bool = True, past: Past | None = None) -> None:
        self.length, self.past = length, past
        self.offset = 0
        """Position of the first key in the buffers. It is above 0 if the buffers hold only the keys that one chunk
        attends to.
        """
        self.sum_in_fp32 = sum_in_fp32
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.offloaded: list[tuple[Block, Block]] = []
        self.grads: list[tuple[Tensor, Tensor]] = []
        self.updates = 0
        """Number of cache updates in one forward of the layer; 0 before the first chunk has run."""

    def allocate(self, index: int, k: Tensor, v: Tensor) -> None:
        """Allocate buffers for keys and values, unless they exist.

        ``index`` is the number of the cache update within the layer. Batch size, heads, head dimension and dtype are
        taken from ``k`` and ``v``.
        """
        if index < len(self.pairs):
            return
        self.pairs.append((self._new_buffer(k), self._new_buffer(v)))
        notify_tensors("keys and values", *self.pairs[index])
        self.updates = max(self.updates, len(self.pairs))
        if self.past is not None:
            if index:
                refuse_filled_cache("a layer updates its cache more than once in a call", CACHE)
            self.past.check_unchanged()
            for buffer, before in zip(self.pairs[index], (self.past.keys, self.past.values), strict=True):
                if len(before) != len(buffer):
                    refuse_filled_cache(f"the cache holds {len(before)} rows for a call of {len(buffer)} rows", CACHE)
                buffer[:, :, : self.past.length] = before

    def write(self, index: int, chunk: slice, k: Tensor, v: Tensor) -> None:
        """Write a chunk's keys and values into the buffers.

        ``index`` is the number of the cache update within the layer.
        """
        self.allocate(index, k, v)
        for buffer, x in zip(self.pairs[index], (k, v), strict=True):
            buffer[:, :, self.buffer_slice(chunk)] = x

    def buffer_slice(self, keys: slice) -> slice:
        """Return the slice of the buffers that holds the keys at positions ``keys`` of the sequence."""
        return slice(keys.start - self.offset, keys.stop - self.offset)

    def _new_buffer(self, like: Tensor) -> Tensor:
        return like.new_empty((*like.shape[:2], self.length, like.shape[3]))

    def new_grad_sum(self, tensor: Tensor) -> Tensor:
        """Return zeros like ``tensor`` (keys or values), in the dtype in which its gradient is summed."""
        dtype = torch.promote_types(tensor.dtype, torch.float32) if self.sum_in_fp32 else tensor.dtype
        return torch.zeros_like(tensor, dtype=dtype)

    def free_kv(self) -> None:
        """Free the keys and values but not their gradients; the backward recomputes the keys and values."""
        self.pairs.clear()

    def copy_buffers(self) -> None:
        """Copy the buffers before chunks write to them again, because other layers hold the old buffers."""
        self.pairs = [(k.clone(), v.clone()) for k, v in self.pairs]

    def free_all(self) -> None:
        """Free keys, values, their offloaded copies and gradients, after the backward."""
        self.pairs.clear()
        self.offloaded.clear()
        self.grads.clear()

    def offload(self, tier: Tier) -> None:
        """Move the keys and values from the device to ``tier``; :meth:`fetch` copies them back."""
        self.offloaded = [(tier.put(k), tier.put(v)) for k, v in self.pairs]
        tier.wait_for_copies()
        self.pairs.clear()

    def fetch(self) -> None:
        """Copy the offloaded keys and values back to the device."""
        for k, v in self.offloaded:
            self.pairs.append((k.get(), v.get()))
            k.free()
            v.free()
        self.offloaded.clear()

    def kv_views(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Return views ``[B, G, S, D]`` of keys and values at the positions ``keys``.

        ``index`` is the number of the cache update within the layer.
        """
        k, v = self.pairs[index]
        at = self.buffer_slice(keys)
        return k[:, :, at], v[:, :, at]

    def add_grads(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Add gradients that other layers computed for keys and values.

        ``index`` is the number of the cache update within the layer.
        """
        for total, part in zip(self.grad_views(index, slice(0, self.length)), grads, strict=True):
            if part is not None:
                total += part

    @property
    def has_grads(self) -> bool:
        """True if gradients of keys and values are allocated."""
        return bool(self.grads)

    def grad_views(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Return views of the gradients of the keys and values at positions ``keys``, which start as zeros."""
        if not self.grads:
            self.grads = [(self.new_grad_sum(k), self.new_grad_sum(v)) for k, v in self.pairs]
            notify_tensors("keys and values", *(grad for pair in self.grads for grad in pair))
        grad_k, grad_v = self.grads[index]
        at = self.buffer_slice(keys)
        return grad_k[:, :, at], grad_v[:, :, at]

    def past_grads(self) -> tuple[Tensor, Tensor]:
        """Return the gradients ``[B, G, P, D]`` of the keys and values of tokens before the sequence."""
        assert self.past is not None
        grads = self.grad_views(0, slice(0, self.past.length))
        return grads[0].to(self.past.keys.dtype), grads[1].to(self.past.values.dtype)


StateKey = tuple[str, int, int]
"""Name of a state: (kind, index of its layer, index among that layer's states of the same kind)."""


class States:
    """Recurrent and convolution states of one layer call at the borders of its chunks, and their gradients.

    ``states_after[t]`` has the states after the first t tokens. It has none if a packed row begins at t in every
    sequence. If ``tier`` is set, states are also stored there. The copy on the device is then freed once the chunks
    that read it have run forward.
    """

    def __init__(self, rows: PackedRows | None = None) -> None:
        self.rows = rows
        self.has_states = False
        """True once the layer has saved a state."""
        self.tier: Tier | None = None
        """Tier that stores states until the backward; None keeps them on the device."""
        self.offloaded: dict[int, dict[StateKey, Block]] = {}
        self.states_after: dict[int, dict[StateKey, Tensor]] = {}
        self.grads: dict[int, dict[StateKey, Tensor]] = {}

    def on_state_used(self, unchunked: bool) -> None:
        """Do nothing when the layer uses a state; ``SharedStates`` overrides this method.

        ``unchunked`` is True if the layer runs on all tokens at once.
        """

    def on_keys_used(self) -> None:
        """Do nothing when the layer uses keys and values besides a state; ``SharedStates`` overrides this method."""

    def state_positions(self, chunk: slice) -> tuple[int | None, int]:
        """Return the positions of the state that a chunk reads (None if there is none) and of the state that it
        computes.

        The position of a state is the number of tokens before it.
        """
        before = (chunk.start or None) if self.rows is None else self.rows.start_state_position(chunk.start)
        return before, chunk.stop

    def tokens_to_run(self, chunk: slice) -> slice:
        """Return the tokens on which the layer runs for a chunk; in this class, the chunk itself."""
        return chunk

    def begin_pass(self, backward: bool) -> None:
        """Do nothing before a forward or backward over the chunks; ``SharedStates`` overrides this method."""

    def end_pass(self) -> None:
        """End a forward or backward over the chunks; free the device copies of offloaded states."""
        if self.tier is not None:
            self.tier.wait_for_copies()
            self.states_after.clear()

    def get_state(self, position: int, key: StateKey) -> Tensor | None:
        """Return the state ``key`` after the first ``position`` tokens, on the device; None if there is none."""
        on_device = self.states_after.get(position, {})
        if key in on_device or (block := self.offloaded.get(position, {}).get(key)) is None:
            return on_device.get(key)
        return block.get()

    def has_state_after(self, position: int) -> bool:
        """Return True if a state after the first ``position`` tokens exists."""
        return bool(self.states_after.get(position) or self.offloaded.get(position))

    def prefetch_states(self, chunk: slice) -> None:
        """Start copying to the device the states that a chunk reads."""
        read_position, _ = self.state_positions(chunk)
        for block in () if read_position is None else self.offloaded.get(read_position, {}).values():
            block.prefetch_to_device()

    def receive_state(self, read_position: int | None, key: StateKey) -> None:
        """Do nothing; ``SharedStates`` waits here for a state that another rank computes."""

    def save_state(self, position: int, key: StateKey, state: Tensor) -> None:
        """Save the state ``key`` after the first ``position`` tokens, for the chunks that start from it."""
        notify_tensors("state", state)
        if self.rows is None or self.rows.continues_past(position):
            copy = self.states_after.setdefault(position, {})[key] = state.clone()  # a view would keep the whole chunk
            if self.tier is not None:
                self.offloaded.setdefault(position, {})[key] = self.tier.put(copy)

    def end_chunk(self, read_position: int | None, position: int) -> None:
        """End the forward of a chunk; with ``tier``, free the device copies of states that no other chunk reads."""
        # Without rows, no other chunk begins with these states.
        if self.tier is not None and self.rows is None and read_position is not None:
            self.states_after.pop(read_position, None)

    def remote_gradient_tensor(self, position: int, key: StateKey, state: Tensor) -> Tensor | None:
        """Return None; ``SharedStates`` returns a tensor whose backward receives other ranks' gradient of ``state``."""
        return None

    def on_state_leaf(self, chunk: slice, read_position: int | None, key: StateKey, leaf: Tensor) -> None:
        """Do nothing when the autograd leaf ``leaf`` replaces a state; ``SharedStates`` overrides this method."""

    def add_state_grads(
        self, chunk: slice, read_position: int | None, position: int, parts: dict[StateKey, Tensor | None]
    ) -> None:
        """Add ``parts``, the gradients of the states that ``chunk`` read, to the sums over chunks."""
        if read_position is None:
            return
        totals = self.grads.setdefault(read_position, {})
        for key, part in parts.items():  # a trunk's last state gets a gradient from each of its branches
            if part is not None:
                totals[key] = totals[key] + part if key in totals else part

    def has_state_narrower_than(self, dtype: torch.dtype) -> bool:
        """Return True if a saved state has a floating dtype with fewer bytes than ``dtype``."""
        states = [x for by_key in self.states_after.values() for x in by_key.values() if x.is_floating_point()]
        return any(state.dtype.itemsize < dtype.itemsize for state in states)

    def free_states(self) -> None:
        """Free the states and their gradients."""
        for blocks in self.offloaded.values():
            for block in blocks.values():
                block.free()
        self.offloaded.clear()
        self.states_after.clear()
        self.grads.clear()


@dataclass(frozen=True)
class Past:
    """Keys and values ``[B, G, P, D]`` of the P tokens before a call, for one layer.

    Args:
        keys, values: Tensors of the cache.
        versions: Version counters of both tensors at the time of the call, to detect changes in place.
        layer_idx: Index with which the layer updates its cache.
    """

    keys: Tensor
    values: Tensor
    versions: tuple[int, int]
    layer_idx: int

    @property
    def length(self) -> int:
        """Number P of tokens before the call."""
        return self.keys.shape[2]

    @classmethod
    def from_cache(cls, layer: nn.Module, cache: Any) -> Past:
        """Return the keys and values that a filled cache holds for one layer.

        Raises:
            UnsupportedModelError: The cache does not hold keys and values of all P tokens at the layer's index.
        """
        name, length = type(layer).__name__, int(cache.get_seq_length())
        layers = getattr(cache, "layers", ())
        indices = {i for module in layer.modules() if isinstance(i := getattr(module, "layer_idx", None), int)}
        index = indices.pop() if len(indices) == 1 else len(layers)
        cache_layer = layers[index] if index < len(layers) else None
        keys, values = getattr(cache_layer, "keys", None), getattr(cache_layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
            refuse_filled_cache(f"the {type(cache).__name__} holds no keys and values under this layer's index", name)
        if keys.shape[2] != length:
            refuse_filled_cache(
                f"the cache holds {keys.shape[2]} keys for {length} tokens (a sliding or static cache)", name
            )
        return cls(keys, values, (version_counter(keys), version_counter(values)), index)

    def detached(self) -> Past:
        """Return the keys and values detached from their graph."""
        return replace(self, keys=self.keys.detach(), values=self.values.detach())

    def check_unchanged(self) -> None:
        """Raise :class:`ArgumentError` if the keys or values were changed in place since the forward."""
        if (version_counter(self.keys), version_counter(self.values)) != self.versions:
            raise ArgumentError(
                "the cache that was passed was changed in place between the forward and its backward; both read it",
                fix="call loss.backward() first, or pass a copy of the cache",
            )


def version_counter(x: Tensor) -> int:
    """Return how often ``x`` was changed in place; 0 for an inference tensor, which does not count this."""
    return 0 if x.is_inference() else x._version


def refuse_filled_cache(why: str, where: str) -> NoReturn:
    """Raise :class:`UnsupportedModelError` for a filled cache while gradients are on; ``why`` ends the message."""
    raise UnsupportedModelError(
        f"a cache was passed while gradients are on, and {why}",
        where=where,
        fix=f"pass the whole sequence without {CACHE}, or call the model under torch.no_grad()",
    )
