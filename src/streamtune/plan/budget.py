"""Define memory limits of a training step, measure free memory, and search for the largest number that fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Budget:
    """Bytes that a training step may use on each tier: device, host and disk.

    None means all the memory of a tier, or no limit if the step is simulated.

    Attributes:
        device_bytes: Bytes of device memory.
        host_bytes, disk_bytes: Bytes of host memory and disk for offloaded tensors.
        margin: Fraction of an accelerator's memory that stays free if ``device_bytes`` is None.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    margin: float = 0.05

    def __str__(self) -> str:
        sizes = {"": self.device_bytes, " of the host": self.host_bytes, " of disk": self.disk_bytes}
        words = [f"{_format_bytes(size)}{name}" for name, size in sizes.items() if size is not None]
        return " and ".join(words) or "the device"

    def used_fraction(
        self, device: int | None, host: int | None, disk: int | None, *, usable: float = 1.0
    ) -> float | None:
        """Return used bytes divided by budget, of the tier where this ratio is largest.

        Tiers with an unknown usage or budget are left out; the result is None if no tier remains.

        Args:
            device, host, disk: Bytes that the step uses on each tier; None if unknown.
            usable: Factor between 0 and 1 by which each budget is multiplied first.
        """
        pairs = ((device, self.device_bytes), (host, self.host_bytes), (disk, self.disk_bytes))
        return max((used / (usable * limit) for used, limit in pairs if used is not None and limit), default=None)


