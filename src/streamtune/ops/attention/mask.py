"""A mask that is a function of positions, its parts, and the kernel calls that compute the attention of a part.

Layers of a model are given a :class:`LazyMask` in place of a tensor. Shape suffixes: B batch, T queries, S keys.
Positions are absolute unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.rules import MaskRules, NoTensor
from streamtune.ops.attention.runs import Branch, BranchTable, Stretch, clipped

MASKED_KEYS = 2048
"""Keys of a branch's segment whose mask is built at once."""


@dataclass(frozen=True)
class Segment:
    """Keys ``[start, stop)`` for queries ``[q_start, q_stop)``: the work of one kernel call.

    All positions count from the view's first. The outputs of segments with the same queries are merged; segments with
    different queries have no query in common. ``row`` is the batch row; None is all rows.

    ``causal`` is True if the kernel applies its own lower-triangular mask: the segment is then square and ends at the
    last of its queries. ``masked`` is True if :meth:`MaskView.bias` must be added, and ``only_padding`` if it hides
    only padding.
    """

    start: int
    stop: int
    q_start: int
    q_stop: int
    row: int | None = None
    causal: bool = False
    masked: bool = False
    only_padding: bool = False

    @property
    def queries(self) -> tuple[int | None, int, int]:
        """Batch row and queries: segments with the same ones are merged."""
        return self.row, self.q_start, self.q_stop


