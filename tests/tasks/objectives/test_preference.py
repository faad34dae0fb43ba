"""Every loss of pairs and its gradient, compared with the published formula over padded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from ragged_kit import LENGTHS, Rows, make_rows
from tests.precision_kit import assert_as_precise
from torch import Tensor

from streamtune.errors import ArgumentError
from streamtune.recipe import DpoRecipe
from streamtune.recipe.keys.preferences import OF_PAIRS, OF_SINGLE_COMPLETIONS
from streamtune.tasks.objectives import (
    PREFERENCE_LOSSES,
    PairLogps,
    PairOptions,
    UnpairedOptions,
    check_preference_loss,
    preference_loss,
)

BETA = 0.3


class Padded:
    """Inputs of the formulas below, from padded log-probs and masks. Rows are chosen, rejected, chosen ..."""

    def __init__(self, rows: Rows, ref_NL: Tensor | None, average: bool) -> None:
        self.tokens_N = rows.mask_NL.sum(1)
        logp_N = (rows.logp_NL * rows.mask_NL).sum(1)
        ref_N = torch.zeros_like(logp_N) if ref_NL is None else (ref_NL * rows.mask_NL).sum(1)
        self.nll = -logp_N[::2] / self.tokens_N[::2]
        if average:
            logp_N, ref_N = logp_N / self.tokens_N, ref_N / self.tokens_N
        self.pi_w, self.pi_l, self.ref_w, self.ref_l = logp_N[::2], logp_N[1::2], ref_N[::2], ref_N[1::2]
        self.w, self.l = self.pi_w - self.ref_w, self.pi_l - self.ref_l
        self.h = self.w - self.l


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def smoothed(logits: Tensor, eps: float) -> Tensor:
    return -(1 - eps) * torch.log(sigma(logits)) - eps * torch.log(sigma(-logits))


def exo(p: Padded, eps: float) -> Tensor:
    """Return KL(p_theta || p_labels) over the two completions; p_theta is the softmax of beta times the scores."""
    p_theta = torch.softmax(BETA * torch.stack([p.w, p.l]), dim=0)
    labels = torch.tensor([[1 - eps], [eps]], dtype=p_theta.dtype)
    return (p_theta * (torch.log(p_theta) - torch.log(labels))).sum(0)


def orpo(p: Padded) -> Tensor:
    """Return L_SFT + lambda L_OR with odds = P / (1 - P); P is the geometric mean of token probabilities."""
    odds_w, odds_l = (torch.exp(x) / (1 - torch.exp(x)) for x in (p.pi_w, p.pi_l))
    return p.nll - BETA * torch.log(sigma(torch.log(odds_w / odds_l)))


def copg(p: Padded, scores: tuple[Tensor, Tensor]) -> Tensor:
    """Return minus the sample objective, term by term: R_{beta/2}(y) = R(y) - beta / 2 ln(pi / pi_ref)."""
    regularised_w, regularised_l = scores[0] - BETA / 2 * p.w, scores[1] - BETA / 2 * p.l
    return -((regularised_w - regularised_l) * p.w + (regularised_l - regularised_w) * p.l)


SCORES = (torch.tensor([0.9, -1.0, 2.0, 0.3]).double(), torch.tensor([0.1, 0.4, -0.5, 0.3]).double())

CASES: list[tuple[str, dict[str, Any], Callable[[Padded], Tensor]]] = [
    ("sigmoid", {}, lambda p: smoothed(BETA * p.h, 0.0)),
    ("sigmoid", {"label_smoothing": 0.1}, lambda p: smoothed(BETA * p.h, 0.1)),
    ("sigmoid", {"length_normalization": True}, lambda p: smoothed(BETA * p.h, 0.0)),
    ("sigmoid", {"reference_free": True}, lambda p: smoothed(BETA * (p.pi_w - p.pi_l), 0.0)),
    ("sigmoid", {"rpo_alpha": 0.7}, lambda p: smoothed(BETA * p.h, 0.0) + 0.7 * p.nll),
    ("hinge", {}, lambda p: (1 - BETA * p.h).clamp(min=0)),
    ("ipo", {}, lambda p: (p.h - 1 / (2 * BETA)) ** 2),
    ("ipo", {"length_normalization": True}, lambda p: (p.h - 1 / (2 * BETA)) ** 2),
    (
        "robust",
        {"label_smoothing": 0.1},
        lambda p: (0.9 * smoothed(BETA * p.h, 0) - 0.1 * smoothed(-BETA * p.h, 0)) / 0.8,
    ),
    ("robust", {}, lambda p: smoothed(BETA * p.h, 0.0)),
    ("exo_pair", {"label_smoothing": 0.01}, lambda p: exo(p, 0.01)),
    ("sppo_hard", {}, lambda p: (p.w - 1 / (2 * BETA)) ** 2 + (p.l + 1 / (2 * BETA)) ** 2),
    ("apo_zero", {}, lambda p: 1 - sigma(BETA * p.w) + sigma(BETA * p.l)),
    ("apo_zero", {"rpo_alpha": 1.0}, lambda p: 1 - sigma(BETA * p.w) + sigma(BETA * p.l) + p.nll),
    ("apo_down", {}, lambda p: sigma(BETA * p.w) + 1 - sigma(BETA * p.h)),
    ("dpop", {}, lambda p: -torch.log(sigma(BETA * (p.h - 50 * (p.ref_w - p.pi_w).clamp(min=0))))),
    ("dpop", {"dpop_lambda": 2.0}, lambda p: -torch.log(sigma(BETA * (p.h - 2 * (p.ref_w - p.pi_w).clamp(min=0))))),
    ("copg", {"scores": SCORES}, lambda p: copg(p, SCORES)),
    ("copg", {}, lambda p: copg(p, (torch.full_like(p.w, 0.25), torch.full_like(p.w, -0.25)))),
    ("orpo", {}, orpo),
    ("orpo", {"rpo_alpha": 0.2}, lambda p: orpo(p) + 0.2 * p.nll),
    ("simpo", {}, lambda p: smoothed(BETA * (p.pi_w - p.pi_l) - 0.5, 0.0)),
    ("simpo", {"simpo_gamma": 1.4, "label_smoothing": 0.1}, lambda p: smoothed(BETA * (p.pi_w - p.pi_l) - 1.4, 0.1)),
    ("cpo", {}, lambda p: smoothed(BETA * (p.pi_w - p.pi_l), 0.0) + p.nll),
    ("cpo", {"cpo_alpha": 0.0}, lambda p: smoothed(BETA * (p.pi_w - p.pi_l), 0.0)),
    (
        "cpo",
        {"cpo_alpha": 0.5, "label_smoothing": 0.2},
        lambda p: smoothed(BETA * (p.pi_w - p.pi_l), 0.2) + 0.5 * p.nll,
    ),
]
AVERAGED = {"ipo", "orpo", "simpo"}
IDS = [f"{name}-{'-'.join(knobs)}" for name, knobs, _ in CASES]


def compute(name: str, rows: Rows, ref_NL: Tensor, knobs: dict[str, Any]) -> Any:
    policy = PairLogps.from_tokens(rows.logp_K, rows.row_K, rows.num_rows)
    reference = PairLogps.from_tokens(rows.ragged(ref_NL), rows.row_K, rows.num_rows)
    needs = PREFERENCE_LOSSES[name].needs_reference and not knobs.get("reference_free")
    own = {key: value for key, value in knobs.items() if key != "scores"}
    return preference_loss(
        name, policy, reference if needs else None, PairOptions(beta=BETA, **own), scores=knobs.get("scores")
    )


@pytest.mark.parametrize("left", [False, True], ids=["padded-right", "padded-left"])
@pytest.mark.parametrize(("name", "knobs", "formula"), CASES, ids=IDS)
def test_losses_and_gradients_are_those_of_the_formula(
    name: str, knobs: dict[str, Any], formula: Callable[[Padded], Tensor], left: bool
) -> None:
    rows, theirs = make_rows(left=left), make_rows(left=left)
    ref_NL = rows.other(seed=1)
    terms = compute(name, rows, ref_NL, knobs)
    padded = Padded(theirs, ref_NL, average=name in AVERAGED or bool(knobs.get("length_normalization")))
    expected_P = formula(padded)
    torch.testing.assert_close(terms.losses_P, expected_P, atol=1e-10, rtol=1e-12)
    terms.losses_P.mean().backward()
    expected_P.mean().backward()
    torch.testing.assert_close(rows.logp_NL.grad, theirs.logp_NL.grad, atol=1e-10, rtol=1e-12)


@pytest.mark.parametrize(("name", "knobs", "formula"), CASES, ids=IDS)
def test_float32_log_probs_give_the_values_within_1e_6(
    name: str, knobs: dict[str, Any], formula: Callable[[Padded], Tensor]
) -> None:
    rows, truth = make_rows(dtype=torch.float32), make_rows()
    ref_NL = truth.other(seed=1)
    terms = compute(name, rows, ref_NL.float(), knobs)
    average = name in AVERAGED or bool(knobs.get("length_normalization"))
    plain_P, expected_P = (formula(Padded(r, ref_NL.to(r.logp_K), average=average)) for r in (rows, truth))
    assert_as_precise(terms.losses_P, plain_P, expected_P)


def test_every_loss_of_the_table_is_tested() -> None:
    assert {name for name, _, _ in CASES} == set(PREFERENCE_LOSSES)


def test_copg_has_the_gradient_of_ipo_where_the_reward_is_a_preference() -> None:
    """arXiv 2406.19185, eqs. 21-22: -1/(2 beta) (1/2 - beta h)^2, over summed log-probs."""
    rows, theirs = make_rows(), make_rows()
    ref_NL = rows.other(seed=1)
    compute("copg", rows, ref_NL, {}).losses_P.sum().backward()
    h = Padded(theirs, ref_NL, average=False).h
    (1 / (2 * BETA) * (0.5 - BETA * h) ** 2).sum().backward()
    torch.testing.assert_close(rows.logp_NL.grad, theirs.logp_NL.grad, atol=1e-10, rtol=0)


def test_one_pair_of_one_token_each_at_the_reference() -> None:
    rows = make_rows((1, 1))
    expected = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": (1 / (2 * BETA)) ** 2, "apo_zero": 1.0, "apo_down": 1.0}
    for name, value in expected.items():
        terms = compute(name, rows, rows.logp_NL.detach(), {})
        assert terms.losses_P.tolist() == pytest.approx([value])
        assert terms.chosen_rewards_P.tolist() == [0.0]


def test_a_certain_completion_has_a_finite_orpo_loss_and_gradient() -> None:
    """The log-prob of a certain completion is exactly 0 in float32, and its odds are infinite."""
    logp_K = torch.tensor([0.0, 0.0, -1.0], requires_grad=True)
    pairs = PairLogps.from_tokens(logp_K, torch.tensor([0, 0, 1]), 2)
    loss = preference_loss("orpo", pairs, None).losses_P.sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert logp_K.grad is not None
    assert torch.isfinite(logp_K.grad).all()


def test_far_margins_stay_finite() -> None:
    logp_K = torch.tensor([-1e5, -1.0], requires_grad=True)
    policy = PairLogps.from_tokens(logp_K, torch.tensor([0, 1]), 2)
    reference = PairLogps.from_tokens(torch.tensor([-1.0, -1e5]), torch.tensor([0, 1]), 2)
    for name, loss in PREFERENCE_LOSSES.items():
        knobs = {"label_smoothing": 0.01} if name == "exo_pair" else {}
        terms = preference_loss(name, policy, reference if loss.needs_reference else None, PairOptions(**knobs))
        (grad,) = torch.autograd.grad(terms.losses_P.sum(), logp_K, retain_graph=True)
        assert torch.isfinite(terms.losses_P).all(), name
        assert torch.isfinite(grad).all(), name


def test_the_reference_gets_no_gradient() -> None:
    rows, ref = make_rows(), make_rows(seed=1)
    policy = PairLogps.from_tokens(rows.logp_K, rows.row_K, rows.num_rows)
    reference = PairLogps.from_tokens(ref.logp_K, ref.row_K, ref.num_rows)
    preference_loss("sigmoid", policy, reference).losses_P.sum().backward()
    assert ref.logp_NL.grad is None


def test_rewards_and_log_probs_and_their_metrics() -> None:
    rows = make_rows()
    ref_NL = rows.other(seed=1)
    terms = compute("sigmoid", rows, ref_NL, {})
    padded = Padded(rows, ref_NL, average=False)
    torch.testing.assert_close(terms.chosen_rewards_P, (BETA * padded.w).detach())
    torch.testing.assert_close(terms.rejected_logps_P, padded.pi_l.detach())
    assert not terms.chosen_rewards_P.requires_grad
    metrics = terms.metrics()
    margins = (terms.chosen_rewards_P - terms.rejected_rewards_P).tolist()
    assert metrics["rewards/accuracies"] == (sum(margin > 0 for margin in margins), len(LENGTHS) / 2)
    assert metrics["rewards/margins"][0] == pytest.approx(sum(margins))
    assert metrics["nll_loss"][0] == pytest.approx(padded.nll.sum().item())


def test_losses_do_not_depend_on_how_pairs_are_grouped() -> None:
    together = compute("cpo", make_rows(LENGTHS), make_rows(LENGTHS).logp_NL.detach(), {}).losses_P
    rows = make_rows(LENGTHS)
    apart = []
    for first in range(0, len(LENGTHS), 2):
        of_pair = (rows.row_K == first) | (rows.row_K == first + 1)
        pair = PairLogps.from_tokens(rows.logp_K[of_pair], rows.row_K[of_pair] - first, 2)
        apart.append(preference_loss("cpo", pair, None, PairOptions(beta=BETA)).losses_P)
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "knobs", "where", "says"),
    [
        ("sigmod", {}, "loss_type", "did you mean 'sigmoid'"),
        ("nothing_like_it", {}, "loss_type", "choose one of"),
        ("sigmoid", {"beta": 0.0}, "beta", "must be positive"),
        ("sigmoid", {"beta": math.nan}, "beta", "beta must be finite, found nan"),
        ("sigmoid", {"label_smoothing": 0.5}, "label_smoothing", r"in \[0, 0.5\)"),
        ("exo_pair", {}, "label_smoothing", "logarithm of label_smoothing"),
        ("ipo", {"label_smoothing": 0.1}, "label_smoothing", "does not read label_smoothing"),
        ("sigmoid", {"simpo_gamma": 1.0}, "simpo_gamma", "use simpo"),
        ("simpo", {"cpo_alpha": 0.0}, "cpo_alpha", "use cpo"),
        ("sigmoid", {"dpop_lambda": 1.0}, "dpop_lambda", "use dpop"),
        ("simpo", {"simpo_gamma": -1.0}, "simpo_gamma", "must not be negative"),
        ("sigmoid", {"rpo_alpha": -1.0}, "rpo_alpha", "must not be negative"),
        ("apo_zero", {"reference_free": True}, "reference_free", "reference_free is undefined for it"),
    ],
)
def test_what_a_loss_cannot_use_is_an_error(name: str, knobs: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as error:
        check_preference_loss(name, PairOptions(**knobs))
    assert error.value.where == where


def test_a_missing_reference_and_scores_nobody_reads_are_errors() -> None:
    rows = make_rows()
    pairs = PairLogps.from_tokens(rows.logp_K, rows.row_K, rows.num_rows)
    with pytest.raises(ArgumentError, match="needs a reference"):
        preference_loss("sigmoid", pairs, None)
    with pytest.raises(ArgumentError, match="does not read scores"):
        preference_loss("sigmoid", pairs, pairs, scores=SCORES)


def test_a_key_of_one_kind_of_loss_is_refused_with_the_other() -> None:
    """``recipe/`` cannot import the losses, so it lists the keys that only one kind of loss reads."""
    pairs, single = (
        {field.name for field in fields(knobs)} & set(DpoRecipe.model_fields)
        for knobs in (PairOptions, UnpairedOptions)
    )
    assert set(OF_PAIRS) == pairs - single
    assert set(OF_SINGLE_COMPLETIONS) == single - pairs
