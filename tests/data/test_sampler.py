"""The order of an epoch's rows, their packs and their pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from preparing import prepare

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import (
    Example,
    Pieces,
    PreparedData,
    ResumableSampler,
    Source,
    collate,
    collate_packed,
    cut_rows_into_pieces,
    pack_rows,
)
from streamtune.data.record_table import Stored, open_record_table
from streamtune.errors import CheckpointError


def epochs(sampler: ResumableSampler, count: int, batch_size: int) -> list[list[int]]:
    return [batch for _ in range(count) for batch in sampler.batches(batch_size)]


def test_every_row_once_an_epoch_in_another_order() -> None:
    sampler = ResumableSampler(10, seed=1)
    first, second = list(sampler.batches(3)), list(sampler.batches(3))
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(10))
    assert first != second
    assert sampler.batches_per_epoch(3) == 4
    assert (sampler.epoch, sampler.position) == (2, 0)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    assert epochs(ResumableSampler(10, seed=1), 2, 4) == epochs(ResumableSampler(10, seed=1), 2, 4)
    assert epochs(ResumableSampler(10, seed=1), 1, 4) != epochs(ResumableSampler(10, seed=2), 1, 4)
    # pinned: a run must be resumable after numpy was upgraded
    assert ResumableSampler(8, seed=42).epoch_order(0).tolist() == [3, 1, 5, 7, 4, 0, 6, 2]


def test_in_order() -> None:
    assert list(ResumableSampler(5, seed=1, shuffle=False).batches(2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("taken", range(9))
def test_resumes_after_any_batch(taken: int) -> None:
    whole = epochs(ResumableSampler(10, seed=1), 2, 3)
    sampler, seen = ResumableSampler(10, seed=1), []
    while len(seen) < taken:
        for batch in sampler.batches(3):
            seen.append(batch)
            if len(seen) == taken:
                break
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = ResumableSampler(10, seed=1)
    resumed.load_state_dict(state)
    while len(seen) < len(whole):
        seen += resumed.batches(3)
    assert seen == whole


def test_state_of_other_data_is_refused() -> None:
    state = ResumableSampler(10, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="num_rows = 10, this run has 11"):
        ResumableSampler(11, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="seed = 1, this run has 2"):
        ResumableSampler(10, seed=2).load_state_dict(state)


# --------------------------------------- Rows are packed whole, within the length, tightly, and the same way every time

LENGTHS = {
    "ragged": np.random.RandomState(0).randint(1, 400, size=500),
    "all alike": np.full(40, 7),
    "each fills a sequence": np.full(12, 512),
    "one": np.array([3]),
    "none": np.array([], dtype=np.int64),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_every_row_is_in_one_pack_and_no_pack_is_too_long(kind: str) -> None:
    sizes = LENGTHS[kind]
    packs = pack_rows(sizes, 512, seed=3)
    members = [packs[index] for index in range(len(packs))]
    assert sorted(row for pack in members for row in pack) == list(range(len(sizes)))
    assert all(0 < sum(sizes[row] for row in pack) <= 512 for pack in members)
    assert packs.tokens == sizes.sum()


def test_packs_are_tight() -> None:
    sizes = LENGTHS["ragged"]
    packs = pack_rows(sizes, 512, seed=3)
    fewest = -(-int(sizes.sum()) // 512)
    assert len(packs) <= 11 / 9 * fewest + 1
    assert packs.fill_rate(512) > 0.98
    assert len(pack_rows(np.full(40, 7), 70, seed=0)) == 4
    assert pack_rows(np.full(40, 7), 70, seed=0).fill_rate(70) == 1.0
    assert len(pack_rows([300, 300, 200, 200], 512, seed=0)) == 2, "a short row fills up a long one"


def test_packs_are_those_of_best_fit_decreasing() -> None:
    """Against the rule of "Fewer Truncations Improve Language Modeling", row by row and sequence by sequence."""
    sizes, rooms = LENGTHS["ragged"], list[int]()
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [index for index, room in enumerate(rooms) if room >= size]
        if fits:
            rooms[min(fits, key=rooms.__getitem__)] -= size
        else:
            rooms.append(512 - size)
    packs = pack_rows(sizes, 512, seed=3)
    found = sorted(512 - sum(int(sizes[row]) for row in packs[index]) for index in range(len(packs)))
    assert found == sorted(rooms)


def test_packs_are_a_function_of_lengths_and_seed() -> None:
    def members(seed: int) -> list[list[int]]:
        packs = pack_rows(LENGTHS["ragged"], 512, seed=seed)
        return [packs[index] for index in range(len(packs))]

    assert members(3) == members(3)
    assert members(3) != members(4)


def test_neighbours_of_one_length_are_not_packed_together() -> None:
    packs = pack_rows(np.full(400, 64), 512, seed=1)
    gaps = [abs(a - b) for index in range(len(packs)) for a, b in zip(packs[index], packs[index][1:], strict=False)]
    assert np.mean(gaps) > 100


def test_collate_packed() -> None:
    first, second = Example([11, 12, 13], [-100, 12, 13], "a:1"), Example([21, 22], [21, 22], "a:2")
    third = Example([31], [31], "a:3")
    batch = collate_packed([[first, second], [third]], pad_token_id=9, pad_to_multiple_of=4)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 9, 9, 9], [31, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6]]
    # The last token of a row predicts nothing; what a row's first token is, nobody predicts.
    assert batch["shift_labels"].tolist() == [[12, 13, -100, 22, *[-100] * 4], [-100] * 8]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 3, [1] + [0] * 7]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}  # type: ignore[attr-defined]


def test_packing_changes_no_target() -> None:
    examples = [Example(range(10 * n, 10 * n + n), [-100, *range(10 * n + 1, 10 * n + n)], "a") for n in (3, 5, 2)]
    apart, together = collate(examples, pad_token_id=0), collate_packed([examples], pad_token_id=0)

    def pairs(batch: Any) -> list[tuple[int, int]]:
        seen = batch["shift_labels"] != -100
        return sorted(zip(batch["input_ids"][seen].tolist(), batch["shift_labels"][seen].tolist(), strict=True))

    assert pairs(apart) == pairs(together)
    assert len(pairs(together)) == 2 + 4 + 1


@pytest.fixture
def prepared(tokenizer: Any, write: Callable[..., str]) -> Callable[..., PreparedData]:
    path = write("rows.jsonl", [{"text": "The quick brown fox answers " * (1 + n % 7)} for n in range(40)])

    def run(**options: Any) -> PreparedData:
        return prepare([Source(path)], tokenizer, **{"max_length": 64, "seed": 1, "packing": True, **options})

    return run


def test_prepare_says_what_is_packed(prepared: Callable[..., PreparedData]) -> None:
    data = prepared(val_size=6)
    assert data.packs is not None
    assert data.validation_packs is not None
    assert data.report.train_examples == len(data.training) == sum(len(data.packs[n]) for n in range(len(data.packs)))
    assert len(data.validation) == sum(len(data.validation_packs[n]) for n in range(len(data.validation_packs)))
    tokens = sum(len(example.input_ids) for example in data.training)
    assert data.report.packs == len(data.packs) < len(data.training)
    assert data.report.pack_fill == pytest.approx(tokens / (64 * len(data.packs)), abs=1e-4)
    assert f"packed into {len(data.packs)} sequences, {data.report.pack_fill:.1%} full" in data.report.describe()
    assert data.report.to_json()["packs"] == len(data.packs)


def test_pieces_of_long_rows_are_packed_too(prepared: Callable[..., PreparedData]) -> None:
    data = prepared(max_length=16, overlength="split")
    assert data.packs is not None
    assert data.report.split > 0
    for number in range(len(data.packs)):
        assert sum(len(data.training[row].input_ids) for row in data.packs[number]) <= 16


def test_without_packing_nothing_is_packed(prepared: Callable[..., PreparedData]) -> None:
    data = prepared(packing=False)
    assert data.packs is data.validation_packs is None
    assert "packed" not in data.report.describe()


def test_the_fingerprint_covers_the_packs(prepared: Callable[..., PreparedData]) -> None:
    assert prepared().fingerprint == prepared().fingerprint
    assert len({prepared(packing=False).fingerprint, prepared().fingerprint, prepared(seed=2).fingerprint}) == 3


# ----- Rows cut into pieces of power-of-two length: no token is lost that is not counted, and masks are cut like tokens


def stored(rows: list[Example]) -> Stored[Example]:
    with open_record_table(Example) as (writer, tables):
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
    return cut_rows_into_pieces(rows, max_length=max_length, min_length=min_length, packing=False)


def test_the_pieces_of_one_row() -> None:
    pieces = cut(rows_of([1500], 0.0), max_length=2048, min_length=64)
    assert pieces.lengths().tolist() == [1024, 256, 128, 64, 28]
    assert pieces.buckets.tolist() == [1024, 256, 128, 64, 64]
    assert (pieces.dropped, pieces.tokens_lost, pieces.targets_lost) == (0, 0, 4)
    assert pieces.piece_counts_by_bucket() == {64: 2, 128: 1, 256: 1, 1024: 1}


@pytest.mark.parametrize("masked", [0.0, 0.9])
def test_rows_are_their_pieces_joined(masked: float) -> None:
    lengths = np.random.RandomState(3).lognormal(4, 1, 120).astype(int).clip(2, 512).tolist()
    rows = rows_of(lengths, masked)
    pieces = cut(rows)
    joined: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    targets = 0
    for number, (row, start, stop) in enumerate(zip(pieces.rows, pieces.starts, pieces.stops, strict=True)):
        piece, whole = pieces.cut_piece(rows, number), rows[int(row)]
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
    assert pieces.pieces_per_sequence().tolist() == [1] * len(pieces)
    shared = cut_rows_into_pieces(rows_of([3000], 0.0), max_length=3000, min_length=64, packing=True)
    assert shared.pieces_per_sequence().tolist() == [3000 // size for size in shared.buckets]


def test_rows_that_are_visited_twice_have_their_pieces_twice() -> None:
    rows = rows_of([100, 40], 0.5)
    twice = Stored(Example, rows._table, np.array([1, 0, 1]))
    pieces = cut(twice)
    assert pieces.lengths()[pieces.rows == 0].tolist() == pieces.lengths()[pieces.rows == 2].tolist()
    assert len(pieces) == len(cut(rows)) + sum(cut(rows).rows == 1)
