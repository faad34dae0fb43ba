"""Kernels that compute a whole chunk's attention in one call, instead of one call for each segment of the mask.

    BandView    A causal chunk over its prefix, with or without a sliding window: flash attention.
    RowsView    Packed rows of a chunk: variable-length flash attention, with the starts of each row's queries and keys.
                The first row may have started before the chunk and then has more keys than queries.
    FlexView    Softcap, padding, blocks and arbitrary mask functions: compiled ``flex_attention``, which skips blocks
                of keys that no query sees.

The forward returns the log-sum-exp over the chunk's keys. The backward also accepts another log-sum-exp, because
attention sinks add a logit.
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

from streamtune.ops.attention.flex import FlexView, is_flex_correct
from streamtune.ops.attention.kernel_blocks import merge_attentions
from streamtune.ops.attention.kernel_trial import (
    RUNS,
    AttentionHeadCounts,
    Grads,
    ScoreRule,
    Scores,
    ViewKernel,
    call_kernel,
    draw_token_major,
    view_kernel_agrees,
)
from streamtune.ops.attention.kernels import active_flash_name, fused_segment_kernel
from streamtune.ops.attention.mask import LazyMask, MaskView
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.attention.runs import overlapping_runs
from streamtune.ops.devices import MAX_ELEMENTS, median_time

log = logging.getLogger(__name__)
R = TypeVar("R")
Bounds = tuple[int, ...]

_on_device: WeakKeyDictionary[MaskRules, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()
"""Device tensors by mask: the starts of all rows, with the key ``()``, and the bounds computed from these starts.

