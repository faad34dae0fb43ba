"""Generate the schedules from which the planner chooses.

With ``order: layer`` the backward processes all chunks of a layer, then the layer below. The planner considers every
allowed combination of the other choices. Numbers of layers in a schedule are the largest that fit the memory.

With ``order: chunk`` the backward processes all layers of a chunk, then the chunk before. It stores keys, values and
their gradients instead of layer inputs, and reads all weights once per chunk. So it is faster only if ``order: layer``
runs out of memory, recomputes layers or waits for copies. The planner tries it only in these cases, or if the user sets
it. The planner simulates a few variants, with several chunk sizes.
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
from streamtune.plan.estimate import Estimator, Simulate, StepCost
from streamtune.plan.lower_bound import LeastBytes, LowerBound
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import DEFAULTS, GIVEN, Schedule

CHUNKS = (1024, 2048, 4096, 8192, 16384)
HEAD_CHUNKS = (256, 1024)
MIN_LAYERS_FOR_SEGMENTS = 4
"""Smallest number of layers for ``levels: 2``; with fewer layers an extra forward saves too little memory."""


@dataclass(frozen=True)
class Candidate:
    schedule: Schedule
    cost: StepCost

    def excess_bytes(self, limits: Limits) -> float:
        """Return the largest excess of estimated bytes over the limit of a tier; 0 or less if all bytes fit."""
        cost = self.cost
        return limits.excess_bytes(cost.device_bytes, cost.host_bytes, cost.disk_bytes)

    def most_exceeded_tier(self, limits: Limits) -> str:
        excess_by_tier = {
            "device": self.cost.device_bytes - limits.device_limit,
            "host": -1.0 if limits.shared else self.cost.host_bytes - limits.host_limit,
            "disk": self.cost.disk_bytes - limits.disk_limit,
        }
        return max(excess_by_tier, key=lambda tier: excess_by_tier[tier])


@dataclass(frozen=True)
class SearchSpace:
    """Values that the planner may choose for the fields of a schedule.

    Args:
        layers: Number of decoder layers with a backward.
        length: Number of tokens of a row, or of one rank's shard of a row.
        limits: Memory limits; host or disk is not used if its limit is 0.
        fixed: Schedule fields that the user set, by name; the planner does not change them.
        segment_size: Number of layers per segment with ``levels: 2``, unless the user set it; None for the default,
            which is best if all layers have a backward.
    """

    layers: int
    length: int
    limits: Limits
    fixed: Mapping[str, Any]
    segment_size: int | None = None

    def candidate_values(self, name: str) -> tuple[Any, ...]:
        """Return the values to try for the field ``name``, including the value with the least device memory."""
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
                tiers = (*(["host"] if host else []), *(["disk"] if disk else []))
                return tiers if self.fixed.get("device_layers") and tiers else ("device", *tiers)
            case "levels":
                if self.fixed.get("segment_size"):
                    return (2,)
                return (1, 2) if self.layers >= MIN_LAYERS_FOR_SEGMENTS else (1,)
            case "keep_kv" | "keep_attention":
                return ("no", "device", "host") if host else ("no", "device")
            case "stream_grads":
                return (False, True)
        raise KeyError(name)

    @property
    def common_fields(self) -> dict[str, Any]:
        return {name: self.fixed.get(name, DEFAULTS[name]) for name in GIVEN}

    def allowed_schedules(self) -> Iterator[Schedule]:
        """Yield a schedule for every allowed combination, with default ``device_layers`` and ``keep_layers``."""
        names = ("chunk_size", "head_chunk_size", "offload", "levels", "keep_kv", "keep_attention", "stream_grads")
        for values in product(*(self.candidate_values(name) for name in names)):
            chosen = dict(zip(names, values, strict=True))
            chosen |= self.common_fields
            if chosen["offload"] == "disk":
                chosen["offload_dir"] = self.fixed["offload_dir"]
            if chosen["levels"] == 2:
                chosen["segment_size"] = self.fixed.get("segment_size", self.segment_size)
            if self.fixed.get("device_layers") and chosen["offload"] == "device":
                continue
            yield Schedule(**chosen)


def enumerate_candidates(
    search_space: SearchSpace, estimator: Estimator, limits: Limits, reduced_limits: Mapping[int, Limits] | None = None
) -> Iterator[Candidate]:
    """Yield every schedule to consider, with its estimated bytes and work; schedules that do not fit are included.

    If device memory is left, some schedules use it to keep the activations of whole layers, or to store layer inputs
    that would otherwise be offloaded. ``reduced_limits`` maps chunk sizes whose estimates were too low to other limits.
    """
    all_limits = limits
    for schedule in search_space.allowed_schedules():
        limits = (reduced_limits or {}).get(schedule.chunk_size, all_limits)
        plain = Candidate(schedule, estimator.estimate(schedule))
        sized_candidates = [] if search_space.fixed.get("device_layers") else [plain]
        if schedule.offload != "device" and (schedule.levels == 1 or not sized_candidates):
            sized_candidates += _vary_device_layers(plain, search_space, estimator, limits)
        for candidate in sized_candidates:
            yield from _vary_kept_layers(candidate, search_space, estimator, limits)


def _vary_device_layers(
    candidate: Candidate, search_space: SearchSpace, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """Yield the candidate with the smallest and the largest ``device_layers`` that fit, or with the user's."""
    schedule, cost = candidate.schedule, candidate.cost
    layer_cost = estimator.device_layer_cost(schedule)
    max_count = math.floor(min(search_space.layers, cost.max_additions(layer_cost, limits.device_limit)))
    missing_bytes, bytes_per_layer = cost.host_bytes - limits.host_limit, -layer_cost.host_bytes
    if schedule.offload == "disk":
        missing_bytes, bytes_per_layer = cost.disk_bytes - limits.disk_limit, -layer_cost.disk_bytes
    min_count = math.ceil(missing_bytes / bytes_per_layer) if missing_bytes > 0 and bytes_per_layer > 0 else 0
    counts = {min_count, max_count}
    if "device_layers" in search_space.fixed:
        counts = {search_space.fixed["device_layers"]}
    for count in sorted(counts):
        if 0 < count <= search_space.layers:
            yield Candidate(replace(schedule, device_layers=count), cost.plus(layer_cost, count))


