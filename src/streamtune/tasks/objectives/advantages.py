"""Sums over the tokens of each completion without padding, and advantages of completions within a group.

A micro-batch has N completions of any lengths. Their K target tokens follow each other in ``logp_K``, and ``row_K`` has
the completion that each token belongs to:

    logp_K   -0.1 -2.3 -0.7 | -1.1 | -0.2 -0.4        row_K   0 0 0 | 1 | 2 2        N = 3

Row sums are float64, whatever the dtype of the tokens. A completion of 100,000 tokens has a log-prob near -100,000,
where neighbouring float32 numbers differ by 0.008. Preference losses use the small difference of two such numbers.

The completions of one prompt are a group. A reward is NaN if no reward function scored the completion. Such a
completion is left out of its group's baseline, and its advantage is 0.

Shape suffixes: K target tokens, N completions (rows), G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamtune.base.text import look_up
from streamtune.errors import ArgumentError, did_you_mean


def sum_by_row(values_K: Tensor, row_K: Tensor, num_rows: int) -> Tensor:
    """Return the sum over the tokens of each row: ``sum_N[n] = sum of values_K[k] with row_K[k] == n``.

    Args:
        values_K: Value of each token, ``[K]``.
        row_K: Row of each token, int64 ``[K]``, in ``[0, num_rows)``.
        num_rows: Number of rows, N.

    Returns:
        Float64 ``[N]``, differentiable; 0 for a row without tokens.
    """
    assert values_K.shape == row_K.shape, f"values_K {values_K.shape} and row_K {row_K.shape} differ in shape"
    zeros_N = torch.zeros(num_rows, dtype=torch.float64, device=values_K.device)
    return zeros_N.index_add(0, row_K, values_K.double())


def tokens_per_row(row_K: Tensor, num_rows: int) -> Tensor:
    """Return how many tokens each row has: int64 ``[N]``."""
    return torch.bincount(row_K, minlength=num_rows)


def mean_by_row(values_K: Tensor, row_K: Tensor, num_rows: int) -> Tensor:
    """Return the mean over the tokens of each row: float64 ``[N]``, differentiable; 0 for a row without tokens."""
    return sum_by_row(values_K, row_K, num_rows) / tokens_per_row(row_K, num_rows).clamp(min=1)


EPSILON = 1e-4  # TRL's, added to the standard deviation
EQUAL_WITHIN = 1e-12
"""Largest relative difference of rewards that are equal: 0.1 + 0.2 and 0.3, as sums of weighted scores."""
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class Advantages:
    """The advantage of each of N completions, and statistics of its group's rewards. All tensors are ``[N]``."""

    values_N: Tensor  # noqa: N815
    """advantages, in the dtype of the rewards; 0 for a completion without a reward"""
    no_advantage_N: Tensor  # noqa: N815
    """bool: True if all advantages of the completion's group are 0"""
    mean_N: Tensor  # noqa: N815
    """mean reward of the completion's group; NaN if none of its completions has a reward"""
    std_N: Tensor  # noqa: N815
    """standard deviation of the group's rewards (divisor n - 1); 0 if fewer than two completions have a reward"""


@dataclass(frozen=True)
class _Groups:
    """Rewards of N completions in G groups. NaN rewards do not count in the sizes and sums of groups."""

    rewards_N: Tensor  # noqa: N815
    """float64, with 0 in place of NaN"""
    known_N: Tensor  # noqa: N815
    """bool: True if the reward is not NaN"""
    index_N: Tensor  # noqa: N815
    """group of each completion, from 0 to G - 1"""
    size_G: Tensor  # noqa: N815
    """number of completions with a reward, float64"""
    sum_G: Tensor  # noqa: N815

    @classmethod
    def from_rewards(cls, rewards_N: Tensor, group_N: Tensor) -> _Groups:
        ids_G, index_N = torch.unique(group_N, return_inverse=True)
        known_N, num_groups = ~rewards_N.isnan(), ids_G.numel()
        rewards_N = torch.where(known_N, rewards_N.double(), 0.0)
        sizes, sums = sum_by_row(known_N, index_N, num_groups), sum_by_row(rewards_N, index_N, num_groups)
        return cls(rewards_N, known_N, index_N, sizes, sums)

    @property
    def group_mean_N(self) -> Tensor:  # noqa: N802
        return (self.sum_G / self.size_G)[self.index_N]

    @property
    def group_std_N(self) -> Tensor:  # noqa: N802
        square_N = torch.where(self.known_N, (self.rewards_N - self.group_mean_N) ** 2, 0.0)
        variance_G = sum_by_row(square_N, self.index_N, len(self.size_G)) / (self.size_G - 1).clamp(min=1)
        return variance_G.sqrt()[self.index_N]

    @property
    def has_equal_rewards_N(self) -> Tensor:  # noqa: N802
        """bool ``[N]``: True if all rewards of the completion's group are equal, up to the rounding of float64; NaN
        rewards are ignored"""
        lowest, highest = (
            self.sum_G.new_full((len(self.size_G),), fill).scatter_reduce(0, self.index_N, values_N, how)
            for fill, how, values_N in (
                (torch.inf, "amin", torch.where(self.known_N, self.rewards_N, torch.inf)),
                (-torch.inf, "amax", torch.where(self.known_N, self.rewards_N, -torch.inf)),
            )
        )
        return _are_equal(lowest, highest)[self.index_N]


def _are_equal(lower: Tensor, higher: Tensor) -> Tensor:
    return higher - lower <= EQUAL_WITHIN * torch.maximum(lower.abs(), higher.abs())