They are cached because layers share a mask, and the backward uses the tensors again.
"""


@dataclass(frozen=True)
class _FlashView:
    """Flash attention over keys ``[first, stop)`` of a :class:`MaskView`; last query and last key are the same token.

    Args:
        first, stop: Range of keys, counted from the view's first key.
        window: Number of keys that a query sees, including its own key; None means no window.
        scale: Factor of the scores.
    """

    first: int
    stop: int
    window: int | None
    scale: float

    def _flash_options(self) -> dict[str, Any]:
        if self.window is None:
            return {"scale": self.scale}
        return {"scale": self.scale, "window_size_left": self.window - 1, "window_size_right": 0}

    def _visible_keys(self, x: Tensor) -> Tensor:
        return x[:, :, self.first : self.stop]

    def _pad_to_all_keys(self, grad: Tensor, like: Tensor) -> Tensor:
        if grad.shape == like.shape:
            return grad
        whole = torch.zeros_like(like)
        whole[:, :, self.first : self.stop] = grad
        return whole


@dataclass(frozen=True)
class BandView(_FlashView):
    """Kernel for causal attention of a chunk within one packed row, with or without a sliding window."""

    name = "cuda-flash, whole chunk"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return output ``[B, H, T, D]`` and log-sum-exp ``[B, H, T]`` over the view's keys."""
        q, k, v = (x.transpose(1, 2) for x in (q, self._visible_keys(k), self._visible_keys(v)))
        o, lse, *_ = call_kernel(
            torch.ops.aten._flash_attention_forward,
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, **self._flash_options(),
        )  # fmt: skip
        return o.transpose(1, 2), lse

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of q, k and v; ``o`` and ``lse`` may be of a softmax over more keys."""
        grad_o, q, k_seen, v_seen, o = (
            x.transpose(1, 2) for x in (grad_o, q, self._visible_keys(k), self._visible_keys(v), o)
        )
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
        grads = call_kernel(
            torch.ops.aten._flash_attention_backward,
            grad_o, q, k_seen, v_seen, o, lse.contiguous(), None, None, q.shape[1], k_seen.shape[1], 0.0, True, unused,
            unused, **self._flash_options(),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, self._pad_to_all_keys(grad_k, k), self._pad_to_all_keys(grad_v, v)


@dataclass(frozen=True)
class RowsView(_FlashView):
    """Kernel for the packed rows of a chunk, in one call of variable-length flash attention.

    Args:
        queries: Starts of the rows among the queries, then the number of queries.
        keys: Starts of the rows among the keys, then the number of keys.
        origins: Positions in the sequence of the first query and the first key.
        row: Index in the mask of the first of these rows.
        mask: Mask of the sequence.
    """

    queries: Bounds
    keys: Bounds
    origins: tuple[int, int]
    row: int
    mask: MaskRules

    name = "cuda-flash, rows of a chunk"

    def _row_bounds(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        longest = [max(stop - start for start, stop in pairwise(bounds)) for bounds in (self.queries, self.keys)]
        made = [
            self._bounds_on_device(bounds, at, device)
            for bounds, at in zip((self.queries, self.keys), self.origins, strict=True)
        ]
        return made[0], made[1], longest[0], longest[1]

    def _bounds_on_device(self, bounds: Bounds, origin: int, device: torch.device) -> Tensor:
        known = _on_device.setdefault(self.mask, {})
        if () not in known:
            query_ranges = self.mask.query_ranges[0]
            starts = torch.tensor([*(row.start for row in query_ranges), query_ranges[-1].stop], dtype=torch.int32)
            known[()] = starts.to(device, non_blocking=True)
        key = (self.row, len(bounds), origin, bounds[-1])
        if key not in known:
            known[key] = (known[()][self.row : self.row + len(bounds)] - origin).clamp_(0, bounds[-1])
        return known[key]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return output ``[1, H, T, D]`` and log-sum-exp ``[1, H, T]`` over the view's keys."""
        q, k, v = (_as_token_rows(x) for x in (q, self._visible_keys(k), self._visible_keys(v)))
        o, lse, *_ = call_kernel(
            torch.ops.aten._flash_attention_forward,
            q, k, v, *self._row_bounds(q.device), 0.0, True, False, **self._flash_options(),
        )  # fmt: skip
        return o.transpose(0, 1)[None], lse[None]

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of q, k and v; ``o`` and ``lse`` may be of a softmax over more keys."""
        rows = [_as_token_rows(x) for x in (grad_o, q, self._visible_keys(k), self._visible_keys(v), o)]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
        grads = call_kernel(
            torch.ops.aten._flash_attention_backward,
            *rows, lse[0].contiguous(), *self._row_bounds(q.device), 0.0, True, unused, unused, **self._flash_options(),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x.transpose(0, 1)[None] for x in grads)
        return grad_q, self._pad_to_all_keys(grad_k, k), self._pad_to_all_keys(grad_v, v)


def _as_token_rows(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def fused_view_kernel(
    view: MaskView, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, lacks_fused_kernel: bool = True
) -> ViewKernel | None:
    """Return a kernel that computes the attention under ``view`` in one call, or None.

    None means that the attention is computed segment by segment. The result is None on CPU and with dropout. It is None
    if tensors differ in dtype or head size, or have too many elements for 32-bit indices. It is also None if the kernel
    does not agree with the formula on this device, or if segments are as fast.

    Args:
        view, q, k, v: Arguments of ``prefix_attention``.
        rule: Scale, softcap and dropout of the scores.
        lacks_fused_kernel: True if some segment has no fused kernel. If False, the result is None except with a window
            or for many short rows: otherwise segments are as fast, and take less memory for the gradient of a prefix.
    """
    scale, softcap = rule.scale, rule.softcap
    if not q.is_cuda or rule.dropout > 0 or not _are_alike(q, k, v) or _memory_span(q, k, v) > MAX_ELEMENTS:
        return None
    heads = AttentionHeadCounts(q.shape[1], k.shape[1], q.shape[-1])
    windowed, segments = view.mask.window is not None, view.segments()
    if softcap is None and (lacks_fused_kernel or windowed) and (band := band_kernel_of_view(view, scale)) is not None:
        problem = (q.device.index or 0, q.dtype, heads, windowed)
        return band if _is_band_chosen(*problem, active_flash_name()) else None
    many = len(segments) > MAX_SEGMENTS
    if (
        softcap is None
        and (lacks_fused_kernel or windowed or many)
        and (rows := rows_kernel_of_view(view, scale)) is not None
    ):
        near = windowed or rows.stop - rows.first <= MAX_KEYS_PER_QUERY * q.shape[2]
        if near and is_rows_kernel_correct(q.device, q.dtype, heads.size, windowed, active_flash_name()):
            return rows
    if not lacks_fused_kernel or (softcap is None and not many and not any(segment.masked for segment in segments)):
        return None
    flex = FlexView(view, scale, softcap)
    return flex if is_flex_correct(q.device, q.dtype, heads, softcap is not None) else None


def run_view_forward(
    kernel: ViewKernel, q: Tensor, k: Tensor, v: Tensor, for_backward: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the result of ``kernel.forward``; None if the kernel fails now or has failed before."""
    return _run_unless_failed(kernel, lambda: kernel.forward(q, k, v, for_backward))


