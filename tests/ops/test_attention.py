"""Attention of a chunk equals one dense masked softmax: values and all gradients, for every kind of mask and score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.ops import LazyMask, MaskView, prefix_attention, prefix_attention_reference
from streamtune.ops.attention import attention as attention_module
from tests.precision_kit import ROUNDING, assert_as_precise, relative

ROWS, TOTAL = 2, 48
TOLERANCE = 1e-13
"""In fp64; in fp32 it is the reference's own error."""


@dataclass(frozen=True)
class Problem:
    """Queries ``[start, stop)`` of a sequence of TOTAL tokens, over the keys a chunk is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    view: MaskView
    allowed: Tensor
    """Dense, over the whole prefix ``[0, stop)``."""

    @property
    def inputs(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.sinks) if x is not None]

    def ours(self, **how: Any) -> Tensor:
        first = self.view.k_start
        return prefix_attention(
            self.q, self.k[:, :, first:], self.v[:, :, first:], self.view, sinks_H=self.sinks, scale=0.3, **how
        )

    def reference(self, **how: Any) -> Tensor:
        return prefix_attention_reference(self.q, self.k, self.v, self.allowed, sinks_H=self.sinks, scale=0.3, **how)


def make(
    dtype: torch.dtype,
    start: int,
    stop: int,
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 16,
    v_dim: int = 16,
    sinks: bool = False,
    **mask: Any,
) -> Problem:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    lazy = LazyMask(ROWS, TOTAL, TOTAL, **mask)
    view = lazy.view_chunk(start, stop, lazy.first_key(start))
    q, k, v = leaf(ROWS, heads, stop - start, dim), leaf(ROWS, groups, stop, dim), leaf(ROWS, groups, stop, v_dim)
    return Problem(q, k, v, leaf(heads) if sinks else None, view, lazy.tile(start, stop, 0, stop))


def compare(problem: Problem, what: Any = "", constant: float = TOLERANCE, **how: Any) -> None:
    """Output and every gradient: in fp64 the reference's, in fp32 as near to that of fp64 as the reference is.

    A query that sees nothing has both zero.
    """
    exact = problem.q.dtype == torch.float64
    wide = {name: getattr(problem, name) for name in ("q", "k", "v", "sinks")}
    truth = replace(problem, **{n: x if x is None else x.detach().double().requires_grad_() for n, x in wide.items()})
    shape = problem.reference(**how).shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(problem.q.dtype)

    def found(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        return out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))

    ours, plain = (found(f(**how), problem.inputs) for f in (problem.ours, problem.reference))
    for got, own, want in zip(ours, plain, found(truth.reference(**how), truth.inputs), strict=True):
        assert_as_precise(got, own, want, what, constant if exact else ROUNDING)


def padding(side: str) -> Tensor:
    """The first row whole, the second with nine tokens missing on one side."""
    mask = torch.ones(ROWS, TOTAL, dtype=torch.bool)
    mask[1, slice(0, 9) if side == "left" else slice(TOTAL - 9, None)] = False
    return mask


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Packed documents of 20 tokens."""
    return q // 20 == k // 20


def holes() -> Tensor:
    """Padding in the middle of a row, as an interleaved batch leaves it."""
    mask = torch.ones(ROWS, TOTAL, dtype=torch.bool)
    mask[0, 13:17] = False
    mask[1, :3] = False
    return mask


def starts(*rows: list[int]) -> Tensor:
    """``[B, TOTAL]`` where the run of each position starts, runs given by their first positions."""
    return torch.tensor([[max(start for start in row if start <= t) for t in range(TOTAL)] for row in rows])


def blocks(*rows: tuple[int, int]) -> Tensor:
    """``[B, TOTAL]`` with one block of mutual attention in each batch row."""
    return torch.tensor([[start if start <= t < stop else t for t in range(TOTAL)] for start, stop in rows])


