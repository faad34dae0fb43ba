"""Attention masks as functions of token positions, and their division into kernel calls (segments).

The layers of a model receive a :class:`LazyMask` instead of a tensor. Shape suffixes: B batch, T queries, S keys.
Positions count from the start of the sequence unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.rules import MaskPlaceholder, MaskRules
from streamtune.ops.attention.runs import Branch, BranchTable, QueryRange, overlapping_runs

HIGHEST_HIDDEN = -1e4
"""Highest number that hides a key in a mask that is added to the scores."""

MASKED_KEYS = 2048
"""Largest number of keys in a masked segment of a branch; the mask of a segment is one dense tensor."""


@dataclass(frozen=True)
class Segment:
    """Queries and keys of one attention kernel call; ranges count from the first query and key of a :class:`MaskView`.

    ``[start, stop)`` are the keys, ``[q_start, q_stop)`` the queries. Segments with the same queries are merged; other
    segments have no query in common. ``row`` is the batch row; None means all rows.

    ``causal`` is True if the kernel applies its own lower-triangular mask; the segment is then a square whose last key
    and last query are the same token. ``masked`` is True if :meth:`MaskView.additive_mask` must be added,
    ``only_padding`` if this mask hides only padding.
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
        """Batch row and range of queries; segments for which they are equal are merged."""
        return self.row, self.q_start, self.q_stop


