"""The rows of an optimizer step: counted in tokens, assigned to ranks, or chosen among many.

Steps in tokens::

    tokens     rows in the order of the sampler, until the next one would be over the budget
    buckets    as many pieces of one length as the budget holds; lengths follow one another as a curriculum says

Where an epoch is cut is a function of the rows, the seed and the epoch, so that a run can be resumed at any step.

Ranks. They go through their micro-batches in lockstep: with sharded weights they wait for each other in every layer,
so a micro-step takes as long as its slowest batch; with replicated weights they wait at the end of the step. So rows
of similar cost are computed at the same time, and a rank that has had more gets the cheaper batch next. A step trains
on the same rows for any number of ranks.

Medoids. Of n points with distances D, the set S of b points that is nearest to all of them minimises
``sum_i min_{s in S} D_is``. That is the facility location ``sum_i max_{s in S} (C - D_is)`` maximised, a monotone
submodular function: the greedy algorithm is within 1 - 1/e of the best. All rows of small sources are kept, for a
medoid is seldom one of them (CoLM, arXiv 2407.19580, section 4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamtune.data.batches.sampler import Numbers, ResumableSampler, place_in, seeded_random
from streamtune.errors import CheckpointError

Points = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EpochSteps:
    """Units of an epoch in the order of their visits, and the optimizer steps that they are cut into."""

    units: Numbers
    """[units]"""
    stops: Numbers
    """[steps] end of each step in ``units``"""

    def __len__(self) -> int:
        return len(self.stops)


class StepSampler:
    """Visits every unit once an epoch, step by step.

    Args:
        steps: Function that returns the steps of an epoch, from 0.
        facts: Plain JSON values that a state and the sampler that loads it must share.
    """

    def __init__(self, steps: Callable[[int], EpochSteps], facts: Mapping[str, Any]) -> None:
        self.steps, self.facts = steps, dict(facts)
        self.epoch = 0
        """epoch of the step taken last, from 0"""
        self.position = 0
        """units of this epoch that were handed out"""
        self._known: tuple[int, EpochSteps] | None = None

    def epoch_steps(self, epoch: int) -> EpochSteps:
        """Return the steps of an epoch; the last answer is cached."""
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self.steps(epoch))
        return self._known[1]

    def next_step(self) -> list[int]:
        """Return the units of the next step, the first of the next epoch if this one is over."""
        now = self.epoch_steps(self.epoch)
        if self.position >= len(now.units):
            self.epoch, self.position = self.epoch + 1, 0
            now = self.epoch_steps(self.epoch)
        stop = int(now.stops[np.searchsorted(now.stops, self.position, side="right")])
        units = now.units[self.position : stop].tolist()
        self.position = stop
        return [int(unit) for unit in units]

    def state_dict(self) -> dict[str, Any]:
        """Return position and order as plain JSON values."""
        return {**self.facts, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of another sampler over the same units.

        Raises:
            CheckpointError: The other sampler had other units, or cut them otherwise.
        """
        for key, mine in self.facts.items():
            if state.get(key) != mine:
                raise CheckpointError(
                    f"the checkpoint visits the data with {key} = {state.get(key)}, this run with {mine}",
                    fix="resume with the data, the seed and the batching the checkpoint was made with",
                )
        place_in(state, sys.maxsize)  # the epoch has to be a count before its steps are computed
        self.epoch, self.position = place_in(state, len(self.epoch_steps(state["epoch"]).units))


def token_steps(rows: ResumableSampler, lengths: Numbers, budget: int) -> StepSampler:
    """Return a sampler of steps with at most ``budget`` tokens; a longer row is a step by itself.

    Args:
        rows: Sampler that gives the order of each epoch.
        lengths: [rows] tokens.
    """
    facts = {name: rows.state_dict()[name] for name in ("num_rows", "seed", "shuffle")}
    return StepSampler(lambda epoch: _fill(rows.order(epoch), lengths, budget), facts)


def _fill(order: Numbers, lengths: Numbers, budget: int) -> EpochSteps:
    ends = np.cumsum(lengths[order])
    stops: list[int] = []
    start = 0
    while start < len(order):
        used = int(ends[start - 1]) if start else 0
        start = max(start + 1, int(np.searchsorted(ends, used + budget, side="right")))
        stops.append(start)
    return EpochSteps(order, np.array(stops, dtype=np.int64))


CURRICULA: dict[str, Callable[[int], int]] = {
    "uniform": lambda doublings: 1,
    "grow-linear": lambda doublings: 1 + doublings,
    "grow-p2": lambda doublings: 2**doublings,
}
"""Odds of a batch, by the number of times that its length doubles to reach the longest bucket."""


