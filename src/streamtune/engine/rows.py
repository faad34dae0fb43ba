"""Rows (training examples) of a sequence: packed rows, and rows that share a prefix.

In attention layers the mask separates the rows. A recurrent layer has no mask. Its chunks are cut where any row begins,
and its state is set to zero in the sequences in which a row begins there.

Rows that share a prefix are laid out as a tree in one sequence, so that the prefix is computed once. A trunk is the
prefix of several rows; a branch is the rest of one row. A tree is a trunk followed by its branches, and a sequence
consists of one or more trees:

    index       0 1 2 3   4 5 6   7 8 9 10   11 ...
                trunk     branch  branch     the next tree
    position    0 1 2 3   4 5 6   4 5 6 7    0 ...

A branch may have branches itself, to any depth. A token sees its trunk and its own branch, and its position counts the
tokens of both. So every row is computed as if it were alone, up to rounding. The gradient of the trunk's keys, values
and states is the sum over all branches. A layer with a recurrent state starts each branch from the trunk's last state.

Preference pairs (DPO, arXiv 2305.18290) and groups of completions (GRPO, arXiv 2402.03300) are such rows. The last
token of a prompt belongs to the branches, because it predicts a different token in each.

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

from streamtune.engine.hf_names import ROW_ENDS, ROW_IDS, TEXT_AND_AXES
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import Branch, BranchTable, LazyMask, row_starts
from streamtune.ops.attention.runs import run_starts
from streamtune.ops.devices import host_copy
from streamtune.schedule import Schedule


def describes_packed_rows(arguments: dict[str, Any]) -> bool:
    """Return True if the arguments for attention kernels (``cu_seq_lens``, ``seq_idx``) describe several rows."""
    ends, ids = arguments.get(ROW_ENDS), arguments.get(ROW_IDS)
    several = isinstance(ends, Tensor) and ends.numel() > 2
    return several or (isinstance(ids, Tensor) and bool((ids != ids.flatten()[0]).any()))


@dataclass(eq=False)
class PackedRows:
    """Packed rows (several training examples in one sequence); ``positions_BT`` restart where a row begins."""

    positions_BT: Tensor  # noqa: N815

    @classmethod
    def from_positions(cls, position_ids: Any) -> PackedRows | None:
        """Return the packed rows of ``position_ids`` ``[T]`` or ``[B, T]``; None if each sequence is one row.

        Models with a position per image axis (M-RoPE) also take ``[4, B, T]``, where the first ``[B, T]`` counts tokens
        (``TEXT_AND_AXES``). Positions ``[3, B, T]`` do not show rows.
        """
        if isinstance(position_ids, Tensor) and position_ids.dim() == 3 and position_ids.shape[0] == TEXT_AND_AXES:
            position_ids = position_ids[0]
        if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2):
            return None
        rows = cls(torch.atleast_2d(position_ids))
        return rows if len(rows.row_starts) > 1 else None

    @cached_property
    def row_starts(self) -> list[int]:
        """Sorted positions, including 0, at which a row begins in any sequence of the batch."""
        return row_starts(self.positions_BT)

    @cached_property
    def is_row_start(self) -> Tensor:
        """Boolean ``[B, T]``: True where a row begins."""
        begins = torch.ones_like(self.positions_BT, dtype=torch.bool)
        begins[:, 1:] = self.positions_BT.diff(dim=-1) != 1
        return begins

    def check_described_rows(self, arguments: dict[str, Any]) -> None:
        """Raise an error if arguments for attention kernels begin a row at a token where the positions do not restart.

        Raises:
            UnsupportedModelError: ``cu_seq_lens`` or ``seq_idx`` describe such a row; ``arguments`` are the call's.
        """
        ends, ids = arguments.get(ROW_ENDS), arguments.get(ROW_IDS)
        if not isinstance(ends, Tensor) and not isinstance(ids, Tensor):
            return  # nothing is copied to the host, for which it would wait
        begins = host_copy(self.is_row_start)
        missed: list[int] = []
        if isinstance(ends, Tensor):
            places = host_copy(ends).flatten().long()
            places = places[places < begins.numel()]
            missed += places[~begins.flatten()[places]].tolist()
        if isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] == begins.shape[1]:
            changes = host_copy(ids).diff(dim=1) != 0
            missed += ((changes & ~begins[:, 1:]).nonzero()[:, 1] + 1).tolist()
        if missed:
            raise UnsupportedModelError(
                f"cu_seq_lens or seq_idx begin a row at token {min(missed):,}, where position_ids do not restart",
                fix="pass position_ids that restart at each row, and no attention_mask",
            )

    @cached_property
    def common_starts(self) -> frozenset[int]:
        """Positions at which a row begins in every sequence of the batch."""
        return frozenset(int(place) for place in host_copy(self.is_row_start).all(0).nonzero().flatten().tolist())

    def restrict_mask(self, mask: LazyMask) -> LazyMask:
        """Return ``mask`` restricted so that no packed row sees another; the result is cached for each mask.

        Some models need this, because their own masks ignore position ids (gpt_oss, granitemoehybrid).
        """
        if mask.row_start is not None or not mask.causal or mask.q_length != self.positions_BT.shape[1]:
            return mask
        cached = self._masks.get(id(mask))
        if cached is None or cached[0] is not mask:
            starts = run_starts(host_copy(self.is_row_start).cumsum(1)).to(mask.device)
            cached = self._masks[id(mask)] = (mask, replace(mask, row_start=starts))
        return cached[1]

    @cached_property
    def _masks(self) -> dict[int, tuple[LazyMask, LazyMask]]:
        return {}

    def chunks(self, schedule: Schedule) -> list[slice]:
        """Return the chunks of the schedule, with a cut wherever a row begins."""
        chunks: list[slice] = []
        for start, stop in pairwise([*self.row_starts, self.positions_BT.shape[1]]):
            chunks += [slice(start + c.start, start + c.stop) for c in schedule.chunks(stop - start)]
        self.refuse_single_token_chunks(chunks)
        return chunks

    def refuse_single_token_chunks(self, chunks: Iterable[slice]) -> None:
        """Raise an error for a chunk of one token that begins a row of one sequence, but is inside a row of another.

        A layer with a recurrent state treats a single token as a decoding step, and would lose the state.

        Raises:
            UnsupportedModelError: One of the slices ``chunks`` is such a chunk.
        """
        for part in chunks:
            if part.stop - part.start == 1 and part.start not in self.common_starts:
                raise UnsupportedModelError(
                    f"rows of different sequences in the batch leave a chunk of one token at position {part.start}; a "
                    "layer with a recurrent state would compute it as a decoding step",
                    fix="with packing, write per_device_train_batch_size: 1 and per_device_eval_batch_size: 1",
                )

    def continues_past(self, position: int) -> bool:
        """Return True if a row continues past ``position`` in any sequence, so that the next chunk reads the state."""
        return position not in self.common_starts

    def start_state_position(self, position: int) -> int | None:
        """Return the position of the state that a chunk starts from; None if every sequence begins a row there."""
        return None if position in self.common_starts else position

    def zero_states_at_row_starts(self, state: Tensor, position: int) -> Tensor:
        """Return a state ``[B, ...]`` set to zero in the sequences in which a row begins at ``position``."""
        if not state.is_floating_point():
            raise UnsupportedModelError(
                "a layer has token ids as its state, which cannot be reset for sequences whose rows begin at different "
                "positions",
                fix="pack with per_device_train_batch_size: 1",
            )
        begun = self.is_row_start[:, position]
        return state.masked_fill(begun.reshape(-1, *[1] * (state.dim() - 1)), 0.0)


@dataclass(eq=False)
class Branches(PackedRows):
    """Rows that share a prefix, laid out in one sequence ``[1, T]``: trees of a trunk (the prefix) and its branches."""

    table: BranchTable

    @classmethod
    def of(cls, trees: Iterable[tuple[int, Sequence[int]]]) -> Branches:
        """Return the layout of trees, each a trunk (shared prefix) followed by its branches, laid end to end.

        Args:
            trees: Pair for each tree: number of tokens of the trunk (0: nothing is shared), and numbers of tokens of
                the branches.

        Raises:
            ArgumentError: There is no tree, a tree has no branch, or a branch has no token.

        Example:
            >>> tree = Branches.of([(3, [2, 4])])
            >>> tree.positions_BT.tolist()
            [[0, 1, 2, 3, 4, 3, 4, 5, 6]]
        """
        nodes: list[tuple[int, int]] = []
        for trunk, lengths in trees:
            if trunk < 0 or not lengths or min(lengths) < 1:
                raise ArgumentError(
                    "a tree must have a trunk of 0 or more tokens and branches of 1 or more tokens, found "
                    f"{trunk} and {list(lengths)}"
                )
            root = len(nodes) if trunk else -1
            nodes += [(-1, trunk)] * bool(trunk) + [(root, length) for length in lengths]
        if not nodes:
            raise ArgumentError("trees is empty: a sequence must have at least one tree")
        return cls.of_nodes(nodes)

    @classmethod
    def of_nodes(cls, nodes: Iterable[tuple[int, int]]) -> Branches:
        """Return the layout of trees of any depth, whose parts (trunks and branches) are laid end to end.

        Args:
            nodes: Pair for each part: index of the part that it continues (-1 if it begins a row), and number of
                tokens.

        Raises:
            ArgumentError: There is no part, a part has no token, or a part comes before the part that it continues.
        """
        parts = list(nodes)
        wrong = next((n for n, (parent, tokens) in enumerate(parts) if not -1 <= parent < n or tokens < 1), None)
        if wrong is not None or not parts:
            what = "no parts" if wrong is None else f"part {wrong} as {parts[wrong]}"
            raise ArgumentError(
                f"a part must have 1 or more tokens and come after the part that it continues, found {what}"
            )
        table = BranchTable.from_nodes(parts)
        return cls(table.positions[None], table)

    @property
    def length(self) -> int:
        """Number of tokens T of the sequence."""
        return self.table.length

    @property
    def position_ids(self) -> Tensor:
        """Positions ``[1, T]`` int64, counted in each row; a branch continues the positions of its trunk."""
        return self.positions_BT

    def arguments(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of a model call besides ``input_ids``: position ids, and an attention mask of ones.

        Without a mask, ``transformers`` would treat positions that restart as packed rows, which share nothing.
        """
        return {
            "position_ids": self.positions_BT.to(input_ids.device),
            "attention_mask": torch.ones_like(input_ids),
        }

    def with_row_appended(self, row_length: int) -> Branches:
        """Return the same trees followed by a separate row of ``row_length`` tokens."""
        stop = self.length + row_length
        table = BranchTable((*self.table.parts, Branch(self.length, stop)))
        return Branches(table.positions[None], table)

    @cached_property
    def row_starts(self) -> list[int]:
        """Indices in the sequence at which a trunk or a branch begins."""
        return [part.start for part in self.table.parts]

    @cached_property
    def is_row_start(self) -> Tensor:
        """Boolean ``[1, T]``: True where a trunk or a branch begins."""
        begins = torch.zeros_like(self.positions_BT, dtype=torch.bool)
        begins[:, self.row_starts] = True
        return begins

    @cached_property
    def common_starts(self) -> frozenset[int]:
        """All indices in ``row_starts``, because there is only one sequence."""
        return frozenset(self.row_starts)

    @cached_property
    def _trunk_ends(self) -> dict[int, int]:
        return {part.start: part.trunk[-1][1] for part in self.table.parts if part.trunk}

    def continues_past(self, position: int) -> bool:
        """Return True if a later chunk reads the state at ``position``: inside a part, or at the end of a trunk."""
        return position not in self.common_starts or position in self._trunk_ends.values()

    def start_state_position(self, position: int) -> int | None:
        """Return the position of the state that a chunk at ``position`` starts from; for a branch, its trunk's end."""
        return self._trunk_ends.get(position, super().start_state_position(position))

    def zero_states_at_row_starts(self, state: Tensor, position: int) -> Tensor:
        """Return the state unchanged: a branch starts from its trunk's state, a new tree from none."""
        return state

    def restrict_mask(self, mask: LazyMask) -> LazyMask:
        """Return the mask with which each row sees what it would see alone with ``mask``; cached for each mask."""
        cached = self._masks.get(id(mask))
        if cached is None or cached[0] is not mask:
            cached = self._masks[id(mask)] = (mask, mask.with_shared_prefixes(self.table))
        return cached[1]