MASKS: dict[str, dict[str, Any]] = {
    "rows": {"row_start": starts([0, 5, 6, 20, 30, 47])},
    "other rows": {"row_start": starts([0, 20], [0, 1, 2, 30, 40])},
    "rows and window": {"row_start": starts([0, 20], [0, 1, 2, 30, 40]), "window": 7},
    "rows, spans and padding": {
        "row_start": starts([0, 20]),
        "span_start": starts([0, 12, 24, 36]),
        "padding": padding("right"),
    },
    "block": {"block_start": blocks((17, 30))},
    "other blocks": {"block_start": blocks((0, 16), (20, 29)), "padding": padding("left")},
    "blocks and window": {"block_start": blocks((17, 30), (33, 48)), "window": 5},
    "window that cuts blocks": {"block_start": blocks((17, 30)), "window": 5, "window_cuts_blocks": True},
    "causal": {},
    "narrow window": {"window": 7},
    "window as wide as the chunk": {"window": 16},
    "wide window": {"window": 29},
    "window wider than the row": {"window": 400},
    "left padding": {"padding": padding("left")},
    "right padding": {"padding": padding("right")},
    "padding inside": {"padding": holes()},
    "window and left padding": {"window": 11, "padding": padding("left")},
    "window and right padding": {"window": 23, "padding": padding("right")},
    "documents": {"function": documents},
    "documents, window and padding": {"function": documents, "window": 9, "padding": padding("right")},
    "function alone": {"causal": False, "function": lambda b, h, q, k: (k <= q) & ((q + k) % 3 != 1)},
}
SCORES: dict[str, dict[str, Any]] = {"plain": {}, "softcap": {"softcap": 2.0}}
CHUNKS = {"first": (0, 16), "middle": (16, 32), "ragged": (33, 48), "one query": (31, 32), "whole": (0, TOTAL)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_reference(mask: str, sinks: bool, score: str, dtype: torch.dtype) -> None:
    for start, stop in CHUNKS.values():
        compare(make(dtype, start, stop, sinks=sinks, **MASKS[mask]), (start, stop), **SCORES[score])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (6, 3), (1, 1)])
@pytest.mark.parametrize(("dim", "v_dim"), [(16, 16), (16, 24), (24, 8), (5, 5)])
def test_head_ratios_and_dimensions(heads: int, groups: int, dim: int, v_dim: int, dtype: torch.dtype) -> None:
    for mask in ({}, {"window": 7}, {"padding": padding("left")}):
        for softcap in (None, 2.0):
            problem = make(dtype, 16, 32, heads=heads, groups=groups, dim=dim, v_dim=v_dim, **mask)
            compare(problem, softcap=softcap)


