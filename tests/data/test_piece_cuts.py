"""Rows cut into pieces of power-of-two length: no token is lost that is not counted, and masks are cut like tokens."""

from __future__ import annotations

import numpy as np
import pytest

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import Example, Pieces, cut_rows
from streamtune.data.record_table import Stored, spill


def stored(rows: list[Example]) -> Stored[Example]:
    with spill(Example) as (writer, tables):
        for number, row in enumerate(rows):
            writer.append(row)
            if number % 7 == 0:
                writer.flush()  # several chunks
    return Stored(Example, tables[0], np.arange(len(rows), dtype=np.int64))


def rows_of(lengths: list[int], masked: float, seed: int = 0) -> Stored[Example]:
    random, rows = np.random.RandomState(seed), []
    for number, length in enumerate(lengths):
        ids = random.randint(1, 1000, length).astype(np.int32)
        labels = np.where(random.random_sample(length) < masked, IGNORE_INDEX, ids).astype(np.int32)
        labels[-1] = ids[-1]
        rows.append(Example(ids, labels, f"rows:{number}"))
    return stored(rows)


def cut(rows: Stored[Example], max_length: int = 512, min_length: int = 32) -> Pieces:
    return cut_rows(rows, max_length=max_length, min_length=min_length, packing=False)


def test_the_pieces_of_one_row() -> None:
    pieces = cut(rows_of([1500], 0.0), max_length=2048, min_length=64)
    assert pieces.lengths().tolist() == [1024, 256, 128, 64, 28]
    assert pieces.buckets.tolist() == [1024, 256, 128, 64, 64]
    assert (pieces.dropped, pieces.tokens_lost, pieces.targets_lost) == (0, 0, 4)
    assert pieces.by_bucket() == {64: 2, 128: 1, 256: 1, 1024: 1}


@pytest.mark.parametrize("masked", [0.0, 0.9])
def test_rows_are_their_pieces_joined(masked: float) -> None:
    lengths = np.random.RandomState(3).lognormal(4, 1, 120).astype(int).clip(2, 512).tolist()
    rows = rows_of(lengths, masked)
    pieces = cut(rows)
    joined: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    targets = 0
    for number, (row, start, stop) in enumerate(zip(pieces.rows, pieces.starts, pieces.stops, strict=True)):
        piece, whole = pieces.cut(rows, number), rows[int(row)]
        assert len(piece.input_ids) == stop - start >= 2
        np.testing.assert_array_equal(piece.input_ids, whole.input_ids[start:stop])
        np.testing.assert_array_equal(piece.labels[1:], whole.labels[start + 1 : stop])
        assert start == 0 or piece.labels[0] == IGNORE_INDEX
        size, bucket = stop - start, int(pieces.buckets[number])
        assert size == bucket or (bucket == 32 and size < 32 and stop == len(whole.input_ids))
        count = int((np.asarray(piece.labels[1:]) != IGNORE_INDEX).sum())
        assert count > 0
        targets += count
        joined[int(row)] += range(int(start), int(stop))
    possible = sum(int((np.asarray(row.labels[1:]) != IGNORE_INDEX).sum()) for row in rows)
    assert pieces.targets_lost == possible - targets
    assert pieces.tokens_lost == sum(lengths) - sum(map(len, joined.values()))
    if masked == 0:
        single = sum(length % 32 == 1 for length in lengths)
        assert (pieces.dropped, pieces.tokens_lost) == (0, single)
        assert all(places == list(range(len(places))) for places in joined.values())
    else:
        assert pieces.dropped > 0


def test_no_bucket_is_longer_than_the_length() -> None:
    pieces = cut(rows_of([3000, 2047, 64], 0.0), max_length=3000, min_length=64)
    assert max(pieces.buckets) == 2048
    assert pieces.lengths().sum() == 3000 + 2047 + 64
    assert pieces.per_sequence().tolist() == [1] * len(pieces)
    shared = cut_rows(rows_of([3000], 0.0), max_length=3000, min_length=64, packing=True)
    assert shared.per_sequence().tolist() == [3000 // size for size in shared.buckets]


def test_rows_that_are_visited_twice_have_their_pieces_twice() -> None:
    rows = rows_of([100, 40], 0.5)
    twice = Stored(Example, rows._table, np.array([1, 0, 1]))
    pieces = cut(twice)
    assert pieces.lengths()[pieces.rows == 0].tolist() == pieces.lengths()[pieces.rows == 2].tolist()
    assert len(pieces) == len(cut(rows)) + sum(cut(rows).rows == 1)
