"""Choose the prompts of the next rollout, and divide its completions among them.

A completion passes if its reward is at least ``pass_reward``. The choice of prompts depends on the seed, the number of
prompts drawn so far and, except for ``uniform``, on the prompts' pass rates:

``uniform``     Every prompt once per epoch, in shuffled order.
``pass_rate``   The weight of a prompt is ``p (1 - p)``, the variance of passing, where p is its running pass rate. The
                gradient of a group grows with this variance. If all completions pass, or none, the advantages of a
                group are zero. A constant is added to the weight, because a prompt that was too hard may have become
                easier.
``middle``      All prompts with a pass rate from 1/4 to 3/4 have the same weight, other prompts a small one. Between
                1/4 and 3/4 the variance of passing is at least three quarters of its maximum (arXiv 2504.03380).

Completions are divided so that the variance of the gradient is least. Of n completions of a prompt with pass rate p and
gradient norm G, n p pass. The variance of their mean gradient is about ``G^2 / (n p)``. GVM (arXiv 2505.02391) gives
less weight to prompts that are hardly ever solved, and minimizes, for a given sum of all n,

    sum  G^2 / (n p) / (1 + alpha / p^beta)

The minimum is at

    n  proportional to  G / sqrt(p + alpha / p^(beta - 1))           gvm; 0 if no completion has passed

If the mean reward of a large group is subtracted, the variance is about ``G^2 p (1 - p) / n``. The sum over prompts is
least, by Neyman's rule (1934), at

    n  proportional to  G sqrt(p (1 - p))                            neyman

G is the gradient norm of ``-log p`` of a completion that passed. G and p are running estimates from the completions of
the run. A prompt without completions has p = 1/2 and the mean G.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, get_args

from streamtune.errors import CheckpointError

PromptChoice = Literal["uniform", "pass_rate", "middle"]
PROMPT_CHOICES: tuple[str, ...] = get_args(PromptChoice)
MIN_WEIGHT = 0.02
"""Constant that is added to a weight p (1 - p), which is at most 1/4."""
MIDDLE_RATES = (0.25, 0.75)
"""Range of pass rates of prompts that are neither too easy nor too hard."""
GVM_ALPHA, GVM_BETA = 1e-3, 2.0
"""Parameters of GVM's weights, as in the authors' code."""
MIN_COMPLETIONS = 2
"""Minimum number of completions of a prompt: a single completion cannot be compared with the mean of its group."""
DECAY = 0.5
"""Factor by which earlier counts and norms are multiplied at each update, because the policy changes."""


class PassRates:
    """Estimated pass rates of prompts, from decaying counts of completions and a prior of one pass and one failure."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def pass_rate(self, prompt: int) -> float:
        """Return the estimated pass rate of the prompt with this index; 1/2 if it has no completions yet."""
        passed, tried = self._counts.get(prompt, (0.0, 0.0))
        return (passed + 1.0) / (tried + 2.0)

    def passed_share(self, prompt: int) -> float | None:
        """Return the fraction of a prompt's recorded completions that passed, with decay; None if none is recorded."""
        passed, tried = self._counts.get(prompt, (0.0, 0.0))
        return passed / tried if tried else None

    def sampling_weight(self, prompt: int, *, middle: bool = False) -> float:
        """Return a prompt's weight in random draws: ``p (1 - p)`` plus a constant, for its pass rate p.

        With ``middle`` the weight is the same for all rates in ``MIDDLE_RATES``, and smaller for others.
        """
        rate = self.pass_rate(prompt)
        if middle:
            return 0.25 if MIDDLE_RATES[0] <= rate <= MIDDLE_RATES[1] else MIN_WEIGHT
        return rate * (1.0 - rate) + MIN_WEIGHT

    def record_completions(self, prompt: int, *, passed: int, tried: int) -> None:
        before_passed, before_tried = self._counts.get(prompt, (0.0, 0.0))
        self._counts[prompt] = (DECAY * before_passed + passed, DECAY * before_tried + tried)

    def state_dict(self) -> dict[str, Any]:
        return {str(prompt): list(counts) for prompt, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = {int(prompt): (counts[0], counts[1]) for prompt, counts in state.items()}


class PromptPicker:
    """Chooses the prompts of each rollout.

    Args:
        choice: ``uniform``, ``pass_rate`` (more often at rates near 1/2) or ``middle`` (at rates from 1/4 to 3/4).
        shuffle: Whether ``uniform`` visits the prompts of each epoch in random order. False keeps their order.
        record_rates: True to record pass rates even if the choice does not depend on them.
    """

    def __init__(
        self, num_prompts: int, *, choice: str, seed: int, shuffle: bool = True, record_rates: bool = False
    ) -> None:
        assert choice in PROMPT_CHOICES
        self.num_prompts, self.choice, self.seed, self.shuffle = num_prompts, choice, seed, shuffle
        self.record_rates = record_rates or choice != "uniform"
        self.drawn = 0
        self.rates = PassRates()

    def next_prompts(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` prompts, all different unless there are fewer prompts."""
        picked = self._pick_in_order(count) if self.choice == "uniform" else self._pick_by_rate(count)
        self.drawn += count
        return picked

    def record_completions(self, prompt: int, *, passed: int, tried: int) -> None:
        if self.record_rates:
            self.rates.record_completions(prompt, passed=passed, tried=tried)

    def _pick_in_order(self, count: int) -> list[int]:
        picked: list[int] = []
        position = self.drawn
        while len(picked) < count:
            epoch, start = divmod(position, self.num_prompts)
            part = self._epoch_order(epoch)[start : start + count - len(picked)]
            picked += part
            position += len(part)
        return picked

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed} epoch {epoch}").shuffle(order)
        return order

    def _pick_by_rate(self, count: int) -> list[int]:
        """Return prompts drawn by weight without replacement: the prompts with the largest ``u ** (1 / weight)``.

        The algorithm is from Efraimidis and Spirakis (2006); u is a random number.
        """
        draw, middle = random.Random(f"{self.seed} draw {self.drawn}"), self.choice == "middle"
        weights = [self.rates.sampling_weight(prompt, middle=middle) for prompt in range(self.num_prompts)]
        keys = [(draw.random() ** (1.0 / weight), prompt) for prompt, weight in enumerate(weights)]
        order = [prompt for _, prompt in sorted(keys, reverse=True)]
        return [order[index % self.num_prompts] for index in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "choice": self.choice,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drawn": self.drawn,
            "rates": self.rates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`.

        Raises:
            CheckpointError: The number of prompts, the choice, the seed or ``shuffle`` differs.
        """
        mine, state = self.state_dict(), {"shuffle": True, **state}  # older checkpoints always shuffled
        for key in ("num_prompts", "choice", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint draws its prompts with {key} = {state[key]}, this run with {mine[key]}",
                    fix="resume with the data and the settings of the checkpoint",
                )
        self.drawn = int(state["drawn"])
        self.rates.load_state_dict(state["rates"])


def allocation_score(rate: float, norm: float, rule: str = "gvm") -> float:
    """Return a prompt's score. Completions divided in proportion to the scores give the least variance of the gradient.

    Args:
        norm: Gradient norm of a passing completion.
        rule: ``gvm`` or ``neyman``, two approximations of the variance.
    """
    if rate <= 0:
        return 0.0
    if rule == "neyman":
        return norm * math.sqrt(rate * max(0.0, 1 - rate))
    return norm / math.sqrt(rate + GVM_ALPHA / rate ** (GVM_BETA - 1))


def allocate_completions(scores: Sequence[float], total: int, min_share: int = MIN_COMPLETIONS) -> list[int]:
    """Return the number of each prompt's completions: ``total`` divided in proportion to the scores.

    Shares are rounded down, and the remainder goes to the shares with the largest fractional parts.

    Args:
        scores: Score of each prompt, at least 0. If all are 0, all shares are equal.
        total: Sum to divide, at least ``min_share`` times the number of prompts.
        min_share: Minimum number of completions of a prompt.
    """
    indices = range(len(scores))
    assert total >= min_share * len(scores), "the total must be at least min_share for each prompt"
    shares = [1.0] * len(scores) if not sum(scores) > 0 else list(map(float, scores))
    unfixed = set(indices)
    while True:  # shares below the minimum are raised to it, and the other prompts divide the remainder
        remaining, free_sum = total - min_share * (len(scores) - len(unfixed)), sum(shares[index] for index in unfixed)
        too_small = {index for index in unfixed if shares[index] * remaining < min_share * free_sum or free_sum == 0}
        if not too_small:
            break
        unfixed -= too_small
        if not unfixed:
            break
    exact_shares = [shares[index] * remaining / free_sum if index in unfixed else float(min_share) for index in indices]
    counts = [math.floor(part) for part in exact_shares]
    by_fraction = sorted(indices, key=lambda index: (counts[index] - exact_shares[index], index))
    for number in range(total - sum(counts)):
        counts[by_fraction[number % len(counts)]] += 1
    return counts


class GradientNorms:
    """Running average of the gradient norms of each prompt's passing completions."""

    def __init__(self) -> None:
        self._norms: dict[int, float] = {}

    def gradient_norm(self, prompt: int) -> float:
        """Return a prompt's running gradient norm; without one, the mean over prompts, or 1 if no norm is recorded."""
        if prompt in self._norms:
            return self._norms[prompt]
        return math.fsum(self._norms.values()) / len(self._norms) if self._norms else 1.0

    def record_norm(self, prompt: int, norm: float) -> None:
        """Update a prompt's running norm with the gradient norm of a completion; ignore a norm that is not finite."""
        if math.isfinite(norm):
            self._norms[prompt] = DECAY * self._norms.get(prompt, norm) + (1 - DECAY) * norm

    def state_dict(self) -> dict[str, Any]:
        return {str(prompt): norm for prompt, norm in self._norms.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = {int(prompt): float(norm) for prompt, norm in state.items()}
