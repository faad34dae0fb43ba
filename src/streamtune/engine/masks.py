"""Recognition of the mask functions of ``transformers``, by the closures they are composed of.

``transformers`` composes a mask of small functions of positions. A recognised function becomes a field with which the
lazy mask can compute (causal, window, packed rows, spans, mutual blocks). Any other stays a function, which is always
right but must be evaluated for each query and key. Only exact matches are recognised: ids that are not runs, or parts
in a combination with another meaning, stay a function.

    packed rows          packed_sequence_mask_function(ids), and the mask itself remapped to positions that restart
    spans (Llama 4)      chunked_overlay(size, left padding)
    blocks (images)      or(causal ..., blockwise_overlay(ids)), and Gemma 3's and(or(causal, blockwise), window)
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
    BLOCKS,
    CAUSAL_MASK,
    EITHER,
    EVERY,
    FINDS_PACKED,
    HELD,
    PACKED,
    REMAPPED,
    SPAN,
    WINDOW,
    inside,
    replace_inside,
)
from streamtune.ops.attention.runs import contiguous, run_starts
from streamtune.ops.devices import host_copy, known_host_copy, with_host_copy

_causal_mask_function = inside(CAUSAL_MASK)
_find_packed_sequence_indices = inside(FINDS_PACKED)

Function = Callable[..., Any]

HOST = "cpu"
"""Device of new tensors, named explicitly: a user may have set another default device."""


@dataclass(frozen=True)
class Facts:
    """A mask in the terms of :class:`~streamtune.ops.LazyMask`; the starts are ``[B or 1, T]``."""

    causal: bool = False
    window: int | None = None
    row_start: Tensor | None = None
    span_start: Tensor | None = None
    block_start: Tensor | None = None
    window_cuts_blocks: bool = False
    rest: tuple[Function, ...] = ()

    @property
    def function(self) -> Function | None:
        """Part that the other fields do not express, or None."""
        if len(self.rest) < 2:
            return self.rest[0] if self.rest else None
        return lambda b, h, q, k: reduce(and_, (part(b, h, q, k) for part in self.rest))


class _UnknownError(Exception):
    """The parts are recognised, their combination is not."""


def recognise(function: Function, length: int, device: torch.device) -> Facts:
    """Return the facts of a mask function over ``length`` positions, counted from the start of the sequence.

    Args:
        function: ``(batch, head, query, key) -> bool``.
        length: Length of tensors that follow the sequence.
        device: Device of the starts; each has a copy on the host.
    """
    whole = Facts(rest=(function,))
    try:
        facts = _facts(function, torch.arange(length, device=HOST)[None])
    except _UnknownError:
        return whole
    if not facts.causal:
        return whole  # a window or a span alone also limits how far ahead one sees: leave it to the function
    if facts.block_start is not None and (facts.rest or _splits_blocks(facts)):
        return whole
    found = (facts.row_start, facts.span_start, facts.block_start)
    rows, spans, blocks = (None if x is None else with_host_copy(x, device) for x in found)
    return replace(facts, row_start=rows, span_start=spans, block_start=blocks)


def _facts(function: Function, position_BT: Tensor) -> Facts:
    """Return the facts of a part for positions ``position_BT`` (restarting inside a remap), computed on the host."""
    if function is _causal_mask_function:
        return Facts(causal=True)
    read = _READERS.get(getattr(function, "__qualname__", ""))
    facts = read(function, position_BT) if read is not None else None
    return Facts(rest=(function,)) if facts is None else facts


def _window(function: Function, position_BT: Tensor) -> Facts | None:
    (size,) = _closed(function, WINDOW)
    return Facts(window=size) if isinstance(size, int) else None


def _packed(function: Function, position_BT: Tensor) -> Facts | None:
    (ids,) = _closed(function, PACKED)
    return Facts(row_start=run_starts(host_copy(ids))) if _are_runs(ids, position_BT) else None


def _span(function: Function, position_BT: Tensor) -> Facts | None:
    size, left = _closed(function, SPAN)
    if not isinstance(size, int) or not isinstance(left, Tensor):
        return None
    rows = max(left.shape[0], position_BT.shape[0])
    ids = (position_BT.expand(rows, -1) - host_copy(left)[:, None]).div(size, rounding_mode="floor")
    return Facts(span_start=run_starts(ids))


def _block(function: Function, position_BT: Tensor) -> Facts | None:
    """Return a part's blocks, for :func:`_either`: they have a meaning only in an or with a causal mask."""
    (ids,) = _closed(function, BLOCKS)
    if not _are_runs(ids, position_BT):
        return None
    ids = host_copy(ids)
    positions = torch.arange(ids.shape[1], device=HOST)
    return Facts(block_start=torch.where(ids >= 0, run_starts(ids), positions))


def _every(function: Function, position_BT: Tensor) -> Facts | None:
    (parts,) = _closed(function, EVERY)
    if not parts:
        return None
    facts = Facts()
    remaps = [part for part in parts if _is_remap(part) or _either_remapped(part)]
    for part in parts:
        if part not in remaps:
            facts = _joined(facts, _facts(part, position_BT))
    for part in remaps:
        within = _remapped(part, facts.row_start) if _is_remap(part) else _either(part, position_BT, facts.row_start)
        facts = _joined(facts, within or Facts(rest=(part,)))
    return facts


