"""Split kept rows into a training part and held-out sets, and divide an epoch among the sources by their weights.

Rows of an eval set's sources are never trained on. ``val_size`` holds out some of the other rows. If there are eval
sets too, these rows form the set :data:`HELD_OUT`. Rows are identified by their hashes.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from streamtune.data.batches.sampler import Mixture, Numbers, weighted_mixture
from streamtune.data.data_report import SourceReport
from streamtune.data.reading.sources import Source
from streamtune.errors import DataError


class Digests:
    """A list of 16-byte hashes, stored in one buffer to save memory."""

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self._bytes = bytearray(data)

    def __len__(self) -> int:
        return len(self._bytes) // 16

    def append(self, digest: bytes) -> None:
        assert len(digest) == 16, "every hash has 16 bytes"
        self._bytes += digest

    def first_digests(self, count: int) -> Digests:
        return Digests(self._bytes[: 16 * count])

    def to_array(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytes(self._bytes), dtype=np.uint8).reshape(-1, 16)

    def rank_digests(self) -> npt.NDArray[np.int64]:
        """Return [hashes]: rank of each hash among the distinct hashes in byte order; equal hashes have equal ranks."""
        words = np.frombuffer(bytes(self._bytes), dtype=">u8").astype(np.uint64).reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))
        words = words[order]
        is_new = np.concatenate([[False], (words[1:] != words[:-1]).any(axis=1)])[: len(order)]
        ranks: npt.NDArray[np.int64] = np.empty(len(order), dtype=np.int64)
        ranks[order] = np.cumsum(is_new)
        return ranks


HELD_OUT = "held_out"
"""Name of the set of rows that ``val_size`` holds out, if there are eval sets too."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SourceStart:
    """Counts of rows and records before the first row of a dataset is added."""

    source: Source
    counts: Counter[str]
    """other counts so far, by name"""
    rows: int
    """number of rows with a known length so far"""
    kept: int
    """number of rows kept so far"""
    records: int
    """number of records written so far"""


@dataclass(frozen=True)
class EvalSet:
    """An eval set: held-out rows ``start`` to ``stop`` (exclusive). A packed sequence has rows of only one eval set."""

    name: str
    start: int
    stop: int


def choose_held_out(groups: Digests, starts: Sequence[SourceStart], val_size: float, seed: int) -> Mask:
    """Return a mask over the kept rows, True for rows held out from training.

    Held out are random groups of rows, and all rows of eval sets.

    Args:
        groups: [kept rows] hash of each row's group; rows of a group are held out together.
        starts: Counts at the start of every source; the sources of eval sets come last.
        val_size: Fraction (below 1) or number of the rows to hold out, in addition to the eval sets.

    Raises:
        DataError: No row is left to train on, or in an eval set.
    """
    stops = [*(start.kept for start in starts[1:]), len(groups)]
    kept: Counter[str | None] = Counter()
    for start, stop in zip(starts, stops, strict=True):
        kept[start.source.evaluates] += stop - start.kept
    for name, count in kept.items():
        if not count:
            where = next(start.source.place for start in starts if start.source.evaluates == name)
            what = "no row is left to train on" if name is None else f"no row of the eval set '{name}' is left"
            raise DataError(what, where=where, fix="all rows were dropped: check overlength, on_empty and on_bad_row")
    rows_without_set = kept[None]
    drawn = _draw_held_out_groups(groups.first_digests(rows_without_set), val_size, seed)
    return np.concatenate([drawn, np.ones(len(groups) - rows_without_set, dtype=np.bool_)])


def _draw_held_out_groups(groups: Digests, val_size: float, seed: int) -> Mask:
    if val_size <= 0:
        return np.zeros(len(groups), dtype=np.bool_)
    target_rows = max(1, round(val_size * len(groups))) if val_size < 1 else int(val_size)
    group_of_row = groups.rank_digests()
    sizes = np.bincount(group_of_row)
    order = array("q", range(len(sizes)))
    random.Random(seed).shuffle(order)
    num_groups = int(np.searchsorted(np.cumsum(sizes[order]), target_rows, "left")) + 1
    is_chosen = np.zeros(len(sizes), dtype=np.bool_)
    is_chosen[order[:num_groups]] = True
    held_out: Mask = is_chosen[group_of_row]
    if held_out.all():
        raise DataError(
            f"val_size = {val_size:g} would hold out all {len(groups):,} rows ({len(sizes):,} distinct)",
            where="val_size",
            fix="hold out fewer rows, or add data",
        )
    return held_out