@dataclass(frozen=True, eq=False)
class MaskView(MaskPlaceholder):
    """Part of an attention mask: queries ``[q_start, q_stop)`` and keys ``[k_start, k_stop)``, absolute positions."""

    mask: MaskRules
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape ``(B, 1, T, S)`` of this part of the mask as a dense tensor."""
        return (self.mask.batch_size, 1, self.q_stop - self.q_start, self.k_stop - self.k_start)

    def segments(self) -> list[Segment]:
        """Return the kernel calls (segments) that cover the visible keys, as few as possible.

        A segment is a rectangle of queries and keys. No segment covers only hidden keys, unless an arbitrary mask
        function hides them.

        - A causal chunk has, for each packed row, a rectangle without a mask (earlier keys) and a causal square.
        - A sliding window cuts this rectangle, and adds a masked tile at the far edge of the window.
        - A block whose tokens all see each other (an image) is a rectangle.
        - A part of a tree of rows, which share prefixes, has a rectangle over each run of its row's earlier tokens, and
          a causal square over its own tokens.
        - Keys that all precede the queries (keys of another rank) are one rectangle or none.
        - Any other mask is computed and examined block by block.
        """
        key = (self.q_start, self.q_stop, self.k_start, self.k_stop)
        if key not in self.mask._segments:
            fields_suffice = self.mask.function is None and self.mask.causal
            if self.k_stop <= self.q_start:
                self.mask._segments[key] = self._segments_before_queries(fields_suffice and self.mask.branches is None)
            elif self.mask.branches is not None:
                self.mask._segments[key] = self._branch_segments(self.mask.branches)
            else:
                self.mask._segments[key] = self._segments_from_fields() if fields_suffice else self.examined_segments()
        return self.mask._segments[key]

    def _segments_before_queries(self, fields_suffice: bool) -> list[Segment]:
        """Return the segment of keys that all precede the queries, masked if any key is hidden; none if all are hidden.

        ``fields_suffice`` is False if an arbitrary mask function must be evaluated.
        """
        mask, queries = self.mask, self.q_stop - self.q_start
        if fields_suffice:
            hidden, cut = self._hidden_by_window_and_rows()
        else:
            uniform = {
                block[2] for block in mask.examine_key_blocks(self.q_start, self.q_stop, self.k_start, self.k_stop)
            }
            hidden, cut = uniform == {False}, uniform != {True}
        if hidden:
            return []
        padded = fields_suffice and mask.is_padded(None, self.k_start, self.k_stop)
        keys = self.k_stop - self.k_start
        return [Segment(0, keys, 0, queries, masked=cut or padded, only_padding=padded and not cut)]

    def _hidden_by_window_and_rows(self) -> tuple[bool, bool]:
        """Return whether window and packed rows hide all keys from all queries, and whether they hide any key."""
        mask, hidden, cut = self.mask, False, False
        if mask.window is not None:
            hidden = self.q_start - (self.k_stop - 1) >= mask.window
            cut = self.q_stop - 1 - self.k_start >= mask.window
        if mask.first_visible_key is not None:
            first = mask.first_visible_key[:, self.q_start : self.q_stop]
            hidden = hidden or int(first.min()) >= self.k_stop
            cut = cut or int(first.max()) > self.k_start
        return hidden, cut

    def _segments_from_fields(self) -> list[Segment]:
        rows = self.mask.query_ranges
        return [
            segment
            for row, found in enumerate(rows)
            for start, stop, stretch in overlapping_runs(found, self.q_start, self.q_stop)
            for segment in self._segments_of_stretch(row if len(rows) > 1 else None, start, stop, stretch)
        ]

    def _branch_segments(self, table: BranchTable) -> list[Segment]:
        mask = self.mask
        plain = mask.function is None and mask.causal and mask.first_visible_key is None
        of_part = self._segments_of_branch if plain else self._masked_segments_of_branch
        return [
            segment for found in overlapping_runs(table.parts, self.q_start, self.q_stop) for segment in of_part(*found)
        ]

    def _segments_of_branch(self, start: int, stop: int, part: Branch) -> list[Segment]:
        segments = []
        for run_start, run_stop, shift in part.row_ranges[:-1]:
            first = first_common = run_start
            if self.mask.window is not None:
                offset = shift - part.shift - self.mask.window + 1  # from a query's place to the place of its first key
                first = min(max(first, start + offset), run_stop)
                first_common = min(max(first, stop - 1 + offset), run_stop)
            segments.append(self._make_segment(None, (start, stop), (first, first_common), masked=True))
            segments.append(self._make_segment(None, (start, stop), (first_common, run_stop)))
        own_segments = self._segments_of_stretch(
            None, start, stop, QueryRange(part.start, part.stop, part.start, mutual=False)
        )
        return [segment for segment in segments if segment.stop > segment.start] + own_segments

    def _masked_segments_of_branch(self, start: int, stop: int, part: Branch) -> list[Segment]:
        return [
            self._make_segment(None, (start, stop), (key, min(key + MASKED_KEYS, last)), masked=True)
            for first, last in (*part.trunk, (part.start, stop))
            for key in range(first, last, MASKED_KEYS)
        ]

    def _segments_of_stretch(self, row: int | None, start: int, stop: int, stretch: QueryRange) -> list[Segment]:
        first, window, segments = max(self.k_start, stretch.first), self.mask.window, []
        queries = (start, stop)
        end = min(stretch.stop, self.k_stop) if stretch.mutual else stop
        first_common = first  # from this key on, every query sees every key that is not later than the query
        if window is not None:
            first = max(first, start - window + 1)
            limit = start
            if stretch.mutual and self.mask.window_cuts_blocks:
                limit = end
            elif stretch.mutual:
                limit, first = stretch.start, min(first, max(stretch.start, self.k_start))
            first_common = min(max(first, stop - window), max(limit, first))
            segments.append(self._make_segment(row, queries, (first, first_common), masked=True))
        if stretch.mutual or stop - start == 1:
            segments.append(self._make_segment(row, queries, (first_common, end)))
        else:
            narrow = window is not None and stop - start > window
            segments.append(self._make_segment(row, queries, (first_common, start)))
            segments.append(self._make_segment(row, queries, queries, causal=not narrow, masked=narrow))
        return [segment for segment in segments if segment.stop > segment.start]

    def _make_segment(
        self,
        row: int | None,
        queries: tuple[int, int],
        keys: tuple[int, int],
        causal: bool = False,
        masked: bool = False,
    ) -> Segment:
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
        """Return segments that cover the visible keys, found by computing the mask block by block."""
        segments: list[Segment] = []
        queries = (0, self.q_stop - self.q_start)
        for start, stop, uniform in self.mask.examine_key_blocks(self.q_start, self.q_stop, self.k_start, self.k_stop):
            if uniform is False:
                continue
            segment = Segment(start - self.k_start, stop - self.k_start, *queries, masked=uniform is None)
            if segments and segments[-1].stop == segment.start and not segments[-1].masked and not segment.masked:
                segment = Segment(segments.pop().start, segment.stop, *queries)
            segments.append(segment)
        # If no query of a chunk sees any key, one kernel call is still needed to define its (unread) output.
        return segments or [Segment(0, self.k_stop - self.k_start, *queries, masked=True)]

    def segment_mask(self, segment: Segment, queries: slice = slice(None)) -> Tensor:
        """Return the boolean mask ``[B or 1, 1, T or 1, S]`` of a segment, True for visible keys.

        ``queries`` selects queries, counted from the segment's first query. T is 1 if the mask hides only padding, and
        so is equal for all queries. The mask excludes a causal triangle that the kernel itself applies.
        """
        start, stop = self.k_start + segment.start, self.k_start + segment.stop
        first, last, _ = queries.indices(segment.q_stop - segment.q_start)
        base = self.q_start + segment.q_start
        if segment.only_padding:
            assert self.mask.padding is not None
            batch = slice(None) if segment.row is None else slice(segment.row, segment.row + 1)
            return self.mask.padding[batch, None, None, start:stop]
        return self.mask.tile(base + first, base + last, start, stop, segment.row)

    def additive_mask(self, segment: Segment, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask ``[B or 1, 1, T, S]`` of a segment in ``dtype``; None if nothing is masked.

        Hidden keys get a large negative finite number, not -inf. So a query that sees no key in this segment has a
        finite log-sum-exp, and the segment's weight in the merge is exactly zero.
        """
        if not segment.masked:
            return None
        allowed = self.segment_mask(segment)
        bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        bias.masked_fill_(~allowed, score_of_hidden_key(dtype))
        return bias.expand(-1, -1, segment.q_stop - segment.q_start, -1)