def run_view_backward(kernel: ViewKernel, grad_o: Tensor, *saved: Tensor) -> Grads | None:
    """Return the result of ``kernel.backward``; None if the kernel fails now or has failed before.

    If it is None, a backward by segments can use the output and log-sum-exp of the kernel's forward.
    """
    return _run_unless_failed(kernel, lambda: kernel.backward(grad_o, *saved))


_failed_kernels: set[str] = set()


def _run_unless_failed(kernel: ViewKernel, run: Callable[[], R]) -> R | None:
    """Return the result of ``run``; None, with a warning, if it raises an error. The kernel is then not used again.

    Out-of-memory and device errors are raised.
    """
    if kernel.name in _failed_kernels:
        return None
    try:
        return run()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        _failed_kernels.add(kernel.name)
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"attention by {kernel.name} failed and is not used again ({what})", stacklevel=3)
        return None


MAX_SEGMENTS = 4
"""Largest number of segments that are computed one by one: two packed rows have four."""
MAX_KEYS_PER_QUERY = 2
"""Largest number of keys per query for which one call of packed rows is used without a window."""


def band_kernel_of_view(view: MaskView, scale: float) -> BandView | None:
    """Return the kernel for a view whose queries are in one causal row, without padding; None for any other view."""
    mask = view.mask
    if mask.function is not None or not mask.causal or len(mask.query_ranges) > 1:
        return None
    stretch = next((s for s in mask.query_ranges[0] if s.start <= view.q_start and view.q_stop <= s.stop), None)
    if stretch is None or stretch.mutual or view.k_stop < view.q_stop:
        return None
    first = max(view.k_start, stretch.first)
    if mask.branches is not None:
        part = mask.branches.part_at(view.q_start)
        if part.trunk or part.stop < view.q_stop or mask.span_start is not None:
            return None
        first = max(first, part.start)
    if mask.window is not None:
        first = max(first, view.q_start - mask.window + 1)
    if first > view.q_start or mask.is_padded(None, first, view.q_stop):
        return None
    return BandView(first - view.k_start, view.q_stop - view.k_start, mask.window, scale)


def rows_kernel_of_view(view: MaskView, scale: float) -> RowsView | None:
    """Return the kernel for a view of consecutive causal rows, without padding; None for any other view."""
    mask = view.mask
    plain = mask.function is None and mask.causal and mask.branches is None and mask.batch_size == 1
    if not plain or view.k_stop < view.q_stop:
        return None
    found = overlapping_runs(mask.query_ranges[0], view.q_start, view.q_stop)
    if any(row.mutual for *_, row in found) or any(row.first != start for start, _, row in found[1:]):
        return None
    first = max(view.k_start, found[0][2].first)
    if mask.window is not None:
        first = max(first, view.q_start - mask.window + 1)
    if first > view.q_start or mask.is_padded(None, first, view.q_stop):
        return None
    starts = [start for start, *_ in found[1:]]
    row = bisect_right(mask.query_ranges[0], view.q_start, key=lambda each: each.start) - 1
    queries = (0, *(start - view.q_start for start in starts), view.q_stop - view.q_start)
    keys = (0, *(start - first for start in starts), view.q_stop - first)
    seen, origins = (first - view.k_start, view.q_stop - view.k_start), (view.q_start, first)
    return RowsView(*seen, mask.window, scale, queries, keys, origins, row, mask)


def _are_alike(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0


def _memory_span(q: Tensor, *others: Tensor) -> int:
    """Return the largest number of elements that a kernel must index.

    It is the number of elements that a tensor spans in memory, or that the keys would have for all query heads.
    """
    spans = [sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) for x in (q, *others)]
    return max(*spans, q.shape[0] * q.shape[1] * others[0].shape[2] * q.shape[3])


