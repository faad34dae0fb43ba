"""The memory that a step may take, given or free now, and the search for the largest number that fits into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Budget:
    """Bytes that a step may take; None is all there is, or no limit for a simulated step.

    Attributes:
        device_bytes: Bytes on the device.
        host_bytes, disk_bytes: Bytes that the engine keeps there.
        margin: Fraction of an accelerator's memory that stays free if ``device_bytes`` is None.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    margin: float = 0.05

    def __str__(self) -> str:
        sizes = {"": self.device_bytes, " of the host": self.host_bytes, " of disk": self.disk_bytes}
        words = [f"{_rounded(size)}{name}" for name, size in sizes.items() if size is not None]
        return " and ".join(words) or "the device"

    def share_of(self, device: int | None, host: int | None, disk: int | None, *, usable: float = 1.0) -> float | None:
        """Return the largest fraction of the ``usable`` budget that a step takes, of any tier; None if unknown."""
        pairs = ((device, self.device_bytes), (host, self.host_bytes), (disk, self.disk_bytes))
        return max((used / (usable * limit) for used, limit in pairs if used is not None and limit), default=None)


@dataclass(frozen=True)
class Limits(Budget):
    """A budget of which every size is known: the memory to plan with.

    Attributes:
        device_bytes: Bytes that the step may hold on the device in all, weights included.
        host_bytes: Bytes of host memory for offloading.
        disk_bytes: Bytes of the directory for offloading.
        margin: Fraction of each that stays free.
        shared: True if the device's memory is the host's: a step on the CPU.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    margin: float = 0.05
    shared: bool = False

    @property
    def device(self) -> int:
        return int((1 - self.margin) * self.device_bytes)

    @property
    def host(self) -> int:
        return int((1 - self.margin) * self.host_bytes)

    @property
    def disk(self) -> int:
        return int((1 - self.margin) * self.disk_bytes)

    def tiers(self, device: float, host: float, disk: float) -> tuple[tuple[float, int], ...]:
        """Return what a step takes of each tier, with the bytes that are planned with."""
        memory = ((device + host, self.device),) if self.shared else ((device, self.device), (host, self.host))
        return *memory, (disk, self.disk)

    def excess(self, device: float, host: float, disk: float) -> float:
        """Return by how many bytes a step exceeds the worst tier; negative is what is left."""
        return max(used - limit for used, limit in self.tiers(device, host, disk))

    def filled(self, device: float, host: float, disk: float) -> float | None:
        """Return the fraction that a step takes of the tier it fills most; None if it needs a tier without memory.

        Unused tiers are left out. In :meth:`excess` a tier without memory has nothing left, so every step that fits has
        an excess of 0.
        """
        wanted = [(used, limit) for used, limit in self.tiers(device, host, disk) if used > 0]
        return None if any(limit == 0 for _, limit in wanted) else max((u / limit for u, limit in wanted), default=0.0)


def _rounded(size: int) -> str:
    """Return a size as text, in at most four digits of GiB or MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:,} B"


def free_device_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator, including what torch's allocator holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def free_disk_bytes(directory: str | Path) -> int:
    """Return the free bytes of the disk of a directory, which need not exist yet."""
    path = Path(directory).expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return int(shutil.disk_usage(path).free)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU"


FAR = 0.8
"""Fraction of a number below which another number is far enough from it to tell the slope."""


@dataclass(frozen=True)
class Attempt:
    """The result of trying a number.

    ``filled`` is the fraction of the budget that it takes, above 1 if it does not fit; None if unknown, as when
    aborted.
    """

    fits: bool
    filled: float | None = None


@dataclass(frozen=True)
class Range:
    """The range of a search, and its tolerance.

    Attributes:
        first: The first attempt.
        least, most: Smallest and largest number that is attempted.
        step, share: The search stops when fitting and failing are at most ``step``, or ``share`` of what fits, apart.
        grain: Attempts are multiples of it, except ``first``, ``least`` and ``most``.
    """

    first: int
    least: int
    most: int
    step: int
    share: float = 0.01
    grain: int = 1

    def tolerance(self, fits: int) -> int:
        """Return the distance between ``fits`` and a failing number at which the search is over."""
        return max(self.step, int(self.share * fits))


@dataclass(frozen=True)
class Bracket:
    """The largest number that was seen to fit (0: none) and the smallest that was seen to fail (None: none)."""

    fits: int
    fails: int | None


def search_largest(attempt: Callable[[int], Attempt], within: Range) -> Bracket:
    """Find the largest number that fits, in few attempts: doubling, then bisecting between fitting and failing.

    Memory is nearly linear in the length once there are several chunks. So when the line through two attempts predicts
    the end of the budget, the next attempt is half a tolerance below that point, and the one after it half a tolerance
    above; if both turn out as predicted, the search is over. Otherwise the bracket is halved, so there are at most
    twice as many attempts as in plain bisection.

    Args:
        attempt: Tries a number; if it fits, every smaller number is expected to fit too.
        within: Range and tolerance of the search.
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
    """Return the next number, None at the end of the search, and True if :func:`_aim` predicted it."""
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
    """Return a number just below the budget's end by the line through two attempts, or above if ``low`` is there."""
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
