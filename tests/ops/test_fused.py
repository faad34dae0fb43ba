"""Fused operators against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamtune.ops.fused import add_weight_gradient, apply_rotary, is_norm_kernel_correct, rms_norm, weight_gradient
from tests.precision_kit import EXACT, relative


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@pytest.mark.parametrize("weighted", [True, False])
def test_a_norm_and_its_gradient(weighted: bool) -> None:
    x = (torch.randn(2, 5, 8, dtype=torch.float64) * 1e-3).requires_grad_()  # so small that eps counts
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if weighted else None
    given, grad = [x] if weight is None else [x, weight], torch.randn(2, 5, 8, dtype=torch.float64)
    got, want = rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6)
    assert relative(got, want) <= EXACT
    for a, b in zip(torch.autograd.grad(got, given, grad), torch.autograd.grad(want, given, grad), strict=True):
        assert relative(a, b) <= EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_is_asked_for_value_and_gradient(dtype: torch.dtype) -> None:
    assert is_norm_kernel_correct(torch.device("cpu"), dtype)


def test_a_simulated_norm_makes_and_keeps_what_the_kernel_does() -> None:
    x = torch.empty(2, 5, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = rms_norm(x, weight, 1e-6)
    assert [(t.shape, t.dtype) for t in kept] == [
        (x.shape, torch.bfloat16),
        (weight.shape, torch.bfloat16),
        ((2, 5, 1), torch.float32),
    ]
    grads = torch.autograd.grad(y, [x, weight], torch.empty_like(y))
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype), (weight.shape, weight.dtype)]


def test_a_rotation_and_its_gradient() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    cos, sin = (torch.randn(2, 1, 5, 8, dtype=torch.float64) for _ in range(2))
    got, want, grad = apply_rotary(x, cos, sin), rotated(x, cos, sin), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    assert got.stride() == want.stride()
    assert relative(got, want) <= EXACT
    (a,), (b,) = torch.autograd.grad(got, x, grad), torch.autograd.grad(want, x, grad)
    assert relative(a, b) <= EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_rounds_no_more_than_the_formula(dtype: torch.dtype) -> None:
    x, cos, sin = torch.randn(1, 4, 64, 32), torch.randn(1, 1, 64, 32), torch.randn(1, 1, 64, 32)
    narrow = [t.to(dtype) for t in (x, cos, sin)]
    truth = rotated(*(t.double() for t in narrow))
    assert relative(apply_rotary(*narrow).double(), truth) <= relative(rotated(*narrow).double(), truth)


@pytest.mark.parametrize(
    ("narrow", "wide", "bound"),
    [
        (torch.float64, torch.float64, EXACT),
        (torch.bfloat16, torch.float32, 1e-2),
        (torch.float32, torch.float32, 1e-6),
    ],
)
def test_a_sum_of_outer_products(narrow: torch.dtype, wide: torch.dtype, bound: float) -> None:
    terms = [(torch.randn(n, 6, dtype=narrow), torch.randn(n, 4, dtype=narrow)) for n in (7, 3)]
    total = weight_gradient(*terms[0], wide)
    add_weight_gradient(total, *terms[1])
    assert total.dtype == wide
    assert relative(total.double(), sum(g.double().mT @ x.double() for g, x in terms)) <= bound
