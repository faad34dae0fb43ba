"""Order the rows of an epoch: mixtures of sources, packs of rows, and pieces of rows.

Order. The order depends only on the seed and the epoch, so a run can be resumed anywhere.

Mixture. The share of a source in an epoch is its weight divided by the sum of all weights, in rows or in tokens. An
epoch is as long as all sources together. Each source is read again and again, each time in another order drawn from the
seed. An epoch continues each source where the previous epoch stopped: if an epoch visits a third of a source, three
epochs visit each of its rows once.

Packing. Rows are packed by best fit decreasing, the longest row first. Packs are made once, when the data is prepared.
The sampler shuffles packs: each epoch visits the same packs in another order. Rows of a pack never attend to each
other, so packing only changes which rows are in a step.

Pieces. Rows are cut into pieces of power-of-two length, so that all sequences of a batch have the same length (dataset
decomposition, Pouransari et al., arXiv 2405.13226). A bucket has all pieces of one length::

    a row of 1,500 tokens, smallest bucket 64      1,024 + 256 + 128 + 64 + 28

The remainder is a shorter piece of the smallest bucket. A remainder of one token is dropped, because it has no context
and predicts nothing. The first token of a piece has no context, so it is not predicted. Pieces without a token to train
on are dropped and counted.
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
    """Number of rows (or packs of rows) of each weighted source that an epoch visits."""

    bounds: tuple[int, ...]
    """[sources + 1] index of each source's first row (or pack), then the number of all rows (or packs)"""
    visits: tuple[int, ...]
    """[sources] number of rows (or packs) of each source that an epoch visits"""

    @property
    def units_per_epoch(self) -> int:
        return sum(self.visits)

    def epoch_order(self, epoch: int, *, seed: int, shuffle: bool) -> Numbers:
        """Return the indices of the rows (or packs of rows) of an epoch in the order in which it visits them.

        Args:
            epoch: Number of the epoch, from 0.
            seed: Seed of the order within each source and of the order of sources.
            shuffle: Whether to shuffle. False keeps the order within each source, and mixes the sources evenly.
        """
        parts = [self._draw_source_units(source, epoch, seed, shuffle) for source in range(len(self.visits))]
        units: Numbers = np.concatenate(parts)
        if shuffle:
            return units[seeded_random(seed, epoch, len(parts)).permutation(len(units))]
        places = [(np.arange(len(part)) + 0.5) / max(1, len(part)) for part in parts]
        return units[np.argsort(np.concatenate(places), kind="stable")]

    def _draw_source_units(self, source: int, epoch: int, seed: int, shuffle: bool) -> Numbers:
        """Return the indices of one source's rows (or packs) for an epoch, continuing after the previous epoch."""
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
    """Return a NumPy ``RandomState``, whose numbers are the same in all NumPy releases, unlike ``Generator``."""
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds)))


def weighted_mixture(weights: Sequence[float], unit_bounds: Sequence[int], unit_sizes: Numbers) -> Mixture | None:
    """Return how many units (rows or packs) of each source an epoch visits; None if all weighted sources are empty.

    Args:
        weights: [sources] weight of each source, at least 0.
        unit_bounds: [sources + 1] index of each source's first unit, then the number of all units.
        unit_sizes: [units] number of rows of each unit, or of tokens if weights are shares of tokens.
    """
    counts = np.diff(unit_bounds)
    totals = np.array([unit_sizes[start:stop].sum() for start, stop in pairwise(unit_bounds)])
    shares = np.where(counts > 0, np.array(weights, dtype=np.float64), 0.0)
    if shares.sum() == 0:
        return None
    wanted = shares / shares.sum() * totals.sum()
    means = totals / np.maximum(counts, 1)
    # A source with a weight above 0 is visited at least once.
    visits = [max(1, round(float(size / mean))) if size > 0 else 0 for size, mean in zip(wanted, means, strict=True)]
    return Mixture(tuple(int(bound) for bound in unit_bounds), tuple(visits))