@dataclass(frozen=True, eq=False)
class MaskView(NoTensor):
    """Queries ``[q_start, q_stop)`` and keys ``[k_start, k_stop)`` of a :class:`LazyMask` (absolute positions)."""

    mask: MaskRules
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the dense mask that the view represents."""
        return (self.mask.batch_size, 1, self.q_stop - self.q_start, self.k_stop - self.k_start)

    def segments(self) -> list[Segment]:
        """Cover the visible keys, and no others where the mask's fields determine them, in as few calls as possible.

        - A causal chunk is one rectangle (the prefix, no mask) and one square (lower triangle), for each packed row.
        - A sliding window cuts the prefix to the window and adds one masked tile at its far edge.
        - A block whose tokens see each other is one rectangle.
        - A branch is a rectangle over each run of its trunk and a square over its own keys.
        - Keys that all lie before the queries (another rank's) are one rectangle or none.
        - Any other mask is examined block by block.
        """
        key = (self.q_start, self.q_stop, self.k_start, self.k_stop)
        if key not in self.mask._segments:
            known = self.mask.function is None and self.mask.causal
            if self.k_stop <= self.q_start:
                self.mask._segments[key] = self._earlier_segments(known and self.mask.branches is None)
            elif self.mask.branches is not None:
                self.mask._segments[key] = self._branch_segments(self.mask.branches)
            else:
                self.mask._segments[key] = self._known_segments() if known else self.examined_segments()
        return self.mask._segments[key]

    def _earlier_segments(self, known: bool) -> list[Segment]:
        """Return one segment over keys that all lie before the queries, masked if some are hidden; [] if all are."""
        mask, queries = self.mask, self.q_stop - self.q_start
        if known:
            hidden, cut = self._hidden_by_facts()
        else:
            uniform = {block[2] for block in mask.examined(self.q_start, self.q_stop, self.k_start, self.k_stop)}
            hidden, cut = uniform == {False}, uniform != {True}
        if hidden:
            return []
        padded = known and mask.is_padded(None, self.k_start, self.k_stop)
        keys = self.k_stop - self.k_start
        return [Segment(0, keys, 0, queries, masked=cut or padded, only_padding=padded and not cut)]

    def _hidden_by_facts(self) -> tuple[bool, bool]:
        """Return two flags: window or rows hide all keys from all queries; they hide any key from any query."""
        mask, hidden, cut = self.mask, False, False
        if mask.window is not None:
            hidden = self.q_start - (self.k_stop - 1) >= mask.window
            cut = self.q_stop - 1 - self.k_start >= mask.window
        if mask.first_seen is not None:
            first = mask.first_seen[:, self.q_start : self.q_stop]
            hidden = hidden or int(first.min()) >= self.k_stop
            cut = cut or int(first.max()) > self.k_start
        return hidden, cut

    def _known_segments(self) -> list[Segment]:
        rows = self.mask.stretches
        return [
            piece
            for row, found in enumerate(rows)
            for start, stop, stretch in clipped(found, self.q_start, self.q_stop)
            for piece in self._of_stretch(row if len(rows) > 1 else None, start, stop, stretch)
        ]

    def _branch_segments(self, table: BranchTable) -> list[Segment]:
        mask = self.mask
        plain = mask.function is None and mask.causal and mask.first_seen is None
        of_part = self._of_branch if plain else self._of_masked_branch
        return [piece for found in clipped(table.parts, self.q_start, self.q_stop) for piece in of_part(*found)]

    def _of_branch(self, start: int, stop: int, part: Branch) -> list[Segment]:
        """Return the segments of queries ``[start, stop)`` in a part: its trunk within the window, its own keys."""
        pieces = []
        for run_start, run_stop, shift in part.runs[:-1]:
            first = everyone = run_start
            if self.mask.window is not None:
                behind = shift - part.shift - self.mask.window + 1  # from a query's place to its first key's
                first = min(max(first, start + behind), run_stop)
                everyone = min(max(first, stop - 1 + behind), run_stop)
            pieces.append(self._segment(None, (start, stop), (first, everyone), masked=True))
            pieces.append(self._segment(None, (start, stop), (everyone, run_stop)))
        own = self._of_stretch(None, start, stop, Stretch(part.start, part.stop, part.start, mutual=False))
        return [piece for piece in pieces if piece.stop > piece.start] + own

    def _of_masked_branch(self, start: int, stop: int, part: Branch) -> list[Segment]:
        """Return the segments of a part where the mask has further rules: blocks of keys, all masked."""
        return [
            self._segment(None, (start, stop), (key, min(key + MASKED_KEYS, last)), masked=True)
            for first, last in (*part.trunk, (part.start, stop))
            for key in range(first, last, MASKED_KEYS)
        ]

    def _of_stretch(self, row: int | None, start: int, stop: int, stretch: Stretch) -> list[Segment]:
        first, window, pieces = max(self.k_start, stretch.first), self.mask.window, []
        queries = (start, stop)
        end = min(stretch.stop, self.k_stop) if stretch.mutual else stop
        everyone = first  # from here on every query sees the key, unless it is later than the query
        if window is not None:
            first = max(first, start - window + 1)
            limit = start
            if stretch.mutual and self.mask.window_cuts_blocks:
                limit = end
            elif stretch.mutual:
                limit, first = stretch.start, min(first, max(stretch.start, self.k_start))
            everyone = min(max(first, stop - window), max(limit, first))
            pieces.append(self._segment(row, queries, (first, everyone), masked=True))
        if stretch.mutual or stop - start == 1:
            pieces.append(self._segment(row, queries, (everyone, end)))
        else:
            narrow = window is not None and stop - start > window
            pieces.append(self._segment(row, queries, (everyone, start)))
            pieces.append(self._segment(row, queries, queries, causal=not narrow, masked=narrow))
        return [piece for piece in pieces if piece.stop > piece.start]

    def _segment(
        self,
        row: int | None,
        queries: tuple[int, int],
        keys: tuple[int, int],
        causal: bool = False,
        masked: bool = False,
    ) -> Segment:
        """Return the segment of absolute positions; it is masked if there is padding among its keys."""
        (start, stop), (q_start, q_stop) = keys, queries
        padded = self.mask.is_padded(row, start, stop)
        return Segment(
            start - self.k_start,
            stop - self.k_start,
            q_start - self.q_start,
            q_stop - self.q_start,
            row,
            causal,
            masked or padded,
            only_padding=padded and not masked,
        )

    def examined_segments(self) -> list[Segment]:
        """Return segments of the visible keys, found by an examination of every block of keys."""
        pieces: list[Segment] = []
        queries = (0, self.q_stop - self.q_start)
        for start, stop, uniform in self.mask.examined(self.q_start, self.q_stop, self.k_start, self.k_stop):
            if uniform is False:
                continue
            piece = Segment(start - self.k_start, stop - self.k_start, *queries, masked=uniform is None)
            if pieces and pieces[-1].stop == piece.start and not pieces[-1].masked and not piece.masked:
                piece = Segment(pieces.pop().start, piece.stop, *queries)
            pieces.append(piece)
        # A chunk none of whose queries sees anything still needs one kernel call to define its (unread) output.
        return pieces or [Segment(0, self.k_stop - self.k_start, *queries, masked=True)]

    def allowed(self, segment: Segment, queries: slice = slice(None)) -> Tensor:
        """Return the boolean tile ``[B or 1, 1, T or 1, S]`` of some queries of a segment, counted from its first.

        One row serves all queries where only padding is masked. The kernel hides the keys that ``causal`` hides.
        """
        start, stop = self.k_start + segment.start, self.k_start + segment.stop
        first, last, _ = queries.indices(segment.q_stop - segment.q_start)
        base = self.q_start + segment.q_start
        if segment.only_padding:
            assert self.mask.padding is not None
            batch = slice(None) if segment.row is None else slice(segment.row, segment.row + 1)
            return self.mask.padding[batch, None, None, start:stop]
        return self.mask.tile(base + first, base + last, start, stop, segment.row)

    def bias(self, segment: Segment, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask ``[B or 1, 1, T, S]`` of a segment in ``dtype``, or None if nothing is masked.

        Masked places hold a large finite number, not -inf: a row that sees nothing in this segment then has a finite
        log-sum-exp, whose weight in the merge is exactly zero, instead of NaN.
        """
        if not segment.masked:
            return None
        allowed = self.allowed(segment)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        bias.masked_fill_(~allowed, masked_score(dtype))
        return bias.expand(-1, -1, segment.q_stop - segment.q_start, -1)


def masked_score(dtype: torch.dtype) -> float:
    """Return the score of a masked place: finite, and so low that its weight beside any real score is exactly zero."""
    return torch.finfo(dtype).min / 4


class LazyMask(MaskRules):
    """An attention mask that is never built as a whole; takes the arguments of :class:`MaskRules`."""

    def branched(self, table: BranchTable) -> LazyMask:
        """Return the mask under which each row of ``table`` sees the same keys as alone under this mask.

        Raises:
            UnsupportedModelError: This mask has padding, packed rows or blocks whose tokens see each other.
        """
        alone = self.batch_size == 1 and self.padding is None and self.row_start is None and self.block_start is None
        offsets = (self.q_offset, self.kv_offset, self.q_length, self.kv_length)
        if not alone or offsets != (0, 0, table.length, table.length):
            raise UnsupportedModelError(
                "this model's attention mask is not that of a single row, so rows cannot share their beginning",
                fix="set share_prefix: never",
            )
        return replace(self, branches=table)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the equal dense mask."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the dense mask, which models read to see if a mask is in its final form."""
        return 4

    def __getitem__(self, key: Any) -> LazyMask:
        """Return the whole mask for slices that leave nothing out; refuse any other index."""
        if not isinstance(key, tuple) or len(key) != 4 or not all(isinstance(part, slice) for part in key):
            raise self._refuse("indexing")
        if any(part.indices(size) != (0, size, 1) for part, size in zip(key, self.shape, strict=True)):
            raise self._refuse("slicing")
        return self

    def rows(self, start: int, stop: int) -> MaskView:
        """Return the mask of queries ``[start, stop)``, counted from this mask's first query, over all keys."""
        last = self.kv_offset + self.kv_length
        return MaskView(self, self.q_offset + start, self.q_offset + stop, self.kv_offset, last)

    def chunk(self, start: int, stop: int, first_key: int) -> MaskView:
        """Return the mask of queries ``[start, stop)`` over the keys ``[first_key, stop)`` of a chunk."""
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
