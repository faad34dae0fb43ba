"""Completions of prompts as tensors: rows apart, or with what they begin with once. Labels are shifted here.

Shape suffixes: B sequences, T positions, K targets, N completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamtune.base.labels import IGNORE_INDEX
from streamtune.data.batches.prefixes import PrefixTree
from streamtune.data.record_table import Tree


class CollatedTrees(TypedDict):
    """Tensors are int64 on the CPU; those of [B, T] are [1, T] with shared beginnings, [N, L] without."""

    input_ids: Tensor
    attention_mask: Tensor
    """1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """the token that a position is to predict, -100 where there is none or it does not count"""
    place_K: Tensor
    """[K] the place of each target among all positions, B x T: completion by completion, then by position"""
    row_K: Tensor
    """[K] number of the completion that the target belongs to"""
    position_ids: Tensor
    """position of a token in its own conversation: a branch goes on counting from its trunk; 0 on padding"""
    num_rows: int
    """N"""
    nodes: list[tuple[int, int]] | None
    """of each part the index of the part that it continues, or -1, and its tokens; None without shared beginnings"""
    origins: list[str]
    """N: the row of the data that a completion comes from"""


LEAST_SAVED = 128
"""Tokens that a common beginning saves at least, where it makes a part of the sequence of its own: of completions of
which others begin differently, or of the prompts of several trees."""


def collate_trees(
    trees: Sequence[Tree],
    *,
    pad_token_id: int,
    share: bool,
    padding_side: Literal["right", "left"] = "right",
) -> CollatedTrees:
    """Lay trees out for a forward pass, their targets shifted by one.

    With ``share`` what rows ``[*prompt, *completion]`` begin with is there once, and so is its target, which belongs to
    each of them. A position predicts one token at most, so the last token of what is common stands before every
    branch: that of the prompt, where completions begin differently. What several trees begin with is there once as
    well. The last position of a row predicts nothing.

    Without it each completion is a row ``[*prompt, *completion]``, padded to the longest.

    Args:
        trees: At least one.
        pad_token_id: What to pad with; masked, so any id of the vocabulary does. The shared layout has no padding.
        share: True if rows share what they begin with.
        padding_side: Where the padding of separate rows goes.
    """
    assert trees, "a batch holds at least one tree"
    origins = [tree.origin for tree in trees for _ in tree.completions]
    if share:
        return _shared(trees, origins)
    return _separate(trees, origins, pad_token_id, padding_side)


def _shared(trees: Sequence[Tree], origins: list[str]) -> CollatedTrees:
    tree, rows, common = PrefixTree(scored=True), list[npt.NDArray[np.int32]](), list[range]()
    for each in trees:
        prompt = np.array(each.prompt[:-1], np.int32)
        for index in range(len(each.completions)):
            ids, targets = each.branch(index)
            targets = np.concatenate([np.full_like(prompt, IGNORE_INDEX), targets])
            tree.add_row(np.concatenate([prompt, ids]), targets)
            rows.append(targets)
            # From the prompt's last token, which predicts for all of them, to the last one that all completions have.
            several = len(each.completions) > 1
            common.append(range(max(0, len(prompt) - 1), len(prompt) + each.num_common) if several else range(0))

    def kept(start: int, stop: int, among: Sequence[int]) -> bool:
        return any(start < common[row].stop and common[row].start < stop for row in among)

    tree.drop_short(LEAST_SAVED, kept)
    nodes, places = tree.nodes(), tree.places()
    counted = [targets != IGNORE_INDEX for targets in rows]
    at = np.concatenate([where[kept] for where, kept in zip(places, counted, strict=True)])
    labels = np.full(tree.tokens, IGNORE_INDEX, np.int64)
    labels[at] = np.concatenate([targets[kept] for targets, kept in zip(rows, counted, strict=True)])
    positions = np.empty(tree.tokens, np.int64)
    for where in places:
        positions[where] = np.arange(len(where))
    input_ids = torch.as_tensor(np.concatenate([node.ids for _, node in nodes]).astype(np.int64))[None]
    return CollatedTrees(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        shift_labels=torch.as_tensor(labels)[None],
        place_K=torch.as_tensor(at),
        row_K=torch.arange(len(rows)).repeat_interleave(torch.tensor([int(kept.sum()) for kept in counted])),
        position_ids=torch.as_tensor(positions)[None],
        num_rows=len(rows),
        nodes=[(parent, len(node.ids)) for parent, node in nodes],
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
        place_K=torch.empty(0, dtype=torch.int64),
        row_K=torch.empty(0, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        num_rows=len(branches),
        nodes=None,
        origins=origins,
    )
    for row, (tree, index) in enumerate(branches):
        size = len(tree.prompt) + len(tree.completions[index])
        start = 0 if padding_side == "right" else shape[1] - size
        held = slice(start, start + size)
        batch["input_ids"][row, held] = torch.tensor([*tree.prompt, *tree.completions[index]])
        batch["attention_mask"][row, held] = 1
        batch["position_ids"][row, held] = torch.arange(size)
        targets = torch.as_tensor(tree.branch(index)[1].astype(np.int64))
        batch["shift_labels"][row, held][len(tree.prompt) - 1 :] = targets
    batch["place_K"] = (batch["shift_labels"].flatten() != IGNORE_INDEX).nonzero()[:, 0]
    batch["row_K"] = batch["place_K"] // shape[1]
    return batch