@pytest.mark.parametrize("elements", [1, 700, 3000])
def test_row_tiles_of_any_height(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled formula cuts the queries so that few scores exist at once; the cut is not seen in the result."""
    monkeypatch.setattr(attention_module, "TILE_ELEMENTS", elements)
    for mask in MASKS.values():
        compare(make(torch.float64, 16, 32, v_dim=8, **mask), softcap=2.0)


@pytest.mark.parametrize("mask", ["causal", "narrow window", "left padding", "documents", "other rows", "block"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_only_what_is_wanted_gets_a_gradient(mask: str, softcap: float | None, wanted: str) -> None:
    problem = make(torch.float64, 16, 32, **MASKS[mask])
    leaf = getattr(problem, wanted)
    for x in problem.inputs:
        x.requires_grad_(x is leaf)
    (got,) = torch.autograd.grad(problem.ours(softcap=softcap).square().sum(), leaf)
    (want,) = torch.autograd.grad(problem.reference(softcap=softcap).square().sum(), leaf)
    assert relative(got, want) <= TOLERANCE


def test_gradients_are_those_of_finite_differences() -> None:
    """A witness that shares no code with the reference."""
    problem = make(torch.float64, 4, 7, heads=2, groups=1, dim=3, v_dim=2, sinks=True, window=5)
    first = problem.view.k_start

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return prefix_attention(q, k, v, problem.view, scale=0.5, softcap=1.5, sinks_H=sinks)

    k, v = (x[:, :, first:].detach().requires_grad_() for x in (problem.k, problem.v))
    assert torch.autograd.gradcheck(run, (problem.q, k, v, problem.sinks))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(
    dtype: torch.dtype, softcap: float | None, sinks: bool
) -> None:
    problem = make(dtype, 0, 16, sinks=sinks, padding=padding("left"))
    out = problem.ours(softcap=softcap)
    grads = torch.autograd.grad(out.float().square().sum() + out.sum(), problem.inputs)
    assert torch.equal(out[1, :, :9], torch.zeros_like(out[1, :, :9]))
    assert all(torch.isfinite(g).all() for g in grads)
    assert torch.equal(grads[0][1, :, :9], torch.zeros_like(grads[0][1, :, :9]))
    assert torch.equal(grads[1][1, :, :9], torch.zeros_like(grads[1][1, :, :9]))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """One key takes it all: differences of scores near 1e4, which fp32 rounds at 1e-3."""
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-11)):
        problem = make(dtype, 16, 32, padding=padding("left"), window=11)
        with torch.no_grad():
            problem.q.mul_(200)
        got, want = problem.ours(), problem.reference()
        assert torch.isfinite(got).all()
        grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        found = (got, *torch.autograd.grad(got, problem.inputs, grad))
        for ours, reference in zip(found, (want, *torch.autograd.grad(want, problem.inputs, grad)), strict=True):
            assert relative(ours, reference) <= bound


@pytest.mark.parametrize(
    "mask", ["causal", "wide window", "narrow window", "left padding", "documents", "other rows", "block"]
)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_in_bf16_as_precise_as_torch(mask: str, chunk: str) -> None:
    """Three ways: fp64 truth, torch's own attention in bf16, ours in bf16.

    The kernels round the output of each segment to bf16 and the merge is rounded again, so where there is more than one
    segment the error may be that of two roundings instead of one, sqrt(2) times as large.
    """
    start, stop = CHUNKS[chunk]
    problem = make(torch.bfloat16, start, stop, **MASKS[mask])
    truth = make(torch.float64, start, stop, **MASKS[mask])
    with torch.no_grad():
        for exact, rounded in zip(truth.inputs, problem.inputs, strict=True):
            exact.copy_(rounded)
    seen = problem.allowed.any(-1).expand(ROWS, 4, -1)  # torch's result is undefined where nothing is seen
    grad = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(1)).bfloat16() * seen[..., None]

    def found(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [out * seen[..., None], *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    want = found(truth.reference(), truth.inputs)
    ours = found(problem.ours(), problem.inputs)
    bias = torch.zeros(problem.allowed.shape, dtype=torch.bfloat16).masked_fill(~problem.allowed, -1e30)
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        problem.q, problem.k, problem.v, attn_mask=bias, scale=0.3, enable_gqa=True
    )
    torchs = found(sdpa, problem.inputs)
    allowance = 1.1 if len(problem.view.segments()) == 1 else 1.45
    for name, t, o, w in zip(("out", "q", "k", "v"), torchs, ours, want, strict=True):
        assert o.dtype == torch.bfloat16
        assert relative(o, w) <= allowance * relative(t, w) + 1e-4, (name, relative(o, w), relative(t, w))


@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_bf16_formula_rounds_once(softcap: float) -> None:
    """A softcap takes the tiled formula, which computes in fp32 and rounds its results."""
    for start, stop in CHUNKS.values():
        problem = make(torch.bfloat16, start, stop, v_dim=24, sinks=True, window=11)
        exact = make(torch.float64, start, stop, v_dim=24, sinks=True, window=11)
        with torch.no_grad():
            for wide, narrow in zip(exact.inputs, problem.inputs, strict=True):
                wide.copy_(narrow)
        out, want = problem.ours(softcap=softcap), exact.reference(softcap=softcap)
        grad = torch.ones_like(out)
        got = (out, *torch.autograd.grad(out, problem.inputs, grad))
        truth = (want, *torch.autograd.grad(want, exact.inputs, grad.double()))
        assert max(relative(g, w) for g, w in zip(got, truth, strict=True)) <= 4e-3  # half a step of bf16 is 2e-3


def test_autocast_outside_does_not_reach_inside() -> None:
    problem = make(torch.float32, 16, 32, window=11)
    plain = problem.ours(softcap=2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = problem.ours(softcap=2.0)
        grads = torch.autograd.grad(under.sum(), problem.inputs)
    want = torch.autograd.grad(plain.sum(), problem.inputs)
    assert torch.equal(under, plain)
    assert all(torch.equal(g, w) for g, w in zip(grads, want, strict=True))


@pytest.mark.parametrize("mask", ["causal", "narrow window", "left padding", "documents", "other rows", "block"])
def test_dropout_is_unbiased(mask: str) -> None:
    problem = make(torch.float64, 16, 32, **MASKS[mask])
    draws = 400
    torch.manual_seed(0)
    with torch.no_grad():
        want = problem.ours()
        outs = torch.stack([problem.ours(dropout=0.3) for _ in range(draws)])
    assert not torch.equal(outs[0], outs[1])
    spread = outs.std(0) / draws**0.5
    assert ((outs.mean(0) - want).abs() <= 5 * spread + 1e-12).all()


@pytest.mark.parametrize("mask", ["causal", "narrow window", "left padding", "documents", "other rows", "block"])
@pytest.mark.parametrize("elements", [attention_module.TILE_ELEMENTS, 700])
def test_dropout_backward_replays_the_forward(mask: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of the function the forward drew; nothing else is drawn meanwhile."""
    monkeypatch.setattr(attention_module, "TILE_ELEMENTS", elements)
    problem = make(torch.float64, 16, 32, sinks=True, **MASKS[mask])
    direction = [torch.randn_like(x) for x in problem.inputs]
    weight = torch.randn_like(problem.q)

    def value(distance: float, seed: int = 3) -> Tensor:
        moved = [x + distance * step for x, step in zip(problem.inputs, direction, strict=True)]
        torch.manual_seed(seed)
        there = replace(problem, **dict(zip(("q", "k", "v", "sinks"), moved, strict=True)))
        return (there.ours(dropout=0.4, softcap=2.0) * weight).sum()

    out = value(0.0)
    state = torch.get_rng_state()
    grads = torch.autograd.grad(out, problem.inputs)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        slope = float(value(1e-5) - value(-1e-5)) / 2e-5
        other = float(value(0.0, seed=4))
    along = sum(float((g * step).sum()) for g, step in zip(grads, direction, strict=True))
    assert along == pytest.approx(slope, rel=1e-7)
    assert other != pytest.approx(out.item(), rel=1e-6)


def test_dropout_draws_differ_between_segments_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal weights everywhere, so that an output says which of 16 marked keys were kept: no two drop alike."""
    monkeypatch.setattr(attention_module, "TILE_ELEMENTS", 64)  # one row a tile
    length, start, marked = 256, 128, 8
    q, k = torch.zeros(1, 1, length - start, 4), torch.zeros(1, 1, length, 4)
    v = torch.zeros(1, 1, length, 2 * marked)
    for key in range(marked):
        v[0, 0, key, key] = v[0, 0, start + key, marked + key] = 1
    torch.manual_seed(0)
    out = prefix_attention(q, k, v, LazyMask(1, length, length).view_chunk(start, length, 0), scale=1.0, dropout=0.5)
    visible = torch.arange(start + 1, length + 1)[:, None]
    kept = (out[0, 0] * visible * 0.5)[marked:]  # rows that see all the marked keys
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-4)
    kept = kept.round().bool()
    prefix, own = kept[:, :marked], kept[:, marked:]
    for one, other in ((prefix, own), (kept[1:], kept[:-1]), (kept, torch.ones_like(kept))):
        assert 0.4 < float((one == other).float().mean()) < 0.6
