"""Policy-gradient losses: from per-token log-probs and advantages to one scalar for each micro-batch.

    ratio  = pi / pi_old          a token's, or one for its completion          (importance level)
    term   = -min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A) + beta KL      for every token
    loss   = sum of the terms, weighted as the loss has it                       (aggregation)

Divisors count the whole optimizer step and come in as arguments, so that the losses of its micro-batches add up
to the loss of the step, however it is split.

Shape suffixes: K target tokens, N completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamtune.base.text import look_up
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.tasks.objectives.advantages import counts, mean_by_row, sum_by_row

LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class StepTotals:
    """The divisors of a step's losses, over all its micro-batches (and processes)."""

    completions: int
    """completions of the step; one without a gradient may be left out of the micro-batches and counts all the same"""
    tokens: int
    """their target tokens"""
    max_completion_length: int = 0
    """longest completion a rollout may have; dr_grpo divides by it"""


@dataclass(frozen=True)
class TokenLogps:
    """Log-probs of the K target tokens of N completions."""

    policy_K: Tensor  # noqa: N815
    """under the model that is trained ``[K]``, with graph"""
    row_K: Tensor  # noqa: N815
    """the completion of each token, int64 ``[K]``"""
    old_K: Tensor | None = None  # noqa: N815
    """under the model that sampled the tokens ``[K]``; None: the same model, so every ratio is 1"""
    ref_K: Tensor | None = None  # noqa: N815
    """under the reference ``[K]``; required where ``beta > 0``, otherwise only logged as ``kl``"""
    entropy_K: Tensor | None = None  # noqa: N815
    """entropy of each token's distribution ``[K]``, only logged"""


@dataclass(frozen=True)
class PolicyKnobs:
    """Parameters of the policy-gradient losses."""

    epsilon_low: float = 0.2
    """ratios below ``1 - epsilon_low`` are clipped if the advantage is negative"""
    epsilon_high: float = 0.2
    """ratios above ``1 + epsilon_high`` are clipped if the advantage is positive"""
    delta: float | None = None
    """largest ratio anywhere (arXiv 2505.07291): bounds the loss if the advantage is negative"""
    beta: float = 0.0
    """weight of the KL with the reference"""
    kl_by_ratio: bool = False
    """multiply a token's KL by its ratio, with gradient. At a ratio of 1 the value is the same, and the gradient is the
    unbiased gradient of the reverse KL (arXiv 2512.02556, eq. 7)"""
    importance_level: str | None = None
    """``token`` or ``sequence``; None: the loss's own level"""


@dataclass(frozen=True)
class PolicyTerms:
    """The loss of a micro-batch and its metrics."""

    loss: Tensor
    """float64 scalar with graph, already divided"""
    metrics: dict[str, tuple[float, float]]
    """name -> (sum, count), under TRL's names"""


def kl_estimate(logp_K: Tensor, ref_K: Tensor) -> Tensor:
    """Estimate the KL of policy to reference token by token: ``exp(ref - logp) - (ref - logp) - 1``, ``[K]``.

    GRPO (arXiv 2402.03300, eq. 4), the k3 of J. Schulman's "Approximating KL divergence" (2020): never negative, and
    unbiased over tokens drawn from the policy.
    """
    gap_K = ref_K - logp_K
    return torch.exp(gap_K) - gap_K - 1


def _mean_of_means(term_K: Tensor, row_K: Tensor, rows: int, totals: StepTotals) -> Tensor:
    """Return ``1 / N sum_n 1 / |o_n| sum_t``: every completion counts the same."""
    return mean_by_row(term_K, row_K, rows).sum() / totals.completions


def _mean_of_tokens(term_K: Tensor, row_K: Tensor, rows: int, totals: StepTotals) -> Tensor:
    """Return ``1 / (tokens of the step) sum_n sum_t``: every token counts the same."""
    return term_K.double().sum() / totals.tokens


def _mean_of_local_tokens(term_K: Tensor, row_K: Tensor, rows: int, totals: StepTotals) -> Tensor:
    """Return ``1 / (tokens of the micro-batch) sum_n sum_t``, times the micro-batch's share of the completions."""
    return term_K.double().sum() / max(1, term_K.numel()) * (rows / totals.completions)


