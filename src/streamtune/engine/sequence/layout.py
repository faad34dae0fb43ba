"""The chunks of a rank's own tokens, where ranks share a sequence of rows and layers carry states.

A layer with a state runs on the pieces of shards in which no row begins (``states``). It takes a piece of one token and
a state for a step of decoding, which leaves no state. So chunks are chosen a few tokens longer or shorter where a state
would be lost: near the ends of a trunk, or where one of several packed sequences goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from streamtune.engine.rows import PackedRows
from streamtune.errors import UnsupportedModelError
from streamtune.schedule import Schedule

FURTHEST = 16
"""Tokens that the end of a chunk is moved, at most, and that are added to each rank's."""
TRIALS = 20_000


class _Lost(NamedTuple):
    """Positions at which a shard may not start, or end."""

    starts: frozenset[int]
    ends: frozenset[int]


def chunks_between_rows(schedule: Schedule, own: int, size: int, rows: PackedRows) -> list[slice]:
    """Return chunks of each rank's tokens with which no state is lost; they may end a few tokens later.

    Args:
        schedule: Gives the chunks that are changed, where they have to be.
        own: Least number of tokens of a rank.
        size: Number of ranks.
        rows: The rows in the sequence.

    Raises:
        UnsupportedModelError: There are none near those of the schedule, or one of several packed sequences has a row
            of one token beside another's.
    """
    borders = frozenset(rows.starts)
    everything = list(pairwise([*rows.starts, max(own * size, rows.starts[-1] + 1)]))
    rows.refuse_single(slice(*each) for each in everything[:-1])
    parts = [(start, stop) for start, stop in everything if stop - start > 1]
    lost = _Lost(
        frozenset(stop - 1 for _, stop in parts if stop in borders and rows.carries_on(stop)),
        frozenset(start + 1 for start, _ in parts if start and rows.state_before(start) is not None),
    )
    if not any(lost):
        return schedule.chunks(own)
    trials = iter(range(TRIALS))
    for length in range(own, own + FURTHEST + 1):
        found = _search([chunk.stop for chunk in schedule.chunks(length)], 0, size, lost, trials)
        if found is not None:
            return [slice(*each) for each in pairwise([0, *found])]
    raise UnsupportedModelError(
        f"rows of a few tokens cannot be cut for {size} ranks so that every part of a row that others go on from has "
        "two tokens or more on a rank, as layers with states need",
        mend="set share_prefix: never, pack with per_device_train_batch_size: 1, or sequence_parallel_size: 1",
    )


def _search(stops: list[int], start: int, size: int, lost: _Lost, trials: Iterator[int]) -> list[int] | None:
    """Return stops of chunks from ``start`` on, near those given and the last one equal; None if there are none."""
    if not stops:
        return []
    last = len(stops) == 1
    for stop in [stops[0]] if last else _near(stops[0]):
        if next(trials, None) is None:
            return None
        long_enough = stop - start >= 2 and (last or stops[-1] - stop >= 2)
        bounds = [start * size + rank * (stop - start) for rank in range(size + 1)]
        if not long_enough or lost.starts & set(bounds[:-1]) or lost.ends & set(bounds[1:]):
            continue
        if (rest := _search(stops[1:], stop, size, lost, trials)) is not None:
            return [stop, *rest]
    return None


def _near(stop: int) -> Iterator[int]:
    yield stop
    for distance in range(1, FURTHEST + 1):
        yield stop - distance
        yield stop + distance
