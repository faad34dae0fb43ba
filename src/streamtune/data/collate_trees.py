"""Trees to tensors: laid end to end with each prompt once, or one padded row for each completion.

Legend: N completions, T positions of the shared layout, L of the longest separate row. Completions are numbered tree
after tree, in the order of their tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor

from streamtune.data.render import IGNORE_INDEX
from streamtune.data.tree import Tree

__all__ = ["NO_ROW", "CollatedTrees", "collate_trees"]

NO_ROW = -1
"""The row of a position that predicts nothing that counts."""


class CollatedTrees(TypedDict):
    """Tensors are int64 on the CPU, of one shape: [1, T] with shared prompts, [N, L] without."""

    input_ids: Tensor
    attention_mask: Tensor
    """1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """the token that a position is to predict, -100 where there is none or it does not count"""
    rows: Tensor
    """number of the completion that token belongs to, -1 where there is none"""
    position_ids: Tensor
    """position of a token in its own conversation: a branch goes on counting from its trunk; 0 on padding"""
    num_rows: int
    """N"""
    tree_lengths: list[tuple[int, list[int]]] | None
    """of each tree the trunk's positions (may be 0) and those of its branches; None without shared prompts"""
    origins: list[str]
    """N: the row of the data that a completion comes from"""


def collate_trees(
    trees: Sequence[Tree],
    *,
    pad_token_id: int,
    share: bool,
    padding_side: Literal["right", "left"] = "right",
) -> CollatedTrees:
    """Lay trees out for a forward pass, their targets shifted by one.

    With ``share`` a tree takes ``prompt[:-1]`` and then, for each completion, ``[prompt[-1], *completion]``: the last
    token of the prompt predicts the first of every completion, so every branch has its own copy. A position of a
    branch predicts the next token of the branch; its last position and the trunk predict nothing.

    Without it each completion is a row ``[*prompt, *completion]``, padded to the longest.

    Args:
        trees: At least one.
        pad_token_id: What to pad with; masked, so any id of the vocabulary does. The shared layout has no padding.
        share: True if completions share their prompt.
        padding_side: Where the padding of separate rows goes.
    """
    assert trees, "a batch holds at least one tree"
    origins = [tree.origin for tree in trees for _ in tree.completions]
    if share:
        return _shared(trees, origins)
    return _separate(trees, origins, pad_token_id, padding_side)


def _shared(trees: Sequence[Tree], origins: list[str]) -> CollatedTrees:
    ids: list[int] = []
    labels: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    lengths = []
    row = 0
    for tree in trees:
        trunk = len(tree.prompt) - 1
        ids += tree.prompt[:trunk]
        labels += [IGNORE_INDEX] * trunk
        rows += [NO_ROW] * trunk
        positions += range(trunk)
        for index, completion in enumerate(tree.completions):
            targets = _targets(tree, index)
            ids += [tree.prompt[-1], *completion]
            labels += [*targets, IGNORE_INDEX]
            rows += [NO_ROW if target == IGNORE_INDEX else row for target in [*targets, IGNORE_INDEX]]
            positions += range(trunk, trunk + len(completion) + 1)
            row += 1
        lengths.append((trunk, [len(completion) + 1 for completion in tree.completions]))
    input_ids = torch.tensor([ids])
    return CollatedTrees(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        shift_labels=torch.tensor([labels]),
        rows=torch.tensor([rows]),
        position_ids=torch.tensor([positions]),
        num_rows=row,
        tree_lengths=lengths,
        origins=origins,
    )


def _separate(
    trees: Sequence[Tree], origins: list[str], pad_token_id: int, padding_side: Literal["right", "left"]
) -> CollatedTrees:
    branches = [(tree, index) for tree in trees for index in range(len(tree.completions))]
    shape = (len(branches), max(len(tree.prompt) + len(tree.completions[index]) for tree, index in branches))
    batch = CollatedTrees(
        input_ids=torch.full(shape, pad_token_id),
        attention_mask=torch.zeros(shape, dtype=torch.int64),
        shift_labels=torch.full(shape, IGNORE_INDEX),
        rows=torch.full(shape, NO_ROW),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        num_rows=len(branches),
        tree_lengths=None,
        origins=origins,
    )
    for row, (tree, index) in enumerate(branches):
        size = len(tree.prompt) + len(tree.completions[index])
        start = 0 if padding_side == "right" else shape[1] - size
        held = slice(start, start + size)
        batch["input_ids"][row, held] = torch.tensor([*tree.prompt, *tree.completions[index]])
        batch["attention_mask"][row, held] = 1
        batch["position_ids"][row, held] = torch.arange(size)
        labels = batch["shift_labels"][row, held]
        labels[len(tree.prompt) - 1 : size - 1] = torch.tensor(_targets(tree, index))
        batch["rows"][row, held] = torch.where(labels == IGNORE_INDEX, NO_ROW, row)
    return batch


def _targets(tree: Tree, index: int) -> list[int]:
    """Return the tokens of a completion, with -100 in place of those that do not count."""
    completion = tree.completions[index]
    if tree.masks is None:
        return completion
    return [token if counts else IGNORE_INDEX for token, counts in zip(completion, tree.masks[index], strict=True)]
