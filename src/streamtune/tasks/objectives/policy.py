"""Policy-gradient losses: from per-token log-probs and advantages to one scalar for each micro-batch.

    ratio  = pi / pi_old          of a token, or of its whole completion         (importance level)
    term   = -min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A) + beta KL      for every token
    loss   = weighted sum of the terms; each loss has its own weights            (aggregation)

Divisors, such as the number of tokens, are arguments and count the whole optimizer step. So the losses of its
micro-batches add up to the loss of the step, however the step is split.

Shape suffixes: K target tokens, N completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamtune.base.policy_losses import POLICY_LOSS_FACTS
from streamtune.base.text import look_up
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.tasks.objectives.advantages import mean_by_row, sum_by_row, tokens_per_row

IMPORTANCE_LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class StepTotals:
    """Divisors of the losses of an optimizer step: its numbers of completions and tokens, over all ranks."""

    completions: int
    """number of completions, including completions without a gradient, which are in no micro-batch"""
    tokens: int
    """number of target tokens, including tokens of completions without a gradient"""
    max_completion_length: int = 0
    """maximum number of tokens of a completion in a rollout; dr_grpo divides by it"""


@dataclass(frozen=True)
class TokenLogps:
    """Log-probs of the K target tokens of N completions, under the policy, the old policy and the reference."""

    policy_K: Tensor  # noqa: N815
    """log-probs under the trained policy ``[K]``, differentiable"""
    row_K: Tensor  # noqa: N815
    """index of each token's completion, int64 ``[K]``"""
    old_K: Tensor | None = None  # noqa: N815
    """log-probs under the policy that sampled the tokens ``[K]``; None: the trained policy, so every ratio is 1"""
    ref_K: Tensor | None = None  # noqa: N815
    """log-probs under the reference ``[K]``; required if ``beta > 0``, otherwise only logged as ``kl``"""
    entropy_K: Tensor | None = None  # noqa: N815
    """entropy of each token's distribution ``[K]``; only logged"""


@dataclass(frozen=True)
class PolicyOptions:
    epsilon_low: float = 0.2
    """ratios below ``1 - epsilon_low`` are clipped if the advantage is negative"""
    epsilon_high: float = 0.2
    """ratios above ``1 + epsilon_high`` are clipped if the advantage is positive"""
    delta: float | None = None
    """upper bound of ratios (arXiv 2505.07291), which bounds the loss if the advantage is negative; None: no bound"""
    beta: float = 0.0
    """weight of the KL with the reference"""
    kl_by_ratio: bool = False
    """True to multiply a token's KL by its ratio, which has a gradient. At a ratio of 1 the value does not change, and
    the gradient is the unbiased gradient of the reverse KL (arXiv 2512.02556, eq. 7)"""
    importance_level: str | None = None
    """``token`` or ``sequence``: level at which ratios are computed; None: the default of the loss"""


@dataclass(frozen=True)
class PolicyTerms:
    loss: Tensor
    """float64 scalar, differentiable, already divided by the divisors of the step"""
    metrics: dict[str, tuple[float, float]]
    """TRL's name of a metric -> (sum, count)"""


def kl_estimate(logp_K: Tensor, ref_K: Tensor) -> Tensor:
    """Return an estimate of the KL of policy and reference at each token: ``exp(ref - logp) - (ref - logp) - 1``.

    GRPO (arXiv 2402.03300, eq. 4); the estimator k3 of J. Schulman's "Approximating KL divergence" (2020). The estimate
    is never negative, and it is unbiased for tokens sampled from the policy.

    Example:
        >>> kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])).tolist()
        [0.0, 0.7182817459106445]
    """
    gap_K = ref_K - logp_K
    return torch.exp(gap_K) - gap_K - 1


def _mean_of_means(term_K: Tensor, row_K: Tensor, num_rows: int, totals: StepTotals) -> Tensor:
    return mean_by_row(term_K, row_K, num_rows).sum() / totals.completions


def _mean_of_tokens(term_K: Tensor, row_K: Tensor, num_rows: int, totals: StepTotals) -> Tensor:
    return term_K.double().sum() / totals.tokens


def _mean_of_local_tokens(term_K: Tensor, row_K: Tensor, num_rows: int, totals: StepTotals) -> Tensor:
    """Return the mean over the tokens of the micro-batch, weighted by its fraction of the step's completions."""
    return term_K.double().sum() / max(1, term_K.numel()) * (num_rows / totals.completions)


