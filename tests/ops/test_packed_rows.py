"""Packed rows in one call of flash attention, around its operators as they are documented."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.ops import LazyMask, prefix_attention
from streamtune.ops.attention import attention, view_kernels
from streamtune.ops.attention.kernel_trial import view_kernel_agrees
from streamtune.ops.attention.runs import run_starts
from streamtune.ops.attention.view_kernels import is_rows_kernel_correct, rows_kernel_of_view
from tests.ops.cuda_operators import cuda_operators

__all__ = ["cuda_operators"]

HERE = torch.device("cpu")
LENGTH, SCALE = 300, 0.3
pytestmark = pytest.mark.usefixtures("cuda_operators")


def mask(*places: int, batch: int = 1, **more: Any) -> LazyMask:
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    for place in places:
        ids[:, place:] += 1
    return LazyMask(batch, LENGTH, LENGTH, row_start=run_starts(ids), device=HERE, **more)


def draw(heads: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, heads, length, 16, generator=torch.Generator().manual_seed(heads + length)).to(dtype)


@pytest.mark.parametrize("window", [None, 40, 400])
@pytest.mark.parametrize("chunk", [(0, 300), (0, 33), (33, 140), (100, 250), (141, 142), (250, 300)])
def test_they_are_the_formula(chunk: tuple[int, int], window: int | None) -> None:
    lazy = mask(33, 140, 141, 280, window=window)
    view = lazy.view_chunk(*chunk, 0)
    rows = rows_kernel_of_view(view, SCALE)
    assert rows is not None
    queries, keys = view.shape[2:]
    tensors = [draw(4, queries), draw(2, keys), draw(2, keys), draw(4, queries)]
    assert view_kernel_agrees(rows, tensors, lazy.tile(*chunk, 0, chunk[1]), SCALE)


def test_each_row_has_its_own_bounds() -> None:
    rows = rows_kernel_of_view(mask(33, 140, 141, 280).view_chunk(100, 250, 0), SCALE)
    assert rows is not None
    assert (rows.queries, rows.keys, rows.first, rows.stop) == ((0, 40, 41, 150), (0, 107, 108, 217), 33, 250)
    bounds = rows._row_bounds(HERE)
    assert [tuple(each.tolist()) for each in bounds[:2]] == [rows.queries, rows.keys]
    assert bounds[2:] == (109, 109)


def test_what_are_no_such_rows() -> None:
    kept = torch.ones(1, LENGTH, dtype=torch.bool)
    kept[:, :120] = False
    for lazy in (
        mask(33, batch=2),
        mask(33, padding=kept),
        mask(33, block_start=run_starts(torch.arange(LENGTH)[None] // 50)),
        mask(33, function=lambda b, h, q, k: k % 3 != 1),
    ):
        assert rows_kernel_of_view(lazy.view_chunk(20, 250, 0), SCALE) is None
    assert rows_kernel_of_view(LazyMask(1, 10, 10, causal=False, device=HERE).view_queries(0, 10), SCALE) is None


def test_bounds_are_copied_to_the_device_once() -> None:
    lazy = mask(33, 140)
    first, again = (rows_kernel_of_view(lazy.view_chunk(100, 200, 0), SCALE) for _ in range(2))
    assert first is not None
    assert again is not None
    assert all(a is b for a, b in zip(first._row_bounds(HERE)[:2], again._row_bounds(HERE)[:2], strict=True))


@pytest.mark.parametrize("windowed", [False, True])
def test_a_kernel_that_reads_the_bounds_otherwise_is_rejected(monkeypatch: pytest.MonkeyPatch, windowed: bool) -> None:
    check = is_rows_kernel_correct.__wrapped__
    assert check(HERE, torch.bfloat16, 16, windowed, "FA2")
    assert not check(HERE, torch.float32, 16, windowed, "FA2")
    inner: Any = torch.ops.aten._flash_attention_forward

    def padded(q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, *rest: Any, **how: Any) -> Any:
        """A log-sum-exp with a place for each token of the longest row, as in older versions."""
        o, lse, *more = inner(q, k, v, cum_q, *rest, **how)
        return o, lse[:, : rest[1]].expand(len(cum_q) - 1, -1, -1), *more

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", padded)
    assert not check(HERE, torch.bfloat16, 16, windowed, "FA2")


@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
def test_attention_by_rows_is_attention_by_segments(monkeypatch: pytest.MonkeyPatch, sunk: bool) -> None:
    lazy, sinks = mask(33, 140, 141, 280), torch.linspace(-1, 3, 4) if sunk else None
    found = []
    for by_rows in (False, True):
        if by_rows:
            choose = lambda view, q, k, v, rule, *rest: rows_kernel_of_view(view, rule.scale)  # noqa: E731
            monkeypatch.setattr(attention, "fused_view_kernel", choose)
            monkeypatch.setattr(attention.SegmentAttention, "lacks_fused_kernel", lambda *_: True)
        leaves = [draw(heads, length).requires_grad_() for heads, length in ((4, 150), (2, 250), (2, 250))]
        o = prefix_attention(*leaves, lazy.view_chunk(100, 250, 0), scale=SCALE, sinks_H=sinks)
        found.append([o.detach(), *torch.autograd.grad(o, leaves, draw(4, 150))])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_the_module_does_not_keep_a_mask() -> None:
    lazy = mask(33)
    rows = rows_kernel_of_view(lazy.view_chunk(0, 100, 0), SCALE)
    assert rows is not None
    rows._row_bounds(HERE)
    assert lazy in view_kernels._on_device
    count = len(view_kernels._on_device)
    del rows, lazy
    assert len(view_kernels._on_device) == count - 1
