"""Runs of consecutive positions in a mask: packed rows, spans of chunked attention, image blocks, and trees of rows.

All runs are defined by one number per position: the start of the position's run. In a tree of rows, rows share
beginnings, and each shared part is in the sequence once. A token of a tree has a position, counted within its row, and
an index, counted from the start of the sequence. Shape suffixes: B batch, T positions.
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
    """Return the starts of packed rows: 0, and every index whose position id is not the previous id plus one.

    ``transformers.masking_utils.find_packed_sequence_indices`` has the same rule. For ids ``[B, T]``, the starts in all
    sequences are returned in one list.

    Example:
        >>> row_starts(torch.tensor([0, 1, 2, 0, 1, 0]))
        [0, 3, 5]
    """
    restarts = (torch.atleast_2d(host_copy(position_ids)).diff(dim=-1) != 1).flatten(0, -2).any(0)
    return [0, *(int(place) + 1 for place in restarts.nonzero().flatten().tolist())]


def run_starts(ids_BT: Tensor) -> Tensor:
    """Return the start of the run of equal ids at each position, int64 ``[B, T]``."""
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    is_start = torch.ones_like(ids_BT, dtype=torch.bool)
    is_start[:, 1:] = ids_BT[:, 1:] != ids_BT[:, :-1]
    return positions.masked_fill(~is_start, 0).cummax(dim=1).values


def has_adjacent_ids(ids_BT: Tensor) -> bool:
    """Return True if positions with equal ids are adjacent in each batch row; negative ids are ignored."""
    starts = run_starts(ids_BT)
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    heads = (starts == positions) & (ids_BT >= 0)
    for ids, head in zip(ids_BT, heads, strict=True):
        found = ids[head]
        if found.unique().numel() != found.numel():
            return False
    return True


@dataclass(frozen=True)
class QueryRange:
    """Range of queries ``[start, stop)`` whose first visible key is ``first``.

    Attention among these queries is causal or, if ``mutual``, full: each query sees all others, also later ones.
    """

    start: int
    stop: int
    first: int
    mutual: bool


def split_into_stretches(first_BT: Tensor, block_start_BT: Tensor | None) -> list[list[QueryRange]]:
    """Return, per batch row, ranges of queries with the same first visible key and block; one list if rows are equal.

    Args:
        first_BT: First visible key of each position, on the CPU.
        block_start_BT: Start of each position's block, whose tokens all see each other, or the position itself outside
            blocks; on the CPU.
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
    is_start = torch.ones_like(first, dtype=torch.bool)
    is_start[:, 1:] = (first[:, 1:] != first[:, :-1]) | (block[:, 1:] != block[:, :-1])
    out = []
    for row in range(first.shape[0]):
        positions_of_starts = is_start[row].nonzero().flatten()
        starts = positions_of_starts.tolist()
        first_keys, mutual = first[row, positions_of_starts].tolist(), (block[row, positions_of_starts] >= 0).tolist()
        stops = [*starts[1:], length]
        out.append([QueryRange(*each) for each in zip(starts, stops, first_keys, mutual, strict=True)])
    return out


@dataclass(frozen=True)
class Branch:
    """Part of a tree of rows that share prefixes: the tokens ``[start, stop)`` of the sequence.

    ``trunk`` has the ranges ``[start, stop)`` of the row's earlier tokens, in order, which this part's tokens also see.
    ``trunk`` is empty if the part begins its row.
    """

    start: int
    stop: int
    trunk: tuple[tuple[int, int], ...] = ()

    @cached_property
    def trunk_length(self) -> int:
        """Number of tokens in the row before this part."""
        return sum(stop - start for start, stop in self.trunk)

    @property
    def row_start(self) -> int:
        """Index in the sequence of the first token of the part's row."""
        return self.trunk[0][0] if self.trunk else self.start

    @property
    def shift(self) -> int:
        """Index of a token in the sequence minus its position in the row; the same for all tokens of the part."""
        return self.start - self.trunk_length

    @cached_property
    def row_ranges(self) -> tuple[tuple[int, int, int], ...]:
        """(start, stop, shift) of the trunk's ranges and of the part; ``shift`` is index minus position in the row."""
        found, position = [], 0
        for start, stop in (*self.trunk, (self.start, self.stop)):
            found.append((start, stop, start - position))
            position += stop - start
        return tuple(found)

    def index_at_position(self, position: int) -> int:
        """Return the index in the sequence of the token at ``position`` in the row."""
        return next(position + shift for _, stop, shift in self.row_ranges if position + shift < stop)


@dataclass(frozen=True)
class BranchTable:
    """Trees of rows that share prefixes: all their parts, in the order of the sequence and without gaps."""

    parts: tuple[Branch, ...]

    @classmethod
    def from_nodes(cls, nodes: Iterable[tuple[int, int]]) -> BranchTable:
        """Return the table of trees whose parts are concatenated in this order.

        Args:
            nodes: Pair for each part: index of the part that it continues (-1 if it begins a row), and number of
                tokens.
        """
        parts: list[Branch] = []
        for parent, length in nodes:
            start = parts[-1].stop if parts else 0
            trunk: tuple[tuple[int, int], ...] = ()
            if parent >= 0:
                before = parts[parent]
                trunk = _join_adjacent_runs((*before.trunk, (before.start, before.stop)))
            parts.append(Branch(start, start + length, trunk))
        return cls(tuple(parts))

    @property
    def length(self) -> int:
        """Number of tokens in the sequence, T."""
        return self.parts[-1].stop

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its row, int64 ``[T]``."""
        return torch.cat([torch.arange(part.start - part.shift, part.stop - part.shift) for part in self.parts])

    @cached_property
    def bounds(self) -> Tensor:
        """For each token: start of its part, then start and stop of the R ranges of its trunk, int64 ``[1 + 2 R, T]``.

        R is the largest number of ranges in a trunk; missing ranges are empty.
        """
        most = max(1, *(len(part.trunk) for part in self.parts))
        lengths = torch.tensor([part.stop - part.start for part in self.parts])
        padded = [(*part.trunk, *[(part.start, part.start)] * (most - len(part.trunk))) for part in self.parts]
        facts = torch.tensor([[part.start, *sum(runs, ())] for part, runs in zip(self.parts, padded, strict=True)])
        return facts.repeat_interleave(lengths, 0).T.contiguous()

    def part_at(self, place: int) -> Branch:
        """Return the part that contains the token at index ``place`` of the sequence."""
        return self.parts[self.part_index_at(place)]

    def part_index_at(self, place: int) -> int:
        """Return the index in ``parts`` of the part that contains the token at index ``place`` of the sequence."""
        return bisect_right(self.parts, place, key=_start_of) - 1

    @cached_property
    def last_parts(self) -> list[Branch]:
        """Parts that no other part continues: the ends of the rows."""
        continued = {part.trunk[-1][1] for part in self.parts if part.trunk}
        return [part for part in self.parts if part.stop not in continued]


def _join_adjacent_runs(runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    out: list[tuple[int, int]] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


Run = TypeVar("Run", QueryRange, Branch)


def overlapping_runs(runs: Sequence[Run], start: int, stop: int) -> list[tuple[int, int, Run]]:
    """Return (start, stop, run) for each run that overlaps ``[start, stop)``, with the bounds of the overlap."""
    out = []
    index = max(0, bisect_right(runs, start, key=_start_of) - 1)
    while index < len(runs) and runs[index].start < stop:
        run = runs[index]
        out.append((max(start, run.start), min(stop, run.stop), run))
        index += 1
    return out


def _start_of(run: QueryRange | Branch) -> int:
    return run.start
