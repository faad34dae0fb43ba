"""Kernels that compute a whole chunk's attention in one call, instead of several for the segments of its mask.

    BandView    A causal chunk over its prefix, with or without a sliding window: flash attention, whose causal triangle
                ends at the last query and the last key.
    RowsView    Packed rows of a chunk: variable-length flash attention. The kernel takes the tokens of all rows one
                after another, and the starts of each row's queries and keys. Each row is causal, with its last query at
                its last key. The first row may have started before the chunk and then has more keys than queries; all
                others have equally many.
    FlexView    Softcap, padding, blocks and arbitrary mask functions: compiled ``flex_attention``, which skips blocks
                of keys that no query sees.

The forward returns the log-sum-exp of the view. The backward also accepts another log-sum-exp, because sinks add a key
that is not in the view.
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from streamtune.ops.attention.flex import FlexView, flex_is_right
from streamtune.ops.attention.kernel_blocks import merged
from streamtune.ops.attention.kernel_trial import (
    RUNS,
    Grads,
    ScoreRule,
    Scores,
    TrialHeads,
    ViewKernel,
    call_kernel,
    drawn,
    whole_agrees,
)
from streamtune.ops.attention.kernels import active_flash, flash_kernel
from streamtune.ops.attention.mask import LazyMask, MaskView
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.attention.runs import clipped
from streamtune.ops.devices import MAX_ELEMENTS, median_time

log = logging.getLogger(__name__)
R = TypeVar("R")
Bounds = tuple[int, ...]

_on_device: WeakKeyDictionary[MaskRules, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()
"""Device tensors by mask: the starts of all rows, with the key ``()``, and the bounds made from them.

They are cached because layers share a mask, and the backward needs them again.
"""


@dataclass(frozen=True)
class _FlashView:
    """Flash attention over the keys ``[first, stop)`` of a view; the last query is at the last of these keys.

    Args:
        first, stop: Range of keys, counted from the view's first key.
        window: Number of keys that a query sees, its own included; None means all (of its row).
        scale: Factor of the scores.
    """

    first: int
    stop: int
    window: int | None
    scale: float

    def _options(self) -> dict[str, Any]:
        if self.window is None:
            return {"scale": self.scale}
        return {"scale": self.scale, "window_size_left": self.window - 1, "window_size_right": 0}

    def _seen(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.stop]

    def _placed(self, grad: Tensor, like: Tensor) -> Tensor:
        """Return the gradient in the shape of ``like``, with zeros for keys that no query sees."""
        if grad.shape == like.shape:
            return grad
        whole = torch.zeros_like(like)
        whole[:, :, self.first : self.stop] = grad
        return whole


@dataclass(frozen=True)
class BandView(_FlashView):
    """Attention of a causal chunk: each query sees the keys up to its own token."""

    name = "cuda-flash, whole chunk"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Implement ``ViewKernel.forward``."""
        q, k, v = (x.transpose(1, 2) for x in (q, self._seen(k), self._seen(v)))
        o, lse, *_ = call_kernel(
            torch.ops.aten._flash_attention_forward,
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, **self._options(),
        )  # fmt: skip
        return o.transpose(1, 2), lse

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Implement ``ViewKernel.backward``."""
        grad_o, q, k_seen, v_seen, o = (x.transpose(1, 2) for x in (grad_o, q, self._seen(k), self._seen(v), o))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
        grads = call_kernel(
            torch.ops.aten._flash_attention_backward,
            grad_o, q, k_seen, v_seen, o, lse.contiguous(), None, None, q.shape[1], k_seen.shape[1], 0.0, True, unused,
            unused, **self._options(),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, self._placed(grad_k, k), self._placed(grad_v, v)


@dataclass(frozen=True)
class RowsView(_FlashView):
    """Attention of the packed rows of a chunk.

    Args:
        queries: Starts of the rows among the queries, then the number of queries.
        keys: Starts of the rows among the keys, then the number of keys.
        origins: Positions of the first query and the first key.
        row: Index of the first row in the mask.
        mask: Mask to which the view belongs.
    """

    queries: Bounds
    keys: Bounds
    origins: tuple[int, int]
    row: int
    mask: MaskRules

    name = "cuda-flash, rows of a chunk"

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Return the bounds of queries and keys on the device, and the length of the longest row of each."""
        longest = [max(stop - start for start, stop in pairwise(bounds)) for bounds in (self.queries, self.keys)]
        made = [
            self._made(bounds, at, device) for bounds, at in zip((self.queries, self.keys), self.origins, strict=True)
        ]
        return made[0], made[1], longest[0], longest[1]

    def _made(self, bounds: Bounds, origin: int, device: torch.device) -> Tensor:
        """Return bounds counted from ``origin``, computed on the device: a copy for each chunk could wait for it."""
        known = _on_device.setdefault(self.mask, {})
        if () not in known:
            stretches = self.mask.stretches[0]
            starts = torch.tensor([*(row.start for row in stretches), stretches[-1].stop], dtype=torch.int32)
            known[()] = starts.to(device, non_blocking=True)
        key = (self.row, len(bounds), origin, bounds[-1])
        if key not in known:
            known[key] = (known[()][self.row : self.row + len(bounds)] - origin).clamp_(0, bounds[-1])
        return known[key]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Implement ``ViewKernel.forward``."""
        q, k, v = (_tokens(x) for x in (q, self._seen(k), self._seen(v)))
        o, lse, *_ = call_kernel(
            torch.ops.aten._flash_attention_forward, q, k, v, *self._rows(q.device), 0.0, True, False, **self._options()
        )
        return o.transpose(0, 1)[None], lse[None]

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Implement ``ViewKernel.backward``."""
        given = [_tokens(x) for x in (grad_o, q, self._seen(k), self._seen(v), o)]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
        grads = call_kernel(
            torch.ops.aten._flash_attention_backward,
            *given, lse[0].contiguous(), *self._rows(q.device), 0.0, True, unused, unused, **self._options(),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x.transpose(0, 1)[None] for x in grads)
        return grad_q, self._placed(grad_k, k), self._placed(grad_v, v)


