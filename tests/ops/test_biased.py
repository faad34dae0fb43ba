"""Attention with a bias of the model's own making equals the dense formula, with the gradients of bias and sinks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamtune.ops import LazyMask, biased_attention


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, allowed: Tensor, sinks: Tensor | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * 0.3 + bias).masked_fill(~allowed, -1e30)
    if sinks is not None:
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights * allowed.any(-1, keepdim=True)) @ v


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_equals_the_formula(window: int | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    padding = torch.ones(2, 11, dtype=torch.bool)
    padding[1, :9] = False  # the second row's first queries of the chunk see nothing
    mask = LazyMask(2, 11, 11, window=window, padding=padding)
    view = mask.chunk(7, 11, mask.first_key(7))
    keys = view.shape[3]
    shapes = [(2, 4, 4, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, 4, 4, keys), (2, 4, 4, 1)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v, bias, sinks = leaves
    used = leaves if with_sinks else leaves[:4]
    allowed = mask.tile(7, 11, view.k_start, view.k_stop).expand(2, 1, -1, -1)
    want = formula(q, k, v, bias, allowed, sinks if with_sinks else None)
    got = biased_attention(q, k, v, view, bias, scale=0.3, sinks_BHT1=sinks if with_sinks else None)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    for got_grad, want_grad in zip(
        torch.autograd.grad(got, used, grad), torch.autograd.grad(want, used, grad), strict=True
    ):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-11, atol=1e-12)


def test_a_squashed_score_and_dropped_weights() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    view = LazyMask(1, 6, 6).rows(0, 6)
    bias = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    allowed = torch.ones(6, 6).tril().bool()
    scores = 2.0 * ((q @ k.mT * 0.5) / 2.0).tanh() + bias
    want = scores.masked_fill(~allowed, -1e30).softmax(-1) @ v
    torch.testing.assert_close(biased_attention(q, k, v, view, bias, scale=0.5, softcap=2.0), want)
    many = torch.stack(
        [biased_attention(q, k, v, view, bias, scale=0.5, softcap=2.0, dropout=0.3) for _ in range(4000)]
    )
    assert not torch.equal(many[0], many[1])
    torch.testing.assert_close(many.mean(0), want, rtol=0.1, atol=0.1)
