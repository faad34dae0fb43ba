"""Padding and the one shift of the labels."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from streamtune.data import Example, collate

SHORT = Example([5, 6, 7], [-100, 6, 7], "x:1")
LONG = Example([1, 2, 3, 4, 9], [-100, -100, 3, 4, 9], "x:2")


def test_right_padding() -> None:
    batch = collate([SHORT, LONG], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [1, 2, 3, 4, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["shift_labels"].tolist() == [[6, 7, -100, -100, -100], [-100, 3, 4, 9, -100]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_left_padding() -> None:
    batch = collate([SHORT, LONG], pad_token_id=0, padding_side="left")
    assert batch["input_ids"].tolist() == [[0, 0, 5, 6, 7], [1, 2, 3, 4, 9]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert batch["shift_labels"].tolist() == [[-100, -100, 6, 7, -100], [-100, 3, 4, 9, -100]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_never_predicts_the_first_token(side: Literal["left", "right"]) -> None:
    trained = Example([5, 6, 7], [5, 6, 7], "x:1")
    batch = collate([trained, LONG], pad_token_id=0, padding_side=side)
    padding = batch["attention_mask"] == 0
    assert (batch["shift_labels"][padding] == -100).all()
    assert (batch["shift_labels"][0] != -100).sum() == 2


def test_length_is_rounded_up() -> None:
    assert collate([LONG], pad_token_id=0, pad_to_multiple_of=8)["input_ids"].shape == (1, 8)
    assert collate([LONG], pad_token_id=0, pad_to_multiple_of=5)["input_ids"].shape == (1, 5)


def test_one_token() -> None:
    batch = collate([Example([5], [5], "x:1")], pad_token_id=0)
    assert batch["shift_labels"].tolist() == [[-100]]