def score_of_hidden_key(dtype: torch.dtype) -> float:
    """Return the score of a hidden key: finite, but so low that its softmax weight next to real scores is zero."""
    return torch.finfo(dtype).min / 4


class LazyMask(MaskRules):
    """Attention mask that is never computed as a whole; arguments as for :class:`MaskRules`."""

    def with_shared_prefixes(self, branches: BranchTable) -> LazyMask:
        """Return this mask for rows that share prefixes (``branches``): each row sees the keys that it would see alone.

        Raises:
            UnsupportedModelError: This mask has padding, packed rows or blocks whose tokens see each other.
        """
        alone = self.batch_size == 1 and self.padding is None and self.row_start is None and self.block_start is None
        offsets = (self.q_offset, self.kv_offset, self.q_length, self.kv_length)
        if not alone or offsets != (0, 0, branches.length, branches.length):
            raise UnsupportedModelError(
                "rows cannot share a prefix: this model's attention mask has padding, packed rows or image blocks",
                fix="set share_prefix: never",
            )
        return replace(self, branches=branches)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape ``(B, 1, T, S)`` of this mask as a dense tensor."""
        return (self.batch_size, 1, self.q_length, self.kv_length)

    @property
    def ndim(self) -> int:
        """Number of dimensions, 4, by which models recognise a mask that needs no further preparation."""
        return 4

    def __getitem__(self, key: Any) -> LazyMask:
        """Return this mask for slices that select the whole mask; raise an error for any other index."""
        if not isinstance(key, tuple) or len(key) != 4 or not all(isinstance(part, slice) for part in key):
            raise self._make_error("indexing")
        if any(part.indices(size) != (0, size, 1) for part, size in zip(key, self.shape, strict=True)):
            raise self._make_error("slicing")
        return self

    def view_queries(self, start: int, stop: int) -> MaskView:
        """Return the part of the mask for queries ``[start, stop)``, counted from the first query, and all keys."""
        last = self.kv_offset + self.kv_length
        return MaskView(self, self.q_offset + start, self.q_offset + stop, self.kv_offset, last)

    def view_chunk(self, start: int, stop: int, first_key: int) -> MaskView:
        """Return the part of the mask for queries ``[start, stop)`` and keys from ``first_key`` to the last query.

        ``start`` and ``stop`` count from the mask's first query; ``first_key`` is an absolute position.
        """
        return MaskView(self, self.q_offset + start, self.q_offset + stop, first_key, self.q_offset + stop)

    @classmethod
    def from_dense(cls, allowed_B1TS: Tensor) -> LazyMask:
        """Return a mask with the values of a dense boolean mask, whose last query and last key are the same token."""
        rows, _, queries, keys = allowed_B1TS.shape
        offset = keys - queries

        def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return allowed_B1TS[b % rows, 0, q - offset, k]

        device = allowed_B1TS.device
        return cls(rows, queries, keys, q_offset=offset, causal=False, function=function, device=device)
