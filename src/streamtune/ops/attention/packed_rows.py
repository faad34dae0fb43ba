"""Packed rows of a chunk in one call of flash attention, as rows of different lengths.

The kernel takes the tokens of all rows one after another, and where each row's queries and keys begin. Each row is
causal with its last query at its last key: so the row that the chunk goes on with has the keys of its beginning before
the chunk, and the others have as many keys as queries.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, drawn, whole_agrees
from streamtune.ops.attention.layout import call_kernel
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.attention.runs import clipped
from streamtune.ops.attention.view import MaskView

Bounds = tuple[int, ...]

_on_device: WeakKeyDictionary[MaskRules, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()
"""Where all rows of a mask begin, by the key ``()``, and the bounds made of that: layers share a mask, and the backward
asks again."""


@dataclass(frozen=True)
class RowsView:
    """Queries ``[0, T)`` and keys ``[first, stop)`` of a view, in rows; the last query is at the last of these keys.

    Args:
        queries: Where each row begins among the queries, and T.
        keys: Where each row begins among those keys, and their number.
        first, stop: These keys, counted from the view's first.
        origins: The positions of the first query and the first of these keys.
        row: Which of the mask's rows is the first.
        window: Keys a query sees, itself included; None is all of its row.
        scale: Factor on the scores.
        mask: The mask it is a view of.
    """

    queries: Bounds
    keys: Bounds
    first: int
    stop: int
    origins: tuple[int, int]
    row: int
    window: int | None
    scale: float
    mask: MaskRules

    name = "cuda-flash, rows of a chunk"

    def _rows(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """Return the bounds of queries and keys as the kernel reads them, and the longest row of each."""
        longest = [max(stop - start for start, stop in pairwise(bounds)) for bounds in (self.queries, self.keys)]
        made = [
            self._made(bounds, at, device) for bounds, at in zip((self.queries, self.keys), self.origins, strict=True)
        ]
        return made[0], made[1], longest[0], longest[1]

    def _made(self, bounds: Bounds, origin: int, device: torch.device) -> Tensor:
        """Return bounds on the device, counted from a position: made there, since a copy for each chunk may wait."""
        known = _on_device.setdefault(self.mask, {})
        if () not in known:
            stretches = self.mask.stretches[0]
            starts = torch.tensor([*(row.start for row in stretches), stretches[-1].stop], dtype=torch.int32)
            known[()] = starts.to(device, non_blocking=True)
        key = (self.row, len(bounds), origin, bounds[-1])
        if key not in known:
            known[key] = (known[()][self.row : self.row + len(bounds)] - origin).clamp_(0, bounds[-1])
        return known[key]

    def _options(self) -> dict[str, Any]:
        if self.window is None:
            return {"scale": self.scale}
        return {"scale": self.scale, "window_size_left": self.window - 1, "window_size_right": 0}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Compute ``ViewKernel.forward``."""
        q, k, v = (_tokens(x) for x in (q, k[:, :, self.first : self.stop], v[:, :, self.first : self.stop]))
        o, lse, *_ = call_kernel(
            torch.ops.aten._flash_attention_forward, q, k, v, *self._rows(q.device), 0.0, True, False, **self._options()
        )
        return o.transpose(0, 1)[None], lse[None]

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Compute ``ViewKernel.backward``."""
        seen = [x[:, :, self.first : self.stop] for x in (k, v)]
        given = [_tokens(x) for x in (grad_o, q, *seen, o)]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
        grads = call_kernel(
            torch.ops.aten._flash_attention_backward,
            *given, lse[0].contiguous(), *self._rows(q.device), 0.0, True, unused, unused, **self._options(),
        )  # fmt: skip
        grad_q, grad_k, grad_v = (x.transpose(0, 1)[None] for x in grads)
        return grad_q, self._placed(grad_k, k), self._placed(grad_v, v)

    def _placed(self, grad: Tensor, like: Tensor) -> Tensor:
        """Return the gradient in the shape of ``like``: zeros for keys of rows that have ended."""
        if grad.shape == like.shape:
            return grad
        whole = torch.zeros_like(like)
        whole[:, :, self.first : self.stop] = grad
        return whole


def _tokens(x: Tensor) -> Tensor:
    """Return ``[1, H, T, D]`` as ``[T, H, D]``."""
    return x[0].transpose(0, 1)


def rows_of(view: MaskView, scale: float) -> RowsView | None:
    """Return the view as causal rows one after another, or None if it is something else."""
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
    return RowsView(queries, keys, *seen, origins, row, mask.window, scale, mask)


@lru_cache(maxsize=64)
def rows_are_right(device: torch.device, dtype: torch.dtype, head_dim: int, windowed: bool, flash: str) -> bool:
    """Return True if the rows agree with the formula in fp64 on a small problem, with a log-sum-exp not their own.

    ``flash`` is the implementation of flash attention that torch has active, for the cache.
    """
    if dtype not in (torch.float16, torch.bfloat16) or head_dim > 256:
        return False
    from streamtune.ops.attention.mask import LazyMask

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
        return whole_agrees(rows, q, k, v, grad, mask.tile(keys - queries, keys, 0, keys), rows.scale, None)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return False
