"""GaLore: the steps of the galore-torch package, projections that hold a gradient, a resume to the same bits."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from streamtune.optim import OptimChoice, build_optimizer
from streamtune.optim.matrix_optimizers import (
    GaLoreAdamW,
    Projection,
    ProjType,
    cosine_columns,
    cosine_transform,
    randomized_columns,
)

SHAPES = ((24, 16), (16, 40), (32, 32), (20,))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    """A part that is the same in all steps, of low rank, and noise."""
    generator = torch.Generator().manual_seed(7)
    low = [torch.randn(*p.shape[:1], 3, generator=generator) @ torch.randn(3, p.shape[-1], generator=generator)
           if p.dim() == 2 else torch.randn(p.shape, generator=generator) for p in like]  # fmt: skip
    noise = torch.Generator().manual_seed(100 + step)
    return [x + 0.1 * torch.randn(x.shape, generator=noise) for x in low]


def train(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, grad in zip(held, gradients(step, held), strict=True):
            parameter.grad = grad
        optimizer.step()


@pytest.mark.parametrize("proj_type", get_args(ProjType))
def test_fifty_steps_are_those_of_galore_torch(proj_type: ProjType) -> None:
    galore_torch = pytest.importorskip("galore_torch")
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"rank": 4, "update_proj_gap": 11, "scale": 0.3}
    low = {"params": theirs[:-1], **options, "proj_type": proj_type}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = galore_torch.GaLoreAdamW(
            [low, {"params": theirs[-1:]}], lr=1e-2, weight_decay=0.1, eps=1e-6, no_deprecation_warning=True
        )
        train(reference, theirs, range(50))
    train(GaLoreAdamW(ours, lr=1e-2, weight_decay=0.1, eps=1e-6, proj_type=proj_type, **options), ours, range(50))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm((a - b).double()) <= 1e-6 * torch.linalg.vector_norm(b.double())


def test_without_a_smaller_rank_the_steps_are_adamws() -> None:
    ours, theirs = parameters(), parameters()
    train(torch.optim.AdamW(theirs, lr=1e-2, eps=0.0, weight_decay=0.0, foreach=False), theirs, range(50))
    train(GaLoreAdamW(ours, lr=1e-2, eps=0.0, rank=None), ours, range(50))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm(a - b) <= 1e-6 * torch.linalg.vector_norm(b)


def held_share(grad: Tensor, columns: Tensor) -> float:
    assert torch.allclose(columns.T @ columns, torch.eye(columns.shape[1]), atol=1e-5)
    return float((grad @ columns).norm() / grad.norm())


def test_a_random_sketch_holds_what_the_singular_vectors_hold() -> None:
    generator = torch.Generator().manual_seed(3)
    grad = torch.randn(200, 90, generator=generator) * torch.logspace(0, -2, 90)
    _, _, vectors = torch.linalg.svd(grad, full_matrices=False)
    best = held_share(grad, vectors[:12].T)
    found = held_share(grad, randomized_columns(grad, 12, seed=5))
    assert best >= found >= 0.999 * best
    assert torch.equal(randomized_columns(grad, 12, seed=5), randomized_columns(grad, 12, seed=5))


def test_the_cosines_that_a_gradient_is_made_of_are_found() -> None:
    size = 30
    angle = torch.pi / size * (torch.arange(size) + 0.5)
    grad = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)) * torch.cos(angle * 7)
    grad = grad + 0.5 * torch.cos(angle * 19)
    transform = cosine_transform(size, torch.float32, torch.device("cpu"))
    assert cosine_columns(grad, transform, 2).tolist() == [7, 19]


@pytest.mark.parametrize("size", [7, 600])
def test_the_cosines_are_orthonormal(size: int) -> None:
    found = cosine_transform(size, torch.float32, torch.device("cpu")).double()
    place = torch.arange(size, dtype=torch.float64)
    exact = torch.cos(torch.pi / size * (place[:, None] + 0.5) * place) * (2 / size) ** 0.5
    exact[:, 0] /= 2**0.5
    assert torch.allclose(found, exact, atol=1e-6)
    assert torch.allclose(found.T @ found, torch.eye(size, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("proj_type", get_args(ProjType))
@pytest.mark.parametrize("projection", get_args(Projection))
def test_the_state_has_the_rank_and_goes_on_to_the_same_bits(projection: Projection, proj_type: ProjType) -> None:
    def optimizer_of(held: list[nn.Parameter]) -> torch.optim.Optimizer:
        args = {"rank": 4, "update_proj_gap": 3, "projection": projection, "proj_type": proj_type}
        return build_optimizer(OptimChoice("galore", 1e-2, args=args), [(str(i), p) for i, p in enumerate(held)])

    ours, other = parameters(), parameters()
    optimizer = optimizer_of(ours)
    train(optimizer, ours, range(7))
    shapes = [(24, 4), (40, 4), (32, 4)] if proj_type == "std" else 3 * [(4, 4)]
    assert [optimizer.state[p]["exp_avg"].shape for p in ours] == [*shapes, (20,)]
    stored = [4] if projection == "dct" else [16, 4]
    assert list(optimizer.state[ours[0]]["projection"].shape) == stored
    with torch.no_grad():
        for a, b in zip(other, ours, strict=True):
            a.copy_(b)
    loaded = optimizer_of(other)
    loaded.load_state_dict(optimizer.state_dict())
    train(optimizer, ours, range(7, 14))
    train(loaded, other, range(7, 14))
    assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize("proj_type", get_args(ProjType))
@pytest.mark.parametrize("projection", get_args(Projection))
def test_weights_move_towards_what_the_gradients_ask_for(projection: Projection, proj_type: ProjType) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(48, 24, generator=generator)
    weight = nn.Parameter(torch.zeros(48, 24))
    how: dict[str, Any] = {"projection": projection, "proj_type": proj_type}
    optimizer = GaLoreAdamW([weight], lr=0.05, rank=8, update_proj_gap=10, scale=1.0, **how)
    for _ in range(400 if proj_type == "std" else 2000):  # of 64 numbers each
        weight.grad = weight.detach() - wanted
        optimizer.step()
    assert (weight - wanted).norm() < 0.1 * wanted.norm()