@lru_cache(maxsize=64)
def _is_band_chosen(
    index: int, dtype: torch.dtype, heads: AttentionHeadCounts, windowed: bool, flash_name: str
) -> bool:
    """Return True if :class:`BandView` is correct and, without a window, faster than segments.

    ``flash_name`` is only part of the cache key.
    """
    device = torch.device("cuda", index)
    if dtype not in (torch.float16, torch.bfloat16) or heads.size > 256:
        return False
    right = is_band_correct(device, dtype, heads.size, windowed)
    chosen = right and (windowed or _is_band_faster(device, dtype, heads))
    problem = f"{dtype}, {heads.queries} query heads, {heads.groups} key heads of {heads.size}"
    log.info("a chunk%s, %s: %s", " in a window" if windowed else "", problem, BandView.name if chosen else "segments")
    return chosen


def is_band_correct(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool) -> bool:
    """Return True if :class:`BandView` agrees with the attention formula in fp64 on a small problem."""
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, first, window = 136, 200, 11, 50 if windowed else None
    shapes = ((4, queries), (2, keys), (2, keys), (4, queries))
    q, k, v, grad = (draw_token_major(generator, dtype, 2, *shape, head_dim) for shape in shapes)
    band = BandView(first, keys, window, head_dim**-0.5)
    behind = torch.arange(queries, device=device)[:, None] + keys - queries - torch.arange(keys, device=device)
    seen = (behind >= 0) & (torch.arange(keys, device=device) >= first)
    seen &= behind < (window or keys)
    try:
        return view_kernel_agrees(band, (q, k, v, grad), seen, band.scale)
    except (RuntimeError, NotImplementedError, TypeError):
        return False


@lru_cache(maxsize=64)
def is_rows_kernel_correct(
    device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, flash_name: str
) -> bool:
    """Return True if :class:`RowsView` agrees with the attention formula in fp64 on a small problem.

    ``flash_name``, the active flash attention implementation, is only part of the cache key.
    """
    if dtype not in (torch.float16, torch.bfloat16) or head_dim > 256:
        return False
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, window = 136, 200, 50 if windowed else None
    shapes = ((4, queries), (2, keys), (2, keys), (4, queries))
    q, k, v, grad = (draw_token_major(generator, dtype, 1, *shape, head_dim) for shape in shapes)
    starts = torch.zeros(1, keys, dtype=torch.long)
    for start in (11, 90, 91, 170):  # the first has keys before the queries
        starts[:, start:] = start
    mask = LazyMask(1, keys, keys, window=window, row_start=starts.to(device), device=device)
    rows = rows_kernel_of_view(mask.view_queries(keys - queries, keys), head_dim**-0.5)
    assert rows is not None
    try:
        return view_kernel_agrees(rows, (q, k, v, grad), mask.tile(keys - queries, keys, 0, keys), rows.scale)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return False


def _is_band_faster(device: torch.device, dtype: torch.dtype, heads: AttentionHeadCounts) -> bool:
    queries, keys = 2048, 16384
    generator = torch.Generator(device).manual_seed(0)
    scale = heads.size**-0.5
    band = BandView(0, keys, None, scale)
    try:
        q, grad = (draw_token_major(generator, dtype, 1, heads.queries, queries, heads.size) for _ in range(2))
        k, v = (draw_token_major(generator, dtype, 1, heads.groups, keys, heads.size) for _ in range(2))
        kernel = fused_segment_kernel(q, k, v, biased=False)
        if kernel is None:
            return True
        parts = [(slice(0, keys - queries), False), (slice(keys - queries, keys), True)]

        def run_band() -> None:
            band.backward(grad, q, k, v, *band.forward(q, k, v, for_backward=True))

        def run_segments() -> None:
            o, lse = merge_attentions(
                kernel.forward(q, k[:, :, s], v[:, :, s], Scores(scale, causal)) for s, causal in parts
            )
            for s, causal in parts:
                kernel.backward(grad, q, k[:, :, s], v[:, :, s], o.to(dtype), lse, Scores(scale, causal))

        return median_time(run_band, device, RUNS) < median_time(run_segments, device, RUNS)
    except RuntimeError:  # not enough memory to compare
        return True