def _vary_kept_layers(
    candidate: Candidate, search_space: SearchSpace, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """Yield the candidate with ``keep_layers`` 0, and with the largest ``keep_layers`` that fits.

    If the user set ``keep_layers``, only this value is used; without it, ``levels: 2`` allows only 0.
    """
    schedule, cost = candidate.schedule, candidate.cost
    fixed_count = search_space.fixed.get("keep_layers")
    # levels: 2 recomputes layers that keep_layers would not recompute
    if fixed_count == 0 or (fixed_count is None and schedule.levels == 2):
        yield candidate
        return
    layer_cost = estimator.kept_layer_cost
    room = cost.max_additions(layer_cost, limits.device_limit - (cost.host_bytes if limits.shared else 0))
    counts = {0, max(0, math.floor(min(search_space.layers, room)))} if fixed_count is None else {fixed_count}
    for count in sorted(counts):
        kept = replace(schedule, keep_layers=count) if count else schedule
        yield Candidate(kept, cost.plus(layer_cost, count))


def _sizes_up_to(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    below = [size for size in sizes if size < length]
    return tuple(sizes[: len(below) + 1])


LARGE_CHUNK = 8192
"""Number of tokens of a large chunk, with which a row has few chunks."""

SimulatedSchedule = tuple[Schedule, Simulation]


def allows_chunk_order(fixed: Mapping[str, Any], cluster: Cluster) -> bool:
    return fixed.get("order") != "layer" and not cluster.gathers_layers and cluster.sequence_size == 1


def find_best_chunk_order(
    workload: Workload, search_space: SearchSpace, simulate: Simulate
) -> SimulatedSchedule | None:
    """Return the first variant of ``order: chunk`` that fits, with the largest chunk size that fits; None if none fits.

    The variants differ in ``levels`` and in the tensors that are offloaded; later variants need less device memory.
    """
    sizes = search_space.candidate_values("chunk_size")
    bound = LowerBound(workload)
    for variant in _chunk_order_variants(search_space.limits, search_space.fixed):
        steps: dict[int, SimulatedSchedule] = {}
        smallest = _make_schedule({**variant, "chunk_size": sizes[0], **search_space.fixed})
        if bound.least_bytes(smallest, workload.length).excess_bytes(search_space.limits) > 0:
            continue

        def simulated_excess_bytes(
            chunk_size: int, variant: Mapping[str, Any] = variant, steps: dict[int, SimulatedSchedule] = steps
        ) -> float:
            found = _simulate_variant(workload, {**variant, "chunk_size": chunk_size, **search_space.fixed}, simulate)
            if found is None:
                return float("inf")
            steps[chunk_size] = found
            return excess_bytes(found[1], search_space.limits)

        smallest_excess = simulated_excess_bytes(sizes[0])
        if smallest_excess > 0:
            continue
        largest_excess = simulated_excess_bytes(sizes[-1]) if len(sizes) > 1 else smallest_excess
        if largest_excess > 0:
            largest = _interpolate_chunk_size(
                sizes[0], steps[sizes[0]], sizes[-1], steps.get(sizes[-1]), search_space.limits
            )
            for size in sorted((s for s in sizes[1:-1] if s <= largest), reverse=True):
                if simulated_excess_bytes(size) <= 0:
                    break
        return steps[max(size for size, found in steps.items() if excess_bytes(found[1], search_space.limits) <= 0)]
    return None


def _interpolate_chunk_size(
    low: int, fits: SimulatedSchedule, high: int, exceeds: SimulatedSchedule | None, limits: Limits
) -> float:
    """Return the largest chunk size that should fit, interpolated linearly between two simulated steps.

    Args:
        low: Chunk size that fits.
        fits: Simulated step with chunk size ``low``.
        high: Larger chunk size that does not fit.
        exceeds: Simulated step with chunk size ``high``. If the model does not allow this size, it is None, and the
            result is ``high``.
        limits: Memory limits.
    """
    found = float(high)
    if exceeds is None:
        return found
    for (before, limit), (after, _) in zip(_tier_usage(fits, limits), _tier_usage(exceeds, limits), strict=True):
        if after > limit:
            found = min(found, low + (high - low) * (limit - before) / (after - before))
    return found


def find_least_memory_chunk_order(
    workload: Workload,
    limits: Limits,
    fixed: Mapping[str, Any],
    simulate: Simulate,
    *,
    smallest_excess: float = float("inf"),
) -> SimulatedSchedule | None:
    """Return the first variant of ``order: chunk`` that fits; variants with the least device memory are tried first.

    If no variant fits, return the variant with the smallest excess. Return None if ``order: chunk`` does not support
    the model, if the user's fields exclude all variants, or if no variant has a smaller excess than
    ``smallest_excess`` bytes. Variants whose lower bound is not smaller are not simulated.
    """
    found, bound = None, LowerBound(workload)
    for schedule in chunk_order_schedules(limits, fixed):
        if bound.least_bytes(schedule, workload.length).excess_bytes(limits) >= max(0, smallest_excess):
            continue
        try:
            step = schedule, simulate(workload, schedule)
        except UnsupportedModelError:  # such as layers that share keys and values
            break
        if (excess := excess_bytes(step[1], limits)) < smallest_excess or excess <= 0:
            found, smallest_excess = step, excess
        if excess <= 0:
            break
    return found


def chunk_order_schedules(limits: Limits, fixed: Mapping[str, Any]) -> Iterator[Schedule]:
    """Yield the schedules with ``order: chunk`` that need the least memory, those with the least device memory first.

    Each variant has large chunks first, because each chunk border stores states and windows.
    """
    variants = list(_chunk_order_variants(limits, fixed))[::-1]
    for variant, size in product(variants, (LARGE_CHUNK, CHUNKS[0])):
        yield _make_schedule({**variant, "chunk_size": size, **fixed})


def _chunk_order_variants(limits: Limits, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    base = {"order": "chunk", "head_chunk_size": HEAD_CHUNKS[0]}
    may_offload = not limits.shared and limits.host_bytes > 0 and "offload" not in fixed
    smallest = {**base, "stream_grads": True, **({"offload": "host"} if may_offload else {})}
    forms = [{**base, "levels": 1}, {**smallest, "levels": 1}]
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**smallest, "levels": 1, "keep_kv": "host"})
    forms.append({**smallest, "levels": 2})
    if not limits.shared and limits.host_bytes > 0:
        forms.append({**smallest, "levels": 2, "keep_kv": "host"})
    seen: list[Schedule] = []
    for form in forms:
        with suppress(ArgumentError):  # the user's fields exclude this form
            schedule = Schedule(**{**form, **_without_unused_offload_dir(fixed)})
            if schedule not in seen:
                seen.append(schedule)
                yield form


def _without_unused_offload_dir(fixed: Mapping[str, Any]) -> dict[str, Any]:
    disk = fixed.get("offload") == "disk"
    return {name: value for name, value in fixed.items() if disk or name != "offload_dir"}


def _simulate_variant(workload: Workload, chosen: dict[str, Any], simulate: Simulate) -> SimulatedSchedule | None:
    schedule = _make_schedule(chosen)
    with suppress(UnsupportedModelError):  # such as layers that share keys and values
        return schedule, simulate(workload, schedule)
    return None


def _make_schedule(fields: Mapping[str, Any]) -> Schedule:
    return Schedule(**_without_unused_offload_dir(fields))


def excess_bytes(step: Simulation | LeastBytes, limits: Limits) -> float:
    """Return the largest excess of a simulated step over the limit of a tier, in bytes; 0 or less if the step fits."""
    return limits.excess_bytes(step.peak_bytes, step.host_bytes, step.disk_bytes)


def _tier_usage(simulated: SimulatedSchedule, limits: Limits) -> tuple[tuple[float, int], ...]:
    return limits.usage_and_limits(simulated[1].peak_bytes, simulated[1].host_bytes, simulated[1].disk_bytes)
