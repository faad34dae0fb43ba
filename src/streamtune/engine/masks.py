"""Recognises the mask functions of ``transformers`` by the closures they consist of.

``transformers`` composes a mask from small functions of positions. A recognised function becomes a field of the
``LazyMask``: causal, window, packed rows, spans, or blocks. With these fields the mask can skip whole tiles. Other
functions are called for each query and key, which is exact but slower. Only exact matches are recognised. A function
with ids that are not contiguous, or with a combination of another meaning, stays a function.

    packed rows          packed_sequence_mask_function(ids), and the mask itself remapped to positions that restart
    spans (Llama 4)      chunked_overlay(size, left padding): a token sees only its own span of tokens
    blocks (images)      or(causal ..., blockwise_overlay(ids)), and Gemma 3's and(or(causal, blockwise), window):
                         the tokens of a block see each other in both directions
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce, wraps
from operator import and_
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.hf_names import (
    AND_MASKS,
    BLOCKS,
    CAUSAL_MASK,
    CLOSURE_VARIABLES,
    FINDS_PACKED,
    OR_MASKS,
    PACKED,
    REMAPPED,
    SPAN,
    WINDOW,
    hf_internal,
    replace_internal,
)
from streamtune.ops.attention.runs import has_adjacent_ids, run_starts
from streamtune.ops.devices import cached_host_copy, host_copy, to_device_with_host_copy

_causal_mask_function = hf_internal(CAUSAL_MASK)
_find_packed_sequence_indices = hf_internal(FINDS_PACKED)

Function = Callable[..., Any]

HOST = "cpu"
"""Device of new tensors, named explicitly: a user may have set another default device."""


@dataclass(frozen=True)
class ParsedMask:
    """A recognised attention mask, with the fields of :class:`~streamtune.ops.LazyMask`.

    The fields ``row_start``, ``span_start`` and ``block_start`` have the shape ``[B, T]`` or ``[1, T]``.
    """

    causal: bool = False
    window: int | None = None
    row_start: Tensor | None = None
    span_start: Tensor | None = None
    block_start: Tensor | None = None
    window_cuts_blocks: bool = False
    rest: tuple[Function, ...] = ()

    @property
    def function(self) -> Function | None:
        """Mask function for the parts that no other field expresses; None if there are none."""
        if len(self.rest) < 2:
            return self.rest[0] if self.rest else None
        return lambda b, h, q, k: reduce(and_, (part(b, h, q, k) for part in self.rest))


class _UnknownCombinationError(Exception): ...


def recognise_mask(function: Function, length: int, device: torch.device) -> ParsedMask:
    """Return the properties of a ``transformers`` mask function; parts that are not recognised stay functions.

    Args:
        function: Mask function ``(batch, head, query, key) -> bool``.
        length: Number of positions.
        device: Device of the returned tensors; each also has a copy on the host.
    """
    unrecognised = ParsedMask(rest=(function,))
    try:
        parsed = _detect_mask(function, torch.arange(length, device=HOST)[None])
    except _UnknownCombinationError:
        return unrecognised
    if not parsed.causal:
        return unrecognised  # a window or span without causality also limits later keys: leave it to the function
    if parsed.block_start is not None and (parsed.rest or _has_start_inside_block(parsed)):
        return unrecognised
    starts = (parsed.row_start, parsed.span_start, parsed.block_start)
    rows, spans, blocks = (None if x is None else to_device_with_host_copy(x, device) for x in starts)
    return replace(parsed, row_start=rows, span_start=spans, block_start=blocks)


def _detect_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask:
    if mask_function is _causal_mask_function:
        return ParsedMask(causal=True)
    detect = _DETECTORS.get(getattr(mask_function, "__qualname__", ""))
    parsed = detect(mask_function, position_BT) if detect is not None else None
    return ParsedMask(rest=(mask_function,)) if parsed is None else parsed


def _detect_window_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask | None:
    (size,) = _captured_variables(mask_function, WINDOW)
    return ParsedMask(window=size) if isinstance(size, int) else None


def _detect_packed_rows_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask | None:
    (ids,) = _captured_variables(mask_function, PACKED)
    return ParsedMask(row_start=run_starts(host_copy(ids))) if _are_contiguous_runs(ids, position_BT) else None


def _detect_span_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask | None:
    size, left = _captured_variables(mask_function, SPAN)
    if not isinstance(size, int) or not isinstance(left, Tensor):
        return None
    rows = max(left.shape[0], position_BT.shape[0])
    ids = (position_BT.expand(rows, -1) - host_copy(left)[:, None]).div(size, rounding_mode="floor")
    return ParsedMask(span_start=run_starts(ids))


def _detect_block_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask | None:
    """Return the blocks of a blockwise mask, to be combined by ``or`` with a causal mask; None if not contiguous."""
    (ids,) = _captured_variables(mask_function, BLOCKS)
    if not _are_contiguous_runs(ids, position_BT):
        return None
    ids = host_copy(ids)
    positions = torch.arange(ids.shape[1], device=HOST)
    return ParsedMask(block_start=torch.where(ids >= 0, run_starts(ids), positions))


def _detect_and_mask(mask_function: Function, position_BT: Tensor) -> ParsedMask | None:
    (parts,) = _captured_variables(mask_function, AND_MASKS)
    if not parts:
        return None
    parsed = ParsedMask()
    remaps = [part for part in parts if _is_remapped_mask(part) or _is_or_of_remapped_mask(part)]
    for part in parts:
        if part not in remaps:
            parsed = _intersect_masks(parsed, _detect_mask(part, position_BT))
    for part in remaps:
        within = (
            _detect_remapped_mask(part, parsed.row_start)
            if _is_remapped_mask(part)
            else _detect_or_mask(part, position_BT, parsed.row_start)
        )
        parsed = _intersect_masks(parsed, within or ParsedMask(rest=(part,)))
    return parsed


def _is_or_of_remapped_mask(function: Function) -> bool:
    if getattr(function, "__qualname__", "") != OR_MASKS:
        return False
    (parts,) = _captured_variables(function, OR_MASKS)
    return bool(parts) and _is_remapped_mask(parts[0])


def _detect_or_mask(mask_function: Function, position_BT: Tensor, row_start: Tensor | None = None) -> ParsedMask | None:
    """Return the properties of ``or_masks(causal mask, blocks)`` in the rows ``row_start``; None for other masks."""
    (parts_held,) = _captured_variables(mask_function, OR_MASKS)
    parts: Any = parts_held or ()
    if len(parts) != 2 or getattr(parts[1], "__qualname__", "") != BLOCKS:
        return None
    first = parts[0]
    base = _detect_remapped_mask(first, row_start) if _is_remapped_mask(first) else _detect_mask(first, position_BT)
    blocks = _detect_block_mask(parts[1], position_BT)
    if blocks is None or not base.causal or base.block_start is not None or base.rest:
        return None
    return replace(base, block_start=blocks.block_start)


def _detect_remapped_mask(mask_function: Function, row_start: Tensor | None) -> ParsedMask:
    """Return the properties of a mask of positions that restart in each row.

    The mask is recognised if positions restart only where packed rows begin. Then two positions in a row differ by as
    much as their indices in the sequence. Blocks (images) are those at the tokens' indices. In Gemma 3's windows,
    ``transformers`` 5.24 takes those at the tokens' positions: blocks of the first row.
    """
    inner, positions = _captured_variables(mask_function, REMAPPED)
    opaque = ParsedMask(rest=(mask_function,))
    if row_start is None or not isinstance(positions, Tensor) or positions.shape[1] != row_start.shape[1]:
        return opaque
    positions = host_copy(positions)
    places = torch.arange(positions.shape[1], device=HOST)
    restarts = (positions.diff(dim=1) != 1) & (row_start[:, 1:] != places[1:])
    if bool(restarts.any()):
        return opaque
    parsed = _detect_mask(inner, positions)
    if parsed.rest:
        by_index = _detect_mask(inner, places[None])
        if by_index.block_start is not None and not by_index.rest and by_index.span_start is None:
            return by_index
    if parsed.rest or parsed.row_start is not None or parsed.block_start is not None:
        # The inner mask refers to positions, not to places in the sequence. Causality is the same for both.
        return replace(opaque, causal=parsed.causal and parsed.block_start is None)
    return parsed


def _intersect_masks(mask: ParsedMask, other: ParsedMask) -> ParsedMask:
    if (mask.block_start is not None and other.causal) or (other.block_start is not None and mask.causal):
        raise _UnknownCombinationError
    windows = [window for window in (mask.window, other.window) if window is not None]
    blocks = mask.block_start if mask.block_start is not None else other.block_start
    without_blocks = other if mask.block_start is not None else mask  # the mask outside the ``or`` with the blocks
    with_blocks = mask if mask.block_start is not None else other
    if blocks is not None and with_blocks.window is not None and without_blocks.window is not None:
        raise _UnknownCombinationError
    rows = _elementwise_later_start(mask.row_start, other.row_start)
    return ParsedMask(
        causal=mask.causal or other.causal,
        window=min(windows, default=None),
        row_start=rows,
        span_start=_elementwise_later_start(mask.span_start, other.span_start),
        block_start=None if blocks is None else _elementwise_later_start(blocks, rows),  # a block ends with its row
        window_cuts_blocks=blocks is not None and (with_blocks.window_cuts_blocks or without_blocks.window is not None),
        rest=(*mask.rest, *other.rest),
    )


def _elementwise_later_start(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return torch.maximum(first, second)


def _has_start_inside_block(parsed: ParsedMask) -> bool:
    starts, blocks = (parsed.row_start, parsed.span_start), parsed.block_start
    return any(bool((start > blocks).any()) for start in starts if start is not None and blocks is not None)


def _are_contiguous_runs(ids: Any, position_BT: Tensor) -> bool:
    """Return True if ``ids`` ``[B, T]`` has one id per token, and the tokens of each non-negative id are contiguous."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != position_BT.shape[1]:
        return False
    places = torch.arange(ids.shape[1], device=HOST)
    return bool((position_BT == places).all()) and has_adjacent_ids(host_copy(ids))