def _tokens(x: Tensor) -> Tensor:
    """Return ``[1, H, T, D]`` as ``[T, H, D]``."""
    return x[0].transpose(0, 1)


def fused_view_kernel(
    view: MaskView, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, by_formula: bool = True
) -> ViewKernel | None:
    """Return the kernel for a whole view, or None if its segments are to be computed one by one.

    It is None on CPU, with dropout, and if tensors differ in dtype or head size or their addresses exceed 32 bits. It
    is also None if the kernel does not agree with the formula on this device, or if the segments should be as fast.

    Args:
        view, q, k, v: Arguments of ``prefix_attention``.
        rule: Scale, softcap and dropout of the scores.
        by_formula: True if some segment has no kernel. If each has one, segments need less memory (for the gradient
            of a prefix). They are also as fast, except with a window, which needs a mask, and for many short rows.
    """
    scale, softcap = rule.scale, rule.softcap
    if not q.is_cuda or rule.dropout > 0 or not _alike(q, k, v) or _extent(q, k, v) > MAX_ELEMENTS:
        return None
    heads = TrialHeads(q.shape[1], k.shape[1], q.shape[-1])
    windowed, segments = view.mask.window is not None, view.segments()
    if softcap is None and (by_formula or windowed) and (band := band_of(view, scale)) is not None:
        problem = (q.device.index or 0, q.dtype, heads, windowed)
        return band if _band_is_chosen(*problem, active_flash()) else None
    many = len(segments) > MAX_SEGMENTS
    if softcap is None and (by_formula or windowed or many) and (rows := rows_of(view, scale)) is not None:
        near = windowed or rows.stop - rows.first <= MAX_KEYS_PER_QUERY * q.shape[2]
        if near and rows_are_right(q.device, q.dtype, heads.size, windowed, active_flash()):
            return rows
    if not by_formula or (softcap is None and not many and not any(segment.masked for segment in segments)):
        return None
    flex = FlexView(view, scale, softcap)
    return flex if flex_is_right(q.device, q.dtype, heads, softcap is not None) else None


