"""Every policy loss and its gradient, compared with the published formula over padded tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ragged_kit import LENGTHS, Rows, make_rows
from tests.precision_kit import assert_as_precise
from torch import Tensor

from streamtune.base.policy_losses import POLICY_LOSS_FACTS
from streamtune.errors import ArgumentError
from streamtune.tasks.objectives import (
    POLICY_LOSSES,
    PolicyOptions,
    StepTotals,
    TokenLogps,
    check_policy_loss,
    kl_estimate,
    policy_loss,
)

ADVANTAGES = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.3, -0.1, 0.7]).double()
TOTALS = StepTotals(completions=11, tokens=57, max_completion_length=9)
LOW, HIGH = 0.1, 0.15


def formula(
    name: str,
    rows: Rows,
    old_NL: Tensor,
    ref_NL: Tensor,
    *,
    beta: float,
    delta: float | None,
    level: str,
    by_ratio: bool = False,
) -> Tensor:
    mask, length_N = rows.mask_NL, rows.mask_NL.sum(1)
    log_ratio = (rows.logp_NL - old_NL) * mask
    if level == "token":
        ratio, advantage = log_ratio.exp(), ADVANTAGES[:, None]
    elif name in ("rloo", "remax"):
        ratio, advantage = log_ratio.sum(1).exp(), ADVANTAGES  # the probability of the whole completion
    else:
        ratio, advantage = (log_ratio.sum(1) / length_N).exp()[:, None], ADVANTAGES[:, None]
    first = ratio if delta is None else torch.where(ratio > delta, delta, ratio)
    surrogate = torch.minimum(first * advantage, torch.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    if surrogate.dim() == 1:
        return -surrogate.sum() / TOTALS.completions
    x = ref_NL - rows.logp_NL
    per_token = (-surrogate + beta * (ratio if by_ratio else 1) * (x.exp() - x - 1)) * mask
    per_row = per_token.sum(1)
    if name in ("grpo", "gspo"):
        return (per_row / length_N).sum() / TOTALS.completions
    if name == "dr_grpo":
        return per_row.sum() / (TOTALS.completions * TOTALS.max_completion_length)
    if name == "dapo":
        return per_row.sum() / TOTALS.tokens
    if name == "bnpo":
        return per_row.sum() / mask.sum() * (len(mask) / TOTALS.completions)
    return per_row.sum() / TOTALS.completions


CASES = [
    (name, level, beta, delta)
    for name, loss in POLICY_LOSSES.items()
    for level in loss.levels
    for beta in ((0.0,) if POLICY_LOSS_FACTS[name].kl_in_reward else (0.0, 0.04))
    for delta in (None, 1.3)
]


def both(
    name: str, level: str, beta: float, delta: float | None, left: bool, by_ratio: bool = False
) -> tuple[Any, Tensor, Rows, Rows]:
    rows, theirs = make_rows(left=left), make_rows(left=left)
    old_NL, ref_NL = rows.other(seed=3), rows.other(seed=4)
    terms = policy_loss(
        name,
        TokenLogps(rows.logp_K, rows.row_K, rows.ragged(old_NL), rows.ragged(ref_NL)),
        ADVANTAGES,
        TOTALS,
        PolicyOptions(LOW, HIGH, delta=delta, beta=beta, kl_by_ratio=by_ratio, importance_level=level),
    )
    expected = formula(name, theirs, old_NL, ref_NL, beta=beta, delta=delta, level=level, by_ratio=by_ratio)
    return terms, expected, rows, theirs


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(("name", "level", "beta", "delta"), CASES)
def test_losses_and_gradients_are_those_of_the_formula(
    name: str, level: str, beta: float, delta: float | None, left: bool
) -> None:
    terms, expected, rows, theirs = both(name, level, beta, delta, left)
    torch.testing.assert_close(terms.loss, expected, atol=1e-10, rtol=0)
    terms.loss.backward()
    expected.backward()
    torch.testing.assert_close(rows.logp_NL.grad, theirs.logp_NL.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("name", "level", "beta", "delta"), [case for case in CASES if case[2]])
def test_the_divergence_times_the_ratio(name: str, level: str, beta: float, delta: float | None) -> None:
    terms, expected, rows, theirs = both(name, level, beta, delta, False, by_ratio=True)
    torch.testing.assert_close(terms.loss, expected, atol=1e-10, rtol=0)
    terms.loss.backward()
    expected.backward()
    torch.testing.assert_close(rows.logp_NL.grad, theirs.logp_NL.grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_float32_log_probs_give_the_value_within_1e_6(name: str) -> None:
    rows, truth = make_rows(dtype=torch.float32), make_rows()
    old_NL, ref_NL = truth.other(seed=3), truth.other(seed=4)
    level = POLICY_LOSSES[name].level
    logps = TokenLogps(rows.logp_K, rows.row_K, rows.ragged(old_NL.float()))
    terms = policy_loss(name, logps, ADVANTAGES.float(), TOTALS, PolicyOptions(LOW, HIGH))
    expected = formula(name, truth, old_NL, ref_NL, beta=0.0, delta=None, level=level)
    plain = formula(name, rows, old_NL.float(), ref_NL.float(), beta=0.0, delta=None, level=level)
    assert_as_precise(terms.loss, plain, expected)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_without_old_log_probs_the_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    """All ratios are 1, so the gradient is ``-A grad log pi`` with the token weights of the loss."""
    rows = make_rows()
    policy_loss(name, TokenLogps(rows.logp_K, rows.row_K), ADVANTAGES, TOTALS).loss.backward()
    length_N = rows.mask_NL.sum(1, keepdim=True).double()
    weight = {
        "dr_grpo": (1 / (TOTALS.completions * TOTALS.max_completion_length)),
        "dapo": (1 / TOTALS.tokens),
        "bnpo": (len(LENGTHS) / TOTALS.completions / sum(LENGTHS)),
        "rloo": (1 / TOTALS.completions),
        "remax": (1 / TOTALS.completions),
    }.get(name, 1 / length_N / TOTALS.completions)
    torch.testing.assert_close(rows.logp_NL.grad, -ADVANTAGES[:, None] * weight * rows.mask_NL, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"bnpo"}))
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    rows = make_rows()
    old_K, totals = rows.ragged(rows.other(seed=3)), StepTotals(len(LENGTHS), sum(LENGTHS), 9)
    whole = policy_loss(name, TokenLogps(rows.logp_K, rows.row_K, old_K), ADVANTAGES, totals).loss
    parts = []
    for first, end in ((0, 3), (3, 4), (4, 8)):
        mine = (rows.row_K >= first) & (rows.row_K < end)
        logps = TokenLogps(rows.logp_K[mine], rows.row_K[mine] - first, old_K[mine])
        parts.append(policy_loss(name, logps, ADVANTAGES[first:end], totals).loss)
    torch.testing.assert_close(whole, torch.stack(parts).sum(), atol=1e-12, rtol=0)


def test_bnpo_with_one_completion_a_micro_batch_is_grpo() -> None:
    rows = make_rows()
    totals = StepTotals(len(LENGTHS), sum(LENGTHS), 9)
    grpo = policy_loss("grpo", TokenLogps(rows.logp_K, rows.row_K), ADVANTAGES, totals).loss
    bnpo = []
    for n, length in enumerate(LENGTHS):
        logps = TokenLogps(rows.logp_K[rows.row_K == n], torch.zeros(length).long())
        bnpo.append(policy_loss("bnpo", logps, ADVANTAGES[n, None], totals).loss)
    torch.testing.assert_close(grpo, torch.stack(bnpo).sum(), atol=1e-12, rtol=0)


def test_metrics_count_clipped_tokens_and_average_kl_and_entropy() -> None:
    rows = make_rows()
    old_NL, ref_NL = rows.other(seed=3), rows.other(seed=4)
    entropy_K = torch.arange(float(len(rows.row_K)))
    logps = TokenLogps(rows.logp_K, rows.row_K, rows.ragged(old_NL), rows.ragged(ref_NL), entropy_K)
    metrics = policy_loss("grpo", logps, ADVANTAGES, TOTALS, PolicyOptions(LOW, HIGH)).metrics
    ratio_K = (rows.logp_K - rows.ragged(old_NL)).exp()
    advantage_K = ADVANTAGES[rows.row_K]
    low = int(((ratio_K < 1 - LOW) & (advantage_K < 0)).sum())
    high = int(((ratio_K > 1 + HIGH) & (advantage_K > 0)).sum())
    assert low > 0 < high
    count = len(rows.row_K)
    assert metrics["clip_ratio/low_mean"] == (low, count)
    assert metrics["clip_ratio/high_mean"] == (high, count)
    assert metrics["clip_ratio/region_mean"] == (low + high, count)
    assert metrics["kl"] == (pytest.approx(kl_estimate(rows.logp_K, rows.ragged(ref_NL)).sum().item()), count)
    assert metrics["entropy"] == (entropy_K.sum().item(), count)


def test_at_sequence_level_completions_are_counted() -> None:
    rows = make_rows()
    metrics = policy_loss("gspo", TokenLogps(rows.logp_K, rows.row_K), ADVANTAGES, TOTALS).metrics
    assert metrics == {f"clip_ratio/{side}_mean": (0.0, 8.0) for side in ("low", "high", "region")}


def test_an_enormous_ratio_with_no_advantage_is_no_nan() -> None:
    logp_K = torch.tensor([-1.0, -1.0], requires_grad=True)
    old_K, advantages_N = torch.tensor([-1e4, -1.0]), torch.tensor([0.0, 1.0])
    logps = TokenLogps(logp_K, torch.tensor([0, 1]), old_K)
    loss = policy_loss("grpo", logps, advantages_N, StepTotals(2, 2)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logp_K.grad).all()


def test_kl_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    logp_K = torch.tensor([-1.0, -2.0, -0.5])
    assert kl_estimate(logp_K, logp_K).tolist() == [0.0, 0.0, 0.0]
    assert (kl_estimate(logp_K, logp_K + torch.tensor([0.3, -0.3, 1.0])) > 0).all()


@pytest.mark.parametrize(
    ("name", "knobs", "where", "says"),
    [
        ("grp", {}, "loss_type", "did you mean 'grpo'"),
        ("grpo", {"epsilon_low": 0.0}, "epsilon", r"in \(0, 1\]"),
        ("grpo", {"epsilon_high": math.inf}, "epsilon_high", "positive and finite"),
        ("grpo", {"delta": 1.1}, "delta", "undo the upper clip"),
        ("grpo", {"beta": -0.1}, "beta", "not negative"),
        ("grpo", {"importance_level": "sequnce"}, "importance_sampling_level", "did you mean 'sequence'"),
        ("gspo", {"importance_level": "token"}, "importance_sampling_level", "is not defined for the importance level"),
        ("rloo", {"beta": 0.1}, "beta", "subtracts its KL from the reward"),
        ("dr_grpo", {"max_completion_length": 0}, "max_completion_length", "divides by"),
    ],
)
def test_wrong_arguments(name: str, knobs: dict[str, Any], where: str, says: str) -> None:
    longest = knobs.get("max_completion_length", 1)
    others = {key: value for key, value in knobs.items() if key != "max_completion_length"}
    with pytest.raises(ArgumentError, match=says) as error:
        check_policy_loss(name, PolicyOptions(**others), max_completion_length=longest)
    assert error.value.where == where


def test_a_kl_without_a_reference_is_an_error() -> None:
    rows = make_rows()
    with pytest.raises(ArgumentError, match="no reference"):
        policy_loss("grpo", TokenLogps(rows.logp_K, rows.row_K), ADVANTAGES, TOTALS, PolicyOptions(beta=0.1))
