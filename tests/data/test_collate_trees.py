"""Trees as tensors: with each prompt once, and a row for each completion; held against a count by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.data import NO_ROW, CollatedTrees, Tree, collate_trees
from streamtune.labels import IGNORE_INDEX

TREES = [
    Tree([1, 2, 3], [[4, 5], [6, 7, 8]], [[True, False], [True, False, True]], origin="a:1"),
    Tree([9], [[10], [11, 12]], origin="a:2"),
]


def test_shared() -> None:
    batch = collate_trees(TREES, pad_token_id=0, share=True)
    expected = {
        "input_ids": [1, 2, 3, 4, 5, 3, 6, 7, 8, 9, 10, 9, 11, 12],
        "shift_labels": [-100, -100, 4, -100, -100, 6, -100, 8, -100, 10, -100, 11, 12, -100],
        "rows": [-1, -1, 0, -1, -1, 1, -1, 1, -1, 2, -1, 3, 3, -1],
        "position_ids": [0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1, 0, 1, 2],
        "attention_mask": [1] * 14,
    }
    found: dict[str, Any] = dict(batch)
    assert {name: found[name].tolist() for name in expected} == {name: [row] for name, row in expected.items()}
    assert batch["tree_lengths"] == [(2, [3, 4]), (0, [2, 3])]
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
    numbers = torch.arange(4)[:, None].expand(4, 6)
    assert torch.equal(batch["rows"], torch.where(batch["shift_labels"] == IGNORE_INDEX, NO_ROW, numbers))
    for row, size in enumerate(sizes):
        held = batch["attention_mask"][row] == 1
        assert batch["position_ids"][row][held].tolist() == list(range(size))
        assert batch["position_ids"][row][~held].eq(0).all()
    assert batch["tree_lengths"] is None
    assert batch["num_rows"] == 4
    assert batch["origins"] == ["a:1", "a:1", "a:2", "a:2"]


def predictions(batch: CollatedTrees) -> list[tuple[int, int, int, int]]:
    """(completion, position, token that predicts, token predicted), in the order objectives see them."""
    held = batch["rows"] >= 0
    columns = (batch["rows"], batch["position_ids"], batch["input_ids"], batch["shift_labels"])
    return sorted(zip(*(column[held].tolist() for column in columns), strict=True))


def random_tree(draw: random.Random) -> Tree:
    completions = [[draw.randrange(100) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 4))]
    masks = [[True, *(draw.random() < 0.6 for _ in completion[1:])] for completion in completions]
    prompt = [draw.randrange(100) for _ in range(draw.randint(1, 5))]
    return Tree(prompt, completions, draw.choice([masks, None]))


@pytest.mark.parametrize("seed", range(20))
def test_both_layouts_hold_the_same_predictions(seed: int) -> None:
    draw = random.Random(seed)
    trees = [random_tree(draw) for _ in range(draw.randint(1, 4))]
    shared = collate_trees(trees, pad_token_id=0, share=True)
    assert shared["input_ids"].shape == (1, sum(tree.num_tokens for tree in trees))
    expected = []
    branches = [(tree, index) for tree in trees for index in range(len(tree.completions))]
    for row, (tree, index) in enumerate(branches):
        conversation = [*tree.prompt, *tree.completions[index]]
        mask = tree.masks[index] if tree.masks else [True] * len(tree.completions[index])
        for position in range(len(tree.prompt) - 1, len(conversation) - 1):
            if mask[position + 1 - len(tree.prompt)]:
                expected.append((row, position, conversation[position], conversation[position + 1]))
    assert predictions(shared) == expected
    for side in ("right", "left"):
        separate = collate_trees(trees, pad_token_id=0, share=False, padding_side=side)
        assert predictions(separate) == expected
        assert int(separate["attention_mask"].sum()) == sum(tree.num_tokens_separate for tree in trees)
    assert sum(tree.num_targets for tree in trees) == len(expected)


def test_a_tree_is_checked() -> None:
    for wrong in (
        {"prompt": [], "completions": [[1]]},
        {"prompt": [1], "completions": []},
        {"prompt": [1], "completions": [[1], []]},
        {"prompt": [1], "completions": [[1]], "masks": [[True, True]]},
    ):
        with pytest.raises(AssertionError):
            Tree(**wrong)
