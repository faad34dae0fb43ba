"""The schedules to choose from.

In the order of layers: every allowed combination, sized to the available memory. In the order of chunks: a few forms,
each sized by simulations of its own. That order stores keys and values with their gradients in place of layer inputs.
It does the same work with weights that pass once for every chunk, so it can win only where the order of layers runs out
of memory, recomputes layers or waits for copies. It is tried only there, or if it is given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.plan.budget import Limits
from streamtune.plan.estimate import Estimator, Figures, Simulate
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import DEFAULTS, GIVEN, Schedule

CHUNKS = (1024, 2048, 4096, 8192, 16384)
HEAD_CHUNKS = (256, 1024)
FEWEST_FOR_SEGMENTS = 4
"""Layers below which storing every second input saves less than a forward is worth."""


@dataclass(frozen=True)
class Candidate:
    schedule: Schedule
    figures: Figures

    def excess(self, limits: Limits) -> float:
        figures = self.figures
        return limits.excess(figures.device_bytes, figures.host_bytes, figures.disk_bytes)

    def tier_that_lacks(self, limits: Limits) -> str:
        lacking = {
            "device": self.figures.device_bytes - limits.device,
            "host": -1.0 if limits.shared else self.figures.host_bytes - limits.host,
            "disk": self.figures.disk_bytes - limits.disk,
        }
        return max(lacking, key=lambda tier: lacking[tier])


@dataclass(frozen=True)
class Space:
    """The values that may be chosen for the fields of a schedule.

    Args:
        layers: Number of decoder layers of the model.
        length: Tokens of a row, or of a rank's part of it.
        limits: The memory; a tier without any is not used.
        fixed: Given fields of the schedule.
    """

    layers: int
    length: int
    limits: Limits
    fixed: Mapping[str, Any]

    def options(self, name: str) -> tuple[Any, ...]:
        """Return the values of a field that are tried, including the one with the least device memory."""
        if name in self.fixed:
            return (self.fixed[name],)
        host = not self.limits.shared and self.limits.host_bytes > 0
        disk = self.fixed.get("offload_dir") is not None and self.limits.disk_bytes > 0
        match name:
            case "chunk_size":
                return _up_to(CHUNKS, self.length)
            case "head_chunk_size":
                return _up_to(HEAD_CHUNKS, self.length)
            case "offload":
                away = (*(["host"] if host else []), *(["disk"] if disk else []))
                return away if self.fixed.get("device_layers") and away else ("device", *away)
            case "levels":
                if self.fixed.get("segment_size"):
                    return (2,)
                return (1, 2) if self.layers >= FEWEST_FOR_SEGMENTS else (1,)
            case "keep_kv" | "keep_attention":
                return ("no", "device", "host") if host else ("no", "device")
            case "stream_grads":
                return (False, True)
        raise KeyError(name)

    @property
    def given(self) -> dict[str, Any]:
        return {name: self.fixed.get(name, DEFAULTS[name]) for name in GIVEN}

    def combinations(self) -> Iterator[Schedule]:
        """Yield every allowed combination, without layers whose inputs stay on the device or that are kept whole."""
        names = ("chunk_size", "head_chunk_size", "offload", "levels", "keep_kv", "keep_attention", "stream_grads")
        for values in product(*(self.options(name) for name in names)):
            chosen = dict(zip(names, values, strict=True))
            chosen |= self.given
            if chosen["offload"] == "disk":
                chosen["offload_dir"] = self.fixed["offload_dir"]
            if chosen["levels"] == 2:
                chosen["segment_size"] = self.fixed.get("segment_size")
            if self.fixed.get("device_layers") and chosen["offload"] == "device":
                continue
            yield Schedule(**chosen)


def candidates(
    space: Space, estimator: Estimator, limits: Limits, reduced: Mapping[int, Limits] | None = None
) -> Iterator[Candidate]:
    """Yield every schedule to consider, with its estimate; also those that do not fit, for the error.

    Spare device memory is filled: by layers kept whole, which are not recomputed, or by layer inputs that need not be
    offloaded. ``reduced`` has the memory for some chunk sizes, where it is less than ``limits``.
    """
    whole = limits
    for schedule in space.combinations():
        limits = (reduced or {}).get(schedule.chunk_size, whole)
        plain = Candidate(schedule, estimator.estimate(schedule))
        sized = [] if space.fixed.get("device_layers") else [plain]
        if schedule.offload != "device" and (schedule.levels == 1 or not sized):
            sized += _with_device_layers(plain, space, estimator, limits)
        for candidate in sized:
            yield from _with_kept_layers(candidate, space, estimator, limits)


def _with_device_layers(
    candidate: Candidate, space: Space, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """Yield the candidate with the most layer inputs on the device that fit, and the fewest that host or disk allow."""
    schedule, figures = candidate.schedule, candidate.figures
    each = estimator.of_a_device_layer(schedule)
    most = math.floor(min(space.layers, figures.room_for(each, limits.device)))
    lacking, relief = figures.host_bytes - limits.host, -each.host_bytes
    if schedule.offload == "disk":
        lacking, relief = figures.disk_bytes - limits.disk, -each.disk_bytes
    least = math.ceil(lacking / relief) if lacking > 0 and relief > 0 else 0
    counts = {least, most} if "device_layers" not in space.fixed else {space.fixed["device_layers"]}
    for count in sorted(counts):
        if 0 < count <= space.layers:
            yield Candidate(replace(schedule, device_layers=count), figures.plus(each, count))


def _with_kept_layers(candidate: Candidate, space: Space, estimator: Estimator, limits: Limits) -> Iterator[Candidate]:
    """Yield the candidate as it is, and with as many layers kept whole as the device holds."""
    schedule, figures = candidate.schedule, candidate.figures
    wanted = space.fixed.get("keep_layers")
    if wanted == 0 or (wanted is None and schedule.levels == 2):  # two levels spend what keeping layers saves
        yield candidate
        return
    each = estimator.of_a_kept_layer
    room = figures.room_for(each, limits.device - (figures.host_bytes if limits.shared else 0))
    counts = {0, max(0, math.floor(min(space.layers, room)))} if wanted is None else {wanted}
    for count in sorted(counts):
        kept = replace(schedule, keep_layers=count) if count else schedule
        yield Candidate(kept, figures.plus(each, count))


def _up_to(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    below = [size for size in sizes if size < length]
    return tuple(sizes[: len(below) + 1])


LARGE = 8192
"""Tokens of a chunk with few borders."""

Found = tuple[Schedule, Simulation]


def may_order_chunks(written: Mapping[str, Any], cluster: Cluster) -> bool:
    """Return True if no given field excludes the order of chunks."""
    return written.get("order") != "layer" and not cluster.gathers_layers and cluster.sequence_size == 1


def best_in_chunk_order(workload: Workload, space: Space, simulate: Simulate) -> Found | None:
    """Return the first form that fits, with the largest chunks that do, and its step; None if none fits."""
    sizes = space.options("chunk_size")
    for form in _forms(space.limits, space.fixed):
        steps: dict[int, Found] = {}

        def excess(size: int, form: Mapping[str, Any] = form, steps: dict[int, Found] = steps) -> float:
            found = _simulated(workload, {**form, "chunk_size": size, **space.fixed}, simulate)
            if found is None:
                return float("inf")
            steps[size] = found
            return excess_of(found[1], space.limits)

        least = excess(sizes[0])
        if least > 0:
            continue
        most = excess(sizes[-1]) if len(sizes) > 1 else least
        if most > 0:
            largest = _largest_size(sizes[0], steps[sizes[0]], sizes[-1], steps.get(sizes[-1]), space.limits)
            for size in sorted((s for s in sizes[1:-1] if s <= largest), reverse=True):
                if excess(size) <= 0:
                    break
        return steps[max(size for size, found in steps.items() if excess_of(found[1], space.limits) <= 0)]
    return None


def _largest_size(low: int, fits: Found, high: int, exceeds: Found | None, limits: Limits) -> float:
    """Return the largest chunk size that fits, if the bytes of each tier are linear in it between two steps.

    Args:
        low: A size that fits.
        fits: Step of the size ``low``.
        high: A larger size that does not fit.
        exceeds: Step of the size ``high``; None if the model does not allow that size, which says nothing of the sizes
            between.
        limits: The memory.
    """
    found = float(high)
    if exceeds is None:
        return found
    for (before, limit), (after, _) in zip(_tiers(fits, limits), _tiers(exceeds, limits), strict=True):
        if after > limit:
            found = min(found, low + (high - low) * (limit - before) / (after - before))
    return found


def smallest_in_chunk_order(
    workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate
) -> Found | None:
    """Try schedules from the smallest device footprint upwards; return the first that fits, else the one that
    overshoots least.

    Large chunks come first: they have fewer states and windows at their borders. None if a layer's cache cannot be kept
    apart, or the given fields allow no form.
    """
    found: Found | None = None
    forms = list(_forms(limits, written))[::-1]
    for form, size in product(forms, (LARGE, CHUNKS[0])):
        step = _simulated(workload, {**form, "chunk_size": size, **written}, simulate)
        if step is not None and (found is None or excess_of(step[1], limits) < excess_of(found[1], limits)):
            found = step
        if found is None or excess_of(found[1], limits) <= 0:
            break
    return found


def _forms(limits: Limits, written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    base = {"order": "chunk", "head_chunk_size": HEAD_CHUNKS[0]}
    away = not limits.shared and limits.host_bytes > 0 and "offload" not in written
    least = {**base, "stream_grads": True, **({"offload": "host"} if away else {})}
    forms = [{**base, "levels": 1}, {**least, "levels": 1}]
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**least, "levels": 1, "keep_kv": "host"})
    forms.append({**least, "levels": 2})
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**least, "levels": 2, "keep_kv": "host"})
    seen: list[Schedule] = []
    for form in forms:
        with suppress(ArgumentError):  # what is written goes with another form
            schedule = Schedule(**{**form, **_of_a_schedule(written)})
            if schedule not in seen:
                seen.append(schedule)
                yield form


def _of_a_schedule(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields, without a directory if nothing goes to disk."""
    disk = written.get("offload") == "disk"
    return {name: value for name, value in written.items() if disk or name != "offload_dir"}


def _simulated(workload: Workload, chosen: dict[str, Any], simulate: Simulate) -> Found | None:
    schedule = Schedule(**_of_a_schedule(chosen))
    with suppress(UnsupportedModelError):  # layers that share their keys
        return schedule, simulate(workload, schedule)
    return None


def excess_of(step: Simulation, limits: Limits) -> float:
    """Return :meth:`Limits.excess` of a simulated step."""
    return limits.excess(step.peak_bytes, step.host_bytes, step.disk_bytes)


def _tiers(found: Found, limits: Limits) -> tuple[tuple[float, int], ...]:
    return limits.tiers(found[1].peak_bytes, found[1].host_bytes, found[1].disk_bytes)
