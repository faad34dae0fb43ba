"""A mask that is a function of positions, given to the layers of a model in place of a tensor.

Shape suffixes: B batch, T queries, S keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.attention.view import MaskView

__all__ = [
    "Branch",
    "BranchTable",
    "LazyMask",
    "Stretch",
    "clipped",
    "contiguous",
    "row_starts",
    "run_starts",
    "stretches",
]


def row_starts(position_ids: Tensor) -> list[int]:
    """Return the starts of packed rows: 0, and every place where a position is not its predecessor's plus one.

    The rule of ``transformers.masking_utils.find_packed_sequence_indices``.

    Args:
        position_ids: ``[..., T]``, integers.

    Returns:
        Sorted positions at which a row starts in any of the sequences.

    Example:
        >>> row_starts(torch.tensor([0, 1, 2, 0, 1, 0]))
        [0, 3, 5]
    """
    restarts = (torch.atleast_2d(position_ids).diff(dim=-1) != 1).flatten(0, -2).any(0)
    return [0, *(int(place) + 1 for place in restarts.nonzero().flatten().tolist())]


def run_starts(ids_BT: Tensor) -> Tensor:
    """Return ``[B, T]`` int64: for every position the first one of its run of equal ids."""
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    begins = torch.ones_like(ids_BT, dtype=torch.bool)
    begins[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return positions.masked_fill(~begins, 0).cummax(dim=1).values


def contiguous(ids_BT: Tensor) -> bool:
    """Return True if no id of 0 or more occurs in two runs of one batch row; negative ids are ignored."""
    starts = run_starts(ids_BT)
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    heads = (starts == positions) & (ids_BT >= 0)
    for ids, head in zip(ids_BT, heads, strict=True):
        found = ids[head]
        if found.unique().numel() != found.numel():
            return False
    return True


@dataclass(frozen=True)
class Stretch:
    """Queries ``[start, stop)`` with the same first visible key, ``first``.

    They are causal among themselves, or ``mutual``: each sees all of them, later ones included.
    """

    start: int
    stop: int
    first: int
    mutual: bool


def stretches(first_BT: Tensor, block_start_BT: Tensor | None) -> list[list[Stretch]]:
    """Cut every batch row into stretches; one list for all of them where they are alike.

    Args:
        first_BT: For each position the first key its run allows.
        block_start_BT: For each position the start of its mutual block (itself where it is in none).
    """
    first, length = first_BT, first_BT.shape[1]
    block = torch.full_like(first, -1)
    if block_start_BT is not None:
        positions = torch.arange(length, device=first.device)
        inside = block_start_BT != positions
        inside[:, :-1] |= block_start_BT[:, 1:] == positions[:-1]
        block = torch.where(inside, block_start_BT, -1)
    if bool((first == first[:1]).all()) and bool((block == block[:1]).all()):
        first, block = first[:1], block[:1]
    begins = torch.ones_like(first, dtype=torch.bool)
    begins[:, 1:] = (first[:, 1:] != first[:, :-1]) | (block[:, 1:] != block[:, :-1])
    out = []
    for row in range(first.shape[0]):
        places = begins[row].nonzero().flatten()
        starts = places.tolist()
        sees, mutual = first[row, places].tolist(), (block[row, places] >= 0).tolist()
        stops = [*starts[1:], length]
        out.append([Stretch(*each) for each in zip(starts, stops, sees, mutual, strict=True)])
    return out


def clipped(found: list[Stretch], start: int, stop: int) -> list[tuple[int, int, Stretch]]:
    """Return the stretches that overlap queries ``[start, stop)``: start and stop of the overlap, and the stretch."""
    out = []
    index = max(0, bisect_right(found, start, key=lambda stretch: stretch.start) - 1)
    while index < len(found) and found[index].start < stop:
        stretch = found[index]
        out.append((max(start, stretch.start), min(stop, stretch.stop), stretch))
        index += 1
    return out


class LazyMask(MaskRules):
    """An attention mask that is never built as a whole; its arguments are those of :class:`MaskRules`."""

    def branched(self, table: BranchTable) -> LazyMask:
        """Return the mask under which each row of ``table`` sees what it would see alone under this one.

        Raises:
            UnsupportedModelError: It has padding, packed rows or blocks whose tokens see each other.
        """
        alone = self.batch_size == 1 and self.padding is None and self.row_start is None and self.block_start is None
        offsets = (self.q_offset, self.kv_offset, self.q_length, self.kv_length)
        if not alone or offsets != (0, 0, table.length, table.length):
            raise UnsupportedModelError(
                "this model's attention mask is not that of a single row, so rows cannot share their beginning",
                mend="set share_prefix: never",
            )
        return replace(self, branches=table)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the equal dense mask."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the dense mask. Models read it to see if the mask they got is in its final form."""
        return 4

    def __getitem__(self, key: Any) -> LazyMask:
        """Return the whole mask for slices that leave nothing out; refuse any other index."""
        sizes = (self.batch_size, 1, self.q_length, self.kv_length)
        if not isinstance(key, tuple) or len(key) != 4 or not all(isinstance(part, slice) for part in key):
            raise self._refuse("indexing")
        if any(part.indices(size) != (0, size, 1) for part, size in zip(key, sizes, strict=True)):
            raise self._refuse("slicing")
        return self

    def rows(self, start: int, stop: int) -> MaskView:
        """Return the mask of queries ``[start, stop)``, counted from this mask's first query, over all keys."""
        last = self.kv_offset + self.kv_length
        return MaskView(self, self.q_offset + start, self.q_offset + stop, self.kv_offset, last)

    def chunk(self, start: int, stop: int, first_key: int) -> MaskView:
        """Return the mask of queries ``[start, stop)`` over the keys ``[first_key, stop)``, all that a chunk has."""
        return MaskView(self, self.q_offset + start, self.q_offset + stop, first_key, self.q_offset + stop)

    @classmethod
    def from_dense(cls, allowed_B1TS: Tensor) -> LazyMask:
        """Return a mask that reads a dense boolean one, bottom-right aligned: last query and last key are one token."""
        rows, _, queries, keys = allowed_B1TS.shape
        offset = keys - queries

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return allowed_B1TS[b % rows, 0, q - offset, k]

        device = allowed_B1TS.device
        return cls(rows, queries, keys, q_offset=offset, causal=False, function=function, device=device)


