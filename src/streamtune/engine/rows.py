"""The rows in a sequence: packed rows, and rows that share their beginning.

Attention layers find the rows in their mask (``ops.attention.rules``). A recurrence has no mask: its chunks are cut
where any row begins, and the state is zero for the sequences that begin a row there.

Rows that begin alike are streamed with their common beginning once, as a tree laid out in one sequence. A trunk is the
common beginning of several rows; a branch is the rest of one of them. A tree is its trunk and then its branches, end to
end, and a sequence is any number of trees:

    place       0 1 2 3   4 5 6   7 8 9 10   11 ...
                trunk     branch  branch     the next tree
    position    0 1 2 3   4 5 6   4 5 6 7    0 ...

A branch may have branches itself, to any depth: its trunk is then all that its rows have in common. A token sees its
trunk and its own branch, and counts its position through both. So every row is computed as alone, to rounding. The
gradient of the trunk's keys, values and states is the sum over all branches. A layer with a recurrent state begins each
branch with the trunk's last state.

Preference pairs (arXiv 2305.18290) and groups of completions (arXiv 2402.03300) are such rows. The last token of a
prompt belongs to the branches, for there it predicts another token in each.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.hf_names import ROW_ENDS, ROW_IDS
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import Branch, BranchTable, LazyMask, row_starts
from streamtune.ops.attention.runs import run_starts
from streamtune.ops.devices import host_copy
from streamtune.schedule import Schedule


def names_several_rows(arguments: dict[str, Any]) -> bool:
    """Return True if the kernels' arguments name more than one row."""
    ends, ids = arguments.get(ROW_ENDS), arguments.get(ROW_IDS)
    several = isinstance(ends, Tensor) and ends.numel() > 2
    return several or (isinstance(ids, Tensor) and bool((ids != ids.flatten()[0]).any()))


@dataclass(eq=False)
class PackedRows:
    """Rows of a packed batch: ``positions_BT`` restart where a row begins."""

    positions_BT: Tensor  # noqa: N815

    @classmethod
    def of(cls, position_ids: Any) -> PackedRows | None:
        """Return the rows that positions ``[T]`` or ``[B, T]`` show; None if each sequence is one row."""
        if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2):
            return None
        rows = cls(torch.atleast_2d(position_ids))
        return rows if len(rows.starts) > 1 else None

    @cached_property
    def starts(self) -> list[int]:
        """Sorted positions at which a row begins in any of the sequences, 0 among them."""
        return row_starts(self.positions_BT)

    @cached_property
    def begins(self) -> Tensor:
        """Boolean ``[B, T]``: True where a row begins."""
        begins = torch.ones_like(self.positions_BT, dtype=torch.bool)
        begins[:, 1:] = self.positions_BT.diff(dim=-1) != 1
        return begins

    @cached_property
    def clean_starts(self) -> frozenset[int]:
        """Positions at which a row begins in every sequence."""
        return frozenset(int(place) for place in host_copy(self.begins).all(0).nonzero().flatten().tolist())

    def masked(self, mask: LazyMask) -> LazyMask:
        """Return the mask under which no row sees another; made once for each mask.

        Some models ignore positions in their masks (gpt_oss, granitemoehybrid).
        """
        if mask.row_start is not None or not mask.causal or mask.q_length != self.positions_BT.shape[1]:
            return mask
        known = self._masks.get(id(mask))
        if known is None or known[0] is not mask:
            starts = run_starts(host_copy(self.begins).cumsum(1)).to(mask.device)
            known = self._masks[id(mask)] = (mask, replace(mask, row_start=starts))
        return known[1]

    @cached_property
    def _masks(self) -> dict[int, tuple[LazyMask, LazyMask]]:
        return {}

    def chunks(self, schedule: Schedule) -> list[slice]:
        """Return the chunks of the schedule, cut wherever a row begins."""
        found: list[slice] = []
        for start, stop in pairwise([*self.starts, self.positions_BT.shape[1]]):
            found += [slice(start + c.start, start + c.stop) for c in schedule.chunks(stop - start)]
        self.refuse_single(found)
        return found

    def refuse_single(self, parts: Iterable[slice]) -> None:
        """Refuse parts of the sequence that are a single token in the middle of another sequence's row."""
        for part in parts:
            if part.stop - part.start == 1 and part.start not in self.clean_starts:
                raise UnsupportedModelError(
                    f"a packed row of one token at position {part.start} lies beside a longer one of the same batch, "
                    "which a layer with a recurrent state cannot be cut at",
                    fix="pack with per_device_train_batch_size: 1",
                )

    def carries_on(self, position: int) -> bool:
        """Return True if any sequence goes on past a position, so that its state there is used again."""
        return position not in self.clean_starts

    def state_before(self, position: int) -> int | None:
        """Return the position whose state a chunk from ``position`` on begins with; None if all rows begin anew."""
        return None if position in self.clean_starts else position

    def without_begun(self, state: Tensor, position: int) -> Tensor:
        """Return a state ``[B, ...]`` with zeros for the sequences that begin a row at the position."""
        if not state.is_floating_point():
            raise UnsupportedModelError(
                "a layer carries tokens on as its state, which several packed sequences with other rows cannot share",
                fix="pack with per_device_train_batch_size: 1",
            )
        begun = self.begins[:, position]
        return state.masked_fill(begun.reshape(-1, *[1] * (state.dim() - 1)), 0.0)


