"""Rows that begin alike, laid in one sequence with their common beginnings once: a tree of any depth.

The turns of a conversation whose template drops earlier reasoning are such rows, and the completions of a prompt. A
token of the sequence predicts one token at most, so rows go separate ways behind it where they go on with others.

    a loss on the sequence     rows also go separate ways where two of them train what a common token predicts: each
                               token of the sequence counts once
    scores of each row         (``scored``) a token that predicts the same in several rows is scored once for all of
                               them; whoever sums the scores of a row reads that score for each

Rows are streamed so by :class:`streamtune.engine.Branches`, to the same gradient as each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from streamtune.base.labels import IGNORE_INDEX
from streamtune.data.batches.collate import Batch
from streamtune.data.batches.sampler import Packs
from streamtune.data.record_table import Example, common_beginning

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class _Node:
    """A run of tokens that the same rows have in common."""

    ids: Ids
    targets: Ids
    """[n] the token that each is to predict, -100 for none"""
    children: list[_Node] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """the rows that go through it, in the order they were added; some may end in a node before it"""

    def split(self, length: int) -> None:
        """Keep the first tokens, and give the others to a child."""
        rest = _Node(self.ids[length:], self.targets[length:], self.children, list(self.rows))
        self.ids, self.targets, self.children = self.ids[:length], self.targets[:length], [rest]

    def taken_over(self) -> list[_Node]:
        """Return the children, each with a copy of this node's tokens before its own."""
        ended = [row for row in self.rows if not any(row in child.rows for child in self.children)]
        for number, child in enumerate(self.children):
            child.ids, child.targets = np.append(self.ids, child.ids), np.append(self.targets, child.targets)
            child.rows += [] if number else ended
        return self.children


class PrefixTree:
    """Rows, each token of a common beginning once.

    Args:
        scored: A token that predicts the same in several rows may be common to them.
    """

    def __init__(self, *, scored: bool = False) -> None:
        self.scored = scored
        self._root = _Node(np.empty(0, np.int32), np.empty(0, np.int32))
        self._lengths: list[int] = []
        self.tokens = 0
        """Tokens of the sequence."""

    def room_for(self, example: Example) -> int:
        """Return the tokens that a row would add."""
        return len(example.input_ids) - sum(shared for _, shared in self._path(*_row(example)))

    def add(self, example: Example) -> None:
        """Add a row."""
        self.add_row(*_row(example))

    def add_row(self, ids: Ids, targets: Ids) -> None:
        """Add a row of tokens [T], and what each is to predict [T], -100 for none."""
        row = len(self._lengths)
        self._lengths.append(len(ids))
        node, place = self._root, 0
        for child, shared in self._path(ids, targets):
            if shared < len(child.ids):
                child.split(shared)
            own = targets[place : place + shared]
            child.targets = np.where(own == IGNORE_INDEX, child.targets, own)
            child.rows.append(row)
            node, place = child, place + shared
        if place < len(ids):
            rest = _Node(ids[place:], targets[place:], rows=[row])
            if node is self._root or node.children:
                node.children.append(rest)
            else:  # the row goes on where another ends
                node.ids, node.targets = np.append(node.ids, rest.ids), np.append(node.targets, rest.targets)
            self.tokens += len(ids) - place

    def drop_short(self, least: int, kept: Callable[[int, int, Sequence[int]], bool]) -> None:
        """Compute beginnings that save less than ``least`` tokens once for each of the parts that continue them.

        A part costs calls of its own in every layer, and a chunk's end in layers with a state.

        Args:
            least: Tokens that a common part saves at least.
            kept: Given the first place of a part in its rows, the place behind its last and the numbers of its rows,
                returns True if it is to stay common however little it saves.
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
                elif not others or (others * len(child.ids) < least and not kept(stop, end, child.rows)):
                    self.tokens += others * len(child.ids)
                    children = child.taken_over() + children
                else:
                    node.children.append(child)
                    waiting.append((stop, child))

    def places(self) -> list[npt.NDArray[np.int64]]:
        """Return the places of each row's tokens in the sequence, in the order in which rows were added."""
        found: list[list[npt.NDArray[np.int64]]] = [[] for _ in self._lengths]
        start = 0
        for _, node in self.nodes():
            stop = start + len(node.ids)
            for row in node.rows:
                found[row].append(np.arange(start, stop))
            start = stop
        return [np.concatenate(parts)[:length] for parts, length in zip(found, self._lengths, strict=True)]

    def _path(self, ids: Ids, targets: Ids) -> list[tuple[_Node, int]]:
        """Return the nodes that a row goes through, each with the tokens that it shares: the path that shares most."""
        best: tuple[int, list[tuple[_Node, int]]] = (0, [])
        waiting: list[tuple[int, list[tuple[_Node, int]], _Node]] = [(0, [], self._root)]
        while waiting:
            place, path, node = waiting.pop()
            for child in node.children:
                shared = common_beginning(
                    child.ids, child.targets, ids[place:], targets[place:], same_target=self.scored
                )
                if not shared:
                    continue
                longer = (place + shared, [*path, (child, shared)])
                best = max(best, longer, key=lambda found: found[0])
                if shared == len(child.ids):
                    waiting.append((*longer, child))
        return best[1]

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
    collated = CollatedPrefixes(
        input_ids=torch.as_tensor(ids)[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        shift_labels=torch.as_tensor(targets)[None],
        nodes=[(parent, len(node.ids)) for parent, node in nodes],
    )
    if any(example.weight != 1 for example in examples):
        weights = torch.ones(1, len(ids))
        for example, places in zip(examples, tree.places(), strict=True):  # a target is of one row
            weights[0, places[:-1][np.asarray(example.labels[1:]) != IGNORE_INDEX]] = example.weight
        collated["weights"] = weights
    return collated


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
