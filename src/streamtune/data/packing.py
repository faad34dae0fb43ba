"""The packing of rows into sequences: best fit, longest first, a function of the lengths and the seed.

Packs are made once, when the data is prepared, and are what the sampler shuffles: a run resumes at a pack as it would
at a row, and each epoch visits the same packs in another order. The rows of a pack never attend to one another, so
packing changes which rows make up a step and nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Packs", "pack_rows"]


@dataclass(frozen=True, eq=False)
class Packs:
    """A partition of rows into sequences."""

    rows: npt.NDArray[np.int64]
    """[rows] row numbers, pack after pack"""
    starts: npt.NDArray[np.int64]
    """[packs + 1] where each pack begins in ``rows``"""
    tokens: int
    """tokens of all rows"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> list[int]:
        """Return the rows of a pack, in their order within it."""
        start, stop = self.starts[pack : pack + 2].tolist()
        return [int(row) for row in self.rows[start:stop]]

    def fill_rate(self, max_length: int) -> float:
        """Return the part of the positions of full-length sequences that hold a token."""
        return self.tokens / (len(self) * max_length) if len(self) else 1.0


def pack_rows(lengths: Sequence[int] | npt.NDArray[np.int64], max_length: int, *, seed: int) -> Packs:
    """Pack rows into sequences of at most ``max_length`` tokens.

    Longest first, each into the fullest sequence it fits in (best fit decreasing: at most 11/9 of the fewest sequences
    there could be, plus one). Rows of one length come in an order drawn from the seed, so that neighbours in a file do
    not end up together; the packs come in such an order too.

    Args:
        lengths: Tokens of each row, none longer than ``max_length``.
        max_length: Tokens a sequence holds.
        seed: Seed of what the lengths leave open.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= max_length, "rows are cut to the length before"
    # RandomState's streams are frozen by numpy's compatibility policy; Generator's may change with a release.
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, len(sizes)))))
    drawn = random.permutation(len(sizes))
    order = drawn[np.argsort(-sizes[drawn], kind="stable")]
    packs = _best_fit(order.tolist(), sizes, max_length)
    visited = [packs[index] for index in random.permutation(len(packs))]
    starts = np.cumsum([0, *(len(pack) for pack in visited)], dtype=np.int64)
    rows = np.fromiter((row for pack in visited for row in pack), dtype=np.int64, count=len(sizes))
    assert all(int(sizes[rows[a:b]].sum()) <= max_length for a, b in pairwise(starts))
    return Packs(rows, starts, int(sizes.sum()))


def _best_fit(order: Sequence[int], sizes: npt.NDArray[np.int64], max_length: int) -> list[list[int]]:
    """Pack rows in the given order, each into the sequence with the least room that still holds it."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # packs by the tokens they have left
    rooms: list[int] = []  # the keys above, sorted
    for row in order:
        size = int(sizes[row])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            pack, room = len(packs), max_length
            packs.append([])
        else:
            room = rooms[place]
            pack = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[pack].append(row)
        left = room - size
        if left:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(pack)
    return packs