def _per_token_of_longest(term_K: Tensor, row_K: Tensor, num_rows: int, totals: StepTotals) -> Tensor:
    return term_K.double().sum() / (totals.completions * totals.max_completion_length)


def _mean_of_sums(term_K: Tensor, row_K: Tensor, num_rows: int, totals: StepTotals) -> Tensor:
    return term_K.double().sum() / totals.completions


@dataclass(frozen=True)
class PolicyLoss:
    """A policy-gradient loss: the weights of its tokens, and whether ratios are of tokens or of completions."""

    aggregate: Callable[[Tensor, Tensor, int, StepTotals], Tensor]
    """(term of each token ``[K]``, rows ``[K]``, N, totals) -> scalar"""
    level: str = "token"
    """default level of the importance ratio: of a token, or of a sequence"""
    levels: tuple[str, ...] = IMPORTANCE_LEVELS
    """levels of the importance ratio for which the loss is defined"""
    is_single_action: bool = False
    """True if the ratio of a sequence is the product of its tokens' ratios, and a sequence has one term in the loss.
    False if the ratio is their geometric mean, and every token has a term"""
    averages_over_micro_batch: bool = False
    """True if the loss is a mean over the tokens of a micro-batch. Completions without a gradient change this mean, so
    they are not left out"""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(_mean_of_means),
    "dr_grpo": PolicyLoss(_per_token_of_longest),
    "dapo": PolicyLoss(_mean_of_tokens),
    "bnpo": PolicyLoss(_mean_of_local_tokens, averages_over_micro_batch=True),
    "gspo": PolicyLoss(_mean_of_means, level="sequence", levels=("sequence",)),
    "rloo": PolicyLoss(_mean_of_sums, level="sequence", is_single_action=True),
    "remax": PolicyLoss(_mean_of_sums, level="sequence", is_single_action=True),
}
"""Name of a policy-gradient loss -> the loss.

grpo
    arXiv 2402.03300, eq. 3: the mean over completions of the mean over their tokens.
dr_grpo
    arXiv 2503.20783: the sum over tokens is divided by the constant ``max_completion_length``.
dapo
    arXiv 2503.14476: every token of the step has the same weight.
bnpo
    As in TRL: every token of a micro-batch has the same weight. With one completion per micro-batch it equals grpo.
gspo
    arXiv 2507.18071, eqs. 5 and 7: one ratio for a completion, the geometric mean of its tokens' ratios.
rloo
    arXiv 2402.14740: a completion is one action; its ratio is clipped as in TRL.
remax
    arXiv 2310.10505: as rloo, but the baseline of an advantage is the reward of the greedy completion.
"""


def policy_loss(
    name: str, logps: TokenLogps, advantages_N: Tensor, totals: StepTotals, options: PolicyOptions = PolicyOptions()
) -> PolicyTerms:
    """Return the loss of a micro-batch: the weighted sum of ``-min(ratio A, clip(ratio) A) + beta KL`` over tokens.

    Args:
        name: Name of the loss, a key of :data:`POLICY_LOSSES`.
        logps: Log-probs of the target tokens.
        advantages_N: Advantage of each completion ``[N]``.
        totals: Numbers of completions and tokens of the whole step, by which the loss is divided.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, a reference is missing, or the combination is
            undefined.

    Example:
        >>> logps = TokenLogps(torch.tensor([-1.0, -2.0, -0.5]), row_K=torch.tensor([0, 0, 1]))
        >>> advantages, totals = torch.tensor([1.0, -1.0]), StepTotals(completions=2, tokens=3)
        >>> policy_loss("dapo", logps, advantages, totals).loss.item()  # all ratios are 1: -(1 + 1 - 1) / 3
        -0.3333333333333333
    """
    loss = check_policy_loss(name, options, max_completion_length=totals.max_completion_length)
    logp_K, ref_K, row_K, beta = logps.policy_K, logps.ref_K, logps.row_K, options.beta
    if beta > 0 and ref_K is None:
        raise ArgumentError(f"beta is {beta}, but there is no reference for the KL", where="beta", fix="set beta: 0")
    rows = advantages_N.numel()
    by_sequence = (options.importance_level or loss.level) == "sequence"
    gap_K = logp_K - (logp_K if logps.old_K is None else logps.old_K).detach()
    if by_sequence:
        log_ratio_U = (sum_by_row if loss.is_single_action else mean_by_row)(gap_K, row_K, rows)
        advantages_U = advantages_N.to(log_ratio_U)
    else:
        log_ratio_U, advantages_U = gap_K, advantages_N.to(gap_K)[row_K]
    # e^80 is far outside any clip and finite in float32: an infinite ratio times an advantage of 0 would be NaN
    ratio_U = torch.exp(log_ratio_U.clamp(max=80.0))
    term_U, metrics = _clipped_surrogate(ratio_U, advantages_U, options)
    if by_sequence and loss.is_single_action:  # the tokens of a completion share its one term
        term_U = term_U / tokens_per_row(row_K, rows).clamp(min=1)
    term_K = term_U[row_K] if by_sequence else term_U
    if ref_K is not None:
        kl_K = kl_estimate(logp_K, ref_K.detach())
        if beta:
            weight_K = (ratio_U[row_K] if by_sequence else ratio_U) if options.kl_by_ratio else 1.0
            term_K = term_K + beta * weight_K * kl_K
        metrics["kl"] = _sum_and_count(kl_K)
    if logps.entropy_K is not None:
        metrics["entropy"] = _sum_and_count(logps.entropy_K)
    return PolicyTerms(loss.aggregate(term_K, row_K, rows, totals), metrics)