def _per_token_of_longest(term_K: Tensor, row_K: Tensor, rows: int, totals: StepTotals) -> Tensor:
    """Return ``1 / (N max_completion_length) sum_n sum_t``: a constant divisor, so that length has no weight."""
    return term_K.double().sum() / (totals.completions * totals.max_completion_length)


def _mean_of_sums(term_K: Tensor, row_K: Tensor, rows: int, totals: StepTotals) -> Tensor:
    """Return ``1 / N sum_n sum_t``: a completion is one action, its log-prob the sum over tokens."""
    return term_K.double().sum() / totals.completions


@dataclass(frozen=True)
class PolicyLoss:
    """One loss of :data:`POLICY_LOSSES`."""

    aggregate: Callable[[Tensor, Tensor, int, StepTotals], Tensor]
    """(term of each token ``[K]``, rows ``[K]``, N, totals) -> scalar"""
    level: str = "token"
    """importance level where the user names none"""
    levels: tuple[str, ...] = LEVELS
    """importance levels it is defined for"""
    whole: bool = False
    """a sequence's ratio is the product of its tokens' ratios, and its term counts once; else the ratio is their
    geometric mean, and its term counts at every token"""
    kl_in_reward: bool = False
    """as published, KL with the reference is taken off the reward (``reward_with_kl``), not added to the loss"""
    by_micro_batch: bool = False
    """a mean over the tokens of a micro-batch: completions without a gradient change it, so none is left out"""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(_mean_of_means),
    "dr_grpo": PolicyLoss(_per_token_of_longest),
    "dapo": PolicyLoss(_mean_of_tokens),
    "bnpo": PolicyLoss(_mean_of_local_tokens, by_micro_batch=True),
    "gspo": PolicyLoss(_mean_of_means, level="sequence", levels=("sequence",)),
    "rloo": PolicyLoss(_mean_of_sums, level="sequence", whole=True, kl_in_reward=True),
    "remax": PolicyLoss(_mean_of_sums, level="sequence", whole=True, kl_in_reward=True),
}
"""Name -> loss.

==========  ===============================================================================================
grpo        arXiv 2402.03300, eq. 3: tokens averaged in a completion, completions averaged
dr_grpo     arXiv 2503.20783: sum over tokens by the constant ``max_completion_length``
dapo        arXiv 2503.14476: every token of the step weighs the same
bnpo        as TRL has it: every token of a micro-batch weighs the same; with one completion each it is grpo
gspo        arXiv 2507.18071, eqs. 5 and 7: one ratio a completion, the geometric mean of its tokens' ratios
rloo        arXiv 2402.14740: a completion is one action; its ratio is clipped as TRL's
remax       arXiv 2310.10505: the same, with the greedy completion's reward as the baseline of advantages
==========  ===============================================================================================
"""


def policy_loss(
    name: str, logps: TokenLogps, advantages_N: Tensor, totals: StepTotals, knobs: PolicyKnobs = PolicyKnobs()
) -> PolicyTerms:
    """Compute the loss of a micro-batch: ``sum of -min(ratio A, clip(ratio) A) + beta KL``, as the loss weighs tokens.

    Args:
        name: A key of :data:`POLICY_LOSSES`.
        logps: Log-probs of the target tokens.
        advantages_N: One advantage for each completion ``[N]``.
        totals: Divisors of the whole step.
        knobs: Parameters of the loss.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, a reference is missing, or the combination is
            undefined.
    """
    loss = check_policy(name, knobs, max_completion_length=totals.max_completion_length)
    logp_K, ref_K, row_K, beta = logps.policy_K, logps.ref_K, logps.row_K, knobs.beta
    if beta > 0 and ref_K is None:
        raise ArgumentError(f"beta is {beta}, but there is no reference for the KL", where="beta", fix="set beta: 0")
    rows = advantages_N.numel()
    by_sequence = (knobs.importance_level or loss.level) == "sequence"
    gap_K = logp_K - (logp_K if logps.old_K is None else logps.old_K).detach()
    if by_sequence:
        log_ratio_U = (sum_by_row if loss.whole else mean_by_row)(gap_K, row_K, rows)
        advantages_U = advantages_N.to(log_ratio_U)
    else:
        log_ratio_U, advantages_U = gap_K, advantages_N.to(gap_K)[row_K]
    # e^80 is far outside any clip and finite in float32: an infinite ratio times an advantage of 0 would be NaN
    ratio_U = torch.exp(log_ratio_U.clamp(max=80.0))
    term_U, metrics = _clipped(ratio_U, advantages_U, knobs)
    if by_sequence and loss.whole:  # the tokens of a completion share its one term
        term_U = term_U / counts(row_K, rows).clamp(min=1)
    term_K = term_U[row_K] if by_sequence else term_U
    if ref_K is not None:
        kl_K = kl_estimate(logp_K, ref_K.detach())
        if beta:
            weight_K = (ratio_U[row_K] if by_sequence else ratio_U) if knobs.kl_by_ratio else 1.0
            term_K = term_K + beta * weight_K * kl_K
        metrics["kl"] = _sum_and_count(kl_K)
    if logps.entropy_K is not None:
        metrics["entropy"] = _sum_and_count(logps.entropy_K)
    return PolicyTerms(loss.aggregate(term_K, row_K, rows, totals), metrics)