def _reward_minus_group_mean(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    return torch.where(groups.has_equal_rewards_N, 0.0, groups.rewards_N - groups.group_mean_N)


def _reward_minus_mean_of_others(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    others_N = (groups.sum_G[groups.index_N] - groups.rewards_N) / (groups.size_G - 1).clamp(min=1)[groups.index_N]
    return torch.where(groups.has_equal_rewards_N, 0.0, groups.rewards_N - others_N)


def _reward_minus_greedy(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    if greedy_N is None:
        raise ArgumentError("remax needs the reward of the greedy completion of each prompt", where="loss_type")
    lower_N, higher_N = (how(groups.rewards_N, greedy_N.double()) for how in (torch.minimum, torch.maximum))
    has_none_N = greedy_N.isnan() | _are_equal(lower_N, higher_N)
    return torch.where(has_none_N, 0.0, groups.rewards_N - greedy_N.double())


@dataclass(frozen=True)
class _AdvantageKind:
    baseline: Callable[[_Groups, Tensor | None], Tensor]
    scale: str
    """default of the recipe key ``scale_rewards``"""
    scales: tuple[str, ...] = SCALES


ADVANTAGES: dict[str, _AdvantageKind] = {
    "grpo": _AdvantageKind(_reward_minus_group_mean, "group"),
    "dr_grpo": _AdvantageKind(_reward_minus_group_mean, "none"),
    "dapo": _AdvantageKind(_reward_minus_group_mean, "group"),
    "bnpo": _AdvantageKind(_reward_minus_group_mean, "group"),
    "gspo": _AdvantageKind(_reward_minus_group_mean, "group"),
    "rloo": _AdvantageKind(_reward_minus_mean_of_others, "none", ("none",)),
    "remax": _AdvantageKind(_reward_minus_greedy, "none", ("none",)),
}
"""Name of a policy loss -> how its advantages are computed from rewards R.

grpo, dapo, bnpo, gspo
    ``(R - mean) / (std + 1e-4)``: arXiv 2402.03300, section 4.1.2.
dr_grpo
    ``R - mean``: arXiv 2503.20783, which shows that the division causes a bias.
rloo
    ``R - mean of the other rewards``: arXiv 2402.14740.
remax
    ``R - R of the greedy completion``: arXiv 2310.10505.
"""


def group_advantages(
    name: str,
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    scale_rewards: str | None = None,
    greedy_N: Tensor | None = None,
) -> Advantages:
    """Return the advantage of each completion: its reward minus a baseline, possibly divided by a standard deviation.

    Args:
        name: Name of the policy loss, a key of :data:`ADVANTAGES`.
        rewards_N: Rewards ``[N]``, floating point; NaN for a completion without a reward.
        group_N: Number that identifies each completion's prompt, int64 ``[N]``; any numbers, in any order.
        scale_rewards: Standard deviation to divide by: ``group``, ``batch`` or ``none``. None: as in the loss's paper.
        greedy_N: Reward of the greedy completion of each completion's prompt ``[N]``, for remax.

    Raises:
        ArgumentError: The name or the scale is unknown, the loss does not allow the scale, or remax has no greedy
            rewards.

    Example:
        >>> rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> group_advantages("grpo", rewards, groups, scale_rewards="none").values_N.tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    kind = _find_advantage_kind(name, scale_rewards)
    groups = _Groups.from_rewards(rewards_N, group_N)
    values_N = torch.where(groups.known_N, kind.baseline(groups, greedy_N), 0.0)
    scale = scale_rewards or kind.scale
    if scale == "group":
        values_N = values_N / (groups.group_std_N + EPSILON)
    elif scale == "batch":
        known_R = groups.rewards_N[groups.known_N]
        values_N = values_N / ((known_R.std() if known_R.numel() > 1 else 0.0) + EPSILON)
    moving_G = sum_by_row(values_N != 0, groups.index_N, len(groups.size_G))
    return Advantages(
        values_N.to(rewards_N.dtype),
        (moving_G == 0)[groups.index_N],
        groups.group_mean_N.to(rewards_N.dtype),
        groups.group_std_N.to(rewards_N.dtype),
    )


def _find_advantage_kind(name: str, scale: str | None) -> _AdvantageKind:
    kind = look_up(name, ADVANTAGES, "policy loss", where="loss_type")
    if scale is not None and scale not in SCALES:
        raise ArgumentError(
            f"scale_rewards must be one of {', '.join(SCALES)}; found '{scale}'",
            where="scale_rewards",
            fix=did_you_mean(scale, SCALES) or f"choose one of: {', '.join(SCALES)}",
        )
    if scale is not None and scale not in kind.scales:
        raise ArgumentError(
            f"the loss '{name}' does not divide advantages by a standard deviation, found scale_rewards: {scale}",
            where="scale_rewards",
            fix="delete the line, or set scale_rewards: none",
        )
    return kind


def reward_with_kl(
    rewards_N: Tensor, old_K: Tensor, ref_K: Tensor, row_K: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Return rewards minus the KL with the reference: ``R - beta sum_t (log pi_old - log pi_ref)``.

    rloo and remax subtract the KL from the reward (arXiv 2402.14740, section 2; TRL's RLOO).

    Args:
        rewards_N: Rewards ``[N]``.
        old_K: Log-probs of the tokens under the model that sampled them ``[K]``.
        ref_K: Log-probs of the tokens under the reference ``[K]``.
        row_K: Completion of each token, int64 ``[K]``.
        beta: Weight of the KL.

    Returns:
        Rewards ``[N]`` in the dtype of ``rewards_N``, and each completion's log-ratio of policy and reference, float64
        ``[N]``. Both are without gradient.
    """
    kl_N = sum_by_row((old_K - ref_K).detach(), row_K, rewards_N.numel())
    return (rewards_N.double() - beta * kl_N).to(rewards_N.dtype), kl_N
