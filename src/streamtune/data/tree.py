"""One prompt and its completions as token ids: in memory, and in Arrow on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

__all__ = ["TREE_SCHEMA", "Tree", "TreeSequence"]

TREE_SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.int32())),
        ("completions", pa.list_(pa.list_(pa.int32()))),
        ("masks", pa.list_(pa.list_(pa.bool_()))),
        ("origin", pa.string()),
        ("labels", pa.list_(pa.bool_())),
        ("margin", pa.float64()),
        ("tokens", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Tree:
    """One prompt with G completions that each continue from it.

    The prompt's last token predicts the first of every completion. So the part all share is ``prompt[:-1]``, the trunk;
    a branch is ``[prompt[-1], *completion]``.
    """

    prompt: list[int]
    """[P] token ids, P at least 1"""
    completions: list[list[int]]
    """G lists of token ids, none empty"""
    masks: list[list[bool]] | None = None
    """for every completion's tokens whether they count; None where all do"""
    origin: str = ""
    """the row it comes from, ``file:line`` or ``file:row N``"""
    labels: list[bool] | None = None
    """of unpaired data: whether each completion is desirable"""
    margin: float | None = None
    """of a pair: by how much the first completion is better, where the data says so"""

    def __post_init__(self) -> None:
        assert self.prompt, "a prompt has at least one token: it predicts the first of a completion"
        assert self.completions, "a tree has at least one completion"
        assert all(self.completions), "a completion has at least one token"
        if self.masks is not None:
            sizes, marked = ([len(item) for item in items] for items in (self.completions, self.masks))
            assert sizes == marked, "a mask says of every token of its completion whether it counts"

    @property
    def num_tokens(self) -> int:
        """Positions of the shared layout: the trunk once, then every branch."""
        return len(self.prompt) - 1 + sum(len(completion) + 1 for completion in self.completions)

    @property
    def num_tokens_separate(self) -> int:
        """Tokens where every completion is a row of its own behind its own copy of the prompt."""
        return sum(len(self.prompt) + len(completion) for completion in self.completions)

    @property
    def num_targets(self) -> int:
        """Tokens of the completions that count."""
        masks = self.masks or [[True] * len(completion) for completion in self.completions]
        return sum(sum(mask) for mask in masks)

    def columns(self) -> dict[str, Any]:
        """Return the tree as a row of :data:`TREE_SCHEMA`."""
        return {
            "prompt": self.prompt,
            "completions": self.completions,
            "masks": self.masks,
            "origin": self.origin,
            "labels": self.labels,
            "margin": self.margin,
            "tokens": self.num_tokens,
        }


class TreeSequence(Sequence[Tree]):
    """Some rows of an Arrow table of trees, in a given order; each is decoded on access."""

    def __init__(self, table: pa.Table, rows: npt.NDArray[np.int64]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the positions of each tree in the shared layout, [trees], without decoding any."""
        return np.asarray(self._table["tokens"].to_numpy(), dtype=np.int64)[self._rows]

    @overload
    def __getitem__(self, index: int) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> TreeSequence: ...
    def __getitem__(self, index: int | slice) -> Tree | TreeSequence:
        if isinstance(index, slice):
            return TreeSequence(self._table, self._rows[index])
        row = int(self._rows[index])
        masks = self._table["masks"][row]
        return Tree(
            prompt=_items(self._table["prompt"][row]),
            completions=[_items(item) for item in self._table["completions"][row]],
            masks=[_items(item) for item in masks] if masks.is_valid else None,
            origin=self._table["origin"][row].as_py(),
            labels=self._table["labels"][row].as_py(),
            margin=self._table["margin"][row].as_py(),
        )


def _items(cell: pa.ListScalar) -> list[Any]:
    """Return a list cell as plain Python values, through NumPy: several times as fast as item by item."""
    items: list[Any] = cell.values.to_numpy(zero_copy_only=False).tolist()
    return items
