"""Losses of labelled completions, compared with their formulas over padded tensors."""

from __future__ import annotations

import math

import pytest
import torch
from ragged_kit import Rows, make_rows
from torch import Tensor

from streamtune.errors import ArgumentError
from streamtune.tasks.objectives import (
    UNPAIRED_LOSSES,
    RowLogps,
    UnpairedOptions,
    check_unpaired_loss,
    kto_baseline,
    unpaired_loss,
)

BETA = 0.2
DESIRABLE = torch.tensor([True, False, False, True, True, True, False, False])


def row_logps(rows: Rows, padded_NL: Tensor) -> RowLogps:
    return RowLogps.from_tokens(rows.ragged(padded_NL), rows.row_K, rows.num_rows)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("shift", [2.0, -3.0], ids=["baseline", "baseline-at-zero"])
@pytest.mark.parametrize("name", sorted(UNPAIRED_LOSSES))
def test_losses_and_gradients_are_those_of_the_formula(name: str, shift: float, average: bool) -> None:
    rows, theirs, other = make_rows(), make_rows(), make_rows((4, 2, 3), seed=5)
    ref_NL, other_ref_NL = rows.other(seed=1), other.other(seed=2) - 0.1 - shift
    mismatched, mismatched_ref = row_logps(other, other.logp_NL), row_logps(other, other_ref_NL)
    if average:
        mismatched, mismatched_ref = mismatched.token_means(), mismatched_ref.token_means()
    z0 = kto_baseline(mismatched, mismatched_ref)
    terms = unpaired_loss(
        name,
        row_logps(rows, rows.logp_NL),
        row_logps(rows, ref_NL),
        DESIRABLE,
        UnpairedOptions(BETA, 1.33, 0.7, average),
        baseline=z0,
    )

    def ratios(policy_NL: Tensor, reference_NL: Tensor, mask_NL: Tensor) -> Tensor:
        sums_N = ((policy_NL - reference_NL) * mask_NL).sum(1)
        return sums_N / mask_NL.sum(1) if average else sums_N

    r = ratios(theirs.logp_NL, ref_NL, theirs.mask_NL)
    kl = ratios(other.logp_NL.detach(), other_ref_NL, other.mask_NL).mean().clamp(min=0)
    assert (kl == 0) == (shift < 0)
    assert z0.item() == pytest.approx(kl.item(), abs=1e-12)
    if name == "kto":
        expected_N = torch.where(DESIRABLE, 1.33 * (1 - sigma(BETA * (r - kl))), 0.7 * (1 - sigma(BETA * (kl - r))))
    else:
        expected_N = torch.where(DESIRABLE, 1.33 * (1 - sigma(BETA * r)), 0.7 * sigma(BETA * r))
    torch.testing.assert_close(terms.losses_N, expected_N, atol=1e-10, rtol=0)
    terms.losses_N.mean().backward()
    expected_N.mean().backward()
    torch.testing.assert_close(rows.logp_NL.grad, theirs.logp_NL.grad, atol=1e-10, rtol=0)
    assert other.logp_NL.grad is None, "the baseline is not trained through"


def test_metrics_of_desirable_and_undesirable_rows() -> None:
    rows = make_rows()
    policy, reference = row_logps(rows, rows.logp_NL), row_logps(rows, rows.other(seed=1))
    metrics = unpaired_loss("apo_zero_unpaired", policy, reference, DESIRABLE, UnpairedOptions(BETA)).metrics()
    ratio_N = BETA * (policy.logp_N - reference.logp_N)
    assert metrics["rewards/chosen"] == (pytest.approx(ratio_N[DESIRABLE].sum().item()), 4.0)
    assert metrics["logps/rejected"] == (pytest.approx(policy.logp_N[~DESIRABLE].sum().item()), 4.0)


def test_rows_of_one_label_alone() -> None:
    rows = make_rows((2,))
    policy = row_logps(rows, rows.logp_NL)
    terms = unpaired_loss("kto", policy, policy, torch.tensor([True]), baseline=torch.tensor(0.0))
    assert terms.losses_N.tolist() == [0.5]
    assert set(terms.metrics()) == {"rewards/chosen", "logps/chosen"}


def test_wrong_arguments() -> None:
    rows = make_rows()
    policy = row_logps(rows, rows.logp_NL)
    with pytest.raises(ArgumentError, match="did you mean 'kto'"):
        check_unpaired_loss("ktoo")
    with pytest.raises(ArgumentError, match="needs a KL baseline"):
        unpaired_loss("kto", policy, policy, DESIRABLE)
    for key in ("beta", "desirable_weight", "undesirable_weight"):
        for value in (0.0, math.inf):
            with pytest.raises(ArgumentError, match="positive and finite") as error:
                check_unpaired_loss("kto", UnpairedOptions(**{key: value}))
            assert error.value.where == key