def _is_remapped_mask(function: Function) -> bool:
    return getattr(function, "__qualname__", "") == REMAPPED


def _captured_variables(function: Function, function_kind: str) -> tuple[Any, ...]:
    """Return the variables that a mask closure captured, in the order of ``CLOSURE_VARIABLES``;
    None for a missing one.
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ()), strict=True))
    return tuple(held.get(name) for name in CLOSURE_VARIABLES[function_kind])


_DETECTORS: dict[str, Callable[[Function, Tensor], ParsedMask | None]] = {
    AND_MASKS: _detect_and_mask,
    OR_MASKS: _detect_or_mask,
    WINDOW: _detect_window_mask,
    SPAN: _detect_span_mask,
    PACKED: _detect_packed_rows_mask,
}
"""Detectors of mask closures, by qualified name; the closures are local functions of ``transformers.masking_utils``."""


@wraps(_find_packed_sequence_indices)
def _find_packed_on_host(position_ids: Tensor) -> Tensor | None:
    """Return the result of ``find_packed_sequence_indices``, computed from the host's copy of the positions.

    The original function reads a device tensor, which waits for the device. It is called if there is no copy on the
    host.
    """
    copy = None if torch.compiler.is_compiling() else cached_host_copy(position_ids)
    if copy is None:
        return _find_packed_sequence_indices(position_ids)
    ids = _find_packed_sequence_indices(copy)
    return None if ids is None else to_device_with_host_copy(ids, position_ids.device)


replace_internal(FINDS_PACKED, _find_packed_on_host)
