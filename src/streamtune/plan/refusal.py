"""Build the error for a step that no schedule fits: exceeded memory, its largest parts, and changes that would help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from streamtune.base.text import show_size
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Attempt, Limits, Range, search_largest
from streamtune.plan.choices import (
    CHUNKS,
    HEAD_CHUNKS,
    SearchSpace,
    allows_chunk_order,
    excess_bytes,
    find_least_memory_chunk_order,
)
from streamtune.plan.estimate import Simulate
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

FIXED_TERMS = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""Memory terms whose size does not depend on the row length."""


STREAMED_TERMS = ("layer inputs", "keys and values")
"""Memory terms on the host that grow with the row length."""


class NothingFitsError(ArgumentError):
    """No schedule of the training step fits in memory."""


def make_nothing_fits_error(
    workload: Workload,
    search_space: SearchSpace,
    tried: dict[Schedule, Simulation],
    limits: Limits,
    simulate: Simulate,
) -> NothingFitsError:
    """Return the error for a step that does not fit; ``tried`` contains the schedule with the least memory."""
    simulation = min(tried.values(), key=lambda simulation: excess_bytes(simulation, limits))
    if (error := _host_too_small_error(workload, simulation, limits)) is not None:
        return error
    fixed_bytes = sum(simulation.terms.get(name, 0) for name in FIXED_TERMS)
    largest = _largest_terms(simulation)
    what = (
        f"no schedule fits {_describe_rows(workload)}: {_describe_excess(simulation, limits)}; largest parts: {largest}"
    )
    advice: list[str] = []
    reference = ", reference weights" if workload.reference_bytes else ""
    if fixed_bytes > limits.device_limit:
        advice.append(
            f"weights{reference}, gradients and optimizer state alone take {show_size(fixed_bytes)}: "
            f"{_offload_advice(workload, search_space, limits, simulation, fixed_bytes)}train adapters "
            "(finetuning_type: lora or qlora), keep the weights in bfloat16, or use a larger device"
        )
    elif longest := longest_row_up_to(workload, limits, search_space.fixed, simulate):
        advice.append(f"set max_length: {longest}, the longest that fits")
    chosen = (
        "offload",
        "levels",
        "chunk_size",
        *(() if search_space.fixed.get("weights") == "host" else ("keep_layers",)),
    )
    if given := [name for name in chosen if name in search_space.fixed]:
        advice.append(f"leave {', '.join(given)} to the planner")
    if not limits.shared and simulation.host_bytes > limits.host_limit:
        advice.append("use a machine with more memory, or set offload_dir to a directory on a fast disk")
    if workload.cluster.ranks > workload.cluster.sequence_size:
        ranks = workload.cluster.ranks
        advice.append(f"sequence_parallel_size: {ranks} divides each row among all {ranks} ranks")
    advice.append("larger chunks do not help, because they take more memory")
    return NothingFitsError(what, where="max_length", fix="; ".join(advice))


def _offload_advice(
    workload: Workload, search_space: SearchSpace, limits: Limits, simulation: Simulation, fixed_bytes: int
) -> str:
    """Return advice to offload optimizer state, or also weights and gradients, if the step would then fit."""
    advice = []
    state = simulation.terms.get("optimizer", 0)
    if (
        0 < state <= limits.host_limit
        and fixed_bytes - state <= limits.device_limit
        and _may_offload(workload, search_space, limits, state)
    ):
        advice.append(f"engine: {{optimizer: host}} offloads the {show_size(state)} of optimizer state; or ")
    if _may_offload(workload, search_space, limits, fixed_bytes):
        advice.append("engine: {weights: host} offloads weights, gradients and optimizer state to the host; or ")
    return "".join(advice)


def _may_offload(workload: Workload, search_space: SearchSpace, limits: Limits, size: int) -> bool:
    alone = workload.cluster.ranks == 1 and workload.cluster.engine == "none"
    return alone and not limits.shared and search_space.fixed.get("weights") != "host" and size <= limits.host_limit


