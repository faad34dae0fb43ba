"""Choose the prompts that the policy completes next, and divide the completions of a batch among them.

Prompts: each in turn, or more often those that the policy solves now and then. The choice depends on the seed, the
number of prompts drawn so far and, except for ``uniform``, the pass rates.

``uniform``     every prompt once an epoch, in a shuffled order
``pass_rate``   drawn with a weight of ``p (1 - p)``, p the prompt's running pass rate. Where all completions pass, or
                none does, a group's advantages are zero and teach nothing. The weight is the variance of a pass, which
                a group's gradient grows with. A floor lets every prompt be drawn: it may no longer be too hard.
``middle``      drawn evenly from those with a pass rate of 1/4 to 3/4, and with a small weight from the others: the
                variance of a pass is at least three quarters of the largest there (arXiv 2504.03380)

Completions: so that their gradient varies least. Of n completions of a prompt with pass rate p and gradient norm G, n p
pass, and their mean gradient has a variance of about ``G^2 / (n p)``. The sum

    sum  G^2 / (n p) / (1 + alpha / p^beta)

in which prompts that hardly any completion solves count less, is least for a given sum of all n (GVM, arXiv 2505.02391)
at

    n  proportional to  G / sqrt(p + alpha / p^(beta - 1))           gvm; 0 where none has passed

With advantages, from which the mean of a large group is subtracted, the variance is about ``G^2 p (1 - p) / n``. Its
sum is least, by Neyman's rule (1934), at

    n  proportional to  G sqrt(p (1 - p))                            neyman

G is the norm of the gradient of ``-log p`` of a completion that passed. G and p are running estimates from the
completions that a run writes anyway. A prompt that was not asked yet counts as p = 1/2 and the mean G.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, get_args

from streamtune.errors import CheckpointError

PromptChoice = Literal["uniform", "pass_rate", "middle"]
PROMPT_CHOICES: tuple[str, ...] = get_args(PromptChoice)
FLOOR = 0.02
"""Of a weight, beside p (1 - p) of at most 1/4."""
MIDDLE = (0.25, 0.75)
"""Pass rates of prompts that are neither too easy nor too hard."""
ALPHA, BETA = 1e-3, 2.0
"""The penalty, as in the authors' code."""
LEAST = 2
"""Completions of a prompt at least: fewer have no mean to be better than, and tell nothing of its pass rate."""
MEMORY = 0.5
"""Factor of earlier counts and weight of earlier norms at each visit: the policy changes, so these count less."""