def _either_remapped(function: Function) -> bool:
    """Return True for ``or_masks`` of a remap and others, which is joined with the packed rows since 5.24."""
    if getattr(function, "__qualname__", "") != EITHER:
        return False
    (parts,) = _closed(function, EITHER)
    return bool(parts) and _is_remap(parts[0])


def _either(function: Function, position_BT: Tensor, row_start: Tensor | None = None) -> Facts | None:
    """Return the facts of ``or_masks`` of a causal mask and blocks (in rows ``row_start``); None for other parts."""
    (held,) = _closed(function, EITHER)
    parts: Any = held or ()
    if len(parts) != 2 or getattr(parts[1], "__qualname__", "") != BLOCKS:
        return None
    first = parts[0]
    base = _remapped(first, row_start) if _is_remap(first) else _facts(first, position_BT)
    blocks = _block(parts[1], position_BT)
    if blocks is None or not base.causal or base.block_start is not None or base.rest:
        return None
    return replace(base, block_start=blocks.block_start)


def _remapped(function: Function, row_start: Tensor | None) -> Facts:
    """Return the facts of a mask of positions that restart; within a packed row they differ by as much as places do."""
    inner, positions = _closed(function, REMAPPED)
    opaque = Facts(rest=(function,))
    if row_start is None or not isinstance(positions, Tensor) or positions.shape[1] != row_start.shape[1]:
        return opaque
    positions = host_copy(positions)
    places = torch.arange(positions.shape[1], device=HOST)
    restarts = (positions.diff(dim=1) != 1) & (row_start[:, 1:] != places[1:])
    if bool(restarts.any()):
        return opaque
    facts = _facts(inner, positions)
    if facts.rest or facts.row_start is not None or facts.block_start is not None:
        # Known or not, its positions are not places. That it is causal is true of both.
        return replace(opaque, causal=facts.causal and facts.block_start is None)
    return facts


def _joined(one: Facts, other: Facts) -> Facts:
    """Return the facts of a mask that allows what two masks both allow."""
    if (one.block_start is not None and other.causal) or (other.block_start is not None and one.causal):
        raise _UnknownError
    windows = [window for window in (one.window, other.window) if window is not None]
    blocks = one.block_start if one.block_start is not None else other.block_start
    outside = other if one.block_start is not None else one  # of the or that admits the blocks
    inside = one if one.block_start is not None else other
    if blocks is not None and inside.window is not None and outside.window is not None:
        raise _UnknownError
    return Facts(
        causal=one.causal or other.causal,
        window=min(windows, default=None),
        row_start=_later(one.row_start, other.row_start),
        span_start=_later(one.span_start, other.span_start),
        block_start=blocks,
        window_cuts_blocks=blocks is not None and (inside.window_cuts_blocks or outside.window is not None),
        rest=(*one.rest, *other.rest),
    )


def _later(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return torch.maximum(one, other)


def _splits_blocks(facts: Facts) -> bool:
    """Return True if a row or span starts inside a block."""
    starts, blocks = (facts.row_start, facts.span_start), facts.block_start
    return any(bool((start > blocks).any()) for start in starts if start is not None and blocks is not None)


def _are_runs(ids: Any, position_BT: Tensor) -> bool:
    """Return True if these are ids of the places ``position_BT`` counts, and each but the negative ones is one run."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != position_BT.shape[1]:
        return False
    places = torch.arange(ids.shape[1], device=HOST)
    return bool((position_BT == places).all()) and contiguous(host_copy(ids))


def _is_remap(function: Function) -> bool:
    return getattr(function, "__qualname__", "") == REMAPPED


def _closed(function: Function, kind: str) -> tuple[Any, ...]:
    """Return the values of the variables that a closure of a kind holds, None for each that it does not hold."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    held = dict(zip(names, (cell.cell_contents for cell in getattr(function, "__closure__", None) or ()), strict=True))
    return tuple(held.get(name) for name in HELD[kind])


_READERS: dict[str, Callable[[Function, Tensor], Facts | None]] = {
    EVERY: _every,
    EITHER: _either,
    WINDOW: _window,
    SPAN: _span,
    PACKED: _packed,
}
"""By the qualified name of the closure: these are local functions of ``transformers.masking_utils``."""


@wraps(_find_packed_sequence_indices)
def _found_on_the_host(position_ids: Tensor) -> Tensor | None:
    """Return what ``transformers`` finds, by the copy of the positions that a streamed call has made of them.

    It reads a tensor of the device, and so would :func:`recognise`. Without a copy nothing is changed.
    """
    copy = None if torch.compiler.is_compiling() else known_host_copy(position_ids)
    if copy is None:
        return _find_packed_sequence_indices(position_ids)
    ids = _find_packed_sequence_indices(copy)
    return None if ids is None else with_host_copy(ids, position_ids.device)


replace_inside(FINDS_PACKED, _found_on_the_host)