def find_eval_sets(held_out: Numbers, starts: Sequence[SourceStart]) -> tuple[EvalSet, ...]:
    """Return the eval sets as ranges of the held-out records; empty if no source belongs to an eval set.

    Args:
        held_out: Indices of the held-out records, ascending.
        starts: Counts at the start of every source; the sources of eval sets come last.
    """
    sets: list[EvalSet] = []
    places = [int(np.searchsorted(held_out, start.records)) for start in starts]
    for start, first, stop in zip(starts, places, [*places[1:], len(held_out)], strict=True):
        name = start.source.evaluates
        if name is None:
            continue
        if not sets and first:
            sets.append(EvalSet(HELD_OUT, 0, first))
        if sets and sets[-1].name == name:  # several sources belong to the set
            sets[-1] = replace(sets[-1], stop=stop)
        else:
            sets.append(EvalSet(name, first, stop))
    return tuple(sets)


def eval_set_bounds(eval_sets: Sequence[EvalSet], num_held_out: int) -> list[int]:
    """Return the index of the first row of each eval set (0 without eval sets), then the number of held-out rows."""
    return [*(each.start for each in eval_sets), num_held_out] if eval_sets else [0, num_held_out]


def make_mixture(sources: Sequence[Source], bounds: Sequence[int], rows: Numbers, tokens: Numbers) -> Mixture | None:
    """Return how many units (rows or packs) of each source an epoch visits; None if the sources have no weights.

    Args:
        bounds: [sources + 1] index of each source's first training unit, then the number of all units.
        rows: [units] number of rows of each unit.
        tokens: [units] number of tokens of each unit.

    Raises:
        DataError: No source with a weight above 0 has a row.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        return None
    assert len(weights) == len(sources), "the recipe has weights for all of its datasets, or for none"
    mixture = weighted_mixture(weights, bounds, tokens if sources[0].mix_by == "tokens" else rows)
    if mixture is None:
        raise DataError(
            "no dataset with a weight above 0 has a row to train on",
            where=sources[0].place,
            fix="set a weight above 0 for a dataset that has rows",
        )
    return mixture


def add_epoch_counts(
    reports: Sequence[SourceReport], bounds: Sequence[int], lengths: Numbers, mixture: Mixture | None
) -> tuple[SourceReport, ...]:
    """Return the reports with ``epoch_rows`` and ``epoch_tokens``: how much of each source an epoch visits.

    Args:
        reports: Report of every source; eval sets come last, and an epoch does not visit them.
        bounds: [sources + 1] index of each source's first training row, then the number of all rows.
        lengths: [rows] number of tokens of each training row.
        mixture: Number of rows or packs of each source per epoch; None visits each row once.
    """
    completed = list(reports)
    for number, (first, stop) in enumerate(pairwise(bounds)):
        times = 1.0
        if mixture is not None:
            times = mixture.visits[number] / max(1, mixture.bounds[number + 1] - mixture.bounds[number])
        completed[number] = replace(
            completed[number],
            epoch_rows=round(times * (stop - first)),
            epoch_tokens=round(times * int(lengths[first:stop].sum())),
        )
    return tuple(completed)


def count_duplicates(digests: Digests, is_held_out: Mask) -> tuple[int, Mask]:
    """Count records that equal an earlier record, and find records that are both trained on and held out.

    Args:
        digests: [records] 128-bit hashes.
        is_held_out: [records] True for held-out records; the others are trained on.

    Returns:
        The number, and a mask [records] of records that are in both parts.
    """
    if not len(digests):
        return 0, np.zeros(0, dtype=np.bool_)
    # 64 of the 128 bits are compared: for a million different records a collision has the probability 3e-8.
    keys = np.ascontiguousarray(digests.to_array()[:, :8]).view(np.uint64)[:, 0]
    in_both = np.intersect1d(keys[is_held_out], keys[~is_held_out])
    return len(keys) - len(np.unique(keys)), np.isin(keys, in_both)
