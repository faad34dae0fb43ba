"""Examples to a padded batch, one or several to a sequence. Labels are shifted here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from streamtune.data.records import Example, Tree
from streamtune.labels import IGNORE_INDEX

__all__ = ["NO_ROW", "Batch", "CollatedTrees", "PackedBatch", "collate", "collate_packed", "collate_trees"]


class Batch(TypedDict):
    """B sequences padded to T positions; everything int64 on the CPU."""

    input_ids: Tensor
    """[B, T]"""
    attention_mask: Tensor
    """[B, T] 1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """[B, T] the token position t is to predict, that is ``labels[:, t + 1]``; -100 where there is none"""


class PackedBatch(Batch):
    """A batch whose sequences hold several rows. A model is given no mask: the positions show where a row ends."""

    position_ids: Tensor
    """[B, T] from 0 in each row; the padding behind the last is a row of its own"""


def collate(
    examples: Sequence[Example],
    *,
    pad_token_id: int,
    padding_side: Literal["right", "left"] = "right",
    pad_to_multiple_of: int = 1,
) -> Batch:
    """Pad examples to one length and shift their labels by one.

    ``shift_labels[b, t] = labels[b, t + 1]``, with -100 at the last position and on all padding. A sequence's first
    token is predicted by nothing, not even by padding on its left.

    Args:
        examples: At least one.
        pad_token_id: What to pad with; masked, so any id of the vocabulary does.
        padding_side: Where the padding goes.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """
    assert examples, "a batch holds at least one example"
    assert pad_to_multiple_of >= 1, "the length is rounded up to a positive multiple"
    longest = max(len(example.input_ids) for example in examples)
    batch = _empty(len(examples), longest, pad_token_id, pad_to_multiple_of)
    length = batch["input_ids"].shape[1]
    for row, example in enumerate(examples):
        _write(batch, row, 0 if padding_side == "right" else length - len(example.input_ids), example)
    return batch


def collate_packed(
    packs: Sequence[Sequence[Example]], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PackedBatch:
    """Lay the examples of each pack end to end, and pad the packs to one length on the right.

    As :func:`collate` for each example: its last token predicts nothing, least of all the next row's first.

    Args:
        packs: At least one, each of at least one example.
        pad_token_id: What to pad with.
        pad_to_multiple_of: Round the length up to a multiple of this.
    """
    assert packs, "a batch holds at least one pack"
    assert all(packs), "a pack holds at least one example"
    longest = max(sum(len(example.input_ids) for example in pack) for pack in packs)
    batch = _empty(len(packs), longest, pad_token_id, pad_to_multiple_of)
    position_ids = torch.zeros_like(batch["input_ids"])
    for row, pack in enumerate(packs):
        start = 0
        for example in pack:
            stop = start + len(example.input_ids)
            _write(batch, row, start, example)
            position_ids[row, start:stop] = torch.arange(stop - start)
            start = stop
        position_ids[row, start:] = torch.arange(position_ids.shape[1] - start)
    return PackedBatch(**batch, position_ids=position_ids)


def _empty(rows: int, longest: int, pad_token_id: int, pad_to_multiple_of: int) -> Batch:
    """Return a batch that is all padding."""
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    return Batch(
        input_ids=torch.full((rows, length), pad_token_id),
        attention_mask=torch.zeros((rows, length), dtype=torch.int64),
        shift_labels=torch.full((rows, length), IGNORE_INDEX),
    )


def _write(batch: Batch, row: int, start: int, example: Example) -> None:
    """Put an example into a batch, its labels shifted."""
    size = len(example.input_ids)
    batch["input_ids"][row, start : start + size] = torch.as_tensor(np.array(example.input_ids, dtype=np.int64))
    batch["attention_mask"][row, start : start + size] = 1
    labels = np.array(example.labels[1:], dtype=np.int64)
    batch["shift_labels"][row, start : start + size - 1] = torch.as_tensor(labels)


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