@dataclass(eq=False)
class Branches(PackedRows):
    """Trees of rows in a sequence ``[1, T]``; made by :meth:`of`."""

    table: BranchTable

    @classmethod
    def of(cls, trees: Iterable[tuple[int, Sequence[int]]]) -> Branches:
        """Lay trees end to end.

        Args:
            trees: Tokens of the trunk (0: its branches share nothing) and of each branch, for each tree.

        Raises:
            ArgumentError: There is no tree, no branch, or a branch without a token.
        """
        nodes: list[tuple[int, int]] = []
        for trunk, lengths in trees:
            if trunk < 0 or not lengths or min(lengths) < 1:
                raise ArgumentError(
                    f"a tree has a trunk of 0 or more tokens and branches of 1 or more, not {trunk} and {list(lengths)}"
                )
            root = len(nodes) if trunk else -1
            nodes += [(-1, trunk)] * bool(trunk) + [(root, length) for length in lengths]
        if not nodes:
            raise ArgumentError("a sequence of branches has one tree or more")
        return cls.of_nodes(nodes)

    @classmethod
    def of_nodes(cls, nodes: Iterable[tuple[int, int]]) -> Branches:
        """Lay trees of any depth end to end, part after part.

        Args:
            nodes: Index of the part that it continues, or -1 where rows begin, and number of tokens, for each part.

        Raises:
            ArgumentError: There is no part, one without a token, or one before the part that it continues.
        """
        given = list(nodes)
        wrong = next((n for n, (parent, tokens) in enumerate(given) if not -1 <= parent < n or tokens < 1), None)
        if wrong is not None or not given:
            what = "there is none" if wrong is None else f"part {wrong} is {given[wrong]}"
            raise ArgumentError(f"a part has 1 or more tokens and stands behind the one that it continues; {what}")
        table = BranchTable.of(given)
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
        """Return the same trees, and behind them a row of ``tokens`` tokens that shares nothing."""
        stop = self.length + tokens
        table = BranchTable((*self.table.parts, Branch(self.length, stop)))
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
        """Set of all ``starts``: there is only one sequence."""
        return frozenset(self.starts)

    @cached_property
    def _taken_up(self) -> dict[int, int]:
        return {part.start: part.trunk[-1][1] for part in self.table.parts if part.trunk}

    def carries_on(self, position: int) -> bool:
        """Return True if the state at a position is used again: within a part, or at the end of a trunk."""
        return position not in self.clean_starts or position in self._taken_up.values()

    def state_before(self, position: int) -> int | None:
        """Return the position whose state a chunk from ``position`` on begins with: for a branch, its trunk's end."""
        return self._taken_up.get(position, super().state_before(position))

    def without_begun(self, state: Tensor, position: int) -> Tensor:
        """Return the state unchanged: a branch begins with its trunk's, and a row that begins anew has none."""
        return state

    def masked(self, mask: LazyMask) -> LazyMask:
        """Return the mask under which each row sees what it would see alone under ``mask``; made once for each mask."""
        known = self._masks.get(id(mask))
        if known is None or known[0] is not mask:
            known = self._masks[id(mask)] = (mask, mask.branched(self.table))
        return known[1]
