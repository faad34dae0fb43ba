"""What an initial state adds to Mamba-1's scan, against the recurrence written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamtune.engine.scan import scan_from


def recurrence(state: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(x.shape[-1]):
        state = (a * dt[:, :, t, None]).exp() * state + (dt[:, :, t] * x[:, :, t])[:, :, None] * b[:, None, :, t]
        outputs.append((state * c[:, None, :, t]).sum(-1))
    return torch.stack(outputs, -1), state


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_scan_is_linear_in_its_state(tokens: int) -> None:
    torch.manual_seed(0)
    batch, channels, states = 2, 3, 4
    state = torch.randn(batch, channels, states, dtype=torch.float64, requires_grad=True)
    dt = torch.rand(batch, channels, tokens, dtype=torch.float64, requires_grad=True)
    a = (-torch.rand(channels, states, dtype=torch.float64)).requires_grad_()
    b, c = (torch.randn(batch, states, tokens, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(batch, channels, tokens, dtype=torch.float64)
    want = recurrence(state, dt, a, b, c, x)
    bare = recurrence(torch.zeros_like(state), dt, a, b, c, x)
    got = [mine + added for mine, added in zip(bare, scan_from(state, dt, a, c), strict=True)]
    grads = [torch.randn_like(z) for z in want]
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    leaves = [state, dt, a, b, c]
    for mine, its in zip(
        torch.autograd.grad(got, leaves, grads), torch.autograd.grad(want, leaves, grads), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-12)
