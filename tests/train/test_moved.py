"""The share of the trained weights that a step changes: counted, in any way of stepping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streamtune.optim import OptimChoice, build_optimizer
from streamtune.train import HostOptimizer, InBackwardBackend, LocalBackend, World
from streamtune.train.guard import MOST, WHOLE, MovedWeights, describe_moved


def changed(before: list[torch.Tensor], model: nn.Module) -> float:
    pairs = list(zip(before, model.parameters(), strict=True))
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["after", "backward", "host", "host, backward"])
def test_the_share_is_the_count(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 40)).to(dtype)
    optimizer = build_optimizer(OptimChoice("adamw", 1e-5), model.named_parameters())
    if "host" in kind:
        optimizer = HostOptimizer(optimizer)
    backend = InBackwardBackend(model, optimizer, 0.0) if "backward" in kind else LocalBackend(model, optimizer)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        backend.begin_step(1e-5, lambda: None)
        watched = MovedWeights(backend.stepped())
        with backend.micro_step(last=True):
            backend.backward(model(torch.randn(8, 60, dtype=dtype)).float().square().mean())
        backend.clip_gradients(0.0)
        backend.step(1e-5)
        share = watched.share(World())
        assert share == pytest.approx(changed(before, model), abs=1e-12)
        assert share > 0.95 if dtype == torch.float32 else share < 0.5
    backend.close()


def test_of_large_weights_every_nth_value_is_compared_and_small_ones_whole() -> None:
    large, small = torch.zeros(2 * MOST), torch.zeros(WHOLE)
    watched = MovedWeights([large, small, torch.zeros(0)])
    large[: MOST // 2] = 1  # a quarter
    small[7] = 1
    want = (MOST / 2 + 1) / (2 * MOST + WHOLE)
    assert watched.share(World()) == pytest.approx(want, rel=1e-5)
    held = sum(x.nbytes for x in watched._before)
    assert held < 4 * (MOST + WHOLE)
    only_small = MovedWeights([large, small])
    small[8] = 1
    assert only_small.share(World()) == 1 / (2 * MOST + WHOLE)


def test_without_weights_nothing_moves() -> None:
    assert MovedWeights([]).share(World()) == 0.0


def test_the_note_says_what_to_change() -> None:
    narrow = describe_moved(0.031, {torch.bfloat16}, 1e-5)
    assert "changes 3.1% of the trained weights" in narrow
    assert "weight_rounding: stochastic" in narrow
    assert "raise learning_rate" in describe_moved(0.0, {torch.float32}, 1e-12)