def _clipped_surrogate(
    ratio_U: Tensor, advantages_U: Tensor, options: PolicyOptions
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """Return PPO's negative clipped surrogate (arXiv 1707.06347, eq. 7), and metrics of the clipping.

    U is the number of tokens or, if ratios are of whole completions, of completions.
    """
    low, high = 1 - options.epsilon_low, 1 + options.epsilon_high
    clipped_U = ratio_U.clamp(low, high)
    bounded_U = ratio_U if options.delta is None else ratio_U.clamp(max=options.delta)
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


def check_policy_loss(
    name: str, options: PolicyOptions = PolicyOptions(), *, max_completion_length: int = 1
) -> PolicyLoss:
    """Return the policy-gradient loss called ``name``, after checking that its parameters are valid.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, or the combination is undefined.
    """
    epsilon_low, epsilon_high = options.epsilon_low, options.epsilon_high
    delta, beta, level = options.delta, options.beta, options.importance_level
    loss = look_up(name, POLICY_LOSSES, "policy loss", where="loss_type")
    if not 0 < epsilon_low <= 1:
        raise ArgumentError(f"epsilon must be in (0, 1], found {epsilon_low}", where="epsilon", fix="0.2 is usual")
    if not (epsilon_high > 0 and math.isfinite(epsilon_high)):
        raise ArgumentError(f"epsilon_high must be positive and finite, found {epsilon_high}", where="epsilon_high")
    if delta is not None and not delta > 1 + epsilon_high:
        raise ArgumentError(
            f"delta must be above 1 + epsilon_high = {1 + epsilon_high:g}, found {delta}: it would undo the upper clip",
            where="delta",
            fix=f"give a value above {1 + epsilon_high:g}, or delete the line",
        )
    if not (beta >= 0 and math.isfinite(beta)):
        raise ArgumentError(f"beta must be finite and not negative, found {beta}", where="beta")
    if level is not None and level not in loss.levels:
        raise ArgumentError(
            f"the loss '{name}' is not defined for the importance level '{level}'",
            where="importance_sampling_level",
            fix=did_you_mean(level, loss.levels) or f"choose one of: {', '.join(loss.levels)}",
        )
    if POLICY_LOSS_FACTS[name].kl_in_reward and beta > 0:
        raise ArgumentError(
            f"the loss '{name}' subtracts its KL from the reward, so beta must be 0 here, found {beta}",
            where="beta",
            fix="subtract the KL from the rewards (reward_with_kl) before computing advantages",
        )
    if loss.aggregate is _per_token_of_longest and max_completion_length < 1:
        raise ArgumentError(
            f"the loss '{name}' divides by max_completion_length, which must be at least 1; "
            f"found {max_completion_length}",
            where="max_completion_length",
            fix="set max_completion_length to the maximum number of tokens of a completion",
        )
    return loss