@dataclass(frozen=True)
class Limits(Budget):
    """Memory that a plan may use on each tier (device, host, disk), in bytes.

    Attributes:
        device_bytes: Total bytes that the step may use on the device, weights included.
        host_bytes: Bytes of host memory for offloading.
        disk_bytes: Bytes of disk space for offloading.
        margin: Fraction of each of these numbers that stays free.
        shared: True if device and host are the same memory, as on the CPU.

    Example:
        >>> limits = Limits(device_bytes=24 << 30, host_bytes=64 << 30, margin=0.05)
        >>> limits.device_limit == int(0.95 * (24 << 30))
        True
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    margin: float = 0.05
    shared: bool = False

    @property
    def device_limit(self) -> int:
        return int((1 - self.margin) * self.device_bytes)

    @property
    def host_limit(self) -> int:
        return int((1 - self.margin) * self.host_bytes)

    @property
    def disk_limit(self) -> int:
        return int((1 - self.margin) * self.disk_bytes)

    def usage_and_limits(self, device: float, host: float, disk: float) -> tuple[tuple[float, int], ...]:
        """Return ``(used bytes, limit in bytes)`` of each tier; if device and host share memory, they are one tier."""
        memory = (
            ((device + host, self.device_limit),)
            if self.shared
            else ((device, self.device_limit), (host, self.host_limit))
        )
        return *memory, (disk, self.disk_limit)

    def excess_bytes(self, device: float, host: float, disk: float) -> float:
        """Return the largest number of bytes by which the usage of a tier exceeds its limit; 0 or less if all fit."""
        return max(used - limit for used, limit in self.usage_and_limits(device, host, disk))


def _format_bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:,} B"


def free_disk_bytes(directory: str | Path) -> int:
    """Return how many bytes are free on the disk of a directory; the directory need not exist yet."""
    path = Path(directory).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return int(shutil.disk_usage(path).free)


MAX_SLOPE_RATIO = 0.8
"""Largest ratio of two tried numbers from which the slope of memory use is estimated; closer numbers are unreliable."""


@dataclass(frozen=True)
class Attempt:
    """Result of trying one number, such as a row length, in a search for the largest number that fits.

    Attributes:
        fits: True if a step with this number fits the memory budget.
        filled: Used fraction of the budget, above 1 if the step does not fit; None if the attempt was aborted.
    """

    fits: bool
    filled: float | None = None


@dataclass(frozen=True)
class Range:
    """Range and tolerance of a search for the largest number that fits.

    Attributes:
        first: Number to try first.
        least, most: Smallest and largest number that may be tried.
        step: Absolute tolerance: distance between the largest fitting and the smallest failing number at the end.
        share: Relative tolerance, as a fraction of the largest fitting number. The larger of the two tolerances
            applies.
        grain: Granularity: tried numbers are multiples of it, where possible.
    """

    first: int
    least: int
    most: int
    step: int
    share: float = 0.01
    grain: int = 1

    def tolerance(self, fitting_number: int) -> int:
        """Return the tolerance that applies when ``fitting_number`` is the largest number that fits."""
        return max(self.step, int(self.share * fitting_number))


@dataclass(frozen=True)
class Bracket:
    """Result of a search for the largest number that fits.

    Attributes:
        fits: Largest number that fits; 0 if none fits.
        fails: Smallest number that does not fit; None if none was found.
    """

    fits: int
    fails: int | None


def search_largest(attempt: Callable[[int], Attempt], search_range: Range) -> Bracket:
    """Find the largest number that fits, within a tolerance.

    The search doubles the number until it fails. Then it interpolates, because memory is nearly linear in the length of
    a row with several chunks: a line through two attempts predicts where the budget is exhausted. The search tries a
    number half a tolerance below this point, then a number half a tolerance above. If the prediction is wrong, the
    search bisects, with at most twice the attempts of plain bisection.

    Args:
        attempt: Function that tries a number. If a number fits, every smaller number is assumed to fit.
        search_range: Range and tolerance of the search.
    """
    low, high = 0, None
    used_by_number: dict[int, float] = {}
    number: int | None = search_range.first
    previous_size, predicted = 0, False
    while number is not None:
        found = attempt(number)
        if found.filled is not None:
            used_by_number[number] = found.filled
        if found.fits:
            low = max(low, number)
        else:
            high = number if high is None else min(high, number)
        size = high - low if high is not None else 0
        is_stuck = predicted and 2 * size > previous_size > 0
        previous_size = size
        number, predicted = _next_number(low, high, {} if is_stuck else used_by_number, search_range)
    return Bracket(low, high)


def _next_number(
    low: int, high: int | None, used_by_number: dict[int, float], search_range: Range
) -> tuple[int | None, bool]:
    """Return the next number to try (None ends the search), and True if the number comes from a prediction."""
    if low == search_range.most or (high is not None and low and high - low <= search_range.tolerance(low)):
        return None, False
    if not low:  # nothing has fitted yet
        assert high is not None
        return (max(high // 2, search_range.least) if high > search_range.least else None), False
    ceiling = min(2 * low, search_range.most) if high is None else high
    aim = _predict_budget_end(low, used_by_number, search_range)
    if aim is not None and low < aim < ceiling:
        return aim, True
    if high is None:
        return ceiling, False
    middle = _round_to_grain((low + high) // 2, search_range)
    return (middle if low < middle < high else (low + high) // 2), False


def _predict_budget_end(low: int, used_by_number: dict[int, float], search_range: Range) -> int | None:
    """Return the next number to try, predicted by a line through two attempts; None if the line does not rise.

    The number is half a tolerance below the point where the line reaches the budget. It is half a tolerance above this
    point if ``low`` is already within a tolerance of the point.
    """
    below = sorted(number for number in used_by_number if number <= low)
    above = sorted(number for number in used_by_number if number > low)
    # Rows are divided into equal chunks, so bytes rise unevenly: two close attempts may not show the slope.
    apart = [number for number in below if number <= MAX_SLOPE_RATIO * low] or below[:-1]
    pair = below[-1:] + above[:1] if above else apart[-1:] + below[-1:]
    if len(pair) < 2 or pair[0] == pair[1]:
        return None
    slope = (used_by_number[pair[1]] - used_by_number[pair[0]]) / (pair[1] - pair[0])
    if slope <= 0:
        return None
    end = pair[0] + (1 - used_by_number[pair[0]]) / slope
    half = search_range.tolerance(low) / 2
    aim = end - half if end - half > low + half else end + half
    return _round_to_grain(int(aim), search_range)


def _round_to_grain(number: int, search_range: Range) -> int:
    return number - number % search_range.grain
