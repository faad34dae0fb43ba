"""Order of an epoch's rows: mixture of sources, packs of rows, and pieces of rows.

Order. A function of seed and epoch, so that a run can be resumed anywhere.

Mixture. The share of a source in an epoch is its weight divided by the sum of all weights, in rows or in tokens. An
epoch is as long as all sources together. Each source is gone through in passes, each in an order drawn from the seed,
and an epoch goes on where the one before it stopped: with a third of a source in each, three epochs visit every row
once.

Packing. Best fit, longest first, a function of the lengths and the seed. Packs are made once, when the data is
prepared, and are what the sampler shuffles: each epoch visits the same packs in another order. The rows of a pack
never attend to one another, so packing changes which rows make up a step and nothing else.

Pieces. Rows cut into pieces of power-of-two length, so that all rows of a batch have one length (dataset
decomposition, Pouransari et al., arXiv 2405.13226)::

    a row of 1,500 tokens, the smallest bucket 64      1,024 + 256 + 128 + 64 + 28

The rest below the smallest bucket is a shorter piece of that bucket; a rest of a single token is left out, as nothing
predicts it or is predicted by it. A piece begins without context: nothing predicts its first token. A piece without
trained tokens is left out and counted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.record_table import Example, Stored
from streamtune.errors import CheckpointError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Visits of an epoch to each source; units are rows, or packs of rows of a source."""

    bounds: tuple[int, ...]
    """[sources + 1] first unit of each source, and the number of all units"""
    visits: tuple[int, ...]
    """[sources] units of each source in an epoch"""

    @property
    def units(self) -> int:
        return sum(self.visits)

    def order(self, epoch: int, *, seed: int, shuffle: bool) -> Numbers:
        """Return the units of an epoch in the order of their visits, [units].

        Args:
            epoch: Epoch, from 0.
            seed: Seed of the passes and of their mixing.
            shuffle: False keeps the order within each source, and mixes the sources evenly.
        """
        parts = [self._part(source, epoch, seed, shuffle) for source in range(len(self.visits))]
        units: Numbers = np.concatenate(parts)
        if shuffle:
            return units[seeded_random(seed, epoch, len(parts)).permutation(len(units))]
        places = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
        return units[np.argsort(np.concatenate(places), kind="stable")]

    def _part(self, source: int, epoch: int, seed: int, shuffle: bool) -> Numbers:
        """Return ``visits`` units of a source in an epoch, continuing where the previous epoch stopped."""
        first, size = self.bounds[source], self.bounds[source + 1] - self.bounds[source]
        start, count = epoch * self.visits[source], self.visits[source]
        if not count:
            return np.empty(0, dtype=np.int64)
        passes = range(start // size, (start + count - 1) // size + 1)
        orders = [
            seeded_random(seed, source, number, 1).permutation(size) if shuffle else np.arange(size)
            for number in passes
        ]
        skipped = start - passes[0] * size
        return first + np.concatenate(orders)[skipped : skipped + count].astype(np.int64)


def seeded_random(*seeds: int) -> np.random.RandomState:
    """Return a random stream that no numpy release changes: its policy freezes RandomState's, not Generator's."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))


def mix(weights: Sequence[float], bounds: Sequence[int], sizes: Numbers) -> Mixture | None:
    """Return the mixture of sources by their weights; None if no source with a weight has a unit.

    Args:
        weights: [sources] not negative.
        bounds: [sources + 1] first unit of each source, and the number of all units.
        sizes: [units] 1 if shares are counted in rows, else the tokens of each unit.
    """
    counts = np.diff(bounds)
    totals = np.array([sizes[start:stop].sum() for start, stop in pairwise(bounds)])
    shares = np.where(counts > 0, np.array(weights, dtype=np.float64), 0.0)
    if shares.sum() == 0:
        return None
    wanted = shares / shares.sum() * totals.sum()
    means = totals / np.maximum(counts, 1)
    # A source with a weight is visited, however small its share.
    visits = [max(1, round(float(size / mean))) if size > 0 else 0 for size, mean in zip(wanted, means, strict=True)]
    return Mixture(tuple(int(bound) for bound in bounds), tuple(visits))


class ResumableSampler:
    """Visits every row once an epoch, in an order that depends only on the seed and the epoch.

    The position counts all rows handed out, the last batch included: save the state after the batch was
    trained on, and a sampler that loads it continues with the next.

    Args:
        shuffle: False keeps the rows' own order.
        mixture: Mixture of the same rows: each source is visited as often as its weight says.
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, mixture: Mixture | None = None) -> None:
        assert mixture is None or mixture.bounds[-1] == num_rows, "a mixture of other rows"
        self.mixture = mixture
        self.num_rows = num_rows if mixture is None else mixture.units
        """visits of an epoch"""
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """epoch of the next batch, from 0"""
        self.position = 0
        """rows of this epoch that were handed out"""

    def order(self, epoch: int) -> Numbers:
        """Return the rows of an epoch in the order of their visits, [num_rows]."""
        if self.mixture is not None:
            return self.mixture.order(epoch, seed=self.seed, shuffle=self.shuffle)
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        return seeded_random(self.seed, epoch).permutation(self.num_rows).astype(np.int64)

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """Yield the batches that are left of the current epoch, then move on to the next epoch and stop.

        The last batch of an epoch may have fewer rows; none is left out.
        """
        order = self.order(self.epoch)
        while self.position < self.num_rows:
            rows = order[self.position : self.position + batch_size]
            self.position += len(rows)
            yield rows.tolist()
        self.epoch, self.position = self.epoch + 1, 0

    def batches_per_epoch(self, batch_size: int) -> int:
        return -(-self.num_rows // batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return position and order as plain JSON values."""
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of another sampler over the same rows.

        Raises:
            CheckpointError: The other sampler had other rows or another order.
        """
        mine = self.state_dict()
        for key in ("num_rows", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint visits the data with {key} = {state[key]}, this run with {mine[key]}",
                    fix="resume with the data and the seed the checkpoint was made with",
                )
        self.epoch, self.position = place_in(state, self.num_rows)


def place_in(state: Mapping[str, Any], units: int) -> tuple[int, int]:
    """Return epoch and position of a saved state; an epoch has ``units`` units.

    Raises:
        CheckpointError: Epoch or position is not a count, or the position is behind the last unit.
    """
    epoch, position = state["epoch"], state["position"]
    if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= units:
        raise CheckpointError(
            f"the checkpoint is at row {position} of epoch {epoch} of the data, which has {units:,}",
            fix="use another checkpoint: --resume PATH",
        )
    return epoch, position


@dataclass(frozen=True, eq=False)
class Packs:
    """A partition of rows into sequences."""

    rows: Numbers
    """[rows] row numbers, pack by pack"""
    starts: Numbers
    """[packs + 1] start of each pack in ``rows``"""
    tokens: int
    """tokens of all sequences"""
    sizes: Numbers | None = None
    """[packs] tokens of each sequence if rows share their beginnings; None: the tokens of its rows"""
    squares: Numbers | None = None
    """[packs] then twice the pairs of tokens that see each other; None: the squares of the rows' lengths"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> list[int]:
        start, stop = self.starts[pack : pack + 2].tolist()
        return [int(row) for row in self.rows[start:stop]]

    def of_rows(self, first: int, stop: int) -> range:
        """Return the packs of a part that :func:`pack_parts` packed by itself: of rows ``first`` to ``stop``."""
        start, end = np.searchsorted(self.starts, [first, stop]).tolist()
        return range(start, end)

    def fill_rate(self, max_length: int) -> float:
        """Return the part of the positions of full-length sequences that hold a token."""
        return self.tokens / (len(self) * max_length) if len(self) else 1.0


def pack_rows(lengths: Sequence[int] | Numbers, max_length: int, *, seed: int) -> Packs:
    """Pack rows into sequences of at most ``max_length`` tokens.

    Best fit decreasing: longest first, each into the fullest sequence that holds it; at most 11/9 of the fewest
    possible sequences, plus one. Rows of one length come in an order drawn from the seed, so that neighbours in a file
    do not end up together; the packs come in such an order too.

    Args:
        lengths: Tokens of each row, at most ``max_length``.
        seed: Seed of what the lengths leave open.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= max_length, "rows are cut to the length before"
    random = seeded_random(seed, len(sizes))
    drawn = random.permutation(len(sizes))
    order = drawn[np.argsort(-sizes[drawn], kind="stable")]
    packs = _best_fit(order.tolist(), sizes, max_length)
    visited = [packs[index] for index in random.permutation(len(packs))]
    starts = np.cumsum([0, *(len(pack) for pack in visited)], dtype=np.int64)
    rows = np.fromiter((row for pack in visited for row in pack), dtype=np.int64, count=len(sizes))
    assert all(int(sizes[rows[a:b]].sum()) <= max_length for a, b in pairwise(starts))
    return Packs(rows, starts, int(sizes.sum()))


def pack_parts(lengths: Numbers, bounds: Sequence[int], max_length: int, *, seed: int) -> tuple[Packs, list[int]]:
    """Pack the rows of each part by themselves; return the packs, part by part, and the first pack of each part.

    Args:
        lengths: [rows] tokens.
        bounds: [parts + 1] first row of each part, and the number of all rows.
    """
    rows, starts, firsts = [np.empty(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)], [0]
    for first, stop in pairwise(bounds):
        packs = pack_rows(lengths[first:stop], max_length, seed=seed)
        rows.append(first + packs.rows)
        starts.append(first + packs.starts[1:])
        firsts.append(firsts[-1] + len(packs))
    return Packs(np.concatenate(rows), np.concatenate(starts), int(lengths.sum())), firsts


def _best_fit(order: Sequence[int], sizes: Numbers, max_length: int) -> list[list[int]]:
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


# ------------------------------------------------------------------------------------------------ pieces of buckets


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of rows, each in the bucket of its length."""

    rows: Numbers
    """[pieces] row of each piece"""
    starts: Numbers
    """[pieces] first token in the row"""
    stops: Numbers
    """[pieces] end in the row (exclusive)"""
    buckets: Numbers
    """[pieces] tokens of the longest pieces of the bucket, a power of two"""
    sequence_length: int | None = None
    """tokens of a sequence in which pieces of a bucket lie end to end; None: each piece is a sequence"""
    dropped: int = 0
    """pieces left out for want of trained tokens"""
    tokens_lost: int = 0
    """tokens of rows in no piece"""
    targets_lost: int = 0
    """trained tokens that are predicted in their row and in no piece: most are the first of a piece"""

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> Numbers:
        return self.stops - self.starts

    def by_bucket(self) -> dict[int, int]:
        """Return how many pieces each bucket has, by its length."""
        sizes, counts = np.unique(self.buckets, return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def per_sequence(self) -> Numbers:
        """Return how many pieces of a piece's bucket a sequence holds, [pieces]."""
        return np.ones_like(self.buckets) if self.sequence_length is None else self.sequence_length // self.buckets

    def cut(self, examples: Stored[Example], piece: int) -> Example:
        """Return a piece as an example; its first token is not trained."""
        row, start, stop = int(self.rows[piece]), int(self.starts[piece]), int(self.stops[piece])
        example = examples[row]
        labels = np.array(example.labels[start:stop], dtype=np.int32)
        if start:
            labels[0] = IGNORE_INDEX
        return replace(example, input_ids=example.input_ids[start:stop], labels=labels)


def cut_rows(examples: Stored[Example], *, max_length: int, min_length: int, packing: bool) -> Pieces:
    """Cut rows into pieces.

    Args:
        examples: Rows of at most ``max_length`` tokens.
        max_length: Most tokens of a bucket, and of a sequence that pieces share.
        min_length: Tokens of the smallest bucket, a power of two.
        packing: True if pieces of a bucket share sequences.
    """
    lengths = examples.lengths()
    rows, starts, stops, buckets = _decompose(lengths, max_length, min_length)
    targets = _count_targets(examples, rows, starts, stops)
    every = np.arange(len(lengths))
    possible = _count_targets(examples, every, np.zeros_like(lengths), lengths)
    kept = targets > 0
    return Pieces(
        rows=rows[kept],
        starts=starts[kept],
        stops=stops[kept],
        buckets=buckets[kept],
        sequence_length=max_length if packing else None,
        dropped=int((~kept).sum()),
        tokens_lost=int(lengths.sum() - (stops - starts)[kept].sum()),
        targets_lost=int(possible.sum() - targets[kept].sum()),
    )


def _decompose(lengths: Numbers, longest: int, shortest: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return rows, starts, stops and buckets of the pieces, row by row; a single token left over makes no piece."""
    assert not len(lengths) or lengths.max() <= longest, "rows are fitted to the length before"
    done = np.zeros_like(lengths)
    found: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    size = 1 << (longest.bit_length() - 1)
    while size >= shortest:
        rows = np.flatnonzero(lengths - done >= size)
        found.append((rows, done[rows], done[rows] + size, np.full(len(rows), size)))
        done[rows] += size
        size //= 2
    rows = np.flatnonzero(lengths - done > 1)
    found.append((rows, done[rows], lengths[rows], np.full(len(rows), shortest)))
    rows, starts, stops, buckets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((starts, rows))
    return rows[order], starts[order], stops[order], buckets[order]


def _count_targets(examples: Stored[Example], rows: Numbers, starts: Numbers, stops: Numbers) -> Numbers:
    """Return how many trained tokens stand behind the first of each part, [parts], without decoding rows one by one."""
    places = examples.numbers()[rows]
    order = np.argsort(places, kind="stable")
    counts = np.zeros(len(rows), dtype=np.int64)
    first = 0
    for chunk in examples.cells("labels").chunks:
        low, high = np.searchsorted(places[order], (first, first + len(chunk)))
        inside = order[low:high]
        if len(inside):
            trained = chunk.values.to_numpy() != IGNORE_INDEX
            before = np.concatenate([[0], np.cumsum(trained)])
            begin = chunk.offsets.to_numpy()[places[inside] - first].astype(np.int64)
            counts[inside] = before[begin + stops[inside]] - before[begin + starts[inside] + 1]
        first += len(chunk)
    return counts
