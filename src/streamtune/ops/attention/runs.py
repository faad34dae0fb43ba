"""Runs of positions a mask is made of: packed rows, attention spans, blocks that see each other, trees of rows.

All of them are contiguous, so one number for each position gives them: the start of its run. A tree of rows has parts
that continue other parts, to any depth; its positions count within a row, through all parts of the row, and its places
from the start of the sequence. Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from streamtune.ops.devices import host_copy


def row_starts(position_ids: Tensor) -> list[int]:
    """Return the starts of packed rows: 0, and every place where a position is not its predecessor's plus one.

    The rule of ``transformers.masking_utils.find_packed_sequence_indices``, for ids ``[..., T]``: a start in any of the
    sequences counts.

    Example:
        >>> row_starts(torch.tensor([0, 1, 2, 0, 1, 0]))
        [0, 3, 5]
    """
    restarts = (torch.atleast_2d(host_copy(position_ids)).diff(dim=-1) != 1).flatten(0, -2).any(0)
    return [0, *(int(place) + 1 for place in restarts.nonzero().flatten().tolist())]


def run_starts(ids_BT: Tensor) -> Tensor:
    """Return ``[B, T]`` int64: for every position the first position of its run of equal ids."""
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
    """Cut every batch row into stretches; one list for all rows if they are alike.

    Args:
        first_BT: First key that the run of each position allows; on the host.
        block_start_BT: Start of each position's mutual block, itself if it is in no block; on the host.
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


@dataclass(frozen=True)
class Branch:
    """Places ``[start, stop)``, which also see all of ``trunk``: the runs of places before them in their row.

    ``trunk`` has the runs ``[start, stop)`` of the parts before this part in the row, in order; adjacent runs are
    joined. It is empty if the part begins its row.
    """

    start: int
    stop: int
    trunk: tuple[tuple[int, int], ...] = ()

    @cached_property
    def trunk_length(self) -> int:
        """Tokens of the row before the part: the position of its first token in the row."""
        return sum(stop - start for start, stop in self.trunk)

    @property
    def root(self) -> int:
        """The first place of its row."""
        return self.trunk[0][0] if self.trunk else self.start

    @property
    def shift(self) -> int:
        """The difference between a place of the part and its position in the row."""
        return self.start - self.trunk_length

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Start, stop and shift of the runs of its row up to the end of the part: the trunk's, and its own."""
        found, position = [], 0
        for start, stop in (*self.trunk, (self.start, self.stop)):
            found.append((start, stop, start - position))
            position += stop - start
        return tuple(found)

    def place_at(self, position: int) -> int:
        """Return the place of a position in its row."""
        return next(position + shift for _, stop, shift in self.runs if position + shift < stop)


@dataclass(frozen=True)
class BranchTable:
    """All parts of a sequence, in order, without a gap."""

    parts: tuple[Branch, ...]

    @classmethod
    def of(cls, nodes: Iterable[tuple[int, int]]) -> BranchTable:
        """Lay the nodes of trees end to end, in this order.

        Args:
            nodes: Index of the part that each part continues (-1: it begins rows), and number of its tokens. A part
                stands behind the part that it continues.
        """
        parts: list[Branch] = []
        for parent, length in nodes:
            start = parts[-1].stop if parts else 0
            trunk: tuple[tuple[int, int], ...] = ()
            if parent >= 0:
                before = parts[parent]
                trunk = _joined((*before.trunk, (before.start, before.stop)))
            parts.append(Branch(start, start + length, trunk))
        return cls(tuple(parts))

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
        """``[1 + 2 R, T]`` int64: start of each place's part; start and stop of each of the R runs of the trunk."""
        most = max(1, *(len(part.trunk) for part in self.parts))
        lengths = torch.tensor([part.stop - part.start for part in self.parts])
        padded = [(*part.trunk, *[(part.start, part.start)] * (most - len(part.trunk))) for part in self.parts]
        facts = torch.tensor([[part.start, *sum(runs, ())] for part, runs in zip(self.parts, padded, strict=True)])
        return facts.repeat_interleave(lengths, 0).T.contiguous()

    def at(self, place: int) -> Branch:
        """Return the part that contains a place."""
        return self.parts[self.index(place)]

    def index(self, place: int) -> int:
        """Return the index of the part that contains a place."""
        return bisect_right(self.parts, place, key=_start) - 1

    @cached_property
    def leaves(self) -> list[Branch]:
        """The last parts of the rows: nothing continues them."""
        continued = {part.trunk[-1][1] for part in self.parts if part.trunk}
        return [part for part in self.parts if part.stop not in continued]


def _joined(runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return runs of places with adjacent runs joined."""
    out: list[tuple[int, int]] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


Run = TypeVar("Run", Stretch, Branch)


def clipped(found: Sequence[Run], start: int, stop: int) -> list[tuple[int, int, Run]]:
    """Return the runs that overlap places ``[start, stop)``: start and stop of the overlap, and the run."""
    out = []
    index = max(0, bisect_right(found, start, key=_start) - 1)
    while index < len(found) and found[index].start < stop:
        run = found[index]
        out.append((max(start, run.start), min(stop, run.stop), run))
        index += 1
    return out


def _start(run: Stretch | Branch) -> int:
    return run.start
