"""Tensors that one layer call keeps until its backward.

In the order of chunks a backward comes back to a layer once for every chunk. It then needs the keys and values that
this chunk sees of earlier ones, and the sums of their gradients so far. In between these wait in *pieces*, one for each
chunk:

    chunk        0        1        2        3
    full         [  K0  ][  K1  ][  K2  ]             chunk 3 makes its own again, and no later chunk sees them
    window            [K0]    [K1]    [K2]            of a chunk, only the last tokens are seen by the next

A piece of keys and values is freed when its own chunk is done. A piece of dK, dV exists from the first chunk that adds
to it until its own chunk has read it. On the device the pieces of a layer without a window would be copies of nearly
all its buffers, so the buffers stay (:func:`keep_kv` returns None).

Shape suffixes: B batch, G key/value heads, S tokens of a piece, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from streamtune.engine.attention import SavedAttention
from streamtune.engine.kv import KeysAndValues
from streamtune.engine.memory.tiers import Block, DeviceTier, Source, StoredTensor, Tier
from streamtune.engine.observe import notify_resized, notify_tensors
from streamtune.errors import ArgumentError


class SavedTensors:
    """Tensors of one layer call between its forward and its backward, besides keys, values and states."""

    def __init__(self) -> None:
        self.z_in: Source | None = None
        """The layer's input, wherever it waits; None as long as it is to be computed again."""
        self._version = 0
        self.attention: SavedAttention | None = None
        """The attention outputs; None if the backward computes them again."""
        self.kv: KeptKV | None = None
        """Keys and values in the order of chunks; None if the buffers keep them."""
        self.must_recompute_kv = False
        """True while states, keys or values freed after the forward are still to be computed again."""

    def keep_on_device(self, hidden: Tensor) -> None:
        """Keep the input, and its version."""
        self.z_in, self._version = hidden.detach(), hidden._version

    def input(self, layer: str) -> Source:
        """Return the input as it was stored."""
        assert self.z_in is not None
        if isinstance(self.z_in, Tensor) and self.z_in._version != self._version:
            raise ArgumentError(
                f"the input of {layer} was changed in place after it had been read",
                fix="change a copy of the hidden states",
            )
        return self.z_in

    def settle(self) -> None:
        """Wait for copies to other tiers."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.tier.settle()
        if self.attention is not None:
            self.attention.tier.settle()

    def expect(self, chunks: Sequence[slice]) -> None:
        """Set the order in which chunks are read: while one is worked on, the next is fetched."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.expect(chunks)
        if self.attention is not None:
            self.attention.expect(chunks)

    def free(self) -> None:
        """Free the input and the attention outputs."""
        if isinstance(self.z_in, StoredTensor):
            self.z_in.free()
        self.z_in = self.attention = None


WORTH = 0.5
"""Pieces on the device that hold more than this part of the tokens are not worth a copy of them."""


def keep_kv(kv: KeysAndValues, chunks: Sequence[slice], first_key: Callable[[slice], int], tier: Tier) -> KeptKV | None:
    """Cut the keys and values of a layer's forward into pieces, and free its buffers.

    Return None if the buffers stay: pieces would hold most of them, or tokens before the call begin them.
    ``first_key`` gives the first position that a chunk sees.
    """
    pieces: list[slice] = []
    lowest = chunks[-1].start
    for chunk, later in zip(reversed(chunks[:-1]), reversed(chunks[1:]), strict=True):
        lowest = min(lowest, first_key(later))
        pieces.append(slice(min(max(chunk.start, lowest), chunk.stop), chunk.stop))
    pieces.reverse()
    held = sum(piece.stop - piece.start for piece in pieces)
    if kv.past is not None or not kv.pairs or (isinstance(tier, DeviceTier) and held > WORTH * chunks[-1].start):
        return None
    return KeptKV(kv, dict(zip((chunk.start for chunk in chunks), pieces, strict=False)), tier)