def bucket_steps(buckets: Numbers, budget: int, *, curriculum: str, cycles: int, seed: int) -> StepSampler:
    """Return a sampler of steps of one bucket each, with ``budget`` tokens in pieces of its length.

    The batches of a bucket are spread evenly over the cycles of an epoch. Within a cycle they are drawn without
    replacement, each with the odds of its bucket. The last batch of a bucket may have fewer pieces.

    Args:
        buckets: [pieces] tokens of each piece's bucket, at most ``budget``.
        curriculum: Key of :data:`CURRICULA`.
        cycles: Times in an epoch that lengths grow.
        seed: Seed of the order of the pieces and of the draws.
    """
    facts = {"num_pieces": len(buckets), "seed": seed, "tokens_per_batch": budget}
    curriculum_facts = {"curriculum": curriculum, "cycles": cycles}
    return StepSampler(partial(_draw_epoch, buckets, budget, curriculum, cycles, seed), facts | curriculum_facts)


def _draw_epoch(buckets: Numbers, budget: int, curriculum: str, cycles: int, seed: int, epoch: int) -> EpochSteps:
    random = seeded_random(seed, epoch, len(buckets))
    sizes = [int(size) for size in np.unique(buckets)]
    waiting: list[list[list[Numbers]]] = []  # by bucket and cycle
    for size in sizes:
        pieces = np.flatnonzero(buckets == size)
        pieces = pieces[random.permutation(len(pieces))]
        batches = [pieces[start : start + budget // size] for start in range(0, len(pieces), budget // size)]
        by_cycle: list[list[Numbers]] = [[] for _ in range(cycles)]
        for index, batch in enumerate(batches):
            by_cycle[(2 * index + 1) * cycles // (2 * len(batches))].append(batch)
        waiting.append(by_cycle)
    longest = sizes[-1] if sizes else 1
    odds = np.array([CURRICULA[curriculum]((longest // size).bit_length() - 1) for size in sizes], dtype=np.float64)
    drawn: list[Numbers] = []
    for cycle in range(cycles):
        left = np.array([len(of_bucket[cycle]) for of_bucket in waiting])
        while left.any():
            chances = np.cumsum(odds * left)
            bucket = int(np.searchsorted(chances, random.random_sample() * chances[-1], side="right"))
            left[bucket] -= 1
            drawn.append(waiting[bucket][cycle][left[bucket]])
    units = np.concatenate(drawn) if drawn else np.zeros(0, dtype=np.int64)
    return EpochSteps(units, np.cumsum([len(batch) for batch in drawn], dtype=np.int64))


Batches = list[list[int]]


def assign_rows(
    rows: Sequence[int], cost: Callable[[int], float], *, ranks: int, batch_size: int, padded: bool = True
) -> list[list[list[int]]]:
    """Assign the rows of an optimizer step to ranks and micro-batches.

    Args:
        rows: Row numbers in the order of the sampler; at least one.
        cost: Predicted time of a row, in any unit.
        padded: True if a batch is padded, so that each row takes as long as the longest.

    Returns:
        Micro-batches by rank, equally many for each; every row is in exactly one. Some are empty if there are fewer
            rows than batches. A single rank keeps the order of the rows.
    """
    if ranks == 1:
        return [[list(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]]
    costs = {row: cost(row) for row in rows}
    micro_steps = -(-len(rows) // (ranks * batch_size))
    slowest_first = sorted(rows, key=lambda row: (-costs[row], row))

    def seconds(batch: Sequence[int]) -> float:
        if not batch:
            return 0.0
        return len(batch) * costs[batch[0]] if padded else sum(costs[row] for row in batch)

    dealt = [
        [_deal(group, costs, sizes, padded=padded) for group, sizes in _groups(slowest_first, sizes, ranks)]
        for sizes in _sizes(len(rows), ranks, micro_steps, batch_size)
    ]
    steps = min(dealt, key=lambda steps: sum(max(map(seconds, at_once)) for at_once in steps))
    shares: list[Batches] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for at_once in steps:
        least_first = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, batch in zip(least_first, sorted(at_once, key=seconds, reverse=True), strict=True):
            shares[rank].append(batch)
            loads[rank] += seconds(batch)
    return shares


def _sizes(count: int, ranks: int, micro_steps: int, batch_size: int) -> list[list[int]]:
    """Return ways to cut the rows, the slowest first, into batches, as the sizes of these.

    If there are too few rows to fill a step, the slowest batches are smaller: each a little, or the first as much as
    possible.
    """
    batches = ranks * micro_steps
    smaller, more = divmod(count, batches)
    if smaller == 0:
        return [[1] * more + [0] * (batches - more)]
    even = [smaller] * (batches - more) + [smaller + 1] * more
    first, left = [1] * batches, count - batches
    for index in reversed(range(batches)):
        added = min(batch_size - 1, left)
        first[index] += added
        left -= added
    return [even, first]


def _groups(rows: Sequence[int], sizes: Sequence[int], ranks: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Return the rows that are computed at the same time, with the sizes of their batches."""
    groups, start = [], 0
    for index in range(0, len(sizes), ranks):
        together = sizes[index : index + ranks]
        groups.append((rows[start : start + sum(together)], together))
        start += sum(together)
    return groups


def _deal(rows: Sequence[int], costs: dict[int, float], sizes: Sequence[int], *, padded: bool) -> Batches:
    """Return the batches of rows that are computed at the same time.

    Padded rows stay sorted, so that a batch has little padding. Other rows go one by one, the slowest first, to the
    least loaded batch.
    """
    batches: Batches = [[] for _ in sizes]
    if padded:
        start = 0
        for batch, size in zip(batches, sizes, strict=True):
            batch += rows[start : start + size]
            start += size
        return batches
    loads = [0.0] * len(sizes)
    for row in rows:
        open_ = (index for index, batch in enumerate(batches) if len(batch) < sizes[index])
        index = min(open_, key=lambda index: loads[index])
        batches[index].append(row)
        loads[index] += costs[row]
    return batches


# ----------------------------------------------------------------------------------------------------------- medoids


@dataclass(frozen=True)
class Choice:
    """Rows chosen among others."""

    places: tuple[int, ...]
    """their places among all, ascending"""
    kept: int
    """chosen rows that were kept because their source is small"""
    gap: float
    """||mean of the chosen points - mean of all|| / ||mean of all||, over finite points"""
    chance: float
    """root mean square of ``gap`` over all choices of equally many rows"""


def small_sources(sizes: Sequence[int]) -> frozenset[int]:
    """Return the sources with fewer rows than the mean of the sources that have rows; ``sizes`` are [sources]."""
    present = [size for size in sizes if size > 0]
    return frozenset(source for source, size in enumerate(sizes) if 0 < size * len(present) < sum(present))


def choose_rows(points: Points, sources: Sequence[int], count: int, small: frozenset[int] = frozenset()) -> Choice:
    """Choose ``count`` rows: all rows of small sources, and of each other source medoids in proportion to its size.

    If the small sources alone have ``count`` rows or more, they count as the others. A row with a non-finite point is
    chosen only if the others are too few.

    Args:
        points: [rows, dimensions]
        sources: [rows] source of each row.
    """
    rows = len(points)
    assert rows == len(sources) >= count > 0, "there are rows to choose from"
    finite = np.isfinite(points).all(axis=1)
    usable = [int(row) for row in np.flatnonzero(finite)]
    if len(usable) < count:
        more = np.flatnonzero(~finite)[: count - len(usable)]
        return Choice(tuple(sorted((*usable, *more.tolist()))), 0, 0.0, 0.0)
    kept = [row for row in usable if sources[row] in small]
    if len(kept) >= count:
        kept = []
    by_source: dict[int, list[int]] = {}
    for row in sorted(set(usable) - set(kept)):
        by_source.setdefault(sources[row], []).append(row)
    candidates = [by_source[source] for source in sorted(by_source)]
    chosen = list(kept)
    for places, budget in zip(candidates, _budgets([len(own) for own in candidates], count - len(kept)), strict=True):
        chosen += [places[index] for index in medoids(points[places], budget)]
    chosen.sort()
    return Choice(tuple(chosen), len(kept), *_gaps(points[chosen], points[usable]))


def medoids(points: Points, count: int) -> list[int]:
    """Return the first ``count`` points that the greedy algorithm finds; of equal gains the first point.

    Args:
        points: [n, dimensions] finite; distances are Euclidean.
        count: At most n.
    """
    if count == 0:
        return []
    squares_n = (points**2).sum(axis=1)
    distances_nn = np.sqrt(np.maximum(squares_n[:, None] + squares_n - 2 * points @ points.T, 0))
    np.fill_diagonal(distances_nn, 0)
    nearest_n = np.full(len(points), distances_nn.max() + 1)
    chosen: list[int] = []
    for _ in range(count):
        gains_n = np.maximum(nearest_n[:, None] - distances_nn, 0).sum(axis=0)
        gains_n[chosen] = -1
        chosen.append(int(gains_n.argmax()))
        nearest_n = np.minimum(nearest_n, distances_nn[:, chosen[-1]])
    return chosen


def _budgets(sizes: Sequence[int], count: int) -> list[int]:
    """Divide ``count`` in proportion to sizes, the remainder by the largest fractions; none exceeds its size."""
    total = sum(sizes)
    budgets = [count * size // total for size in sizes]
    by_fraction = sorted(range(len(sizes)), key=lambda index: (-(count * sizes[index] % total), index))
    for index in by_fraction[: count - sum(budgets)]:
        budgets[index] += 1
    return budgets


def _gaps(chosen: Points, every: Points) -> tuple[float, float]:
    """Return :attr:`Choice.gap` and :attr:`Choice.chance`: the variance of draws without replacement."""
    whole, rows, count = every.mean(axis=0), len(every), len(chosen)
    length = max(float(np.linalg.norm(whole)), 1e-30)
    variance = float(((every - whole) ** 2).sum()) / max(1, rows - 1) * (1 - count / rows) / count
    return float(np.linalg.norm(chosen.mean(axis=0) - whole)) / length, float(np.sqrt(variance)) / length
