"""Tensors that chunks leave to later chunks: keys and values, and the states of recurrent layers.

There may be tokens before a call: keys and values of a filled cache, or keys and values that an adapter computes.
Prefix tuning (Li and Liang, arXiv 2101.00190) trains them; a prompt that was read under ``torch.no_grad()`` has no
gradient. Either way they begin every chunk's prefix: the layer's keys are ``[past | sequence]``, and the sum over
chunks of dK, dV of the past is its gradient.

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
    """K, V and dK, dV of one layer call, ``[B, G, length, D]`` each, one pair for every ``update`` the layer makes.

    Args:
        length: Tokens T of the sequence, the tokens of ``past`` included.
        widen: Sum dK, dV in fp32 where K, V are narrower.
        past: Keys and values of tokens before the sequence.
    """

    def __init__(self, length: int, widen: bool = True, past: Past | None = None) -> None:
        self.length, self.past = length, past
        self.offset = 0
        """First position of the buffers: not 0 if they hold the part of the keys that one chunk is given."""
        self.widen = widen
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.away: list[tuple[Block, Block]] = []
        self.grads: list[tuple[Tensor, Tensor]] = []
        self.updates = 0
        """Number of ``update`` calls in a forward of the layer; known once one chunk has been stored."""

    def open(self, index: int, k: Tensor, v: Tensor) -> None:
        """Allocate the buffers of the ``index``-th update, in the form of these keys and values, if not done yet."""
        if index < len(self.pairs):
            return
        self.pairs.append((self._buffer(k), self._buffer(v)))
        notify_tensors("keys and values", *self.pairs[index])
        self.updates = max(self.updates, len(self.pairs))
        if self.past is not None:
            if index:
                refuse_past("a layer keeps more than one pair of keys and values", CACHE)
            self.past.check()
            for buffer, before in zip(self.pairs[index], (self.past.keys, self.past.values), strict=True):
                if len(before) != len(buffer):
                    refuse_past(f"it holds {len(before)} rows for a call of {len(buffer)}", CACHE)
                buffer[:, :, : self.past.length] = before

    def write(self, index: int, chunk: slice, k: Tensor, v: Tensor) -> None:
        """Store a chunk's keys and values of the ``index``-th update."""
        self.open(index, k, v)
        for buffer, own in zip(self.pairs[index], (k, v), strict=True):
            buffer[:, :, self.at(chunk)] = own

    def at(self, keys: slice) -> slice:
        """Return the slice of the buffers for keys at the given positions."""
        return slice(keys.start - self.offset, keys.stop - self.offset)

    def _buffer(self, own: Tensor) -> Tensor:
        return own.new_empty((*own.shape[:2], self.length, own.shape[3]))

    def zeros(self, tensor: Tensor) -> Tensor:
        """Return zeros in which gradients of keys or values are summed."""
        dtype = torch.promote_types(tensor.dtype, torch.float32) if self.widen else tensor.dtype
        return torch.zeros_like(tensor, dtype=dtype)

    def free_kv(self) -> None:
        """Free the buffers; a ``project`` pass fills them again."""
        self.pairs.clear()

    def copy(self) -> None:
        """Replace the buffers by copies: chunks write to them, and other layers hold the old ones."""
        self.pairs = [(k.clone(), v.clone()) for k, v in self.pairs]

    def free_all(self) -> None:
        """Free buffers and gradients: the backward is done."""
        self.pairs.clear()
        self.away.clear()
        self.grads.clear()

    def offload(self, tier: Tier) -> None:
        """Move the buffers to a tier until they are fetched."""
        self.away = [(tier.put(k), tier.put(v)) for k, v in self.pairs]
        tier.settle()
        self.pairs.clear()

    def fetch(self) -> None:
        """Bring the offloaded buffers back."""
        for k, v in self.away:
            self.pairs.append((k.get(), v.get()))
            k.free()
            v.free()
        self.away.clear()

    def prefix(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Return views ``[B, G, S, D]`` of the keys and values at the given positions."""
        k, v = self.pairs[index]
        at = self.at(keys)
        return k[:, :, at], v[:, :, at]

    def add_grads(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Add to dK, dV the gradients from other layers that read these keys and values."""
        for total, part in zip(self.grad(index, slice(0, self.length)), grads, strict=True):
            if part is not None:
                total += part

    @property
    def grads_begun(self) -> bool:
        """True if dK, dV are allocated; the first access does that."""
        return bool(self.grads)

    def grad(self, index: int, keys: slice) -> tuple[Tensor, Tensor]:
        """Return views of dK and dV at the given positions, to read or to add to; zero before anything was added."""
        if not self.grads:
            self.grads = [(self.zeros(k), self.zeros(v)) for k, v in self.pairs]
            notify_tensors("keys and values", *(grad for pair in self.grads for grad in pair))
        grad_k, grad_v = self.grads[index]
        at = self.at(keys)
        return grad_k[:, :, at], grad_v[:, :, at]

    def past_grads(self) -> tuple[Tensor, Tensor]:
        """Return dK and dV ``[B, G, P, D]`` of the tokens before the sequence."""
        assert self.past is not None
        grads = self.grad(0, slice(0, self.past.length))
        return grads[0].to(self.past.keys.dtype), grads[1].to(self.past.values.dtype)


StateKey = tuple[str, int, int]
"""(kind of state, index of its layer, index among that layer's states of the kind)."""


class States:
    """States of one layer call at the chunk boundaries, and their gradients.

    ``after[t]`` holds the states after the first t tokens. It has no entry where all sequences begin a packed row.
    With a tier, states move there once the forward's chunks that begin with them are done.
    """

    def __init__(self, rows: PackedRows | None = None) -> None:
        self.rows = rows
        self.met = False
        """True if the layer has any state."""
        self.tier: Tier | None = None
        """Tier in which states wait for the backward; None leaves them on the device."""
        self.away: dict[int, dict[StateKey, Block]] = {}
        self.after: dict[int, dict[StateKey, Tensor]] = {}
        self.grads: dict[int, dict[StateKey, Tensor]] = {}

    def meet(self, whole: bool) -> None:
        """Note that the layer uses a state; ``whole`` if it runs on the whole sequence with its graph."""

    def meet_keys(self) -> None:
        """Note that the layer keeps keys and values as well."""

    def place(self, chunk: slice) -> tuple[int | None, int]:
        """Return (position whose states a chunk begins with or None, position of the states that it makes)."""
        before = (chunk.start or None) if self.rows is None else self.rows.state_before(chunk.start)
        return before, chunk.stop

    def widened(self, chunk: slice) -> slice:
        """Return the tokens that a layer runs on for a chunk; all but the first are copies of the first."""
        return chunk

    def begin(self, backward: bool) -> None:
        """Begin a pass over the chunks."""

    def end(self) -> None:
        """End a pass: states in a tier leave the device."""
        if self.tier is not None:
            self.tier.settle()
            self.after.clear()

    def before(self, after: int, key: StateKey) -> Tensor | None:
        """Return a state after so many tokens, on the device; None if there is none."""
        known = self.after.get(after, {})
        if key in known or (block := self.away.get(after, {}).get(key)) is None:
            return known.get(key)
        return block.get()

    def known(self, after: int) -> bool:
        """Return True if there is a state after so many tokens."""
        return bool(self.after.get(after) or self.away.get(after))

    def prefetch(self, chunk: slice) -> None:
        """Begin to bring the states that a chunk begins with back to the device."""
        after, _ = self.place(chunk)
        for block in () if after is None else self.away.get(after, {}).values():
            block.prefetch()

    def receive(self, after: int | None, key: StateKey) -> None:
        """Provide a state that a chunk begins with, if there is one."""

    def keep(self, position: int, key: StateKey, state: Tensor) -> None:
        """Keep a state for the chunks that begin with it."""
        notify_tensors("state", state)
        if self.rows is None or self.rows.carries_on(position):
            own = self.after.setdefault(position, {})[key] = state.clone()  # a view would keep the whole chunk
            if self.tier is not None:
                self.away.setdefault(position, {})[key] = self.tier.put(own)

    def close(self, after: int | None, position: int) -> None:
        """End the forward of a chunk."""
        if self.tier is not None and self.rows is None and after is not None:  # no other chunk begins with its states
            self.after.pop(after, None)

    def handed_to_ranks(self, position: int, key: StateKey, state: Tensor) -> Tensor | None:
        """Return an output whose backward is the gradient that a state gets from other ranks, or None."""
        return None

    def watch(self, chunk: slice, after: int | None, key: StateKey, leaf: Tensor) -> None:
        """Note the leaf that stands for a state in the graph of a chunk."""

    def hand_back(self, chunk: slice, after: int | None, position: int, parts: dict[StateKey, Tensor | None]) -> None:
        """Add gradients ``parts`` to the gradients of the states after ``after`` tokens, with which a chunk began."""
        if after is None:
            return
        totals = self.grads.setdefault(after, {})
        for key, part in parts.items():  # of a trunk's last state there are as many as branches take it up
            if part is not None:
                totals[key] = totals[key] + part if key in totals else part

    def narrower_than(self, dtype: torch.dtype) -> bool:
        """Return True if a state has a narrower floating dtype: its layer computes in that dtype for any input."""
        states = [state for kept in self.after.values() for state in kept.values() if state.is_floating_point()]
        return any(state.dtype.itemsize < dtype.itemsize for state in states)

    def free(self) -> None:
        """Free the states and their gradients."""
        for blocks in self.away.values():
            for block in blocks.values():
                block.free()
        self.away.clear()
        self.after.clear()
        self.grads.clear()


@dataclass(frozen=True)
class Past:
    """Keys and values ``[B, G, P, D]`` of the tokens before a call, for one layer.

    Args:
        keys, values: Tensors of the cache.
        versions: Version counters of both (changes in place) at the time of the call.
        layer_idx: Number by which the layer asks its cache for them.
    """

    keys: Tensor
    values: Tensor
    versions: tuple[int, int]
    layer_idx: int

    @property
    def length(self) -> int:
        """Number of tokens P."""
        return self.keys.shape[2]

    @classmethod
    def of(cls, layer: nn.Module, cache: Any) -> Past:
        """Read a layer's part of a filled cache; it must hold keys and values, of all P tokens."""
        name, length = type(layer).__name__, int(cache.get_seq_length())
        layers = getattr(cache, "layers", ())
        places = {i for module in layer.modules() if isinstance(i := getattr(module, "layer_idx", None), int)}
        place = places.pop() if len(places) == 1 else len(layers)
        own = layers[place] if place < len(layers) else None
        keys, values = getattr(own, "keys", None), getattr(own, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
            refuse_past(f"a {type(cache).__name__} does not hold keys and values by this layer's number", name)
        if keys.shape[2] != length:
            refuse_past(f"of {length} tokens it holds {keys.shape[2]} keys (a sliding or static cache)", name)
        return cls(keys, values, (_version(keys), _version(values)), place)

    def detached(self) -> Past:
        """Return the same keys and values without their graph."""
        return replace(self, keys=self.keys.detach(), values=self.values.detach())

    def check(self) -> None:
        """Raise :class:`ArgumentError` if the cache was written to since the forward."""
        if (_version(self.keys), _version(self.values)) != self.versions:
            raise ArgumentError(
                "the cache that was passed was changed in place between the forward and its backward, and both "
                "compute with it",
                fix="call loss.backward() first, or pass a copy of the cache",
            )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def refuse_past(why: str, where: str) -> NoReturn:
    """Raise the :class:`UnsupportedModelError` for a filled cache, for the reason given."""
    raise UnsupportedModelError(
        f"a cache was passed while gradients are on, and {why}",
        where=where,
        fix=f"pass the whole sequence without {CACHE}, or call the model under torch.no_grad()",
    )
