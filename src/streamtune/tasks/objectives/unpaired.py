"""Preference losses of single completions, each labelled desirable or not.

    z0 = max(0, mean of log pi - log pi_ref over mismatched completions)          kto_baseline
    loss_n = weight_n (1 - sigma(+-beta (log-ratio_n - z0)))                      unpaired_loss

A mismatched completion is a completion that is scored after another prompt. TRL gives each prompt of a batch the
completion of its neighbour. The log-probs of mismatched completions have no gradient.

Shape suffixes: K target tokens, N completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamtune.base.text import look_up
from streamtune.errors import ArgumentError
from streamtune.tasks.objectives.advantages import sum_by_row, tokens_per_row


@dataclass(frozen=True)
class UnpairedOptions:
    """Parameters of the losses on single labelled completions. Each is a recipe key of the same name."""

    beta: float = 0.1
    """factor of the log-ratio: a larger value keeps the policy closer to the reference"""
    desirable_weight: float = 1.0
    """factor of the loss of a desirable completion"""
    undesirable_weight: float = 1.0
    """factor of the loss of an undesirable completion. The KTO paper recommends a ratio ``desirable_weight * desirable
    rows : undesirable_weight * undesirable rows`` between 1:1 and 4:3"""
    length_normalization: bool = False
    """True to divide the log-prob of a completion by its number of tokens"""


@dataclass(frozen=True)
class RowLogps:
    """Log-probs of N completions under one model."""

    logp_N: Tensor  # noqa: N815
    """log-prob of each completion, summed over its tokens: float64 ``[N]``"""
    tokens_N: Tensor  # noqa: N815
    """number of target tokens of each completion: int64 ``[N]``"""

    @classmethod
    def from_tokens(cls, logp_K: Tensor, row_K: Tensor, num_rows: int) -> RowLogps:
        """Sum log-probs over the tokens of each completion; ``row_K`` is the index of each token's completion."""
        return cls(sum_by_row(logp_K, row_K, num_rows), tokens_per_row(row_K, num_rows))

    def token_means(self) -> RowLogps:
        return RowLogps(self.logp_N / self.tokens_N.clamp(min=1), self.tokens_N)


@dataclass(frozen=True)
class UnpairedTerms:
    """Losses of N completions, and values for metrics. All are ``[N]``; only ``losses_N`` has a gradient."""

    losses_N: Tensor  # noqa: N815
    """loss of each completion, with its desirable or undesirable weight: float64"""
    rewards_N: Tensor  # noqa: N815
    """beta times the log-ratio of policy and reference: float64"""
    logps_N: Tensor  # noqa: N815
    """log-prob under the policy: float64; divided by the number of tokens with ``length_normalization``"""
    desirable_N: Tensor  # noqa: N815

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return metrics: TRL's name -> (sum, count). Desirable completions are "chosen", others "rejected"."""
        metrics: dict[str, tuple[float, float]] = {}
        for group, rows_N in (("chosen", self.desirable_N), ("rejected", ~self.desirable_N)):
            count = float(rows_N.sum())
            if count:
                metrics[f"rewards/{group}"] = (float(self.rewards_N[rows_N].sum()), count)
                metrics[f"logps/{group}"] = (float(self.logps_N[rows_N].sum()), count)
        return metrics


def _kto(logratio_N: Tensor, desirable_N: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """Return ``1 - sigma(beta (r - z0))`` for a desirable completion, else ``1 - sigma(beta (z0 - r))``.

    KTO (arXiv 2402.01306, eq. 7), with the log-ratio r of policy and reference and the baseline z0.
    """
    gain_N = beta * (logratio_N - baseline)
    return torch.where(desirable_N, torch.sigmoid(-gain_N), torch.sigmoid(gain_N))


def _apo_zero_unpaired(logratio_N: Tensor, desirable_N: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """Return ``1 - sigma(beta r)`` for a desirable completion, else ``sigma(beta r)``, with the log-ratio r.

    APO-zero (arXiv 2408.06266, eq. 7), for single completions.
    """
    return _kto(logratio_N, desirable_N, torch.zeros_like(baseline), beta)


@dataclass(frozen=True)
class UnpairedLoss:
    formula: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """function (log-ratios ``[N]``, desirable ``[N]``, baseline scalar, beta) -> losses ``[N]`` before weights"""
    needs_reference: bool = True
    needs_baseline: bool = True
    """True if the loss subtracts a baseline, computed from log-probs of mismatched completions"""


UNPAIRED_LOSSES: dict[str, UnpairedLoss] = {
    "kto": UnpairedLoss(_kto),
    "apo_zero_unpaired": UnpairedLoss(_apo_zero_unpaired, needs_baseline=False),
}
"""Name of a loss on single labelled completions -> the loss."""


def kto_baseline(policy: RowLogps, reference: RowLogps) -> Tensor:
    """Return KTO's baseline, an estimate of the KL with the reference: ``z0 = max(0, mean(log pi - log pi_ref))``.

    Args:
        policy: Log-probs of completions that are scored after other prompts; means over tokens with
            ``length_normalization``.
        reference: Log-probs of the same completions under the reference.

    Returns:
        Float64 scalar without gradient, as in the paper.
    """
    return (policy.logp_N - reference.logp_N).detach().mean().clamp(min=0)


def unpaired_loss(
    name: str,
    policy: RowLogps,
    reference: RowLogps,
    desirable_N: Tensor,
    options: UnpairedOptions = UnpairedOptions(),
    *,
    baseline: Tensor | None = None,
) -> UnpairedTerms:
    """Return the loss of each completion, which is labelled desirable or undesirable.

    Args:
        name: Name of the loss, a key of :data:`UNPAIRED_LOSSES`.
        reference: Log-probs under the reference, which get no gradient.
        desirable_N: True for a desirable completion: bool ``[N]``.
        baseline: Result of :func:`kto_baseline`, for losses with ``needs_baseline``.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, or the baseline is missing.
    """
    loss = check_unpaired_loss(name, options)
    if loss.needs_baseline and baseline is None:
        raise ArgumentError(
            f"the loss '{name}' needs a KL baseline, found None",
            where="loss_type",
            fix="compute it with kto_baseline from the log-probs of mismatched completions",
        )
    if options.length_normalization:
        policy, reference = policy.token_means(), reference.token_means()
    logratio_N = policy.logp_N - reference.logp_N.detach()
    zero = logratio_N.new_zeros(())
    losses_N = loss.formula(logratio_N, desirable_N, zero if baseline is None else baseline.to(zero), options.beta)
    losses_N = torch.where(desirable_N, options.desirable_weight * losses_N, options.undesirable_weight * losses_N)
    return UnpairedTerms(losses_N, options.beta * logratio_N.detach(), policy.logp_N.detach(), desirable_N)


def check_unpaired_loss(name: str, options: UnpairedOptions = UnpairedOptions()) -> UnpairedLoss:
    """Return the loss on single completions called ``name``, after checking that its parameters are valid.

    Raises:
        ArgumentError: The name is unknown, or a value is out of range; ``where`` is the recipe key.
    """
    loss = look_up(name, UNPAIRED_LOSSES, "loss of unpaired rows", where="loss_type")
    for key in ("beta", "desirable_weight", "undesirable_weight"):
        value = getattr(options, key)
        if not (math.isfinite(value) and value > 0):
            raise ArgumentError(f"{key} must be positive and finite, found {value}", where=key)
    return loss
