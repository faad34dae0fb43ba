"""Streamed losses of target tokens equal their dense formulas, value and gradient, in fp64 and as precisely in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from streamtune.ops import (
    Divergence,
    TeacherHead,
    TokenLoss,
    linear_token_loss,
    project_token_loss,
    token_loss_reference,
)
from streamtune.ops.head import token_losses
from tests.ops.test_cross_entropy import Head, make, precise, softcap
from tests.precision_kit import relative

LOSSES = {
    "nll": TokenLoss(),
    "dft": TokenLoss("dft"),
    "focal": TokenLoss("focal", focal_gamma=2.0),
    "focal, flat": TokenLoss("focal", focal_gamma=0.5),
    "smoothed": TokenLoss(label_smoothing=0.1),
    "z-loss": TokenLoss(z_loss=1e-2),
    "smoothed, z-loss": TokenLoss(label_smoothing=0.2, z_loss=1e-3),
    "dft, z-loss": TokenLoss("dft", z_loss=1e-3),
}


def weights_of(head: Head) -> Tensor:
    return torch.rand(head.targets.shape, generator=torch.Generator().manual_seed(3)) + 0.1


def streamed(head: Head, how: str, transform: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    if how == "linear":
        return linear_token_loss(
            head.hidden, head.weight, head.targets, bias_V=head.bias, transform=transform, **options
        )

    def project(h: Tensor) -> Tensor:
        logits = linear(h, head.weight, head.bias)
        return logits if transform is None else transform(logits)

    return project_token_loss(head.hidden, project, head.leaves[1:], head.targets, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("transform", [None, softcap], ids=["", "softcap"])
@pytest.mark.parametrize("weighed", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("how", ["linear", "project"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_dense_formula(
    name: str, how: str, weighed: bool, transform: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, head = LOSSES[name], make(dtype)
    weights = weights_of(head) if weighed else None
    monkeypatch.setattr(token_losses, "WIDENED", 3 * 71)  # a chunk is computed in several parts

    def dense(head: Head) -> list[Tensor]:
        logits = head.logits() if transform is None else transform(head.logits())
        value = token_loss_reference(logits, head.targets, loss, weights) / 11
        return [value, *torch.autograd.grad(value, head.leaves)]

    want, truth = dense(head), dense(head.to(torch.float64))
    for chunk_size in (7, 1000):
        got, measured = streamed(
            head, how, transform, loss=loss, weights_BT=weights, chunk_size=chunk_size, num_items=11
        )
        precise([got, *torch.autograd.grad(got, head.leaves)], want, truth)
        logits = head.logits() if transform is None else transform(head.logits())
        nll = cross_entropy(logits.flatten(0, 1), head.targets.flatten(), reduction="sum")
        assert relative(measured[0], nll) < 1e-5
        assert not measured.requires_grad


def test_the_reference_is_torchs_own_where_there_is_one() -> None:
    head = make()
    logits, targets = head.logits().flatten(0, 1), head.targets.flatten()
    want = cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    assert relative(token_loss_reference(head.logits(), head.targets, TokenLoss(label_smoothing=0.1)), want) < 1e-13
    assert relative(token_loss_reference(head.logits(), head.targets, TokenLoss()), cross_entropy(
        logits, targets, reduction="sum")) < 1e-13  # fmt: skip


def test_dft_has_no_gradient_through_its_factor() -> None:
    """As TRL's ``dft_loss``: a token of probability p has p times the gradient of the cross entropy."""
    logits = torch.randn(1, 1, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[4]])
    (ours,) = torch.autograd.grad(token_loss_reference(logits, target, TokenLoss("dft")), logits)
    (plain,) = torch.autograd.grad(cross_entropy(logits[0], target[0]), logits)
    assert relative(ours, plain * logits.detach().softmax(-1)[..., 4]) < 1e-14


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_is_finite_where_a_token_is_certain(gamma: float) -> None:
    weight = torch.eye(5) * 200
    hidden, targets = torch.eye(5)[None].requires_grad_(), torch.arange(5)[None]
    loss, _ = linear_token_loss(hidden, weight, targets, loss=TokenLoss("focal", focal_gamma=gamma))
    (grad,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == 0
    assert torch.isfinite(grad).all()


def test_weights_count_in_the_divisor_of_the_call() -> None:
    head = make()
    weights = weights_of(head)
    got, _ = streamed(head, "linear", loss=TokenLoss(), weights_BT=weights)
    kept = head.targets != -100
    want = token_loss_reference(head.logits(), head.targets, TokenLoss(), weights) / weights[kept].sum()
    assert relative(got, want) < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_with_in_fp32(dtype: torch.dtype) -> None:
    head = make(dtype, bias=False)
    loss = TokenLoss(label_smoothing=0.1, z_loss=1e-3)

    def dense(head: Head) -> list[Tensor]:
        value = token_loss_reference(head.logits(), head.targets, loss) / 7
        return [value, *torch.autograd.grad(value, head.leaves)]

    got, _ = streamed(head, "linear", loss=loss, num_items=7, chunk_size=8)
    assert got.dtype == torch.float32
    precise([got, *torch.autograd.grad(got, head.leaves)], dense(head), dense(head.to(torch.float64)))


def test_a_frozen_head_and_a_retained_graph() -> None:
    head = make()
    head.weight.requires_grad_(False)
    loss, _ = linear_token_loss(head.hidden, head.weight, head.targets, loss=TokenLoss("dft"))
    loss.backward(retain_graph=True)
    first = head.hidden.grad.clone()
    loss.backward()
    assert torch.equal(head.hidden.grad, 2 * first)
    with torch.no_grad():
        assert not linear_token_loss(head.hidden, head.weight, head.targets, loss=TokenLoss("dft"))[0].requires_grad


DIVERGENCES = {
    "forward": Divergence("forward"),
    "reverse, warm": Divergence("reverse", temperature=2.0),
    "jsd": Divergence("jsd", beta=0.3, target_loss_weight=0.4),
    "forward, hard": Divergence("forward", temperature=0.5, target_loss_weight=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("transform", [None, softcap], ids=["", "softcap"])
@pytest.mark.parametrize("how", ["linear", "project"])
@pytest.mark.parametrize("tokens", [71, 64, 80])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_equal_the_dense_formula(
    name: str, tokens: int, how: str, transform: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher has another width, and a padded end of the vocabulary of its own."""
    loss, head = TokenLoss("focal", z_loss=1e-3, divergence=DIVERGENCES[name]), make(dtype)
    weights = weights_of(head)
    monkeypatch.setattr(token_losses, "WIDENED", 12 * 71)  # a chunk is computed in several parts
    draw = torch.Generator().manual_seed(8)
    states = torch.randn(*head.targets.shape, 13, generator=draw, dtype=torch.float64)
    matrix = torch.randn(tokens, 13, generator=draw, dtype=torch.float64)
    targets = head.targets.clamp_max(min(tokens, 71) - 1)

    def dense(head: Head) -> list[Tensor]:
        logits = head.logits() if transform is None else transform(head.logits())
        taught = linear(states.to(logits.dtype), matrix.to(logits.dtype))
        value = token_loss_reference(logits, targets, loss, weights, teacher_BTV=taught) / 11
        return [value, *torch.autograd.grad(value, head.leaves)]

    want, truth = dense(head), dense(head.to(torch.float64))
    narrow = matrix.to(dtype)
    teacher = TeacherHead(states.to(dtype), lambda h: linear(h, narrow))
    given = Head(head.hidden, head.weight, head.bias, targets)
    options = {"loss": loss, "weights_BT": weights, "teacher": teacher, "num_items": 11}
    for chunk_size in (7, 1000):
        got, measured = streamed(given, how, transform, chunk_size=chunk_size, **options)
        precise([got, *torch.autograd.grad(got, head.leaves)], want, truth)
        assert measured[1] > 0


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    head = make()
    teacher = TeacherHead(head.hidden.detach(), lambda h: linear(h, head.weight.detach(), head.bias.detach()))
    for kind in ("forward", "reverse", "jsd"):
        loss, _ = streamed(head, "linear", loss=TokenLoss(divergence=Divergence(kind)), teacher=teacher)
        assert abs(loss.item()) < 1e-14
        assert all(g.norm() < 1e-13 for g in torch.autograd.grad(loss, head.leaves))


def test_tokens_that_cannot_be_have_no_share() -> None:
    """A model that rules tokens out gives them a logit of minus infinity; the others have finite values."""
    head = make(bias=False)
    cut = torch.zeros(71, dtype=torch.float64).index_fill(0, torch.tensor([70]), -torch.inf)
    targets = head.targets.clamp_max(69)
    teacher = TeacherHead(head.hidden.detach() + 0.1, lambda h: linear(h, head.weight.detach()) + cut)
    for kind in ("forward", "reverse", "jsd"):
        loss, _ = linear_token_loss(
            head.hidden, head.weight, targets, loss=TokenLoss(divergence=Divergence(kind)), teacher=teacher,
            transform=lambda logits: logits + cut,
        )  # fmt: skip
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, head.hidden)[0]).all()
