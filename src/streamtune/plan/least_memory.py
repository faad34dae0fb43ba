"""Find the schedule that needs the least memory, and the longest row that fits, with few simulations.

A lower bound of a step's memory needs no simulation (``lower_bound``), and a schedule whose bound exceeds the limits is
not simulated. The search for the longest row predicts how far simulated bytes exceed the bound. Between two simulated
lengths the difference is nearly linear in the length. So the search needs two or three simulations for each schedule
that could allow the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.plan.budget import Limits
from streamtune.plan.choices import (
    CHUNKS,
    HEAD_CHUNKS,
    allows_chunk_order,
    chunk_order_schedules,
    excess_bytes,
    find_least_memory_chunk_order,
)
from streamtune.plan.estimate import Simulate
from streamtune.plan.lower_bound import LeastBytes, LowerBound
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

MAX_LENGTH = 1 << 30
"""Longest row that is tried, in tokens."""

MIN_LENGTH, MULTIPLE = 64, 64
"""Shortest row length that is suggested, and the multiple to which lengths are rounded down, in tokens."""

COARSE_MULTIPLE = 1024
"""Multiple to which :func:`longest_row_from` rounds lengths down, in tokens."""

TOLERANCE, COARSE_TOLERANCE = 0.01, 0.05
"""Relative tolerance of :func:`longest_row_up_to` and :func:`longest_row_from`."""

MAX_SIMULATIONS = 24
"""Largest number of simulations in a search for the longest row."""


def least_memory_schedule(limits: Limits, fixed: Mapping[str, Any]) -> Schedule:
    """Return the schedule with the smallest chunks, ``levels: 2`` and nothing kept; ``fixed`` fields do not change.

    Layer inputs are stored on the first tier of disk, host and device that has memory and that ``fixed`` allows.
    ``offload_dir`` is dropped if nothing is offloaded to disk.
    """
    return next(_least_memory_schedules(limits, fixed), None) or Schedule(**fixed)


def _least_memory_schedules(limits: Limits, fixed: Mapping[str, Any]) -> Iterator[Schedule]:
    """Yield :func:`least_memory_schedule` for each tier that can store the layer inputs."""
    tiers = ["device"]
    if limits.host_bytes and not limits.shared:
        tiers.insert(0, "host")
    if limits.disk_bytes and "offload_dir" in fixed:
        tiers.insert(0, "disk")
    tiers += [tier for tier in ("host", "disk") if tier not in tiers and (tier == "host" or "offload_dir" in fixed)]
    sizes = {"chunk_size": CHUNKS[0], "head_chunk_size": HEAD_CHUNKS[0], "stream_grads": True}
    yielded = set()
    for offload, levels in product(tiers, (2, 1)):
        chosen: dict[str, Any] = {**sizes, "offload": offload, "levels": levels, **fixed}
        if chosen["offload"] != "disk":
            chosen.pop("offload_dir", None)
        if chosen["offload"] in yielded:
            continue
        with suppress(ArgumentError):  # the user's fields exclude this tier
            schedule = Schedule(**chosen)
            yielded.add(chosen["offload"])
            yield schedule


def least_excess_bound(workload: Workload, limits: Limits, fixed: Mapping[str, Any]) -> LeastBytes:
    """Return the lower bound that exceeds the limits by the fewest bytes, of all schedules of least memory.

    If it exceeds the limits, the workload fits with no schedule.
    """
    bound = LowerBound(workload)
    found = []
    for family in _schedule_families(workload, limits, fixed):
        for schedule in {family.schedule, family.fitting_schedule(bound, workload.length, limits)}:
            found.append(bound.least_bytes(schedule, workload.length))
    return min(found, key=lambda least: least.excess_bytes(limits))


def simulate_one_level_step(
    workload: Workload, limits: Limits, fixed: Mapping[str, Any], simulate: Simulate
) -> Simulation | None:
    """Simulate :func:`least_memory_schedule` with ``levels: 1``; return None if the step does not fit the limits.

    ``levels: 2`` needs less memory, but takes several times as long to simulate, because the simulation cannot leave
    out layers of a segment.
    """
    if fixed.get("levels", 1) != 1:
        return None
    schedule = least_memory_schedule(limits, {**fixed, "levels": 1})
    if LowerBound(workload).least_bytes(schedule, workload.length).excess_bytes(limits) > 0:
        return None
    step = simulate(workload, schedule)
    return step if excess_bytes(step, limits) <= 0 else None


def simulate_least_memory_step(
    workload: Workload,
    limits: Limits,
    fixed: Mapping[str, Any],
    simulate: Simulate,
) -> tuple[Schedule, Simulation]:
    """Return the schedule that needs the least memory, and its simulated step.

    The schedule is :func:`least_memory_schedule`, or a variant of ``order: chunk`` with a smaller excess. If neither
    fits, some or all layer inputs are stored on another tier, provided that the step then fits.
    """
    first, *others = _schedule_families(workload, limits, fixed)
    found = first.schedule, simulate(workload, first.schedule)
    bound, length = LowerBound(workload), workload.length
    first.remainders[length] = _remainder(bound, length, *found)
    excess = excess_bytes(found[1], limits)
    if (fixed.get("order") == "chunk" or excess > 0) and allows_chunk_order(fixed, workload.cluster):
        by_chunks = find_least_memory_chunk_order(workload, limits, fixed, simulate, smallest_excess=excess)
        if by_chunks is not None and excess_bytes(by_chunks[1], limits) < excess:
            found = by_chunks
    if excess_bytes(found[1], limits) <= 0:
        return found
    for family in (first, *(other for other in others if other.schedule.order == "layer")):
        schedule = family.fitting_schedule(bound, length, limits, family.remainder_at(length))
        may_fit = bound.least_bytes(schedule, length).excess_bytes(limits) <= 0
        if may_fit and schedule != first.schedule and excess_bytes(step := simulate(workload, schedule), limits) <= 0:
            return schedule, step
    return found


def longest_row_from(workload: Workload, limits: Limits, fixed: Mapping[str, Any]) -> int:
    """Return the length in tokens of the longest row that fits, from the workload's length upwards.

    The tolerance is 5%. The result is 0 if the workload's length does not fit.
    """
    search = _LengthSearch(workload, limits, fixed, simulate, multiple=COARSE_MULTIPLE, tolerance=COARSE_TOLERANCE)
    return search.longest(workload.length, MAX_LENGTH)


def longest_row_up_to(workload: Workload, limits: Limits, fixed: Mapping[str, Any], simulate: Simulate) -> int:
    """Return the length in tokens of the longest row that fits, up to the workload's length; 0 if no length fits.

    The tolerance is 1% or :data:`MULTIPLE` tokens, whichever is larger.
    """
    search = _LengthSearch(workload, limits, fixed, simulate, multiple=MULTIPLE, tolerance=TOLERANCE)
    return search.longest(MIN_LENGTH, workload.length)


TierBytes = tuple[float, float, float]
"""Bytes on device, host and disk."""

NO_BYTES: TierBytes = (0.0, 0.0, 0.0)


@dataclass
class _ScheduleFamily:
    """Schedules that differ only in ``device_layers``, and how much simulations of them exceeded the lower bound.

    Attributes:
        schedule: Schedule with the smallest ``device_layers``.
        mixes_tiers: True if more ``device_layers`` are allowed.
        remainders: Simulated bytes less the lower bound, by row length.
        estimates: Estimates of these bytes from a similar schedule, by row length; two or none.
        shortest_failing: Shortest length that did not fit; None if every simulated length fitted.
    """

    schedule: Schedule
    mixes_tiers: bool
    remainders: dict[int, TierBytes] = field(default_factory=dict)
    estimates: dict[int, TierBytes] = field(default_factory=dict)
    shortest_failing: int | None = None

    def remainder_at(self, length: int) -> TierBytes:
        """Predict the bytes above the bound for a row of ``length`` tokens: 0 before the first simulation.

        They are on a line through the two nearest simulated lengths. From one length without estimates they fall in
        proportion to the length, and do not rise above it, so that no row that fits is missed.
        """
        known = self.remainders or self.estimates
        if not known:
            return NO_BYTES
        points = self.remainders if len(self.remainders) > 1 else self.estimates or self.remainders
        start = min(known, key=lambda other: abs(other - length))
        near = sorted(points, key=lambda other: abs(other - length))[:2]
        if len(near) == 2:
            rise = [(b - a) / (near[1] - near[0]) for a, b in zip(*map(points.__getitem__, near), strict=True)]
        else:
            rise = [size / start if length < start else 0.0 for size in known[start]]
        device, host, disk = (
            max(0.0, size + (length - start) * each) for size, each in zip(known[start], rise, strict=True)
        )
        return device, host, disk

    def fitting_schedule(
        self, bound: LowerBound, length: int, limits: Limits, remainder: TierBytes = NO_BYTES
    ) -> Schedule:
        """Return the schedule with the fewest ``device_layers`` for which host and disk should suffice."""
        most = bound.layers if self.mixes_tiers else 0
        for count in range(most + 1):
            schedule = replace(self.schedule, device_layers=count) if count else self.schedule
            least = bound.least_bytes(schedule, length)
            host_fits = least.host_bytes + remainder[1] <= limits.host_limit
            if host_fits and least.disk_bytes + remainder[2] <= limits.disk_limit:
                return schedule
        return self.schedule

    def predicted_excess(self, bound: LowerBound, length: int, limits: Limits) -> float:
        """Predict the most bytes by which a step exceeds the limit of any tier; 0 or less if it should fit."""
        device, host, disk = remainder = self.remainder_at(length)
        least = bound.least_bytes(self.fitting_schedule(bound, length, limits, remainder), length)
        return limits.excess_bytes(least.peak_bytes + device, least.host_bytes + host, least.disk_bytes + disk)


def _remainder(bound: LowerBound, length: int, schedule: Schedule, step: Simulation) -> TierBytes:
    """Return how many bytes a simulated step has above its lower bound, by tier."""
    least = bound.least_bytes(schedule, length)
    return (
        max(0.0, step.peak_bytes - least.peak_bytes),
        max(0.0, step.host_bytes - least.host_bytes),
        max(0.0, step.disk_bytes - least.disk_bytes),
    )


def _may_mix_tiers(schedule: Schedule, limits: Limits, fixed: Mapping[str, Any]) -> bool:
    """Return True if some layer inputs may stay on the device while the others are offloaded."""
    return (
        not limits.shared
        and schedule.order == "layer"
        and schedule.offload != "device"
        and "device_layers" not in fixed
    )


def _schedule_families(workload: Workload, limits: Limits, fixed: Mapping[str, Any]) -> list[_ScheduleFamily]:
    """Return the schedule of least memory for each order, chunk size and choice of tiers."""
    schedules = list(_least_memory_schedules(limits, fixed)) or [Schedule(**fixed)]
    families = [_ScheduleFamily(each, _may_mix_tiers(each, limits, fixed)) for each in schedules]
    if allows_chunk_order(fixed, workload.cluster):
        least: dict[tuple[int, str, str], Schedule] = {}
        for variant in chunk_order_schedules(limits, fixed):  # of those on the same tiers, the first needs the least
            least.setdefault((variant.chunk_size, str(variant.keep_kv), variant.offload), variant)
        families += [_ScheduleFamily(variant, False) for variant in least.values()]
    return families


class _LengthSearch:
    """The search for the longest row that fits.

    Each iteration simulates the schedule with the longest predicted row, at the predicted length. The result corrects
    the prediction. The search ends if no prediction exceeds the longest simulated row by more than the tolerance.

    Args:
        workload: Step whose length is varied.
        limits: Memory limits.
        fixed: Fields of the schedule that the user set, by name.
        simulate: Function that simulates a step.
        multiple: Multiple to which lengths are rounded down, and smallest tolerance, in tokens.
        tolerance: Tolerance as a fraction of the length.
    """

    def __init__(
        self,
        workload: Workload,
        limits: Limits,
        fixed: Mapping[str, Any],
        simulate: Simulate,
        *,
        multiple: int,
        tolerance: float,
    ) -> None:
        self.workload, self.limits, self.simulate = workload, limits, simulate
        self.multiple, self.tolerance = multiple, tolerance
        self.levels_are_given = bool({"levels", "segment_size"} & set(fixed))
        self.families = _schedule_families(workload, limits, fixed)
        self.bound = LowerBound(workload)

    def longest(self, least: int, most: int) -> int:
        """Return the longest row from ``least`` to ``most`` tokens that fits; 0 if none fits."""
        longest = 0
        for number in range(MAX_SIMULATIONS):
            predictions = [self._predict_longest(family, least, most) for family in self.families]
            predicted = max(predictions, default=0)
            if predicted <= longest or (longest and predicted <= longest + self._margin(longest)):
                break
            family = self.families[predictions.index(predicted)]
            if number == 0 and self._estimate_remainders(family, predicted, least):
                continue
            length = self._round_below(predicted, longest, least, most)
            if (fits := self._try(family, length)) is None:
                self.families.remove(family)
            elif fits:
                longest = max(longest, length)
            else:
                family.shortest_failing = min(length, family.shortest_failing or length)
        return longest

    def _margin(self, length: int) -> int:
        return max(self.multiple, int(self.tolerance * length))

    def _round_below(self, predicted: int, longest: int, least: int, most: int) -> int:
        """Return a length half a tolerance below ``predicted``, so that a small error does not make it too long."""
        below = (predicted - self._margin(predicted) // 2) // self.multiple * self.multiple
        return below if predicted < most and below > max(longest, least) else predicted

    def _try(self, family: _ScheduleFamily, length: int) -> bool | None:
        """Simulate a step on rows of ``length`` tokens; return True if it fits, None if the model does not allow it."""
        schedule = family.fitting_schedule(self.bound, length, self.limits, family.remainder_at(length))
        try:
            step = self.simulate(replace(self.workload, length=length), schedule)
        except UnsupportedModelError:  # such as order: chunk with layers that share keys and values
            return None
        family.remainders[length] = _remainder(self.bound, length, schedule, step)
        return excess_bytes(step, self.limits) <= 0

    def _estimate_remainders(self, family: _ScheduleFamily, length: int, least: int) -> bool:
        """Estimate remainders with ``levels: 1``, which is much faster to simulate than ``levels: 2``.

        Return False if the schedule does not have two levels, or if the user set them.
        """
        if family.schedule.levels == 1 or family.schedule.order == "chunk" or self.levels_are_given:
            return False
        one_level = replace(family.schedule, levels=1, segment_size=None)
        for each in {length, max(least, length // 4 // self.multiple * self.multiple)}:
            step = self.simulate(replace(self.workload, length=each), one_level)
            family.estimates[each] = _remainder(self.bound, each, one_level, step)
        return True

    def _predict_longest(self, family: _ScheduleFamily, least: int, most: int) -> int:
        """Return the longest row that should fit with ``family``, found by bisection; 0 if none should."""

        def should_fit(length: int) -> bool:
            return family.predicted_excess(self.bound, length, self.limits) <= 0

        top = most if family.shortest_failing is None else min(most, family.shortest_failing - 1)
        if top < least:
            return 0
        if not should_fit(least):  # predictions far from a simulated length may be wrong
            return least if family.shortest_failing is None and least not in family.remainders else 0
        if should_fit(top):
            return top if top == most else max(least, top // self.multiple * self.multiple)
        fits, fails = least // self.multiple, top // self.multiple + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if should_fit(middle * self.multiple) else (fits, middle)
        return max(least, fits * self.multiple)
