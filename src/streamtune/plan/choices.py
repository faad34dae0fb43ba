"""The schedules that the planner chooses from.

With ``order: layer`` it considers every allowed combination of choices, sized to the available memory. With ``order:
chunk`` it considers a few forms, each sized by simulations of its own. That order stores keys, values and their
gradients instead of layer inputs. It does the same work, but reads all weights once per chunk. So it can win only if
``order: layer`` runs out of memory, recomputes layers or waits for copies. It is tried only then, or if it is given.
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
"""Smallest number of layers for ``levels: 2``; with fewer it saves too little memory for an extra forward."""


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
class SearchSpace:
    """The values that the planner may choose for the fields of a schedule.

    Args:
        layers: Number of decoder layers of the model.
        length: Number of tokens of a row, or of one rank's shard of it.
        limits: Memory to plan with; a tier without memory is not used.
        fixed: Given fields of the schedule, by name.
    """

    layers: int
    length: int
    limits: Limits
    fixed: Mapping[str, Any]

    def options(self, name: str) -> tuple[Any, ...]:
        """Return the values to try for a field; the value with the least device memory is always among them."""
        if name in self.fixed:
            return (self.fixed[name],)
        host = not self.limits.shared and self.limits.host_bytes > 0
        disk = self.fixed.get("offload_dir") is not None and self.limits.disk_bytes > 0
        match name:
            case "chunk_size":
                return _sizes_up_to(CHUNKS, self.length)
            case "head_chunk_size":
                return _sizes_up_to(HEAD_CHUNKS, self.length)
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
        """Yield a schedule for every allowed combination; none has ``device_layers`` or chosen ``keep_layers``."""
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
    search_space: SearchSpace, estimator: Estimator, limits: Limits, reduced: Mapping[int, Limits] | None = None
) -> Iterator[Candidate]:
    """Yield every schedule to consider with its estimate, including schedules that do not fit (the error uses them).

    Spare device memory is filled with layers kept whole, which are not recomputed, or with layer inputs, which then
    need no offload.

    Args:
        search_space: Values that may be chosen.
        estimator: Estimates the figures of a schedule.
        limits: Memory to plan with.
        reduced: Memory to plan with for some chunk sizes, where it is less than ``limits``.
    """
    whole = limits
    for schedule in search_space.combinations():
        limits = (reduced or {}).get(schedule.chunk_size, whole)
        plain = Candidate(schedule, estimator.estimate(schedule))
        sized = [] if search_space.fixed.get("device_layers") else [plain]
        if schedule.offload != "device" and (schedule.levels == 1 or not sized):
            sized += _with_device_layers(plain, search_space, estimator, limits)
        for candidate in sized:
            yield from _with_kept_layers(candidate, search_space, estimator, limits)


def _with_device_layers(
    candidate: Candidate, search_space: SearchSpace, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """Yield the candidate with as many layer inputs on the device as fit, and with as few as host or disk allow."""
    schedule, figures = candidate.schedule, candidate.figures
    each = estimator.of_a_device_layer(schedule)
    most = math.floor(min(search_space.layers, figures.room_for(each, limits.device)))
    lacking, relief = figures.host_bytes - limits.host, -each.host_bytes
    if schedule.offload == "disk":
        lacking, relief = figures.disk_bytes - limits.disk, -each.disk_bytes
    least = math.ceil(lacking / relief) if lacking > 0 and relief > 0 else 0
    counts = {least, most} if "device_layers" not in search_space.fixed else {search_space.fixed["device_layers"]}
    for count in sorted(counts):
        if 0 < count <= search_space.layers:
            yield Candidate(replace(schedule, device_layers=count), figures.plus(each, count))


def _with_kept_layers(
    candidate: Candidate, search_space: SearchSpace, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """Yield the candidate without layers kept whole, and with as many as fit on the device (or the given number)."""
    schedule, figures = candidate.schedule, candidate.figures
    wanted = search_space.fixed.get("keep_layers")
    if wanted == 0 or (wanted is None and schedule.levels == 2):  # levels: 2 recomputes what keep_layers would save
        yield candidate
        return
    each = estimator.of_a_kept_layer
    room = figures.room_for(each, limits.device - (figures.host_bytes if limits.shared else 0))
    counts = {0, max(0, math.floor(min(search_space.layers, room)))} if wanted is None else {wanted}
    for count in sorted(counts):
        kept = replace(schedule, keep_layers=count) if count else schedule
        yield Candidate(kept, figures.plus(each, count))


def _sizes_up_to(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    below = [size for size in sizes if size < length]
    return tuple(sizes[: len(below) + 1])


LARGE_CHUNK = 8192
"""Tokens of a large chunk, with which a row has few chunk borders."""

SimulatedSchedule = tuple[Schedule, Simulation]


def may_order_chunks(written: Mapping[str, Any], cluster: Cluster) -> bool:
    """Return True if ``order: chunk`` is possible with the given fields and this cluster."""
    return written.get("order") != "layer" and not cluster.gathers_layers and cluster.sequence_size == 1


def best_in_chunk_order(workload: Workload, search_space: SearchSpace, simulate: Simulate) -> SimulatedSchedule | None:
    """Return the first form of ``order: chunk`` that fits, with the largest chunks that fit, and its simulated step.

    None if no form fits.
    """
    sizes = search_space.options("chunk_size")
    for form in _chunk_order_forms(search_space.limits, search_space.fixed):
        steps: dict[int, SimulatedSchedule] = {}

        def excess(size: int, form: Mapping[str, Any] = form, steps: dict[int, SimulatedSchedule] = steps) -> float:
            found = _simulate_form(workload, {**form, "chunk_size": size, **search_space.fixed}, simulate)
            if found is None:
                return float("inf")
            steps[size] = found
            return excess_of(found[1], search_space.limits)

        least = excess(sizes[0])
        if least > 0:
            continue
        most = excess(sizes[-1]) if len(sizes) > 1 else least
        if most > 0:
            largest = _largest_size(sizes[0], steps[sizes[0]], sizes[-1], steps.get(sizes[-1]), search_space.limits)
            for size in sorted((s for s in sizes[1:-1] if s <= largest), reverse=True):
                if excess(size) <= 0:
                    break
        return steps[max(size for size, found in steps.items() if excess_of(found[1], search_space.limits) <= 0)]
    return None


def _largest_size(
    low: int, fits: SimulatedSchedule, high: int, exceeds: SimulatedSchedule | None, limits: Limits
) -> float:
    """Return the largest chunk size that fits, by linear interpolation of each tier's bytes between two steps.

    Args:
        low: Chunk size that fits.
        fits: Simulated step with size ``low``.
        high: Larger chunk size that does not fit.
        exceeds: Simulated step with size ``high``; None if the model does not allow that size. Then the result is
            ``high``: nothing is known of the sizes between.
        limits: Memory to plan with.
    """
    found = float(high)
    if exceeds is None:
        return found
    for (before, limit), (after, _) in zip(_tier_usage(fits, limits), _tier_usage(exceeds, limits), strict=True):
        if after > limit:
            found = min(found, low + (high - low) * (limit - before) / (after - before))
    return found


def smallest_in_chunk_order(
    workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate
) -> SimulatedSchedule | None:
    """Return the first form of ``order: chunk`` that fits, tried from the smallest device footprint upwards.

    If no form fits, return the form that exceeds the limits least. Large chunks are tried first, because each chunk
    border stores states and windows. None if ``order: chunk`` does not support the model, or the given fields allow no
    form.
    """
    found: SimulatedSchedule | None = None
    forms = list(_chunk_order_forms(limits, written))[::-1]
    for form, size in product(forms, (LARGE_CHUNK, CHUNKS[0])):
        step = _simulate_form(workload, {**form, "chunk_size": size, **written}, simulate)
        if step is not None and (found is None or excess_of(step[1], limits) < excess_of(found[1], limits)):
            found = step
        if found is None or excess_of(found[1], limits) <= 0:
            break
    return found


def _chunk_order_forms(limits: Limits, written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
        with suppress(ArgumentError):  # the given fields exclude this form
            schedule = Schedule(**{**form, **_schedule_fields(written)})
            if schedule not in seen:
                seen.append(schedule)
                yield form


def _schedule_fields(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields, without ``offload_dir`` if nothing is offloaded to disk."""
    disk = written.get("offload") == "disk"
    return {name: value for name, value in written.items() if disk or name != "offload_dir"}


def _simulate_form(workload: Workload, chosen: dict[str, Any], simulate: Simulate) -> SimulatedSchedule | None:
    schedule = Schedule(**_schedule_fields(chosen))
    with suppress(UnsupportedModelError):  # such as layers that share keys and values
        return schedule, simulate(workload, schedule)
    return None


def excess_of(step: Simulation, limits: Limits) -> float:
    """Return :meth:`Limits.excess` of a simulated step."""
    return limits.excess(step.peak_bytes, step.host_bytes, step.disk_bytes)


def _tier_usage(found: SimulatedSchedule, limits: Limits) -> tuple[tuple[float, int], ...]:
    return limits.tiers(found[1].peak_bytes, found[1].host_bytes, found[1].disk_bytes)