def _host_too_small_error(workload: Workload, simulation: Simulation, limits: Limits) -> NothingFitsError | None:
    """Return the error if offloaded weights, gradients and optimizer state exceed the host's memory; else None."""
    if not fixed_terms_exceed_host(simulation, limits):
        return None
    fixed = _fixed_host_terms(simulation)
    largest = ", ".join(f"{name} {show_size(size)}" for name, size in sorted(fixed.items(), key=lambda item: -item[1]))
    single_device = workload.cluster.engine == "none"
    place = "engine.weights" if "weights" in fixed else "engine.optimizer"
    gradient_advice = ""
    if single_device and workload.step.gradients != "layer":
        gradient_advice = "set optim_in_backward: true, so that few gradients are in memory at a time; "
    return NothingFitsError(
        f"no row length fits: the step needs {show_size(sum(fixed.values()))} of host memory ({largest}), and "
        f"{show_size(limits.host_limit)} are usable ({show_size(limits.host_bytes)} less {limits.margin:.0%})",
        where=place if single_device else "deepspeed",
        fix=f"{gradient_advice}train adapters (finetuning_type: lora or qlora), shard the state over more ranks, or "
        "use a machine with more memory",
    )


def fixed_terms_exceed_host(simulation: Simulation, limits: Limits) -> bool:
    """Return True if offloaded weights, gradients and optimizer state alone exceed the host's memory."""
    return not limits.shared and sum(_fixed_host_terms(simulation).values()) > limits.host_limit


def _fixed_host_terms(simulation: Simulation) -> dict[str, int]:
    return {name: size for name, size in simulation.host_terms.items() if name not in STREAMED_TERMS}


def _describe_rows(workload: Workload) -> str:
    scored = workload.scored
    if scored is None:
        return f"a row of {workload.length:,} tokens"
    total = scored.num_rows * scored.length
    return f"{scored.describe()}, up to {workload.length:,} tokens each with prompt, {total:,} in total"


def _describe_excess(simulation: Simulation, limits: Limits) -> str:
    """Return a clause about the tier with the largest excess over its limit.

    Example: ``the schedule with the least memory needs 95 GiB of device memory in the backward, and 75 GiB are usable
    (79 GiB less 5%)``.
    """
    tiers = [
        (
            "device memory",
            simulation.peak_bytes + (simulation.host_bytes if limits.shared else 0),
            limits.device_limit,
            limits.device_bytes,
        ),
        ("host memory", 0 if limits.shared else simulation.host_bytes, limits.host_limit, limits.host_bytes),
        ("disk space", simulation.disk_bytes, limits.disk_limit, limits.disk_bytes),
    ]
    name, used, usable, whole = max(tiers, key=lambda tier: tier[1] - tier[2])
    when = f" in the {simulation.phase}" if name == "device memory" else ""
    return (
        f"the schedule with the least memory needs {show_size(used)} of {name}{when}, and {show_size(usable)} are "
        f"usable ({show_size(whole)} less {limits.margin:.0%})"
    )


