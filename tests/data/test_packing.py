"""Rows are packed whole, within the length, tightly, and the same way every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from preparing import prepare

from streamtune.data import Example, PreparedData, Source, collate, collate_packed, pack_rows

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
    assert data.report.train_examples == len(data.train) == sum(len(data.packs[n]) for n in range(len(data.packs)))
    assert len(data.validation) == sum(len(data.validation_packs[n]) for n in range(len(data.validation_packs)))
    tokens = sum(len(example.input_ids) for example in data.train)
    assert data.report.packs == len(data.packs) < len(data.train)
    assert data.report.pack_fill == pytest.approx(tokens / (64 * len(data.packs)), abs=1e-4)
    assert f"packed into {len(data.packs)} sequences, {data.report.pack_fill:.1%} full" in data.report.describe()
    assert data.report.to_json()["packs"] == len(data.packs)


def test_pieces_of_long_rows_are_packed_too(prepared: Callable[..., PreparedData]) -> None:
    data = prepared(max_length=16, overlength="split")
    assert data.packs is not None
    assert data.report.split > 0
    for number in range(len(data.packs)):
        assert sum(len(data.train[row].input_ids) for row in data.packs[number]) <= 16


def test_without_packing_nothing_is_packed(prepared: Callable[..., PreparedData]) -> None:
    data = prepared(packing=False)
    assert data.packs is data.validation_packs is None
    assert "packed" not in data.report.describe()


def test_the_fingerprint_covers_the_packs(prepared: Callable[..., PreparedData]) -> None:
    assert prepared().fingerprint == prepared().fingerprint
    assert len({prepared(packing=False).fingerprint, prepared().fingerprint, prepared(seed=2).fingerprint}) == 3
