"""Rows that begin alike, streamed with their common beginning once: a tree laid out as one sequence.

A trunk is the common beginning of several rows; a branch is the rest of one of them. A tree is its trunk and then its
branches, end to end, and a sequence is any number of trees:

    place       0 1 2 3   4 5 6   7 8 9 10   11 ...
                trunk     branch  branch     the next tree
    position    0 1 2 3   4 5 6   4 5 6 7    0 ...

A token sees its trunk and its own branch, and counts its position through both, so every row is computed as it would be
alone, to rounding: its trunk's keys, values and states are those of every row, and their gradient is the sum over
all branches. A layer with a recurrent state begins each branch with the trunk's last state.

Preference pairs (arXiv 2305.18290) and groups of completions (arXiv 2402.03300) are such rows. The last token of a
prompt belongs to the branches, for there it predicts another token in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.rows import PackedRows
from streamtune.errors import ArgumentError
from streamtune.ops import Branch, BranchTable, LazyMask

__all__ = ["Branches"]


@dataclass(eq=False)
class Branches(PackedRows):
    """Trees of rows in a sequence ``[1, T]``; made by :meth:`of`.

    Args:
        positions_BT: ``[1, T]`` the position of each token in its own row.
        table: The trunks and branches, as runs of places.
    """

    table: BranchTable

    @classmethod
    def of(cls, trees: Iterable[tuple[int, Sequence[int]]]) -> Branches:
        """Lay trees end to end.

        Args:
            trees: For each the number of tokens of its trunk (0: its branches share nothing) and of each branch.

        Raises:
            ArgumentError: There is no tree, no branch, or a branch without a token.
        """
        parts: list[Branch] = []
        place = 0
        for trunk, lengths in trees:
            if trunk < 0 or not lengths or min(lengths) < 1:
                raise ArgumentError(
                    f"a tree has a trunk of 0 or more tokens and branches of 1 or more, not {trunk} and {list(lengths)}"
                )
            root = place
            if trunk:
                parts.append(Branch(place, place + trunk, place, place))
                place += trunk
            for length in lengths:
                parts.append(Branch(place, place + length, root, root + trunk))
                place += length
        if not parts:
            raise ArgumentError("a sequence of branches has one tree or more")
        table = BranchTable(tuple(parts))
        return cls(table.positions[None], table)

    @property
    def length(self) -> int:
        """Number of tokens T of the sequence."""
        return self.table.length

    @property
    def position_ids(self) -> Tensor:
        """Positions ``[1, T]`` int64; each branch continues the count of its trunk."""
        return self.positions_BT

    def arguments(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the other arguments of the model's call: positions, and a mask of ones.

        Without a mask ``transformers`` would take positions that restart for packed rows that share nothing.
        """
        return {
            "position_ids": self.positions_BT.to(input_ids.device),
            "attention_mask": torch.ones_like(input_ids),
        }

    def followed_by(self, tokens: int) -> Branches:
        """Return the same trees, with one more row of ``tokens`` tokens behind them that shares nothing."""
        stop = self.length + tokens
        table = BranchTable((*self.table.parts, Branch(self.length, stop, self.length, self.length)))
        return Branches(table.positions[None], table)

    @cached_property
    def starts(self) -> list[int]:
        """Places at which a trunk or a branch begins."""
        return [part.start for part in self.table.parts]

    @cached_property
    def begins(self) -> Tensor:
        """Boolean ``[1, T]``: True where a trunk or a branch begins."""
        begins = torch.zeros_like(self.positions_BT, dtype=torch.bool)
        begins[:, self.starts] = True
        return begins

    @cached_property
    def clean_starts(self) -> frozenset[int]:
        """The set of all ``starts``: there is only one sequence."""
        return frozenset(self.starts)

    @cached_property
    def _taken_up(self) -> dict[int, int]:
        return {part.start: part.trunk_stop for part in self.table.parts if part.trunk_stop > part.trunk_start}

    def carries_on(self, position: int) -> bool:
        """Return True if the state at a position is used again: within a part, or at the end of a trunk."""
        return position not in self.clean_starts or position in self._taken_up.values()

    def state_before(self, position: int) -> int:
        """Return the position whose state a chunk from ``position`` on begins with: for a branch, its trunk's end."""
        return self._taken_up.get(position, position)

    def without_begun(self, state: Tensor, position: int) -> Tensor:
        """Return the state unchanged: a branch begins with its trunk's, and a row that begins anew has none."""
        return state

    def masked(self, mask: LazyMask) -> LazyMask:
        """Return the mask under which each row sees what it would see alone under ``mask``; made once for each mask.

        Raises:
            UnsupportedModelError: Its tokens see later ones, or are padding.
        """
        known = self._masks.get(id(mask))
        if known is None or known[0] is not mask:
            known = self._masks[id(mask)] = (mask, mask.branched(self.table))
        return known[1]

    @cached_property
    def _masks(self) -> dict[int, tuple[LazyMask, LazyMask]]:
        return {}