class ResumableSampler:
    """Sampler that visits every row once per epoch, in an order that depends only on the seed and the epoch.

    The position is the number of rows of the epoch that were already returned. So a state that is saved after training
    on a batch resumes with the next batch.

    Args:
        mixture: Number of rows of each source per epoch, by the sources' weights; None visits each row once.

    Example:
        >>> sampler = ResumableSampler(5, seed=0)
        >>> first = next(sampler.batches(2))
        >>> again = ResumableSampler(5, seed=0)
        >>> again.load_state_dict(sampler.state_dict())
        >>> next(again.batches(2)) == next(sampler.batches(2))
        True
    """

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool = True, mixture: Mixture | None = None) -> None:
        assert mixture is None or mixture.bounds[-1] == num_rows, "the mixture must be made for num_rows rows"
        self.mixture = mixture
        self.num_rows = num_rows if mixture is None else mixture.units_per_epoch
        """number of rows that an epoch visits, repeats included"""
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """epoch of the next batch, from 0"""
        self.position = 0
        """number of rows of this epoch that were already returned"""

    def epoch_order(self, epoch: int) -> Numbers:
        """Return the indices of the rows of an epoch in the order in which it visits them."""
        if self.mixture is not None:
            return self.mixture.epoch_order(epoch, seed=self.seed, shuffle=self.shuffle)
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        return seeded_random(self.seed, epoch).permutation(self.num_rows).astype(np.int64)

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """Yield the remaining batches of row indices of the current epoch; the next call continues with the next epoch.

        The last batch of an epoch may have fewer rows; no row is dropped.
        """
        order = self.epoch_order(self.epoch)
        while self.position < self.num_rows:
            rows = order[self.position : self.position + batch_size]
            self.position += len(rows)
            yield rows.tolist()
        self.epoch, self.position = self.epoch + 1, 0

    def batches_per_epoch(self, batch_size: int) -> int:
        return -(-self.num_rows // batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it and the values that determine the order, as JSON values."""
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the position that :meth:`state_dict` saved.

        Raises:
            CheckpointError: The number of rows, the seed or ``shuffle`` differs, or the position is invalid.
        """
        own_state = self.state_dict()
        for key in ("num_rows", "seed", "shuffle"):
            if state[key] != own_state[key]:
                raise CheckpointError(
                    f"the checkpoint was made with {key} = {state[key]}, this run has {own_state[key]}",
                    fix="resume with the data and seed of the checkpoint",
                )
        self.epoch, self.position = check_saved_position(state, self.num_rows)


def check_saved_position(state: Mapping[str, Any], units: int) -> tuple[int, int]:
    """Return the epoch and the position of a saved sampler state.

    Args:
        units: Number of rows, packs or pieces in an epoch.

    Raises:
        CheckpointError: The epoch or the position is not an integer of at least 0, or the position exceeds ``units``.
    """
    epoch, position = state["epoch"], state["position"]
    if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= units:
        raise CheckpointError(
            f"the checkpoint has an invalid position: row {position} of epoch {epoch}, in data of {units:,} rows",
            fix="use another checkpoint: --resume PATH",
        )
    return epoch, position


@dataclass(frozen=True, eq=False)
class Packs:
    """Packed sequences: the rows of each sequence, and the sizes of the sequences."""

    rows: Numbers
    """[rows] row indices, pack by pack"""
    starts: Numbers
    """[packs + 1] start of each pack in ``rows``"""
    tokens: int
    """number of tokens of all sequences"""
    sizes: Numbers | None = None
    """[packs] number of tokens of each sequence if its rows share common prefixes; None otherwise"""
    squares: Numbers | None = None
    """[packs] twice the number of (query, key) pairs if rows share common prefixes; otherwise None, and this number is
    the sum of the rows' squared lengths"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> list[int]:
        start, stop = self.starts[pack : pack + 2].tolist()
        return [int(row) for row in self.rows[start:stop]]

    def packs_of_rows(self, first_row: int, stop_row: int) -> range:
        """Return the indices of the packs that hold rows ``first_row`` to ``stop_row`` (exclusive) and no others."""
        start, end = np.searchsorted(self.starts, [first_row, stop_row]).tolist()
        return range(start, end)

    def fill_rate(self, max_length: int) -> float:
        """Return the fraction of positions that hold a token, if every sequence has ``max_length`` positions."""
        return self.tokens / (len(self) * max_length) if len(self) else 1.0


def pack_rows(lengths: Sequence[int] | Numbers, max_length: int, *, seed: int) -> Packs:
    """Pack rows into sequences of at most ``max_length`` tokens by best fit decreasing.

    The longest row comes first, and each row goes into the fullest sequence that has room for it. This needs at most
    11/9 of the minimum number of sequences, plus one. Rows of equal length are taken in random order, so that
    neighbours in a file do not end up in one sequence. The packs are in random order too.

    Args:
        lengths: [rows] number of tokens of each row, at most ``max_length``.

    Example:
        >>> packs = pack_rows([700, 300, 600, 400], 1000, seed=0)
        >>> len(packs)
        2
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or 0 < sizes.min() <= sizes.max() <= max_length, "every row must have 1 to max_length tokens"
    random = seeded_random(seed, len(sizes))
    drawn = random.permutation(len(sizes))
    order = drawn[np.argsort(-sizes[drawn], kind="stable")]
    packs = _pack_by_best_fit(order.tolist(), sizes, max_length)
    visited = [packs[index] for index in random.permutation(len(packs))]
    starts = np.cumsum([0, *(len(pack) for pack in visited)], dtype=np.int64)
    rows = np.fromiter((row for pack in visited for row in pack), dtype=np.int64, count=len(sizes))
    assert all(int(sizes[rows[a:b]].sum()) <= max_length for a, b in pairwise(starts))
    return Packs(rows, starts, int(sizes.sum()))


def pack_sections(
    lengths: Numbers, section_bounds: Sequence[int], max_length: int, *, seed: int
) -> tuple[Packs, list[int]]:
    """Pack the rows of each section separately; return all packs, and the index of each section's first pack.

    A section is a range of consecutive rows, such as a dataset or an eval set.

    Args:
        lengths: [rows] number of tokens of each row.
        section_bounds: [sections + 1] index of each section's first row, then the number of all rows.
    """
    rows, starts, firsts = [np.empty(0, dtype=np.int64)], [np.zeros(1, dtype=np.int64)], [0]
    for first, stop in pairwise(section_bounds):
        packs = pack_rows(lengths[first:stop], max_length, seed=seed)
        rows.append(first + packs.rows)
        starts.append(first + packs.starts[1:])
        firsts.append(firsts[-1] + len(packs))
    return Packs(np.concatenate(rows), np.concatenate(starts), int(lengths.sum())), firsts


def _pack_by_best_fit(order: Sequence[int], sizes: Numbers, max_length: int) -> list[list[int]]:
    """Return the rows of each pack: in the given order, each row goes into the fullest pack that has room for it."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> packs
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
    """Pieces of power-of-two length into which rows are cut. A bucket has all pieces of one length; the last piece of a
    row may be shorter.
    """

    rows: Numbers
    """[pieces] index of each piece's row"""
    starts: Numbers
    """[pieces] index of each piece's first token in its row"""
    stops: Numbers
    """[pieces] end (exclusive) of each piece in its row"""
    buckets: Numbers
    """[pieces] length of each piece's bucket in tokens, a power of two"""
    sequence_length: int | None = None
    """number of tokens of a sequence that pieces of one bucket share; None if each piece is a sequence"""
    dropped: int = 0
    """number of pieces dropped because they have no token to train on"""
    tokens_lost: int = 0
    """number of tokens that are in no piece"""
    targets_lost: int = 0
    """number of tokens to train on that no piece predicts; most are the first token of a piece"""

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> Numbers:
        return self.stops - self.starts

    def piece_counts_by_bucket(self) -> dict[int, int]:
        """Return bucket length in tokens -> number of pieces."""
        sizes, counts = np.unique(self.buckets, return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def pieces_per_sequence(self) -> Numbers:
        """Return [pieces]: number of pieces of the same length for which one sequence has room."""
        return np.ones_like(self.buckets) if self.sequence_length is None else self.sequence_length // self.buckets

    def cut_piece(self, examples: Stored[Example], piece: int) -> Example:
        """Return a piece as an example. Its first token has label -100, because the token before it is missing."""
        row, start, stop = int(self.rows[piece]), int(self.starts[piece]), int(self.stops[piece])
        example = examples[row]
        labels = np.array(example.labels[start:stop], dtype=np.int32)
        if start:
            labels[0] = IGNORE_INDEX
        return replace(example, input_ids=example.input_ids[start:stop], labels=labels)


def cut_rows_into_pieces(examples: Stored[Example], *, max_length: int, min_length: int, packing: bool) -> Pieces:
    """Cut rows into pieces of power-of-two length, and drop pieces without a token to train on.

    Args:
        examples: Rows of at most ``max_length`` tokens.
        max_length: Maximum number of tokens of a piece, and of a sequence that pieces share.
        min_length: Length of the smallest bucket in tokens, a power of two.
        packing: Whether pieces of a bucket share sequences.
    """
    lengths = examples.lengths()
    rows, starts, stops, buckets = _cut_by_powers_of_two(lengths, max_length, min_length)
    targets = _count_trained_tokens(examples, rows, starts, stops)
    every = np.arange(len(lengths))
    possible = _count_trained_tokens(examples, every, np.zeros_like(lengths), lengths)
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


def _cut_by_powers_of_two(
    lengths: Numbers, max_piece_length: int, min_piece_length: int
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return row index, start, stop and bucket length of each piece, row by row; a last single token is dropped."""
    assert not len(lengths) or lengths.max() <= max_piece_length, "every row must have 1 to max_length tokens"
    done = np.zeros_like(lengths)
    found: list[tuple[Numbers, Numbers, Numbers, Numbers]] = []
    size = 1 << (max_piece_length.bit_length() - 1)
    while size >= min_piece_length:
        rows = np.flatnonzero(lengths - done >= size)
        found.append((rows, done[rows], done[rows] + size, np.full(len(rows), size)))
        done[rows] += size
        size //= 2
    rows = np.flatnonzero(lengths - done > 1)
    found.append((rows, done[rows], lengths[rows], np.full(len(rows), min_piece_length)))
    rows, starts, stops, buckets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((starts, rows))
    return rows[order], starts[order], stops[order], buckets[order]


def _count_trained_tokens(examples: Stored[Example], rows: Numbers, starts: Numbers, stops: Numbers) -> Numbers:
    """Return [ranges]: number of tokens with a label in each range, without its first token. No row is decoded."""
    places = examples.table_indices()[rows]
    order = np.argsort(places, kind="stable")
    counts = np.zeros(len(rows), dtype=np.int64)
    first = 0
    for chunk in examples.column_cells("labels").chunks:
        low, high = np.searchsorted(places[order], (first, first + len(chunk)))
        inside = order[low:high]
        if len(inside):
            trained = chunk.values.to_numpy() != IGNORE_INDEX
            before = np.concatenate([[0], np.cumsum(trained)])
            begin = chunk.offsets.to_numpy()[places[inside] - first].astype(np.int64)
            counts[inside] = before[begin + stops[inside]] - before[begin + starts[inside] + 1]
        first += len(chunk)
    return counts
