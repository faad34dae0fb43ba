"""Collate tokenized rows to batches of tensors: padded, packed, or with common prefixes stored once.

Labels are shifted here, and in no other module.

Rows with a common prefix can share one sequence: in a prefix tree, each common token occurs once. Such rows are the
completions of a prompt, or the turns of a conversation whose chat template drops earlier reasoning. The tree branches
where the token ids of rows differ. It also branches at a common token with different targets, because a token has at
most one target. If rows have the same target at a common token, :class:`PrefixTree` has two modes:

    scored=False    The tree branches there too, because a loss over the sequence would count the target once.
    scored=True     The token is shared, and each row's sum of log-probabilities includes the target's.

:class:`streamtune.engine.Branches` streams such a sequence, with the same gradient as for separate rows.

Shape suffixes: B sequences, T positions, K targets, N completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.batches.sampler import Numbers, Packs
from streamtune.data.record_table import Example, Tree, shared_beginning_length

Ids = npt.NDArray[np.int32]


class Batch(TypedDict):
    """B sequences, padded to T positions. Ids, mask and labels are int64 tensors on the CPU."""

    input_ids: Tensor
    """[B, T] token ids"""
    attention_mask: Tensor
    """[B, T] 1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """[B, T] token id that each position should predict (``labels[:, t + 1]``), or -100"""
    weights: NotRequired[Tensor]
    """[B, T] fp32, factor of the loss of each position; missing if all factors are 1"""


class PackedBatch(Batch):
    """A batch of packed sequences, used without an attention mask: position ids show where each row begins."""

    position_ids: Tensor
    """[B, T] positions, counted from 0 in each row; padding at the end counts as a row"""


def collate(
    examples: Sequence[Example],
    *,
    pad_token_id: int,
    padding_side: Literal["right", "left"] = "right",
    pad_to_multiple_of: int = 1,
) -> Batch:
    """Return examples (at least one) as one batch, padded to the same length, with labels shifted by one.

    ``shift_labels[b, t] = labels[b, t + 1]``, with -100 at the last position and on all padding. The first token of a
    sequence is not predicted, not even by padding on its left.

    Args:
        pad_token_id: Token id of the padding; padding is masked, so any id of the vocabulary works.
        pad_to_multiple_of: Number to whose next multiple the length is rounded up.

    Example:
        >>> rows = [Example([5, 6, 7], [-100, 6, 7], "a:1"), Example([8, 9], [-100, 9], "a:2")]
        >>> collate(rows, pad_token_id=0)["input_ids"].tolist()
        [[5, 6, 7], [8, 9, 0]]
    """
    assert examples, "a batch has at least one example"
    assert pad_to_multiple_of >= 1, "pad_to_multiple_of is at least 1"
    longest = max(len(example.input_ids) for example in examples)
    batch = _empty_batch(len(examples), longest, pad_token_id, pad_to_multiple_of)
    length = batch["input_ids"].shape[1]
    for row, example in enumerate(examples):
        _write_example(batch, row, 0 if padding_side == "right" else length - len(example.input_ids), example)
    return batch


