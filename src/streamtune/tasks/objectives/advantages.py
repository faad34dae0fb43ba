"""Sums over the tokens of each completion without padding, and advantages of completions over others of their prompt.

A micro-batch holds N completions of any lengths. Their K target tokens lie one after another in ``logp_K``, and
``row_K`` says which completion a token belongs to:

    logp_K   -0.1 -2.3 -0.7 | -1.1 | -0.2 -0.4        row_K   0 0 0 | 1 | 2 2        N = 3

Row sums are float64 whatever the tokens are. A completion of 100,000 tokens has a log-prob near -100,000, where float32
steps by 0.008; preference losses subtract two such numbers and look at the rest. Gradients come back in the dtype of
the tokens.

The completions of one prompt are a group. A reward may be NaN, where no reward function applied to a completion: it
is left out of its group's baseline, and its advantage is 0.

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
    """Add up the tokens of each row: ``sum_N[n] = sum of values_K[k] with row_K[k] == n``.

    Float64 ``[N]``, differentiable; rows without a token sum to 0. ``row_K`` is int64 in ``[0, num_rows)``.
    """
    assert values_K.shape == row_K.shape, f"{tuple(values_K.shape)} values in {tuple(row_K.shape)} rows"
    zeros_N = torch.zeros(num_rows, dtype=torch.float64, device=values_K.device)
    return zeros_N.index_add(0, row_K, values_K.double())


def counts(row_K: Tensor, num_rows: int) -> Tensor:
    """Count the tokens of each row: int64 ``[N]``."""
    return torch.bincount(row_K, minlength=num_rows)


def mean_by_row(values_K: Tensor, row_K: Tensor, num_rows: int) -> Tensor:
    """Average the tokens of each row: float64 ``[N]``, differentiable; rows without a token are 0."""
    return sum_by_row(values_K, row_K, num_rows) / counts(row_K, num_rows).clamp(min=1)


EPSILON = 1e-4  # TRL's, added to the standard deviation
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class Advantages:
    """One advantage for each completion, and statistics of its group."""

    values_N: Tensor  # noqa: N815
    """in the dtype of the rewards; exactly 0 in flat groups and for completions without a reward"""
    flat_N: Tensor  # noqa: N815
    """bool: the completion's group teaches nothing, all its advantages are 0"""
    mean_N: Tensor  # noqa: N815
    """mean reward of the completion's group; NaN where none of it has a reward"""
    std_N: Tensor  # noqa: N815
    """standard deviation of the rewards of its group (divisor n - 1); 0 where fewer than two have one"""


@dataclass(frozen=True)
class _Groups:
    """Rewards with their groups. NaN rewards are left out of sizes and sums."""

    rewards_N: Tensor  # noqa: N815
    """float64, 0 in place of NaN"""
    known_N: Tensor  # noqa: N815
    index_N: Tensor  # noqa: N815
    """group of each completion, 0 .. G - 1"""
    size_G: Tensor  # noqa: N815
    """completions with a reward, float64"""
    sum_G: Tensor  # noqa: N815

    @classmethod
    def of(cls, rewards_N: Tensor, group_N: Tensor) -> _Groups:
        ids_G, index_N = torch.unique(group_N, return_inverse=True)
        known_N, num_groups = ~rewards_N.isnan(), ids_G.numel()
        rewards_N = torch.where(known_N, rewards_N.double(), 0.0)
        sizes, sums = sum_by_row(known_N, index_N, num_groups), sum_by_row(rewards_N, index_N, num_groups)
        return cls(rewards_N, known_N, index_N, sizes, sums)

    @property
    def mean_N(self) -> Tensor:  # noqa: N802
        return (self.sum_G / self.size_G)[self.index_N]

    @property
    def std_N(self) -> Tensor:  # noqa: N802
        square_N = torch.where(self.known_N, (self.rewards_N - self.mean_N) ** 2, 0.0)
        variance_G = sum_by_row(square_N, self.index_N, len(self.size_G)) / (self.size_G - 1).clamp(min=1)
        return variance_G.sqrt()[self.index_N]

    @property
    def equal_N(self) -> Tensor:  # noqa: N802
        """True where all rewards of the completion's group are the same number (or none is known)."""
        lowest, highest = (
            self.sum_G.new_full((len(self.size_G),), fill).scatter_reduce(0, self.index_N, values_N, how)
            for fill, how, values_N in (
                (torch.inf, "amin", torch.where(self.known_N, self.rewards_N, torch.inf)),
                (-torch.inf, "amax", torch.where(self.known_N, self.rewards_N, -torch.inf)),
            )
        )
        return (lowest >= highest)[self.index_N]