class KeptKV:
    """The pieces of one layer call, and the part of them that a chunk is given.

    Args:
        kv: Keys and values of the layer; from now on its buffers hold the part that one chunk is given.
        pieces: Positions of each piece, by the start of its chunk.
        tier: Tier that stores them.
    """

    def __init__(self, kv: KeysAndValues, pieces: dict[int, slice], tier: Tier) -> None:
        self.kv, self.pieces, self.tier = kv, pieces, tier
        self.forms = [tuple(x.new_empty((0,)) for x in pair) for pair in kv.pairs]
        self.shapes = [tuple(x.shape for x in pair) for pair in kv.pairs]
        self.blocks: dict[tuple[int, int, int], Block] = {}
        """Keys (place 0) and values (1), by (start of the chunk, update, place)."""
        self.sums: dict[tuple[int, int, int], Block] = {}
        """Gradients of ``blocks``."""
        for start, piece in pieces.items():
            if piece.start < piece.stop:
                self._store(self.blocks, start, piece, kv.pairs)
        tier.settle()
        kv.pairs.clear()

    def load(self, chunk: slice, first_key: int) -> None:
        """Fill the buffers with the keys and values that a chunk sees of earlier ones; its own have room behind."""
        self.unload()
        if chunk.start == 0:
            return
        before = self._before(chunk, first_key)
        self.kv.offset = min([self.pieces[start].start for start in before], default=chunk.start)
        self.kv.pairs = self._buffers(chunk, lambda like, shape: like.new_empty(shape))
        self._fill(self.blocks, before, self.kv.pairs)

    def release(self) -> None:
        """Free the memory of the buffers. Keep the tensor objects, because the graph of a chunk refers to them."""
        for pair in self.kv.pairs:
            for x in pair:
                _resize(x, 0)

    def refill(self, chunk: slice, own: Sequence[Tensor]) -> None:
        """Give the buffers of a chunk their memory and contents again; ``own`` are its keys and values."""
        for index, pair in enumerate(self.kv.pairs):
            for place, x in enumerate(pair):
                _resize(x, x.numel() * x.element_size())
                with _unsafe_preserve_version_counter(x):
                    x[:, :, self.kv.at(chunk)] = own[2 * index + place].detach()
        seen = [s for s, piece in self.pieces.items() if s < chunk.start and piece.start >= self.kv.offset]
        self._fill(self.blocks, seen, self.kv.pairs)

    def load_sums(self, chunk: slice) -> None:
        """Fill the buffers of dK, dV with the sums so far, for the loaded part and for the chunk's own."""
        within = [
            start for start, piece in self.pieces.items() if start <= chunk.start and piece.start >= self.kv.offset
        ]
        if self.kv.pairs or (chunk.start, 0, 0) in self.sums:
            self.kv.grads = self._buffers(chunk, lambda like, shape: self.kv.zeros(like.new_empty(shape)))
            self._fill(self.sums, within, self.kv.grads)

    def save_sums(self, chunk: slice, keep_graph: bool) -> None:
        """Store dK, dV of the earlier chunks' part; free the chunk's own, but for keys and values if ``keep_graph``."""
        if self.kv.grads:
            for start, piece in self.pieces.items():
                if self.kv.offset <= piece.start < piece.stop and start < chunk.start:
                    self._store(self.sums, start, piece, self.kv.grads)
            self.tier.settle()
        for kept in (self.sums,) if keep_graph else (self.sums, self.blocks):
            for key in [key for key in kept if key[0] == chunk.start]:
                kept.pop(key).free()
        self.unload()

    def unload(self) -> None:
        """Free the buffers."""
        self.kv.pairs, self.kv.grads, self.kv.offset = [], [], 0

    def free_sums(self) -> None:
        """Free the gradients, such as what an interrupted backward left."""
        for block in self.sums.values():
            block.free()
        self.sums.clear()

    def free(self) -> None:
        """Free everything."""
        self.unload()
        self.free_sums()
        for block in self.blocks.values():
            block.free()
        self.blocks.clear()

    def _before(self, chunk: slice, first_key: int) -> list[int]:
        return [
            start
            for start, piece in self.pieces.items()
            if start < chunk.start and piece.start < piece.stop and piece.stop > first_key
        ]

    def _buffers(self, chunk: slice, make: Callable[[Tensor, tuple[int, ...]], Tensor]) -> list[tuple[Tensor, Tensor]]:
        length = chunk.stop - self.kv.offset
        found: list[tuple[Tensor, Tensor]] = []
        for forms, shapes in zip(self.forms, self.shapes, strict=True):
            k, v = (make(x, (*s[:2], length, s[3])) for x, s in zip(forms, shapes, strict=True))
            notify_tensors("keys and values", k, v)
            found.append((k, v))
        return found

    def _store(
        self, kept: dict[tuple[int, int, int], Block], start: int, piece: slice, pairs: list[tuple[Tensor, Tensor]]
    ) -> None:
        for index, pair in enumerate(pairs):
            for place, x in enumerate(pair):
                x_BGSD = x[:, :, self.kv.at(piece)].clone(memory_format=torch.contiguous_format)
                notify_tensors("keys and values", x_BGSD)
                if (known := kept.get((start, index, place))) is not None:
                    known.replace(x_BGSD)
                else:
                    kept[start, index, place] = self.tier.put(x_BGSD)

    def _fill(
        self, kept: dict[tuple[int, int, int], Block], starts: Sequence[int], pairs: list[tuple[Tensor, Tensor]]
    ) -> None:
        keys = [(start, index, place) for start in starts for index in range(len(pairs)) for place in (0, 1)]
        keys = [key for key in keys if key in kept]
        for number, key in enumerate(keys):
            for ahead in keys[number + 1 : number + 3]:  # on their way while this one is copied
                kept[ahead].prefetch()
            start, index, place = key
            with _unsafe_preserve_version_counter(pairs[index][place]):
                pairs[index][place][:, :, self.kv.at(self.pieces[start])] = kept[key].get()


def _resize(x: Tensor, nbytes: int) -> None:
    x.untyped_storage().resize_(nbytes)
    notify_resized(x)
