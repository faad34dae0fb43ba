"""Find the longest sequence that fits with the schedule of least memory, regardless of the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from streamtune.plan.choices import Limits
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.plan.smallest import excess_of, furthest
from streamtune.schedule import Schedule
from streamtune.simulate.simulate import Simulation, simulate
from streamtune.simulate.workload import Workload

__all__ = ["longest_below", "longest_of"]

MOST = 1 << 30
"""Tokens beyond which nothing is looked for."""

COARSE = 0.05
"""Part of a length to which it is told what another number of ranks would allow."""

SHORTEST, GRAIN = 64, 64
"""Tokens: the shortest length that is offered, and what lengths are rounded down to."""

Simulate = Callable[[Workload, Schedule], Simulation]


def longest_of(workload: Workload, limits: Limits, written: Mapping[str, Any]) -> int:
    """Return the most tokens of a row that some schedule fits, within 5%; 0 if the workload's own length does not fit.

    Args:
        workload: The step; the search begins at its length.
        limits: The memory of a rank.
        written: Fields of the schedule that are given.
    """
    least = workload.length
    within = Range(first=least, least=least, most=MOST, step=1, share=COARSE, grain=1024)
    return _search(workload, limits, written, simulate, within)


def longest_below(workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate) -> int:
    """Return the most tokens of a row, below the workload's, that some schedule fits, within about 1%; 0 if none does.

    Args:
        workload: The step, which does not fit at its length.
        limits: The memory of a rank.
        written: Fields of the schedule that are given.
        simulate: Simulates a step.
    """
    within = Range(first=workload.length, least=SHORTEST, most=workload.length, step=GRAIN, grain=GRAIN)
    return _search(workload, limits, written, simulate, within)


def _search(workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate, within: Range) -> int:
    def attempt(length: int) -> Attempt:
        _, step = furthest(replace(workload, length=length), limits, written, simulate)
        filled = limits.filled(step.peak_bytes, step.host_bytes, step.disk_bytes)
        return Attempt(excess_of(step, limits) <= 0, filled)

    return search_largest(attempt, within).fits
