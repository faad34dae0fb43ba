"""Rules of an attention mask as functions of positions, from which parts (tiles) of the mask are computed when needed.

Shape suffixes: B batch, T queries of the tile, S keys of the tile. Positions are absolute: query ``q`` and key ``k``
count tokens from the start of the sequence, whatever part of the sequence the caller has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

# Private in torch; transformers' mask functions and torch's flex_attention are vectorised with it.
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.runs import Branch, BranchTable, QueryRange, overlapping_runs, split_into_stretches
from streamtune.ops.devices import host_copy, to_device_with_host_copy

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function ``(batch, head, query, key) -> bool`` of index tensors that broadcast; True if the query sees the key."""

KEY_BLOCK = 2048
"""Number of keys per tile when an arbitrary mask function is evaluated; a tile has T x KEY_BLOCK bytes per row."""


class NeedsMaskTensorError(UnsupportedModelError):
    """Error: an attention layer needs a mask tensor, so only the layer's own code can compute its attention."""


class _MaskIsNoTensorError(NeedsMaskTensorError, AttributeError): ...


class MaskPlaceholder:
    """Placeholder for a mask tensor: layers may pass it to an attention function; computing with it raises an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._make_error(name)

    def __getitem__(self, key: Any) -> Any:
        raise self._make_error("indexing")

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int | float | Tensor):  # Python would return False, and the layer would continue with that
            raise self._make_error("==")
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise cls._make_error(getattr(func, "__name__", str(func)))

    @staticmethod
    def _make_error(operation: str) -> _MaskIsNoTensorError:
        return _MaskIsNoTensorError(
            f"a layer of this model computes with its attention mask ({operation}), but with streaming the mask "
            "is not a tensor",
            fix="train this model without streaming",
        )


@dataclass(eq=False)
class MaskRules(MaskPlaceholder):
    """Rules of an attention mask, from which any part (tile) of the mask can be computed.

    The dense boolean mask ``[B, 1, q_length, kv_length]`` would be::

        seen = (k <= q if causal) & (q - k < window if window) & (same row) & (same span) & function(b, h, q, k)
        (seen | same block) & padding[b, k]

    Args:
        batch_size: Number of batch rows, B.
        q_length, kv_length: Number of queries, number of keys.
        q_offset, kv_offset: Absolute positions of the first query and the first key.
        causal: True if no query sees a later key outside its block.
        window: Number of keys that a query sees, including its own key (sliding window); None means unlimited.
        function: Additional mask function; None if the other fields describe the whole mask.
        padding: Boolean tensor ``[B, >= kv_offset + kv_length]``, False at padding; None without padding.
        vectorize: True if ``function`` accepts only scalars; then ``torch.vmap`` maps it over a tile.
        row_start: Start of each position's packed row ``[B or 1, kv_offset + kv_length]``; needs ``causal``.
        span_start: Start of each position's span in chunked attention (Llama 4), shaped like ``row_start``.
        block_start: Start of each position's block, whose tokens all see each other (an image), shaped like
            ``row_start``. A token outside such blocks is a block of one token.
        window_cuts_blocks: True if the window also hides tokens of the query's block.
        branches: Table of rows that share prefixes. All other fields then refer to positions in a row, and a query sees
            only keys of its own row (:meth:`LazyMask.with_shared_prefixes`).
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int = 0
    kv_offset: int = 0
    causal: bool = True
    window: int | None = None
    function: MaskFunction | None = None
    padding: Tensor | None = None
    vectorize: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    row_start: Tensor | None = None
    span_start: Tensor | None = None
    block_start: Tensor | None = None
    window_cuts_blocks: bool = False
    branches: BranchTable | None = None

    def __post_init__(self) -> None:
        # Segments of views, cached because layers share a mask, and forward and backward both need them.
        self._segments: dict[tuple[int, int, int, int], list[Any]] = {}
        if self.padding is not None and bool(host_copy(self.padding).all()):
            self.padding = None
        assert self.causal or (self.row_start is self.span_start is self.block_start is None)

    @cached_property
    def unpadded_keys(self) -> tuple[int, int]:
        """Range ``[start, stop)`` of keys that are not padding in any batch row; empty if padding is between tokens."""
        runs = self._unpadded_rows
        return max(start for start, _ in runs), min(stop for _, stop in runs)

    @cached_property
    def _unpadded_rows(self) -> list[tuple[int, int]]:
        if self.padding is None:
            return [(0, self.kv_offset + self.kv_length)]
        padding = host_copy(self.padding)
        valid = padding.int()
        starts, lengths = valid.argmax(dim=1), valid.sum(dim=1)
        positions = torch.arange(valid.shape[1], device=valid.device)
        one_run = (positions >= starts[:, None]) & (positions < (starts + lengths)[:, None])
        if not torch.equal(one_run, padding):
            return [(0, 0)] * valid.shape[0]
        return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))

    def is_padded(self, row: int | None, k_start: int, k_stop: int) -> bool:
        """Return True if keys ``[k_start, k_stop)`` may include padding in batch row ``row`` (None: in any row)."""
        if self.padding is None:
            return False
        start, stop = self.unpadded_keys if row is None else self._unpadded_rows[row]
        return not (start <= k_start and k_stop <= stop)

    @property
    def sees_future(self) -> bool:
        """True if any query sees a later key. An arbitrary mask function is evaluated once, tile by tile."""
        return self.allowed_cuts is not None and len(self.allowed_cuts) <= self.q_length

    @cached_property
    def allowed_cuts(self) -> list[int] | None:
        """Sorted indices of queries at which the sequence may be divided into chunks; None means anywhere.

        Index b is allowed if no query before b sees a key at b or later. The last index, ``q_length``, is missing if a
        query sees keys after the last query.
        """
        if self.block_start is None and self.causal:
            return None
        last = self._last_key_by_block() if self.block_start is not None else self._last_key_by_tiles()
        furthest = last.cummax(dim=0).values - self.q_offset
        allowed = furthest < torch.arange(1, self.q_length + 1, device=furthest.device)
        return [0, *(allowed.nonzero().flatten() + 1).tolist()]

    def _last_key_by_block(self) -> Tensor:
        assert self.block_start is not None
        length = self.block_start.shape[1]
        own = torch.arange(length, device=self.device).expand_as(self.block_start)
        ends = torch.zeros_like(self.block_start).scatter_reduce(1, self.block_start, own, "amax")
        last = ends.gather(1, self.block_start).amax(dim=0)
        return last[self.q_offset : self.q_offset + self.q_length]

    def _last_key_by_tiles(self) -> Tensor:
        last = torch.arange(self.q_offset, self.q_offset + self.q_length, device=self.device)
        end = self.kv_offset + self.kv_length
        for start in range(self.q_offset, self.q_offset + self.q_length, KEY_BLOCK):
            stop = min(start + KEY_BLOCK, self.q_offset + self.q_length)
            rows = slice(start - self.q_offset, stop - self.q_offset)
            for k_start in range(start, end, KEY_BLOCK):
                k_stop = min(k_start + KEY_BLOCK, end)
                k = torch.arange(k_start, k_stop, device=self.device)
                seen = self.tile(start, stop, k_start, k_stop).flatten(0, 1).any(0)
                last[rows] = torch.maximum(last[rows], k.masked_fill(~seen, -1).amax(dim=1))
        return last

    @cached_property
    def row_starts(self) -> list[int]:
        """Starts of the packed rows in all sequences of the batch, ascending; ``[0]`` without packing."""
        return [0] if self.row_start is None else [int(start) for start in host_copy(self.row_start).unique().tolist()]

    @cached_property
    def first_visible_key(self) -> Tensor | None:
        """First key that each query may see within its packed row and span, ``[B or 1, T]``; None if 0 for all."""
        starts = [start for start in (self.row_start, self.span_start) if start is not None]
        if len(starts) < 2:
            return starts[0] if starts else None
        return to_device_with_host_copy(torch.maximum(*map(host_copy, starts)), self.device)

    @cached_property
    def query_ranges(self) -> list[list[QueryRange]]:
        """Per batch row: ranges of queries with the same first visible key and block. One list if rows are equal."""
        length = self.kv_offset + self.kv_length
        if self.first_visible_key is None and self.block_start is None:
            return [[QueryRange(0, max(length, self.q_offset + self.q_length), 0, mutual=False)]]
        seen, block_start = self.first_visible_key, self.block_start
        first = torch.zeros(1, length, dtype=torch.long, device="cpu") if seen is None else host_copy(seen)
        blocks = None if block_start is None else host_copy(block_start)
        rows = max(first.shape[0], 1 if blocks is None else blocks.shape[0])
        return split_into_stretches(first.expand(rows, -1), None if blocks is None else blocks.expand(rows, -1))

    def first_key(self, q_start: int) -> int:
        """Return the first key that any query from ``q_start`` on can see."""
        if self.branches is not None:
            return self._first_visible_key_of_branch(self.branches.part_at(q_start), q_start)
        first = self.kv_offset
        if self.first_visible_key is not None:
            found = [overlapping_runs(row, q_start, q_start + 1) for row in self.query_ranges]
            first = max(first, min((row[0][2].first for row in found if row), default=first))
        return first if self.window is None else max(first, q_start - self.window + 1)

    def _first_visible_key_of_branch(self, part: Branch, q_start: int) -> int:
        if self.window is None:
            return part.row_start
        first = part.index_at_position(max(0, q_start - part.shift - self.window + 1))
        assert self.branches is not None
        for later in self.branches.parts[self.branches.part_index_at(q_start) + 1 :]:
            if later.row_start != part.row_start:
                break
            first = min(first, later.index_at_position(max(0, later.trunk_length - self.window + 1)))
        return first

    @cached_property
    def branch_tensors(self) -> tuple[Tensor, Tensor]:
        """``positions`` and ``bounds`` of ``branches`` (:class:`BranchTable`), on the device of the mask."""
        assert self.branches is not None
        return self.branches.positions.to(self.device), self.branches.bounds.to(self.device)

    def tile(self, q_start: int, q_stop: int, k_start: int, k_stop: int, row: int | None = None) -> Tensor:
        """Return a tile ``[B or 1, 1, T, S]`` of the mask, True if a query sees a key; ``row`` selects a batch row."""
        q = torch.arange(q_start, q_stop, device=self.device)[None, None, :, None]
        k = torch.arange(k_start, k_stop, device=self.device)[None, None, None, :]
        batch = slice(None) if row is None else slice(row, row + 1)
        allowed = torch.ones(1, 1, q_stop - q_start, k_stop - k_start, dtype=torch.bool, device=self.device)
        if self.branches is not None:
            positions, (part, *trunk) = self.branch_tensors
            allowed = (k >= part[q]) & (k <= q)
            for start, stop in zip(trunk[::2], trunk[1::2], strict=True):
                allowed = allowed | ((k >= start[q]) & (k < stop[q]))
            q, k = positions[q], positions[k]
        if self.causal:
            allowed = allowed & (k <= q)
        near = None if self.window is None else q - k < self.window
        if near is not None:
            allowed = allowed & near
        if self.first_visible_key is not None:
            allowed = allowed & (k >= _select_batch_rows(self.first_visible_key, batch)[:, None, q.flatten(), None])
        if self.function is not None:
            evaluated = self._evaluate_function(q.flatten(), k.flatten())
            allowed = allowed & (evaluated[batch] if evaluated.shape[0] > 1 else evaluated)
        if self.block_start is not None:
            block = _select_batch_rows(self.block_start, batch)[:, None]
            mutual = block[..., q_start:q_stop, None] == block[..., None, k_start:k_stop]
            allowed = allowed | (mutual & near if near is not None and self.window_cuts_blocks else mutual)
        if self.padding is not None:
            allowed = allowed & self.padding[batch, None, None, k_start:k_stop]
        return allowed

    def _evaluate_function(self, q_T: Tensor, k_S: Tensor) -> Tensor:
        assert self.function is not None
        b, h = torch.arange(self.batch_size, device=self.device), torch.zeros(1, dtype=torch.long, device=self.device)
        if not self.vectorize:
            return self.function(b[:, None, None, None], h[:, None, None], q_T[:, None], k_S)
        mapped = self.function
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            mapped = torch.vmap(mapped, in_dims=dims, out_dims=0)
        with TransformGetItemToIndex():  # without it, vmap cannot index a tensor, such as blocks, by a mapped scalar
            return mapped(b, h, q_T, k_S)

    def examine_key_blocks(
        self, q_start: int, q_stop: int, k_start: int, k_stop: int
    ) -> Iterator[tuple[int, int, bool | None]]:
        """Yield (start, stop, visible) for blocks of keys; ``visible`` is None if only some keys are visible."""
        for start in range(k_start, k_stop, KEY_BLOCK):
            stop = min(start + KEY_BLOCK, k_stop)
            tile = self.tile(q_start, q_stop, start, stop)
            yield start, stop, True if bool(tile.all()) else (None if bool(tile.any()) else False)


def _select_batch_rows(starts_BT: Tensor, batch: slice) -> Tensor:
    return starts_BT if starts_BT.shape[0] == 1 else starts_BT[batch]