def _largest_terms(simulation: Simulation, count: int = 3) -> str:
    largest = sorted(simulation.terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {show_size(size)}" for name, size in largest)


MAX_LENGTH = 1 << 30
"""Longest row that is tried, in tokens."""

COARSE_TOLERANCE = 0.05
"""Relative tolerance of :func:`longest_row_from`."""

MIN_LENGTH, MULTIPLE = 64, 64
"""Shortest row length that is suggested, and the multiple to which lengths are rounded down, in tokens."""


def least_memory_schedule(limits: Limits, fixed: Mapping[str, Any]) -> Schedule:
    """Return the schedule with the smallest chunks, ``levels: 2`` and nothing kept; ``fixed`` fields do not change.

    Layer inputs are stored on the first tier of disk, host and device that has memory and that ``fixed`` allows.
    ``offload_dir`` is dropped if nothing is offloaded to disk.
    """
    tiers = ["device"]
    if limits.host_bytes and not limits.shared:
        tiers.insert(0, "host")
    if limits.disk_bytes and "offload_dir" in fixed:
        tiers.insert(0, "disk")
    tiers += [tier for tier in ("host", "disk") if tier not in tiers and (tier == "host" or "offload_dir" in fixed)]
    sizes = {"chunk_size": CHUNKS[0], "head_chunk_size": HEAD_CHUNKS[0], "stream_grads": True}
    for offload, levels in product(tiers, (2, 1)):
        chosen: dict[str, Any] = {**sizes, "offload": offload, "levels": levels, **fixed}
        if chosen["offload"] != "disk":
            chosen.pop("offload_dir", None)
        with suppress(ArgumentError):  # the user's fields exclude this tier
            return Schedule(**chosen)
    return Schedule(**fixed)


def simulate_one_level_step(
    workload: Workload, limits: Limits, fixed: Mapping[str, Any], simulate: Simulate
) -> Simulation | None:
    """Simulate :func:`least_memory_schedule` with ``levels: 1``; return None if the step does not fit the limits.

    ``levels: 2`` needs less memory, but takes several times as long to simulate, because the simulation cannot leave
    out layers of a segment.
    """
    if fixed.get("levels", 1) != 1:
        return None
    step = simulate(workload, least_memory_schedule(limits, {**fixed, "levels": 1}))
    return step if excess_bytes(step, limits) <= 0 else None


def simulate_least_memory_step(
    workload: Workload,
    limits: Limits,
    fixed: Mapping[str, Any],
    simulate: Simulate,
) -> tuple[Schedule, Simulation]:
    """Return the schedule that needs the least memory, and its simulated step.

    The schedule is :func:`least_memory_schedule`, or a variant of ``order: chunk`` with a smaller excess. If host or
    disk is too small for all layer inputs, the remaining inputs stay on the device, provided that the step then fits.
    """
    schedule = least_memory_schedule(limits, fixed)
    found = simulate(workload, schedule)
    if (fixed.get("order") == "chunk" or excess_bytes(found, limits) > 0) and allows_chunk_order(
        fixed, workload.cluster
    ):
        by_chunks = find_least_memory_chunk_order(workload, limits, fixed, simulate)
        if by_chunks is not None and excess_bytes(by_chunks[1], limits) < excess_bytes(found, limits):
            return by_chunks
    usable, used = (
        (limits.disk_limit, found.disk_bytes) if schedule.offload == "disk" else (limits.host_limit, found.host_bytes)
    )
    if limits.shared or schedule.offload == "device" or "device_layers" in fixed or used <= usable:
        return schedule, found
    input_bytes = found.host_terms.get("layer inputs", used) if schedule.offload == "host" else used
    layers = len(decoder_layers(workload.make_model()))
    count = min(layers, math.ceil((used - usable) / input_bytes * layers)) if input_bytes else layers
    mixed = replace(schedule, device_layers=count)
    step = simulate(workload, mixed)
    return (mixed, step) if excess_bytes(step, limits) <= 0 else (schedule, found)


def longest_row_from(workload: Workload, limits: Limits, fixed: Mapping[str, Any]) -> int:
    """Return the length in tokens of the longest row that fits, from the workload's length upwards.

    The tolerance is 5%. The result is 0 if the workload's length does not fit.
    """
    least = workload.length
    search_range = Range(first=least, least=least, most=MAX_LENGTH, step=1, share=COARSE_TOLERANCE, grain=1024)
    return _search_length(workload, limits, fixed, simulate, search_range)


def longest_row_up_to(workload: Workload, limits: Limits, fixed: Mapping[str, Any], simulate: Simulate) -> int:
    """Return the length in tokens of the longest row that fits, up to the workload's length; 0 if no length fits.

    The tolerance is 1% or :data:`MULTIPLE` tokens, whichever is larger.
    """
    search_range = Range(first=workload.length, least=MIN_LENGTH, most=workload.length, step=MULTIPLE, grain=MULTIPLE)
    return _search_length(workload, limits, fixed, simulate, search_range)


def _search_length(
    workload: Workload, limits: Limits, fixed: Mapping[str, Any], simulate: Simulate, search_range: Range
) -> int:
    def attempt(length: int) -> Attempt:
        _, step = simulate_least_memory_step(replace(workload, length=length), limits, fixed, simulate)
        filled = limits.fullest_tier_fraction(step.peak_bytes, step.host_bytes, step.disk_bytes)
        return Attempt(excess_bytes(step, limits) <= 0, filled)

    return search_largest(attempt, search_range).fits
