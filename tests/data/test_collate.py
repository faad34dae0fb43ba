"""Collation: padding, the shift of labels, packs, and trees with common beginnings."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import CollatedTrees, Example, Tree, collate, collate_trees
from streamtune.data.batches import collate as batching
from streamtune.ops import BranchTable

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


# ----------------- Trees as tensors: with each prompt once, and a row for each completion; held against a count by hand

TREES = [
    Tree([1, 2, 3], [[4, 5], [6, 7, 8]], [[True, False], [True, False, True]], origin="a:1"),
    Tree([9], [[10], [11, 12]], origin="a:2"),
]


def test_shared() -> None:
    batch = collate_trees(TREES, pad_token_id=0, share=True)
    expected = {
        "input_ids": [1, 2, 3, 6, 7, 8, 3, 4, 5, 9, 11, 12, 9, 10],
        "shift_labels": [-100, -100, 6, -100, 8, -100, 4, -100, -100, 11, 12, -100, 10, -100],
        "position_ids": [0, 1, 2, 3, 4, 5, 2, 3, 4, 0, 1, 2, 0, 1],
        "attention_mask": [1] * 14,
    }
    found: dict[str, Any] = dict(batch)
    assert {name: found[name].tolist() for name in expected} == {name: [row] for name, row in expected.items()}
    assert batch["nodes"] == [(-1, 2), (0, 4), (0, 3), (-1, 3), (-1, 2)]
    assert batch["flat_index_K"].tolist() == [6, 2, 4, 12, 9, 10]
    assert batch["row_K"].tolist() == [0, 1, 1, 2, 3, 3]
    assert batch["num_rows"] == 4
    assert batch["origins"] == ["a:1", "a:1", "a:2", "a:2"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_separate(side: Any) -> None:
    batch = collate_trees(TREES, pad_token_id=0, share=False, padding_side=side)
    ids = [[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8], [9, 10, 0, 0, 0, 0], [9, 11, 12, 0, 0, 0]]
    labels = [
        [-100, -100, 4, -100, -100, -100],
        [-100, -100, 6, -100, 8, -100],
        [10, -100, -100, -100, -100, -100],
        [11, 12, -100, -100, -100, -100],
    ]
    sizes = torch.tensor([5, 6, 2, 3])
    shifts = [0] * 4 if side == "right" else [6 - int(size) for size in sizes]

    def placed(rows: list[list[int]]) -> Tensor:
        return torch.stack([torch.tensor(row).roll(shift) for row, shift in zip(rows, shifts, strict=True)])

    assert torch.equal(batch["input_ids"], placed(ids))
    assert torch.equal(batch["shift_labels"], placed(labels))
    assert torch.equal(batch["attention_mask"].sum(1), sizes)
    assert torch.equal(batch["attention_mask"], placed((torch.arange(6) < sizes[:, None]).long().tolist()))
    targets = batch["shift_labels"].flatten() != IGNORE_INDEX
    assert torch.equal(batch["flat_index_K"], targets.nonzero()[:, 0])
    assert torch.equal(batch["row_K"], batch["flat_index_K"] // 6)
    for row, size in enumerate(sizes):
        held = batch["attention_mask"][row] == 1
        assert batch["position_ids"][row][held].tolist() == list(range(size))
        assert batch["position_ids"][row][~held].eq(0).all()
    assert batch["nodes"] is None
    assert batch["num_rows"] == 4
    assert batch["origins"] == ["a:1", "a:1", "a:2", "a:2"]


def predictions(batch: CollatedTrees) -> list[tuple[int, int, int, int]]:
    """(completion, position, token that predicts, token predicted), in the order objectives see them."""
    columns = [batch[name].flatten()[batch["flat_index_K"]] for name in ("position_ids", "input_ids", "shift_labels")]
    return list(zip(batch["row_K"].tolist(), *(column.tolist() for column in columns), strict=True))


def random_tree(draw: random.Random, letters: int) -> Tree:
    completions = [[draw.randrange(letters) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 4))]
    masks = [[True, *(draw.random() < 0.6 for _ in completion[1:])] for completion in completions]
    prompt = [draw.randrange(letters) for _ in range(draw.randint(1, 5))]
    return Tree(prompt, completions, draw.choice([masks, None]))


def expected_of(trees: list[Tree]) -> tuple[list[tuple[int, int, int, int]], list[list[int]]]:
    """The result of :func:`predictions`, and the rows."""
    expected, rows = [], []
    branches = [(tree, index) for tree in trees for index in range(len(tree.completions))]
    for row, (tree, index) in enumerate(branches):
        conversation = [*tree.prompt, *tree.completions[index]]
        rows.append(conversation)
        mask = tree.masks[index] if tree.masks else [True] * len(tree.completions[index])
        for position in range(len(tree.prompt) - 1, len(conversation) - 1):
            if mask[position + 1 - len(tree.prompt)]:
                expected.append((row, position, conversation[position], conversation[position + 1]))
    return expected, rows


def seen(batch: CollatedTrees) -> list[list[int]]:
    """For each target the tokens that are before it in its row, itself included."""
    assert batch["nodes"] is not None
    table = BranchTable.from_nodes(batch["nodes"])
    ids, found = batch["input_ids"][0].tolist(), []
    for place in batch["flat_index_K"].tolist():
        part = table.part_at(place)
        runs = [*part.trunk, (part.start, place + 1)]
        found.append([token for start, stop in runs for token in ids[start:stop]])
    return found


@pytest.mark.parametrize("least", [1, 3, batching.LEAST_SAVED])
@pytest.mark.parametrize("letters", [2, 3, 100])
def test_both_layouts_hold_the_same_predictions(letters: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "LEAST_SAVED", least)
    draw = random.Random(letters)
    for _ in range(60):
        trees = [random_tree(draw, letters) for _ in range(draw.randint(1, 4))]
        shared = collate_trees(trees, pad_token_id=0, share=True)
        if not any(tree.masks for tree in trees):
            assert shared["input_ids"].shape[1] <= sum(tree.num_tokens for tree in trees)
        expected, rows = expected_of(trees)
        assert predictions(shared) == expected
        assert seen(shared) == [rows[row][: position + 1] for row, position, _, _ in expected]
        assert (shared["shift_labels"] != IGNORE_INDEX).sum() == shared["flat_index_K"].unique().numel()
        for side in ("right", "left"):
            separate = collate_trees(trees, pad_token_id=0, share=False, padding_side=side)
            assert predictions(separate) == expected
            assert int(separate["attention_mask"].sum()) == sum(tree.num_tokens_separate for tree in trees)
        assert sum(tree.num_targets for tree in trees) == len(expected)
        for tree in trees:
            alone = collate_trees([tree], pad_token_id=0, share=True)["input_ids"].shape[1]
            assert alone == tree.num_tokens or (len(tree.completions) > 2 and alone < tree.num_tokens)


def test_first_turns_that_a_pair_shares_are_there_once() -> None:
    """Their targets belong to both; the last shared token stands before each of the answers that differ."""
    first, question = [20, 21, 22], [30, 31]
    masks = [[True] * 3 + [False] * 2 + [True] * 2, [True] * 3 + [False] * 2 + [True]]
    tree = Tree([1, 2, 3], [[*first, *question, 40, 41], [*first, *question, 50]], masks, origin="a:1")
    batch = collate_trees([tree], pad_token_id=0, share=True)
    assert tree.num_common_tokens == 5
    assert batch["input_ids"].tolist() == [[1, 2, 3, 20, 21, 22, 30, 31, 40, 41, 31, 50]]
    assert batch["shift_labels"].tolist() == [[-100, -100, 20, 21, 22, -100, -100, 40, 41, -100, 50, -100]]
    assert batch["nodes"] == [(-1, 7), (0, 3), (0, 2)]
    assert batch["row_K"].tolist() == [0] * 5 + [1] * 4
    assert batch["flat_index_K"].tolist() == [2, 3, 4, 7, 8, 2, 3, 4, 10]


def test_short_beginnings_are_computed_for_each_of_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of its own costs more than it saves; one that grows long enough by it stays."""
    monkeypatch.setattr(batching, "LEAST_SAVED", 32)
    beginnings = {7: [], 8: [5] * 8, 20: [5] * 8 + [6] * 12}
    for tokens, common in beginnings.items():
        trees = [Tree([100 * tokens + 1, *common, 7 + number, 9], [[8]]) for number in range(3)]
        trees = [Tree([1, *tree.prompt], tree.completions) for tree in trees]
        batch = collate_trees(trees, pad_token_id=0, share=True)
        assert batch["nodes"] is not None
        saved = sum(tree.num_tokens for tree in trees) - batch["input_ids"].shape[1]
        assert saved == (2 * (2 + tokens) if tokens == 20 else 0)
        assert len(batch["nodes"]) == 3 + (saved > 0)


def test_a_tree_is_checked() -> None:
    for wrong in (
        {"prompt": [], "completions": [[1]]},
        {"prompt": [1], "completions": []},
        {"prompt": [1], "completions": [[1], []]},
        {"prompt": [1], "completions": [[1]], "masks": [[True, True]]},
    ):
        with pytest.raises(AssertionError):
            Tree(**wrong)
