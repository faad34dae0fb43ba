"""Rows cut into pieces of power-of-two length, so that a batch has rows of one length: dataset decomposition.

    a row of 1,500 tokens, the smallest bucket 64      1,024 + 256 + 128 + 64 + 28

The lengths are the powers of two of which the row's length is the sum, the largest first (Pouransari et al., arXiv
2405.13226). What is left below the smallest bucket is a piece of that bucket, shorter than its other pieces: nothing is
left out for its length but a single last token, which nothing in its piece predicts or is predicted by.

A piece begins without context: its first token is predicted by nothing. Labels are cut as the tokens are. A piece in
which no token is trained is left out and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.record_table import Example, Stored

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of rows, each of the bucket of its length."""

    rows: Numbers
    """[pieces] row that a piece is of"""
    starts: Numbers
    """[pieces] its first token in the row"""
    stops: Numbers
    """[pieces] one behind its last token"""
    buckets: Numbers
    """[pieces] tokens of the longest pieces of its bucket, a power of two"""
    sequence_length: int | None = None
    """tokens of a sequence in which pieces of a bucket lie end to end; None where each is a sequence"""
    dropped: int = 0
    """pieces left out, in which no token is trained"""
    tokens_lost: int = 0
    """tokens of rows that are in no piece"""
    targets_lost: int = 0
    """trained tokens that are predicted in their row and in no piece: most of them are the first of a piece"""

    def __len__(self) -> int:
        return len(self.rows)

    def lengths(self) -> Numbers:
        """Return the tokens of each piece, [pieces]."""
        return self.stops - self.starts

    def by_bucket(self) -> dict[int, int]:
        """Return the number of pieces of each bucket, by its length."""
        sizes, counts = np.unique(self.buckets, return_counts=True)
        return dict(zip(sizes.tolist(), counts.tolist(), strict=True))

    def per_sequence(self) -> Numbers:
        """Return the number of pieces of a piece's bucket that one sequence holds, [pieces]."""
        return np.ones_like(self.buckets) if self.sequence_length is None else self.sequence_length // self.buckets

    def cut(self, examples: Stored[Example], piece: int) -> Example:
        """Return a piece as an example; its first token is not trained on."""
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
        max_length: No bucket is longer, and no sequence that pieces share.
        min_length: Tokens of the smallest bucket, a power of two.
        packing: Pieces of a bucket share sequences.
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
    """Return rows, starts, stops and buckets of the pieces, row by row; pieces of a single token are not among them."""
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
    """Return the trained tokens behind the first of each part of a row, [parts], without decoding rows one by one."""
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