def _clipped(
    ratio_U: Tensor, advantages_U: Tensor, knobs: PolicyKnobs
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Compute the clipped surrogate of PPO (arXiv 1707.06347, eq. 7), negated; U is tokens or completions."""
    low, high = 1 - knobs.epsilon_low, 1 + knobs.epsilon_high
    clipped_U = ratio_U.clamp(low, high)
    bounded_U = ratio_U if knobs.delta is None else ratio_U.clamp(max=knobs.delta)
    low_U = (ratio_U < low) & (advantages_U < 0)
    high_U = (ratio_U > high) & (advantages_U > 0)
    metrics = {
        "clip_ratio/low_mean": _sum_and_count(low_U),
        "clip_ratio/high_mean": _sum_and_count(high_U),
        "clip_ratio/region_mean": _sum_and_count(low_U | high_U),
    }
    return -torch.minimum(bounded_U * advantages_U, clipped_U * advantages_U), metrics


def _sum_and_count(values: Tensor) -> tuple[float, float]:
    return float(values.detach().sum(dtype=torch.float64)), float(values.numel())


def check_policy(name: str, knobs: PolicyKnobs = PolicyKnobs(), *, max_completion_length: int = 1) -> PolicyLoss:
    """Return the loss of this name; raise :class:`ArgumentError` if it cannot be computed with these values."""
    epsilon_low, epsilon_high = knobs.epsilon_low, knobs.epsilon_high
    delta, beta, level = knobs.delta, knobs.beta, knobs.importance_level
    loss = look_up(name, POLICY_LOSSES, "policy loss", where="loss_type")
    if not 0 < epsilon_low <= 1:
        raise ArgumentError(f"epsilon is {epsilon_low}: it must be in (0, 1]", where="epsilon", fix="0.2 is usual")
    if not (epsilon_high > 0 and math.isfinite(epsilon_high)):
        raise ArgumentError(f"epsilon_high is {epsilon_high}: it must be positive and finite", where="epsilon_high")
    if delta is not None and not delta > 1 + epsilon_high:
        raise ArgumentError(
            f"delta is {delta}: below 1 + epsilon_high = {1 + epsilon_high:g} it would undo the upper clip",
            where="delta",
            fix=f"give a value above {1 + epsilon_high:g}, or leave it out",
        )
    if not (beta >= 0 and math.isfinite(beta)):
        raise ArgumentError(f"beta is {beta}: it must be finite and not negative", where="beta")
    if level is not None and level not in loss.levels:
        raise ArgumentError(
            f"'{name}' has no importance ratio at the level '{level}'",
            where="importance_sampling_level",
            fix=did_you_mean(level, loss.levels) or f"choose one of: {', '.join(loss.levels)}",
        )
    if loss.kl_in_reward and beta > 0:
        raise ArgumentError(
            f"the KL of '{name}' belongs to the reward",
            where="beta",
            fix="take it off the rewards (reward_with_kl) before their advantages, and give the loss beta = 0",
        )
    if loss.aggregate is _per_token_of_longest and max_completion_length < 1:
        raise ArgumentError(
            f"'{name}' divides by max_completion_length, which is {max_completion_length}",
            where="max_completion_length",
            fix="give the most tokens a rollout may have",
        )
    return loss
