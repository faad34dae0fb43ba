"""Divide the completions of a batch among its prompts, so that the gradient made of them varies least.

Of a prompt with pass rate p and gradient norm G, n completions have n p that pass, and the mean gradient of these has a
variance of about ``G^2 / (n p)``. The sum of all, in which prompts that hardly any completion solves count less,

    sum  G^2 / (n p) / (1 + alpha / p^beta)

is least for a given sum of all n (GVM, arXiv 2505.02391) at

    n  proportional to  G / sqrt(p + alpha / p^(beta - 1))           gvm; 0 where none has passed

That is of completions that pass. Of n advantages from which the mean of their group is subtracted the variance is about
``G^2 p (1 - p) / n`` where the group is large, and its sum is least, by Neyman's rule (1934), at

    n  proportional to  G sqrt(p (1 - p))                            neyman

G is the norm of the gradient of ``-log p`` of a completion that passed. Both are running estimates here, of the
completions that a run writes anyway: a prompt that was not asked yet counts as one of p = 1/2 and the mean G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

ALPHA, BETA = 1e-3, 2.0
"""The penalty, as in the authors' code."""
LEAST = 2
"""Completions of a prompt at least: fewer have no mean to be better than, and tell nothing of its pass rate."""
MEMORY = 0.5
"""Weight of the earlier estimate at each visit: the policy changes."""


def variance_score(rate: float, norm: float, rule: str = "gvm") -> float:
    """Return the number that completions of a prompt are proportional to.

    Args:
        rate: Its pass rate.
        norm: Its gradient norm.
        rule: ``gvm`` or ``neyman``.
    """
    if rate <= 0:
        return 0.0
    if rule == "neyman":
        return norm * math.sqrt(rate * max(0.0, 1 - rate))
    return norm / math.sqrt(rate + ALPHA / rate ** (BETA - 1))


def allocate(scores: Sequence[float], total: int, least: int = LEAST) -> list[int]:
    """Divide ``total`` in proportion to scores, none below ``least``; the remainder by the largest fractions.

    Args:
        scores: Of each prompt, at least 0; where all are 0 they count as equal.
        total: At least ``least`` for each.
        least: The smallest part.
    """
    places = range(len(scores))
    assert total >= least * len(scores), "each has the least"
    shares = [1.0] * len(scores) if not sum(scores) > 0 else list(map(float, scores))
    free = set(places)
    while True:  # those below the least get it, and the others share what is left
        left, whole = total - least * (len(scores) - len(free)), sum(shares[place] for place in free)
        below = {place for place in free if shares[place] * left < least * whole or whole == 0}
        if not below:
            break
        free -= below
        if not free:
            break
    wanted = [shares[place] * left / whole if place in free else float(least) for place in places]
    parts = [math.floor(part) for part in wanted]
    by_fraction = sorted(places, key=lambda place: (parts[place] - wanted[place], place))
    for number in range(total - sum(parts)):
        parts[by_fraction[number % len(parts)]] += 1
    return parts


class GradientNorms:
    """The running gradient norm of each prompt."""

    def __init__(self) -> None:
        self._norms: dict[int, float] = {}

    def norm(self, prompt: int) -> float:
        """Return the estimate for a prompt by its number; the mean of all for one that has none, 1 without any."""
        if prompt in self._norms:
            return self._norms[prompt]
        return math.fsum(self._norms.values()) / len(self._norms) if self._norms else 1.0

    def observe(self, prompt: int, norm: float) -> None:
        """Add the norm of one completion; one that is not finite is left out."""
        if math.isfinite(norm):
            self._norms[prompt] = MEMORY * self._norms.get(prompt, norm) + (1 - MEMORY) * norm

    def state_dict(self) -> dict[str, Any]:
        """Return the norms, as plain JSON values."""
        return {str(prompt): norm for prompt, norm in self._norms.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the norms of another one."""
        self._norms = {int(prompt): float(norm) for prompt, norm in state.items()}
