"""Choose the rows of each optimizer step: by a token budget, by ranks, or by their gradients.

Steps with a token budget::

    tokens     rows in the order of the sampler, until the next row would exceed the budget
    buckets    as many pieces of rows of one length as the budget holds; a curriculum decides the order of lengths

The steps of an epoch depend only on the rows, the seed and the epoch, so a run can be resumed at any step.

Ranks. All ranks process their micro-batches in lockstep. With sharded weights, ranks wait for each other in every
layer, so a micro-step takes as long as its slowest batch. With replicated weights, ranks wait at the end of the step.
So rows of similar cost are computed at the same time. A rank with more work so far gets the cheaper batch next. A step
trains on the same rows for any number of ranks.

Medoids. For n points with distances D, the b medoids S minimise ``sum_i min_{s in S} D_is``. They also maximise the
facility location function ``sum_i max_{s in S} (C - D_is)``. This function is monotone and submodular, so the greedy
algorithm reaches at least 1 - 1/e of the maximum. All rows of small sources are chosen too, because few of them would
be medoids (CoLM, arXiv 2407.19580, section 4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streamtune.data.batches.sampler import Numbers, ResumableSampler, check_saved_position, seeded_random
from streamtune.errors import CheckpointError

Points = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EpochSteps:
    """The rows, or pieces of rows, of an epoch, in order, divided into optimizer steps."""

    units: Numbers
    """[units] indices of the rows or pieces, in training order"""
    stops: Numbers
    """[steps] end (exclusive) of each step in ``units``"""

    def __len__(self) -> int:
        return len(self.stops)


class StepSampler:
    """Sampler that visits every unit (row, or piece of a row) once per epoch, one optimizer step at a time.

    Args:
        make_epoch_steps: Function that returns the steps of an epoch, given its number from 0.
        order_values: JSON values that determine the order, such as the seed; a saved state with other values is
            rejected.
    """

    def __init__(self, make_epoch_steps: Callable[[int], EpochSteps], order_values: Mapping[str, Any]) -> None:
        self.steps, self.facts = make_epoch_steps, dict(order_values)
        self.epoch = 0
        """epoch of the last step, from 0"""
        self.position = 0
        """number of units of this epoch that were already returned"""
        self._known: tuple[int, EpochSteps] | None = None

    def epoch_steps(self, epoch: int) -> EpochSteps:
        """Return the steps of an epoch; the result of the last call is cached."""
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self.steps(epoch))
        return self._known[1]

    def next_step(self) -> list[int]:
        """Return the row (or piece) indices of the next optimizer step; the next epoch follows the end of an epoch."""
        now = self.epoch_steps(self.epoch)
        if self.position >= len(now.units):
            self.epoch, self.position = self.epoch + 1, 0
            now = self.epoch_steps(self.epoch)
        stop = int(now.stops[np.searchsorted(now.stops, self.position, side="right")])
        units = now.units[self.position : stop].tolist()
        self.position = stop
        return [int(unit) for unit in units]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it and the values that determine the order, as JSON values."""
        return {**self.facts, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the position that :meth:`state_dict` saved.

        Raises:
            CheckpointError: A value that determines the order differs, such as the seed; or the position is invalid.
        """
        for key, own_value in self.facts.items():
            if state.get(key) != own_value:
                raise CheckpointError(
                    f"the checkpoint was made with {key} = {state.get(key)}, this run has {own_value}",
                    fix="resume with the data, seed and batching of the checkpoint",
                )
        check_saved_position(state, sys.maxsize)  # checks that the epoch is a count before its steps are computed
        self.epoch, self.position = check_saved_position(state, len(self.epoch_steps(state["epoch"]).units))


def make_token_budget_sampler(row_sampler: ResumableSampler, lengths: Numbers, token_budget: int) -> StepSampler:
    """Return a sampler of steps with at most ``token_budget`` tokens; a longer row is a step by itself.

    Args:
        lengths: [rows] number of tokens of each row.
    """
    facts = {name: row_sampler.state_dict()[name] for name in ("num_rows", "seed", "shuffle")}
    return StepSampler(lambda epoch: _split_into_steps(row_sampler.epoch_order(epoch), lengths, token_budget), facts)


def _split_into_steps(order: Numbers, lengths: Numbers, token_budget: int) -> EpochSteps:
    ends = np.cumsum(lengths[order])
    stops: list[int] = []
    start = 0
    while start < len(order):
        used = int(ends[start - 1]) if start else 0
        start = max(start + 1, int(np.searchsorted(ends, used + token_budget, side="right")))
        stops.append(start)
    return EpochSteps(order, np.array(stops, dtype=np.int64))


CURRICULA: dict[str, Callable[[int], int]] = {
    "uniform": lambda doublings: 1,
    "grow-linear": lambda doublings: 1 + doublings,
    "grow-p2": lambda doublings: 2**doublings,
}
"""Curriculum -> odds of drawing a batch, as a function of the number of times that its length must be doubled to reach
the longest bucket."""


def make_bucket_sampler(buckets: Numbers, token_budget: int, *, curriculum: str, cycles: int, seed: int) -> StepSampler:
    """Return a sampler of optimizer steps: each has ``token_budget`` tokens, in pieces of rows of one length.

    A bucket has all pieces of one length. The batches of a bucket are spread evenly over the cycles of an epoch. Within
    a cycle, batches are drawn without replacement; the curriculum sets the odds of each length. The last batch of a
    bucket may have fewer pieces.

    Args:
        buckets: [pieces] length of each piece's bucket in tokens, at most ``token_budget``.
        curriculum: Key of :data:`CURRICULA`.
        cycles: Number of cycles in an epoch; in each cycle, pieces tend to get longer.
        seed: Seed of the order of pieces and of the draws.
    """
    facts = {"num_pieces": len(buckets), "seed": seed, "tokens_per_batch": token_budget}
    curriculum_facts = {"curriculum": curriculum, "cycles": cycles}
    return StepSampler(
        partial(_draw_bucket_steps, buckets, token_budget, curriculum, cycles, seed), facts | curriculum_facts
    )


def _draw_bucket_steps(
    buckets: Numbers, budget: int, curriculum: str, cycles: int, seed: int, epoch: int
) -> EpochSteps:
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


def assign_to_ranks(
    rows: Sequence[int], predict_time: Callable[[int], float], *, ranks: int, batch_size: int, padded: bool = True
) -> list[list[list[int]]]:
    """Assign the rows of an optimizer step to ranks and micro-batches, so that ranks wait little for each other.

    Args:
        rows: Row indices in the order of the sampler; at least one.
        predict_time: Function that returns the predicted time of a row, in any unit.
        padded: Whether batches are padded, so that each row takes as long as the longest row of its batch.

    Returns:
        List of micro-batches for each rank. All lists have the same length, and every row is in exactly one
            micro-batch. Some micro-batches are empty if there are too few rows. A single rank keeps the order of rows.
    """
    if ranks == 1:
        return [[list(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]]
    times = {row: predict_time(row) for row in rows}
    micro_steps = -(-len(rows) // (ranks * batch_size))
    slowest_first = sorted(rows, key=lambda row: (-times[row], row))

    def batch_time(batch: Sequence[int]) -> float:
        if not batch:
            return 0.0
        return len(batch) * times[batch[0]] if padded else sum(times[row] for row in batch)

    dealt = [
        [
            _assign_micro_step(group, times, sizes, padded=padded)
            for group, sizes in _split_into_micro_steps(slowest_first, sizes, ranks)
        ]
        for sizes in _possible_batch_sizes(len(rows), ranks, micro_steps, batch_size)
    ]
    steps = min(dealt, key=lambda steps: sum(max(map(batch_time, at_once)) for at_once in steps))
    shares: list[Batches] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for at_once in steps:
        least_first = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, batch in zip(least_first, sorted(at_once, key=batch_time, reverse=True), strict=True):
            shares[rank].append(batch)
            loads[rank] += batch_time(batch)
    return shares


def _possible_batch_sizes(num_rows: int, ranks: int, micro_steps: int, batch_size: int) -> list[list[int]]:
    """Return one or two lists of batch sizes, for rows sorted by time with the slowest first.

    If there are too few rows to fill all batches, the first batches (with the slowest rows) get fewer rows. The first
    list has almost equal sizes. In the second list, as many batches as possible have one row.
    """
    batches = ranks * micro_steps
    smaller, larger_batches = divmod(num_rows, batches)
    if smaller == 0:
        return [[1] * larger_batches + [0] * (batches - larger_batches)]
    even = [smaller] * (batches - larger_batches) + [smaller + 1] * larger_batches
    first, left = [1] * batches, num_rows - batches
    for index in reversed(range(batches)):
        added = min(batch_size - 1, left)
        first[index] += added
        left -= added
    return [even, first]


def _split_into_micro_steps(
    rows: Sequence[int], batch_sizes: Sequence[int], ranks: int
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Split sorted rows into micro-steps (one micro-batch per rank): (rows of all ranks, batch size of each rank)."""
    groups, start = [], 0
    for index in range(0, len(batch_sizes), ranks):
        together = batch_sizes[index : index + ranks]
        groups.append((rows[start : start + sum(together)], together))
        start += sum(together)
    return groups


def _assign_micro_step(rows: Sequence[int], times: dict[int, float], sizes: Sequence[int], *, padded: bool) -> Batches:
    """Return the batches of one micro-step, one per rank.

    Padded batches get consecutive rows of similar length. Otherwise each row, the slowest first, goes to the batch with
    the least total time that still has room.
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
        loads[index] += times[row]
    return batches


# ----------------------------------------------------------------------------------------------------------- medoids


@dataclass(frozen=True)
class ChosenRows:
    """Rows of an optimizer step that were chosen to train on; the other rows of the step are skipped."""

    places: tuple[int, ...]
    """indices of the chosen rows, ascending"""
    kept: int
    """number of rows that were chosen because their source is small"""
    gap: float
    """||mean of the chosen rows' points - mean of all points|| / ||mean of all points||, without non-finite points"""
    chance: float
    """root mean square of ``gap`` over all possible choices of as many rows"""


def find_small_sources(row_counts: Sequence[int]) -> frozenset[int]:
    """Return the indices of non-empty sources that have fewer rows than the mean of all non-empty sources."""
    present = [size for size in row_counts if size > 0]
    return frozenset(source for source, size in enumerate(row_counts) if 0 < size * len(present) < sum(present))


def choose_rows_to_train(
    points: Points, sources: Sequence[int], count: int, kept_sources: frozenset[int] = frozenset()
) -> ChosenRows:
    """Choose ``count`` rows: all rows of small sources, and medoids of the other sources in proportion to their sizes.

    If the small sources alone have ``count`` rows or more, they are treated like other sources. A row with a non-finite
    point is chosen only if there are too few other rows.

    Args:
        points: [rows, dimensions] point of each row, such as its gradient after a random projection.
        sources: [rows] index of the source of each row.
        count: Number of rows to choose, at most the number of rows.
        kept_sources: Indices of the small sources, whose rows are all chosen.
    """
    rows = len(points)
    assert rows == len(sources) >= count > 0, "count must be from 1 to the number of rows"
    finite = np.isfinite(points).all(axis=1)
    usable = [int(row) for row in np.flatnonzero(finite)]
    if len(usable) < count:
        more = np.flatnonzero(~finite)[: count - len(usable)]
        return ChosenRows(tuple(sorted((*usable, *more.tolist()))), 0, 0.0, 0.0)
    kept = [row for row in usable if sources[row] in kept_sources]
    if len(kept) >= count:
        kept = []
    by_source: dict[int, list[int]] = {}
    for row in sorted(set(usable) - set(kept)):
        by_source.setdefault(sources[row], []).append(row)
    candidates = [by_source[source] for source in sorted(by_source)]
    chosen = list(kept)
    for places, budget in zip(
        candidates, _divide_in_proportion([len(own) for own in candidates], count - len(kept)), strict=True
    ):
        chosen += [places[index] for index in choose_medoids(points[places], budget)]
    chosen.sort()
    return ChosenRows(tuple(chosen), len(kept), *_distances_of_means(points[chosen], points[usable]))


def choose_medoids(points: Points, count: int) -> list[int]:
    """Return the indices of ``count`` medoids, found by the greedy algorithm; ties go to the first point.

    Args:
        points: [n, dimensions] finite points; distances are Euclidean.
        count: Number of medoids, at most n.
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


def _divide_in_proportion(sizes: Sequence[int], count: int) -> list[int]:
    """Divide ``count`` in proportion to the sizes by the largest-remainder method; no share exceeds its size."""
    total = sum(sizes)
    budgets = [count * size // total for size in sizes]
    by_fraction = sorted(range(len(sizes)), key=lambda index: (-(count * sizes[index] % total), index))
    for index in by_fraction[: count - sum(budgets)]:
        budgets[index] += 1
    return budgets


def _distances_of_means(chosen_points: Points, all_points: Points) -> tuple[float, float]:
    """Return :attr:`ChosenRows.gap` and :attr:`ChosenRows.chance` of these points."""
    mean_of_all, rows, count = all_points.mean(axis=0), len(all_points), len(chosen_points)
    length = max(float(np.linalg.norm(mean_of_all)), 1e-30)
    variance = float(((all_points - mean_of_all) ** 2).sum()) / max(1, rows - 1) * (1 - count / rows) / count
    return float(np.linalg.norm(chosen_points.mean(axis=0) - mean_of_all)) / length, float(np.sqrt(variance)) / length