def collate_packed(
    packs: Sequence[Sequence[Example]], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PackedBatch:
    """Return a batch of packed sequences, padded on the right; each pack is the list of examples of one sequence.

    The last token of an example has no target: it does not predict the first token of the next example.

    Args:
        packs: Examples of each sequence; at least one sequence, each with at least one example.
        pad_token_id: Token id of the padding; padding is masked, so any id of the vocabulary works.
        pad_to_multiple_of: Number to whose next multiple the length is rounded up.

    Example:
        >>> rows = [Example([5, 6], [-100, 6], "a:1"), Example([8, 9], [-100, 9], "a:2")]
        >>> collate_packed([rows], pad_token_id=0)["position_ids"].tolist()
        [[0, 1, 0, 1]]
    """
    assert packs, "a batch has at least one pack"
    assert all(packs), "a pack has at least one example"
    longest = max(sum(len(example.input_ids) for example in pack) for pack in packs)
    batch = _empty_batch(len(packs), longest, pad_token_id, pad_to_multiple_of)
    position_ids = torch.zeros_like(batch["input_ids"])
    for row, pack in enumerate(packs):
        start = 0
        for example in pack:
            stop = start + len(example.input_ids)
            _write_example(batch, row, start, example)
            position_ids[row, start:stop] = torch.arange(stop - start)
            start = stop
        position_ids[row, start:] = torch.arange(position_ids.shape[1] - start)
    return PackedBatch(**batch, position_ids=position_ids)


def _empty_batch(num_rows: int, max_tokens: int, pad_token_id: int, pad_to_multiple_of: int) -> Batch:
    length = -(-max_tokens // pad_to_multiple_of) * pad_to_multiple_of
    return Batch(
        input_ids=torch.full((num_rows, length), pad_token_id),
        attention_mask=torch.zeros((num_rows, length), dtype=torch.int64),
        shift_labels=torch.full((num_rows, length), IGNORE_INDEX),
    )


def _write_example(batch: Batch, row: int, start: int, example: Example) -> None:
    size = len(example.input_ids)
    batch["input_ids"][row, start : start + size] = torch.as_tensor(np.array(example.input_ids, dtype=np.int64))
    batch["attention_mask"][row, start : start + size] = 1
    labels = np.array(example.labels[1:], dtype=np.int64)
    batch["shift_labels"][row, start : start + size - 1] = torch.as_tensor(labels)
    if example.weight != 1:
        weights = batch.setdefault("weights", torch.ones(batch["input_ids"].shape))
        weights[row, start : start + size] = example.weight


# ----------------------------------------------------------------------------------------------- common beginnings


@dataclass(eq=False)
class _Node:
    """Node of a prefix tree: consecutive tokens that the same rows have in common."""

    ids: Ids
    """[n] token ids"""
    targets: Ids
    """[n] token id that each token should predict, or -100"""
    children: list[_Node] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """indices of the rows that contain the node, in the order in which they were added; some may end inside it"""

    def split_after(self, num_tokens: int) -> None:
        rest = _Node(self.ids[num_tokens:], self.targets[num_tokens:], self.children, list(self.rows))
        self.ids, self.targets, self.children = self.ids[:num_tokens], self.targets[:num_tokens], [rest]

    def prepend_to_children(self) -> list[_Node]:
        """Copy this node's tokens to the beginning of each of its children; return the children."""
        ended = [row for row in self.rows if not any(row in child.rows for child in self.children)]
        for number, child in enumerate(self.children):
            child.ids, child.targets = np.append(self.ids, child.ids), np.append(self.targets, child.targets)
            child.rows += [] if number else ended
        return self.children


class PrefixTree:
    """A prefix tree of token sequences (rows): a prefix that several rows have in common is stored once.

    Args:
        scored: Whether rows share a token at which they have the same target. With False the tree branches there,
            because a loss over the sequence would count the target once.
    """

    def __init__(self, *, scored: bool = False) -> None:
        self.scored = scored
        self._root = _Node(np.empty(0, np.int32), np.empty(0, np.int32))
        self._lengths: list[int] = []
        self.tokens = 0
        """number of tokens of the tree, each common prefix counted once"""

    def count_new_tokens(self, example: Example) -> int:
        return len(example.input_ids) - sum(shared for _, shared in self._best_shared_path(*_ids_and_targets(example)))

    def add(self, example: Example) -> None:
        self.add_row(*_ids_and_targets(example))

    def add_row(self, ids: Ids, targets: Ids) -> None:
        """Add a row: its token ids [T], and the token id that each of them should predict, or -100 [T]."""
        row = len(self._lengths)
        self._lengths.append(len(ids))
        node, place = self._root, 0
        for child, shared in self._best_shared_path(ids, targets):
            if shared < len(child.ids):
                child.split_after(shared)
            row_targets = targets[place : place + shared]
            child.targets = np.where(row_targets == IGNORE_INDEX, child.targets, row_targets)
            child.rows.append(row)
            node, place = child, place + shared
        if place < len(ids):
            rest = _Node(ids[place:], targets[place:], rows=[row])
            if node is self._root or node.children:
                node.children.append(rest)
            else:  # the row continues where another row ends
                node.ids, node.targets = np.append(node.ids, rest.ids), np.append(node.targets, rest.targets)
            self.tokens += len(ids) - place

    def unshare_short_nodes(
        self, min_saved_tokens: int, must_stay_shared: Callable[[int, int, Sequence[int]], bool]
    ) -> None:
        """Copy the tokens of each node that saves fewer than ``min_saved_tokens`` tokens to its children, and remove
        the node.

        Every node costs extra calls in each layer. In layers with a recurrent state, it also ends a chunk.

        Args:
            must_stay_shared: Function of a node's first position, end (exclusive) and rows. If it returns True, the
                node is not removed.
        """
        waiting = [(0, self._root)]
        while waiting:
            start, node = waiting.pop()
            stop, children = start + len(node.ids), node.children
            node.children = []
            while children:
                child = children.pop(0)
                others, end = len(child.children) - 1, stop + len(child.ids)
                if others < 0:
                    node.children.append(child)
                elif not others or (
                    others * len(child.ids) < min_saved_tokens and not must_stay_shared(stop, end, child.rows)
                ):
                    self.tokens += others * len(child.ids)
                    children = child.prepend_to_children() + children
                else:
                    node.children.append(child)
                    waiting.append((stop, child))

    def positions_by_row(self) -> list[Numbers]:
        """Return for each row, in the order of adding, the positions of its tokens in the sequence."""
        found: list[list[Numbers]] = [[] for _ in self._lengths]
        start = 0
        for _, node in self.nodes_in_order():
            stop = start + len(node.ids)
            for row in node.rows:
                found[row].append(np.arange(start, stop))
            start = stop
        return [np.concatenate(parts)[:length] for parts, length in zip(found, self._lengths, strict=True)]

    def _best_shared_path(self, ids: Ids, targets: Ids) -> list[tuple[_Node, int]]:
        """Return the path from the root that shares the most tokens with a row: (node, shared tokens) pairs."""
        best: tuple[int, list[tuple[_Node, int]]] = (0, [])
        waiting: list[tuple[int, list[tuple[_Node, int]], _Node]] = [(0, [], self._root)]
        while waiting:
            place, path, node = waiting.pop()
            for child in node.children:
                shared = shared_beginning_length(
                    child.ids, child.targets, ids[place:], targets[place:], same_target=self.scored
                )
                if not shared:
                    continue
                longer = (place + shared, [*path, (child, shared)])
                best = max(best, longer, key=lambda found: found[0])
                if shared == len(child.ids):
                    waiting.append((*longer, child))
        return best[1]

    def nodes_in_order(self) -> list[tuple[int, _Node]]:
        """Return the nodes in the order of their tokens in the sequence, each as (index of its parent or -1, node).

        The child with the longest row directly follows its parent. So the nodes of a long row are adjacent, and its
        attention is computed in few rectangular blocks.
        """
        found: list[tuple[int, _Node]] = []
        waiting = [(-1, child) for child in sorted(self._root.children, key=_longest_path_tokens)]
        while waiting:
            parent, node = waiting.pop()
            found.append((parent, node))
            waiting += [(len(found) - 1, child) for child in sorted(node.children, key=_longest_path_tokens)]
        return found

    @property
    def attention_work(self) -> int:
        """About twice the number of (query token, key token) pairs for which attention is computed."""
        total, stops = 0, list[int]()
        for parent, node in self.nodes_in_order():
            start = stops[parent] if parent >= 0 else 0
            stops.append(start + len(node.ids))
            total += stops[-1] ** 2 - start**2
        return total


def _longest_path_tokens(node: _Node) -> int:
    longest, waiting = 0, [(0, node)]
    while waiting:
        start, each = waiting.pop()
        longest = max(longest, start + len(each.ids))
        waiting += [(start + len(each.ids), child) for child in each.children]
    return longest


def _ids_and_targets(example: Example) -> tuple[Ids, Ids]:
    targets = np.full(len(example.input_ids), IGNORE_INDEX, np.int32)
    targets[:-1] = np.asarray(example.labels, np.int32)[1:]
    return np.asarray(example.input_ids, np.int32), targets


class CollatedPrefixes(Batch):
    """One sequence [1, T] without padding, in which each common prefix of its rows occurs once."""

    nodes: list[tuple[int, int]]
    """nodes of the prefix tree in the order of the sequence, each as (index of its parent or -1, number of tokens)"""


def collate_prefixes(examples: Sequence[Example]) -> CollatedPrefixes:
    """Return examples (at least one) as one sequence in which each common prefix occurs once, with shifted labels."""
    tree = PrefixTree()
    for example in examples:
        tree.add(example)
    nodes = tree.nodes_in_order()
    ids = np.concatenate([node.ids for _, node in nodes]).astype(np.int64)
    targets = np.concatenate([node.targets for _, node in nodes]).astype(np.int64)
    collated = CollatedPrefixes(
        input_ids=torch.as_tensor(ids)[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        shift_labels=torch.as_tensor(targets)[None],
        nodes=[(parent, len(node.ids)) for parent, node in nodes],
    )
    if any(example.weight != 1 for example in examples):
        weights = torch.ones(1, len(ids))
        for example, places in zip(examples, tree.positions_by_row(), strict=True):  # each target belongs to one row
            weights[0, places[:-1][np.asarray(example.labels[1:]) != IGNORE_INDEX]] = example.weight
        collated["weights"] = weights
    return collated


def pack_turns(examples: Sequence[Example], section_bounds: Sequence[int], max_length: int) -> tuple[Packs, list[int]]:
    """Pack the turns of each conversation; return the packs, and the index of each section's first pack.

    Each turn is a row. Consecutive rows with the same ``origin`` are turns of one conversation. Turns that do not fit
    into the sequence of their conversation continue in another sequence.

    Args:
        examples: Rows of at most ``max_length`` tokens.
        section_bounds: [sections + 1] index of each section's first row, then the number of all rows. A section is a
            range of rows, such as a dataset or an eval set; a pack has rows of only one section.
    """
    starts, sizes, squares, firsts = [0], [], [], [0]
    for first, stop in pairwise(section_bounds):
        tree, origin = PrefixTree(), ""
        for row in range(first, stop):
            example = examples[row]
            if row > first and (example.origin != origin or tree.tokens + tree.count_new_tokens(example) > max_length):
                starts.append(row)
                sizes.append(tree.tokens)
                squares.append(tree.attention_work)
                tree = PrefixTree()
            tree.add(example)
            origin = example.origin
        if stop > first:
            starts.append(stop)
            sizes.append(tree.tokens)
            squares.append(tree.attention_work)
        firsts.append(len(sizes))
    rows = np.arange(section_bounds[-1], dtype=np.int64)
    measured = (np.array(values, dtype=np.int64) for values in (sizes, squares))
    return Packs(rows, np.array(starts, dtype=np.int64), sum(sizes), *measured), firsts


class CollatedTrees(TypedDict):
    """Prompts with their completions as a batch of int64 tensors on the CPU.

    If rows share common prefixes, the batch is one sequence (B = 1). Otherwise it has one row for each of the N
    completions, and T is the length of the longest prompt with its completion.
    """

    input_ids: Tensor
    """[B, T] token ids"""
    attention_mask: Tensor
    """[B, T] 1 on tokens, 0 on padding"""
    shift_labels: Tensor
    """[B, T] token id that each position should predict, or -100"""
    flat_index_K: Tensor
    """[K] index of each target among all B x T positions, ordered by completion, then by position"""
    row_K: Tensor
    """[K] index of the completion of each target"""
    position_ids: Tensor
    """[B, T] position of each token in its prompt with completion, from 0; 0 on padding"""
    num_rows: int
    """number of completions (N)"""
    nodes: list[tuple[int, int]] | None
    """nodes of the prefix tree in the order of the sequence, each as (index of its parent or -1, number of tokens);
    None without common prefixes"""
    origins: list[str]
    """[N] file and line (``file:line`` or ``file:row N``) of the row of each completion"""


LEAST_SAVED = 128
"""Minimum number of tokens that sharing a prefix saves, between some completions of a prompt or between prompts."""


def collate_trees(
    trees: Sequence[Tree],
    *,
    pad_token_id: int,
    share: bool,
    padding_side: Literal["right", "left"] = "right",
) -> CollatedTrees:
    """Return prompts with their completions (:class:`Tree`, at least one) as one batch, with targets shifted by one.

    With ``share``, common prefixes of the rows ``[*prompt, *completion]`` occur once, within a tree and across trees. A
    target of a common token belongs to every row that shares the token. A token has at most one target. So the last
    common token is repeated before each different continuation; if completions begin differently, this is the prompt's
    last token. Without ``share``, each completion is a row ``[*prompt, *completion]``, padded to the longest row.

    Args:
        pad_token_id: Token id of the padding; padding is masked, so any id of the vocabulary works.
        share: Whether common prefixes of rows occur once; this layout has no padding.
    """
    assert trees, "a batch has at least one tree"
    origins = [tree.origin for tree in trees for _ in tree.completions]
    return _collate_shared(trees, origins) if share else _collate_separate(trees, origins, pad_token_id, padding_side)


def _collate_shared(trees: Sequence[Tree], origins: list[str]) -> CollatedTrees:
    tree, rows, common = PrefixTree(scored=True), list[Ids](), list[range]()
    for each in trees:
        prompt = np.array(each.prompt[:-1], np.int32)
        for index in range(len(each.completions)):
            ids, targets = each.branch_tokens(index)
            targets = np.concatenate([np.full_like(prompt, IGNORE_INDEX), targets])
            tree.add_row(np.concatenate([prompt, ids]), targets)
            rows.append(targets)
            # From the prompt's last token, which predicts the first token of all completions, to their last common one.
            several = len(each.completions) > 1
            common.append(range(max(0, len(prompt) - 1), len(prompt) + each.num_common_tokens) if several else range(0))

    def is_common_range(start: int, stop: int, rows_of_node: Sequence[int]) -> bool:
        return any(start < common[row].stop and common[row].start < stop for row in rows_of_node)

    tree.unshare_short_nodes(LEAST_SAVED, is_common_range)
    nodes, places = tree.nodes_in_order(), tree.positions_by_row()
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
        flat_index_K=torch.as_tensor(at),
        row_K=torch.arange(len(rows)).repeat_interleave(torch.tensor([int(kept.sum()) for kept in counted])),
        position_ids=torch.as_tensor(positions)[None],
        num_rows=len(rows),
        nodes=[(parent, len(node.ids)) for parent, node in nodes],
        origins=origins,
    )


def _collate_separate(
    trees: Sequence[Tree], origins: list[str], pad_token_id: int, padding_side: Literal["right", "left"]
) -> CollatedTrees:
    branches = [(tree, index) for tree in trees for index in range(len(tree.completions))]
    shape = (len(branches), max(len(tree.prompt) + len(tree.completions[index]) for tree, index in branches))
    batch = CollatedTrees(
        input_ids=torch.full(shape, pad_token_id),
        attention_mask=torch.zeros(shape, dtype=torch.int64),
        shift_labels=torch.full(shape, IGNORE_INDEX),
        flat_index_K=torch.empty(0, dtype=torch.int64),
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
        targets = torch.as_tensor(tree.branch_tokens(index)[1].astype(np.int64))
        batch["shift_labels"][row, held][len(tree.prompt) - 1 :] = targets
    batch["flat_index_K"] = (batch["shift_labels"].flatten() != IGNORE_INDEX).nonzero()[:, 0]
    batch["row_K"] = batch["flat_index_K"] // shape[1]
    return batch