class PassRates:
    """The pass rate of each prompt's completions: counts that decay, begun with one pass and one failure."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def rate(self, prompt: int) -> float:
        """Return the estimate for a prompt by its number; 1/2 for a prompt not seen yet."""
        passed, tried = self._counts.get(prompt, (0.0, 0.0))
        return (passed + 1.0) / (tried + 2.0)

    def passed(self, prompt: int) -> float | None:
        """Return the share of a prompt's completions that passed, without the prior of a rate; None if not seen yet."""
        passed, tried = self._counts.get(prompt, (0.0, 0.0))
        return passed / tried if tried else None

    def weight(self, prompt: int, *, middle: bool = False) -> float:
        """Return the weight with which a prompt is drawn; with ``middle`` the same for all rates in the middle."""
        rate = self.rate(prompt)
        if middle:
            return 0.25 if MIDDLE[0] <= rate <= MIDDLE[1] else FLOOR
        return rate * (1.0 - rate) + FLOOR

    def observe(self, prompt: int, *, passed: int, tried: int) -> None:
        before_passed, before_tried = self._counts.get(prompt, (0.0, 0.0))
        self._counts[prompt] = (MEMORY * before_passed + passed, MEMORY * before_tried + tried)

    def state_dict(self) -> dict[str, Any]:
        return {str(prompt): list(counts) for prompt, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = {int(prompt): (counts[0], counts[1]) for prompt, counts in state.items()}


class PromptPicker:
    """Chooses the next prompts, without end.

    Args:
        choice: ``uniform``, ``pass_rate`` or ``middle``.
        counts: Keep pass rates where the choice does not read them, too.
    """

    def __init__(self, num_prompts: int, *, choice: str, seed: int, counts: bool = False) -> None:
        assert choice in PROMPT_CHOICES
        self.num_prompts, self.choice, self.seed = num_prompts, choice, seed
        self.counts = counts or choice != "uniform"
        self.drawn = 0
        """Prompts drawn so far."""
        self.rates = PassRates()

    def next(self, count: int) -> list[int]:
        """Return the numbers of the next ``count`` prompts, each at most once among them where there are that many."""
        picked = self._in_turn(count) if self.choice == "uniform" else self._by_rate(count)
        self.drawn += count
        return picked

    def observe(self, prompt: int, *, passed: int, tried: int) -> None:
        if self.counts:
            self.rates.observe(prompt, passed=passed, tried=tried)

    def _in_turn(self, count: int) -> list[int]:
        picked: list[int] = []
        position = self.drawn
        while len(picked) < count:
            epoch, start = divmod(position, self.num_prompts)
            part = self._order(epoch)[start : start + count - len(picked)]
            picked += part
            position += len(part)
        return picked

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.num_prompts))
        random.Random(f"{self.seed} epoch {epoch}").shuffle(order)
        return order

    def _by_rate(self, count: int) -> list[int]:
        """Draw without replacement by the largest ``u ** (1 / weight)`` (Efraimidis and Spirakis, 2006)."""
        draw, middle = random.Random(f"{self.seed} draw {self.drawn}"), self.choice == "middle"
        weights = [self.rates.weight(prompt, middle=middle) for prompt in range(self.num_prompts)]
        keys = [(draw.random() ** (1.0 / weight), prompt) for prompt, weight in enumerate(weights)]
        order = [prompt for _, prompt in sorted(keys, reverse=True)]
        return [order[index % self.num_prompts] for index in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "choice": self.choice,
            "seed": self.seed,
            "drawn": self.drawn,
            "rates": self.rates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state saved by ``state_dict``, over the same prompts."""
        mine = self.state_dict()
        for key in ("num_prompts", "choice", "seed"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint draws its prompts with {key} = {state[key]}, this run with {mine[key]}",
                    fix="resume with the data and the settings the checkpoint was made with",
                )
        self.drawn = int(state["drawn"])
        self.rates.load_state_dict(state["rates"])


def variance_score(rate: float, norm: float, rule: str = "gvm") -> float:
    """Return the number that completions of a prompt are proportional to; ``rule`` is ``gvm`` or ``neyman``."""
    if rate <= 0:
        return 0.0
    if rule == "neyman":
        return norm * math.sqrt(rate * max(0.0, 1 - rate))
    return norm / math.sqrt(rate + ALPHA / rate ** (BETA - 1))


def allocate(scores: Sequence[float], total: int, least: int = LEAST) -> list[int]:
    """Divide ``total`` in proportion to scores, none below ``least``; the remainder by the largest fractions.

    Args:
        scores: Score of each prompt, at least 0; where all are 0 they count as equal.
        total: At least ``least`` for each.
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
    def __init__(self) -> None:
        self._norms: dict[int, float] = {}

    def norm(self, prompt: int) -> float:
        """Return the running norm of a prompt; the mean of all for an unseen prompt, 1 without any."""
        if prompt in self._norms:
            return self._norms[prompt]
        return math.fsum(self._norms.values()) / len(self._norms) if self._norms else 1.0

    def observe(self, prompt: int, norm: float) -> None:
        """Add the norm of one completion, unless it is not finite."""
        if math.isfinite(norm):
            self._norms[prompt] = MEMORY * self._norms.get(prompt, norm) + (1 - MEMORY) * norm

    def state_dict(self) -> dict[str, Any]:
        return {str(prompt): norm for prompt, norm in self._norms.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = {int(prompt): float(norm) for prompt, norm in state.items()}
