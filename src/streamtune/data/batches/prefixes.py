"""Rows that begin alike, laid in one sequence with their common beginnings once: a tree of any depth.

The turns of a conversation whose template drops earlier reasoning are such rows. A token of the sequence predicts one
token at most: rows go separate ways where two of them train what a common token predicts.

Rows are streamed so by :class:`streamtune.engine.Branches`, to the same gradient as each row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from streamtune.data.batches.collate import Batch
from streamtune.data.batches.sampler import Packs
from streamtune.data.records import Example
from streamtune.labels import IGNORE_INDEX

__all__ = ["CollatedPrefixes", "PrefixTree", "collate_prefixes", "pack_turns"]

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class _Node:
    """A run of tokens that the same rows have in common."""

    ids: Ids
    targets: Ids
    """[n] the token that each is to predict, -100 for none"""
    children: list[_Node] = field(default_factory=list)

    def split(self, length: int) -> None:
        """Keep the first tokens, and give the others to a child."""
        rest = _Node(self.ids[length:], self.targets[length:], self.children)
        self.ids, self.targets, self.children = self.ids[:length], self.targets[:length], [rest]

    def shared_with(self, ids: Ids, targets: Ids) -> int:
        """Return the number of tokens that a row's next ones may share."""
        size = min(len(self.ids), len(ids))
        apart = self.ids[:size] != ids[:size]
        apart |= (self.targets[:size] != IGNORE_INDEX) & (targets[:size] != IGNORE_INDEX)
        return int(apart.argmax()) if apart.any() else size


class PrefixTree:
    """Rows, each token of a common beginning once."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32), np.empty(0, np.int32))
        self.tokens = 0
        """Tokens of the sequence."""

    def room_for(self, example: Example) -> int:
        """Return the tokens that a row would add."""
        return len(example.input_ids) - sum(shared for _, shared in self._path(*_row(example)))

    def add(self, example: Example) -> None:
        """Add a row."""
        ids, targets = _row(example)
        node, place = self._root, 0
        for child, shared in list(self._path(ids, targets)):
            if shared < len(child.ids):
                child.split(shared)
            own = targets[place : place + shared]
            child.targets = np.where(own == IGNORE_INDEX, child.targets, own)
            node, place = child, place + shared
        if place < len(ids):
            rest = _Node(ids[place:], targets[place:])
            if node is self._root or node.children:
                node.children.append(rest)
            else:  # the row goes on where another ends
                node.ids, node.targets = np.append(node.ids, rest.ids), np.append(node.targets, rest.targets)
            self.tokens += len(ids) - place

    def _path(self, ids: Ids, targets: Ids) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes that a row goes through, each with the tokens that it shares."""
        node, place = self._root, 0
        while place < len(ids):
            found = [(child.shared_with(ids[place:], targets[place:]), child) for child in node.children]
            shared, child = max(found, key=lambda pair: pair[0], default=(0, node))
            if not shared:
                return
            yield child, shared
            if shared < len(child.ids):
                return
            node, place = child, place + shared

    def nodes(self) -> list[tuple[int, _Node]]:
        """Return the nodes with the index of the one that each continues, or -1; the longest child follows its parent.

        The parts of a long row so lie end to end, and are few rectangles for attention.
        """
        found: list[tuple[int, _Node]] = []
        waiting = [(-1, child) for child in sorted(self._root.children, key=_size)]
        while waiting:
            parent, node = waiting.pop()
            found.append((parent, node))
            waiting += [(len(found) - 1, child) for child in sorted(node.children, key=_size)]
        return found

    @property
    def squares(self) -> int:
        """Twice the pairs of a token and one that it sees, about: what attention computes."""
        total, stops = 0, list[int]()
        for parent, node in self.nodes():
            start = stops[parent] if parent >= 0 else 0
            stops.append(start + len(node.ids))
            total += stops[-1] ** 2 - start**2
        return total


def _size(node: _Node) -> int:
    """Return the tokens of the longest row through a node."""
    longest, waiting = 0, [(0, node)]
    while waiting:
        start, each = waiting.pop()
        longest = max(longest, start + len(each.ids))
        waiting += [(start + len(each.ids), child) for child in each.children]
    return longest


def _row(example: Example) -> tuple[Ids, Ids]:
    """Return the tokens of a row and what each is to predict."""
    targets = np.full(len(example.input_ids), IGNORE_INDEX, np.int32)
    targets[:-1] = np.asarray(example.labels, np.int32)[1:]
    return np.asarray(example.input_ids, np.int32), targets


class CollatedPrefixes(Batch):
    """One sequence [1, T] of rows that share their beginnings; no padding."""

    nodes: list[tuple[int, int]]
    """of each part the index of the part that it continues, or -1, and its tokens"""


def collate_prefixes(examples: Sequence[Example]) -> CollatedPrefixes:
    """Lay rows in one sequence with their common beginnings once; labels are shifted.

    Args:
        examples: At least one.
    """
    tree = PrefixTree()
    for example in examples:
        tree.add(example)
    nodes = tree.nodes()
    ids = np.concatenate([node.ids for _, node in nodes]).astype(np.int64)
    targets = np.concatenate([node.targets for _, node in nodes]).astype(np.int64)
    return CollatedPrefixes(
        input_ids=torch.as_tensor(ids)[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        shift_labels=torch.as_tensor(targets)[None],
        nodes=[(parent, len(node.ids)) for parent, node in nodes],
    )


def pack_turns(examples: Sequence[Example], bounds: Sequence[int], max_length: int) -> tuple[Packs, list[int]]:
    """Put the turns of each conversation in one sequence; return these, and the first of each part.

    Turns are rows of one origin, one after another. Where they do not fit they go on in a further sequence.

    Args:
        examples: The rows, none longer than ``max_length``.
        bounds: [parts + 1] the first row of each part, and the number of all rows.
        max_length: Tokens a sequence holds.
    """
    starts, sizes, squares, firsts = [0], [], [], [0]
    for first, stop in pairwise(bounds):
        tree, origin = PrefixTree(), ""
        for row in range(first, stop):
            example = examples[row]
            if row > first and (example.origin != origin or tree.tokens + tree.room_for(example) > max_length):
                starts.append(row)
                sizes.append(tree.tokens)
                squares.append(tree.squares)
                tree = PrefixTree()
            tree.add(example)
            origin = example.origin
        if stop > first:
            starts.append(stop)
            sizes.append(tree.tokens)
            squares.append(tree.squares)
        firsts.append(len(sizes))
    rows = np.arange(bounds[-1], dtype=np.int64)
    measured = (np.array(values, dtype=np.int64) for values in (sizes, squares))
    return Packs(rows, np.array(starts, dtype=np.int64), sum(sizes), *measured), firsts
