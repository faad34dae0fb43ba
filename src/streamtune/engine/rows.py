"""The rows of a packed batch: where one begins, a layer that carries a state starts anew.

Attention layers find the rows in their mask (``ops.attention.rules``). A recurrence has no mask: its chunks are cut
where any row begins, and the state is zero for the sequences that begin one.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError
from streamtune.ops import row_starts
from streamtune.schedule import Schedule

__all__ = ["OTHER_WORDS", "PackedRows", "names_several_rows"]

OTHER_WORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that name packed rows to kernels. They count from the start of the sequence, so no chunk is given them."""


def names_several_rows(arguments: dict[str, Any]) -> bool:
    """Return True if the arguments that are meant for kernels name more than one row."""
    ends, ids = arguments.get("cu_seq_lens_q"), arguments.get("seq_idx")
    several = isinstance(ends, Tensor) and ends.numel() > 2
    return several or (isinstance(ids, Tensor) and bool((ids != ids.flatten()[0]).any()))


@dataclass(eq=False)
class PackedRows:
    """Rows of a packed batch: ``positions_BT`` restart where one begins."""

    positions_BT: Tensor  # noqa: N815

    @classmethod
    def of(cls, position_ids: Any) -> PackedRows | None:
        """Return the rows that positions ``[T]`` or ``[B, T]`` show; None where each sequence is one row."""
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
        return frozenset(int(place) for place in self.begins.all(0).nonzero().flatten().tolist())

    def chunks(self, schedule: Schedule) -> list[slice]:
        """Return the chunks of the schedule, cut wherever a row begins.

        Raises:
            UnsupportedModelError: One of them is a single token in the middle of another sequence's row, which the
                layer would take for decoding.
        """
        found: list[slice] = []
        for start, stop in pairwise([*self.starts, self.positions_BT.shape[1]]):
            found += [slice(start + c.start, start + c.stop) for c in schedule.chunks(stop - start)]
        for chunk in found:
            if chunk.stop - chunk.start == 1 and chunk.start not in self.clean_starts:
                raise UnsupportedModelError(
                    f"a packed row of one token at position {chunk.start} lies beside a longer one of the same batch, "
                    "which a layer with a recurrent state cannot be cut at",
                    mend="pack with per_device_train_batch_size: 1",
                )
        return found

    def carries_on(self, position: int) -> bool:
        """Return True if any sequence goes on past a position, so that its state there is used again."""
        return position not in self.clean_starts

    def state_before(self, position: int) -> int:
        """Return the position whose state a chunk from ``position`` on begins with."""
        return position

    def without_begun(self, state: Tensor, position: int) -> Tensor:
        """Return a state ``[B, ...]`` with zeros for the sequences that begin a row at the position."""
        if not state.is_floating_point():
            raise UnsupportedModelError(
                "a layer carries tokens on as its state, which several packed sequences with other rows cannot share",
                mend="pack with per_device_train_batch_size: 1",
            )
        begun = self.begins[:, position]
        return state.masked_fill(begun.reshape(-1, *[1] * (state.dim() - 1)), 0.0)
