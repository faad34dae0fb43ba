"""Find the largest number that fits, in few attempts: doubling, then halving the range between fitting and failing.

Memory is close to linear in the length once there are several chunks. So where the line through two attempts predicts
the end of the budget, the bracket is not halved: the next attempt is half a tolerance below that place, the one after
it half a tolerance above, and if both turn out as predicted, the search is over. Where they do not, the bracket is
halved, so the number of attempts stays within twice that of plain bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FAR = 0.8
"""Part of a number below which another one is far enough from it to tell the slope."""


@dataclass(frozen=True)
class Attempt:
    """The result of trying a number.

    Attributes:
        fits: True if the number fits.
        filled: Part of the budget that it takes, above 1 where it does not fit; None where that is not known, as of
            an attempt that was broken off.
    """

    fits: bool
    filled: float | None = None


@dataclass(frozen=True)
class Range:
    """The range of a search, and its tolerance.

    Attributes:
        first: The first attempt.
        least: Nothing below is attempted.
        most: Nothing above is attempted.
        step: The search stops where fitting and failing are at most so far apart,
        share: or so large a part of what fits, whichever is larger.
        grain: Attempts are multiples of it, but for ``first``, ``least`` and ``most``.
    """

    first: int
    least: int
    most: int
    step: int
    share: float = 0.01
    grain: int = 1

    def tolerance(self, fits: int) -> int:
        """Return the largest distance between ``fits`` and a number that fails at which the search is over."""
        return max(self.step, int(self.share * fits))


@dataclass(frozen=True)
class Bracket:
    """The largest number that was seen to fit (0: none) and the smallest that was seen to fail (None: none)."""

    fits: int
    fails: int | None


def search_largest(attempt: Callable[[int], Attempt], within: Range) -> Bracket:
    """Find the largest number that fits.

    Args:
        attempt: Tries a number; if it fits, every smaller one is expected to fit too.
        within: The range of the search, and its tolerance.
    """
    low, high = 0, None
    known: dict[int, float] = {}
    number: int | None = within.first
    size_before, aimed = 0, False
    while number is not None:
        found = attempt(number)
        if found.filled is not None:
            known[number] = found.filled
        if found.fits:
            low = max(low, number)
        else:
            high = number if high is None else min(high, number)
        size = high - low if high is not None else 0
        stuck = aimed and 2 * size > size_before > 0
        size_before = size
        number, aimed = _next(low, high, {} if stuck else known, within)
    return Bracket(low, high)


def _next(low: int, high: int | None, known: dict[int, float], within: Range) -> tuple[int | None, bool]:
    """Return the next number, None where the search is over, and True if it was predicted by :func:`_aim`."""
    if low == within.most or (high is not None and low and high - low <= within.tolerance(low)):
        return None, False
    if not low:  # nothing has fitted yet
        assert high is not None
        return (max(high // 2, within.least) if high > within.least else None), False
    ceiling = min(2 * low, within.most) if high is None else high
    aim = _aim(low, known, within)
    if aim is not None and low < aim < ceiling:
        return aim, True
    if high is None:
        return ceiling, False
    middle = _round((low + high) // 2, within)
    return (middle if low < middle < high else (low + high) // 2), False


def _aim(low: int, known: dict[int, float], within: Range) -> int | None:
    """Return a number just below the end of the budget by the line through two attempts, above if ``low`` is there."""
    below = sorted(number for number in known if number <= low)
    above = sorted(number for number in known if number > low)
    # Chunks are equal, so bytes rise in small teeth: two attempts side by side may say nothing of the line.
    apart = [number for number in below if number <= FAR * low] or below[:-1]
    pair = below[-1:] + above[:1] if above else apart[-1:] + below[-1:]
    if len(pair) < 2 or pair[0] == pair[1]:
        return None
    slope = (known[pair[1]] - known[pair[0]]) / (pair[1] - pair[0])
    if slope <= 0:
        return None
    end = pair[0] + (1 - known[pair[0]]) / slope
    half = within.tolerance(low) / 2
    aim = end - half if end - half > low + half else end + half
    return _round(int(aim), within)


def _round(number: int, within: Range) -> int:
    return number - number % within.grain