@dataclass(frozen=True)
class Branch:
    """Places ``[start, stop)``, which also see all of ``[trunk_start, trunk_stop)``; for a trunk itself that is empty.

    Its row begins at ``trunk_start``; its first position in the row is the length of its trunk.
    """

    start: int
    stop: int
    trunk_start: int
    trunk_stop: int

    @property
    def shift(self) -> int:
        """The difference between a place in it and the position of that place in the row."""
        return self.start - (self.trunk_stop - self.trunk_start)


@dataclass(frozen=True)
class BranchTable:
    """All parts of a sequence, in order, without a gap."""

    parts: tuple[Branch, ...]

    @property
    def length(self) -> int:
        """Number of places T."""
        return self.parts[-1].stop

    @cached_property
    def positions(self) -> Tensor:
        """``[T]`` int64: the position of each place in its row."""
        return torch.cat([torch.arange(part.start - part.shift, part.stop - part.shift) for part in self.parts])

    @cached_property
    def bounds(self) -> Tensor:
        """``[3, T]`` int64: start of each place's part, start of its trunk, stop of its trunk."""
        lengths = torch.tensor([part.stop - part.start for part in self.parts])
        facts = torch.tensor([[part.start, part.trunk_start, part.trunk_stop] for part in self.parts])
        return facts.repeat_interleave(lengths, 0).T.contiguous()

    def at(self, place: int) -> Branch:
        """Return the part that contains a place."""
        return self.parts[bisect_right(self._starts, place) - 1]

    def clipped(self, start: int, stop: int) -> Iterator[tuple[int, int, Branch]]:
        """Yield each part that overlaps places ``[start, stop)``: start and stop of the overlap, and the part."""
        index = bisect_right(self._starts, start) - 1
        while index < len(self.parts) and self.parts[index].start < stop:
            part = self.parts[index]
            yield max(start, part.start), min(stop, part.stop), part
            index += 1

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]