def _less_mean(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    return torch.where(groups.equal_N, 0.0, groups.rewards_N - groups.mean_N)


def _less_others(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    """Return ``R - mean of the others of the group``; 0 where there is no other."""
    others_N = (groups.sum_G[groups.index_N] - groups.rewards_N) / (groups.size_G - 1).clamp(min=1)[groups.index_N]
    return torch.where(groups.equal_N, 0.0, groups.rewards_N - others_N)


def _less_greedy(groups: _Groups, greedy_N: Tensor | None) -> Tensor:
    """Return ``R - reward of the greedy completion of the prompt``."""
    if greedy_N is None:
        raise ArgumentError("remax needs the reward of the greedy completion of each prompt", where="loss_type")
    difference_N = groups.rewards_N - greedy_N.double()
    return torch.where(greedy_N.isnan(), 0.0, difference_N)


@dataclass(frozen=True)
class _Kind:
    baseline: Callable[[_Groups, Tensor | None], Tensor]
    scale: str
    """``scale_rewards`` where the user names none"""
    scales: tuple[str, ...] = SCALES


ADVANTAGES: dict[str, _Kind] = {
    "grpo": _Kind(_less_mean, "group"),
    "dr_grpo": _Kind(_less_mean, "none"),
    "dapo": _Kind(_less_mean, "group"),
    "bnpo": _Kind(_less_mean, "group"),
    "gspo": _Kind(_less_mean, "group"),
    "rloo": _Kind(_less_others, "none", ("none",)),
    "remax": _Kind(_less_greedy, "none", ("none",)),
}
"""Policy loss -> its advantages.

grpo, dapo, bnpo, gspo   ``(R - mean) / (std + 1e-4)``: arXiv 2402.03300, section 4.1.2
dr_grpo                  ``R - mean``: arXiv 2503.20783, where the division is the bias that is taken out
rloo                     ``R - mean of the others``: arXiv 2402.14740
remax                    ``R - R of the greedy completion``: arXiv 2310.10505
"""


def group_advantages(
    name: str,
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    scale_rewards: str | None = None,
    greedy_N: Tensor | None = None,
) -> Advantages:
    """Compute one advantage for each completion.

    Args:
        name: A key of :data:`ADVANTAGES`, the name of the policy loss.
        rewards_N: Rewards ``[N]``, floating; NaN where a completion has none.
        group_N: Number of each completion's prompt, int64 ``[N]``; any numbers, in any order.
        scale_rewards: ``group``, ``batch`` or ``none``: the standard deviation to divide by. None takes the loss's
            published choice.
        greedy_N: Reward of the greedy completion of each completion's prompt ``[N]``, for remax.

    Raises:
        ArgumentError: An unknown name or scale, a scale the loss does not have, or no greedy rewards for remax.
    """
    kind = _kind(name, scale_rewards)
    groups = _Groups.of(rewards_N, group_N)
    values_N = torch.where(groups.known_N, kind.baseline(groups, greedy_N), 0.0)
    scale = scale_rewards or kind.scale
    if scale == "group":
        values_N = values_N / (groups.std_N + EPSILON)
    elif scale == "batch":
        known_R = groups.rewards_N[groups.known_N]
        values_N = values_N / ((known_R.std() if known_R.numel() > 1 else 0.0) + EPSILON)
    moving_G = sum_by_row(values_N != 0, groups.index_N, len(groups.size_G))
    return Advantages(
        values_N.to(rewards_N.dtype),
        (moving_G == 0)[groups.index_N],
        groups.mean_N.to(rewards_N.dtype),
        groups.std_N.to(rewards_N.dtype),
    )


def _kind(name: str, scale: str | None) -> _Kind:
    kind = look_up(name, ADVANTAGES, "policy loss", where="loss_type")
    if scale is not None and scale not in SCALES:
        raise ArgumentError(
            f"scale_rewards is '{scale}'",
            where="scale_rewards",
            fix=did_you_mean(scale, SCALES) or f"choose one of: {', '.join(SCALES)}",
        )
    if scale is not None and scale not in kind.scales:
        raise ArgumentError(
            f"the advantages of '{name}' are not divided by a standard deviation",
            where="scale_rewards",
            fix="leave it out, or set scale_rewards: none",
        )
    return kind


def reward_with_kl(
    rewards_N: Tensor, old_K: Tensor, ref_K: Tensor, row_K: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Subtract the KL with the reference from the rewards: ``R - beta sum_t (log pi_old - log pi_ref)``.

    rloo and remax have their KL here (arXiv 2402.14740, section 2; TRL's RLOO), on the log-probs of the rollout.

    Args:
        old_K: Log-probs of the tokens under the model that drew them ``[K]``.
        ref_K: Log-probs under the reference ``[K]``.
        row_K: The completion of each token, int64 ``[K]``.

    Returns:
        The rewards in their dtype ``[N]``, and the log-ratio of each completion, float64 ``[N]``. No gradient.
    """
    kl_N = sum_by_row((old_K - ref_K).detach(), row_K, rewards_N.numel())
    return (rewards_N.double() - beta * kl_N).to(rewards_N.dtype), kl_N
