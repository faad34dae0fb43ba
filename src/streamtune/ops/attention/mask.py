"""A mask that is a function of positions, given to the layers of a model in place of a tensor.

Shape suffixes: B batch, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.attention.runs import BranchTable
from streamtune.ops.attention.view import MaskView


class LazyMask(MaskRules):
    """An attention mask that is never built as a whole; its arguments are those of :class:`MaskRules`."""

    def branched(self, table: BranchTable) -> LazyMask:
        """Return the mask under which each row of ``table`` sees what it would see alone under this one.

        Raises:
            UnsupportedModelError: It has padding, packed rows or blocks whose tokens see each other.
        """
        alone = self.batch_size == 1 and self.padding is None and self.row_start is None and self.block_start is None
        offsets = (self.q_offset, self.kv_offset, self.q_length, self.kv_length)
        if not alone or offsets != (0, 0, table.length, table.length):
            raise UnsupportedModelError(
                "this model's attention mask is not that of a single row, so rows cannot share their beginning",
                mend="set share_prefix: never",
            )
        return replace(self, branches=table)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the equal dense mask."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the dense mask. Models read it to see if the mask they got is in its final form."""
        return 4

    def __getitem__(self, key: Any) -> LazyMask:
        """Return the whole mask for slices that leave nothing out; refuse any other index."""
        sizes = (self.batch_size, 1, self.q_length, self.kv_length)
        if not isinstance(key, tuple) or len(key) != 4 or not all(isinstance(part, slice) for part in key):
            raise self._refuse("indexing")
        if any(part.indices(size) != (0, size, 1) for part, size in zip(key, sizes, strict=True)):
            raise self._refuse("slicing")
        return self

    def rows(self, start: int, stop: int) -> MaskView:
        """Return the mask of queries ``[start, stop)``, counted from this mask's first query, over all keys."""
        last = self.kv_offset + self.kv_length
        return MaskView(self, self.q_offset + start, self.q_offset + stop, self.kv_offset, last)

    def chunk(self, start: int, stop: int, first_key: int) -> MaskView:
        """Return the mask of queries ``[start, stop)`` over the keys ``[first_key, stop)``, all that a chunk has."""
        return MaskView(self, self.q_offset + start, self.q_offset + stop, first_key, self.q_offset + stop)

    @classmethod
    def from_dense(cls, allowed_B1TS: Tensor) -> LazyMask:
        """Return a mask that reads a dense boolean one, bottom-right aligned: last query and last key are one token."""
        rows, _, queries, keys = allowed_B1TS.shape
        offset = keys - queries

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return allowed_B1TS[b % rows, 0, q - offset, k]

        device = allowed_B1TS.device
        return cls(rows, queries, keys, q_offset=offset, causal=False, function=function, device=device)