def attend_whole(
    kernel: ViewKernel, q: Tensor, k: Tensor, v: Tensor, for_backward: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the result of ``kernel.forward``; None if the kernel fails or failed before: segments are used then."""
    return _attempt(kernel, lambda: kernel.forward(q, k, v, for_backward))


def backward_whole(kernel: ViewKernel, grad_o: Tensor, *saved: Tensor) -> Grads | None:
    """Return the result of ``kernel.backward``; None if the kernel fails or failed before.

    The segments can then use the output and log-sum-exp of the kernel's forward.
    """
    return _attempt(kernel, lambda: kernel.backward(grad_o, *saved))


_given_up: set[str] = set()


def _attempt(kernel: ViewKernel, run: Callable[[], R]) -> R | None:
    """Return the result of ``run``; None, with a warning, if the kernel fails, as one compiled per shape may.

    A failed kernel is not used again. Out-of-memory and device errors are raised.
    """
    if kernel.name in _given_up:
        return None
    try:
        return run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        _given_up.add(kernel.name)
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"attention by {kernel.name} failed and is not used again ({what})", stacklevel=3)
        return None


MAX_SEGMENTS = 4
"""Most segments that are computed one by one, as many as two packed rows have."""
MAX_KEYS_PER_QUERY = 2
"""Most keys per query for which one call of packed rows may compute gradients."""


def band_of(view: MaskView, scale: float) -> BandView | None:
    """Return the view as a single causal band; None if it is not, for example if its queries belong to two rows."""
    mask = view.mask
    if mask.function is not None or not mask.causal or len(mask.stretches) > 1:
        return None
    stretch = next((s for s in mask.stretches[0] if s.start <= view.q_start and view.q_stop <= s.stop), None)
    if stretch is None or stretch.mutual or view.k_stop < view.q_stop:
        return None
    first = max(view.k_start, stretch.first)
    if mask.branches is not None:
        part = mask.branches.at(view.q_start)
        if part.trunk or part.stop < view.q_stop or mask.span_start is not None:
            return None
        first = max(first, part.start)
    if mask.window is not None:
        first = max(first, view.q_start - mask.window + 1)
    if first > view.q_start or mask.is_padded(None, first, view.q_stop):
        return None
    return BandView(first - view.k_start, view.q_stop - view.k_start, mask.window, scale)


def rows_of(view: MaskView, scale: float) -> RowsView | None:
    """Return the view as consecutive causal rows; None if it is not such a view."""
    mask = view.mask
    plain = mask.function is None and mask.causal and mask.branches is None and mask.batch_size == 1
    if not plain or view.k_stop < view.q_stop:
        return None
    found = clipped(mask.stretches[0], view.q_start, view.q_stop)
    if any(row.mutual for *_, row in found) or any(row.first != start for start, _, row in found[1:]):
        return None
    first = max(view.k_start, found[0][2].first)
    if mask.window is not None:
        first = max(first, view.q_start - mask.window + 1)
    if first > view.q_start or mask.is_padded(None, first, view.q_stop):
        return None
    starts = [start for start, *_ in found[1:]]
    row = bisect_right(mask.stretches[0], view.q_start, key=lambda each: each.start) - 1
    queries = (0, *(start - view.q_start for start in starts), view.q_stop - view.q_start)
    keys = (0, *(start - first for start in starts), view.q_stop - first)
    seen, origins = (first - view.k_start, view.q_stop - view.k_start), (view.q_start, first)
    return RowsView(*seen, mask.window, scale, queries, keys, origins, row, mask)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0


def _extent(q: Tensor, *others: Tensor) -> int:
    """Return the largest span of a tensor in memory, or the size of keys repeated for all query heads, in elements."""
    spans = [sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in (q, *others)]
    return max(*spans, q.shape[0] * q.shape[1] * others[0].shape[2] * q.shape[3])


@lru_cache(maxsize=64)
def _band_is_chosen(index: int, dtype: torch.dtype, heads: TrialHeads, windowed: bool, flash: str) -> bool:
    """Return True if the band is right on this device and, without a window, faster than the segments.

    ``flash`` is the active implementation of flash attention; it is an argument only for the cache.
    """
    device = torch.device("cuda", index)
    if dtype not in (torch.float16, torch.bfloat16) or heads.size > 256:
        return False
    right = band_is_right(device, dtype, heads.size, windowed)
    chosen = right and (windowed or _band_is_faster(device, dtype, heads))
    problem = f"{dtype}, {heads.queries} heads of {heads.size} ({heads.groups} for keys)"
    log.info("a chunk%s, %s: %s", " in a window" if windowed else "", problem, BandView.name if chosen else "segments")
    return chosen


def band_is_right(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> bool:
    """Return True if the band agrees with the formula in fp64 on a small problem, with another log-sum-exp."""
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, first, window = 136, 200, 11, 50 if windowed else None
    shapes = ((4, queries), (2, keys), (2, keys), (4, queries))
    q, k, v, grad = (drawn(generator, dtype, 2, *shape, head_dim) for shape in shapes)
    band = BandView(first, keys, window, head_dim**-0.5)
    behind = torch.arange(queries, device=device)[:, None] + keys - queries - torch.arange(keys, device=device)
    seen = (behind >= 0) & (torch.arange(keys, device=device) >= first)
    seen &= behind < (window or keys)
    try:
        return whole_agrees(band, (q, k, v, grad), seen, band.scale)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


@lru_cache(maxsize=64)
def rows_are_right(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, flash: str) -> bool:
    """Return True if the rows agree with the formula in fp64 on a small problem, with another log-sum-exp.

    ``flash`` is the active implementation of flash attention; it is an argument only for the cache.
    """
    if dtype not in (torch.float16, torch.bfloat16) or head_dim > 256:
        return False
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, window = 136, 200, 50 if windowed else None
    shapes = ((4, queries), (2, keys), (2, keys), (4, queries))
    q, k, v, grad = (drawn(generator, dtype, 1, *shape, head_dim) for shape in shapes)
    starts = torch.zeros(1, keys, dtype=torch.long)
    for start in (11, 90, 91, 170):  # the first has keys before the queries
        starts[:, start:] = start
    mask = LazyMask(1, keys, keys, window=window, row_start=starts.to(device), device=device)
    rows = rows_of(mask.rows(keys - queries, keys), head_dim**-0.5)
    assert rows is not None
    try:
        return whole_agrees(rows, (q, k, v, grad), mask.tile(keys - queries, keys, 0, keys), rows.scale)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return False


def _band_is_faster(device: torch.device, dtype: torch.dtype, heads: TrialHeads) -> bool:
    """Return True if one call for a chunk over its prefix is faster than rectangle and square, or cannot be timed."""
    queries, keys = 2048, 16384
    generator = torch.Generator(device).manual_seed(0)
    scale = heads.size**-0.5
    band = BandView(0, keys, None, scale)
    try:
        q, grad = (drawn(generator, dtype, 1, heads.queries, queries, heads.size) for _ in range(2))
        k, v = (drawn(generator, dtype, 1, heads.groups, keys, heads.size) for _ in range(2))
        kernel = flash_kernel(q, k, v, biased=False)
        if kernel is None:
            return True
        parts = [(slice(0, keys - queries), False), (slice(keys - queries, keys), True)]

        def whole() -> None:
            band.backward(grad, q, k, v, *band.forward(q, k, v, for_backward=True))

        def segments() -> None:
            o, lse = merged(kernel.forward(q, k[:, :, s], v[:, :, s], Scores(scale, causal)) for s, causal in parts)
            for s, causal in parts:
                kernel.backward(grad, q, k[:, :, s], v[:, :, s], o.to(dtype), lse, Scores(scale, causal))

        return median_time(whole, device, RUNS) < median_time(segments, device, RUNS)
    except RuntimeError:  # not enough memory to compare
        return True
