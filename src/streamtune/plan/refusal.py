"""The error if no schedule fits: the memory that is too small, its largest terms, and what would help."""

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
from streamtune.plan.choices import CHUNKS, HEAD_CHUNKS, Space, excess_of, may_order_chunks, smallest_in_chunk_order
from streamtune.plan.estimate import Simulate
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

FIXED_TERMS = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""Terms that do not grow with the sequence."""


STREAMED_TERMS = ("layer inputs", "keys and values")
"""Terms on the host that grow with the sequence."""


class NothingFitsError(ArgumentError):
    """No schedule fits the memory."""


def nothing_fits(
    workload: Workload,
    space: Space,
    tried: dict[Schedule, Simulation],
    limits: Limits,
    simulate: Simulate,
) -> NothingFitsError:
    """Return the error for a workload under no schedule; ``tried`` has the one with the least memory."""
    simulation = min(tried.values(), key=lambda simulation: excess_of(simulation, limits))
    if (error := _host_too_small(workload, simulation, limits)) is not None:
        return error
    base = sum(simulation.terms.get(name, 0) for name in FIXED_TERMS)
    what = f"no schedule fits {_describe(workload)}: {_needs(simulation, limits)}; of that {_largest_terms(simulation)}"
    helps: list[str] = []
    beside = "weights, the reference's" if workload.reference_bytes else "weights"
    if base > limits.device:
        helps.append(
            f"{beside}, gradients and optimizer state alone are {show_size(base)}: "
            f"{_host_tiers(workload, space, limits, simulation, base)}train adapters (finetuning_type: lora or "
            "qlora), keep the weights in bfloat16, or take a larger device"
        )
    elif longest := longest_below(workload, limits, space.fixed, simulate):
        helps.append(f"set max_length: {longest}, the longest that fits")
    chosen = ("offload", "levels", "chunk_size", *(() if space.fixed.get("weights") == "host" else ("keep_layers",)))
    if given := [name for name in chosen if name in space.fixed]:
        helps.append(f"leave {', '.join(given)} to the planner")
    if not limits.shared and simulation.host_bytes > limits.host:
        helps.append("a machine with more memory, or offload_dir: a directory on a fast disk, holds more layer inputs")
    if workload.cluster.ranks > workload.cluster.sequence_size:
        ranks = workload.cluster.ranks
        helps.append(f"sequence_parallel_size: {ranks} shares each row between all {ranks} ranks")
    helps.append("longer chunks never help: they only make the working set larger")
    return NothingFitsError(what, where="max_length", fix="; ".join(helps))


def _host_tiers(workload: Workload, space: Space, limits: Limits, simulation: Simulation, base: int) -> str:
    """Return advice on what to offload to the host so that the step fits; the cheapest move first."""
    tiers = []
    state = simulation.terms.get("optimizer", 0)
    if 0 < state <= limits.host and base - state <= limits.device and _may_wait(workload, space, limits, state):
        tiers.append(f"engine: {{optimizer: host}} keeps the {show_size(state)} of state in the host's memory; or ")
    if _may_wait(workload, space, limits, base):
        tiers.append("engine: {weights: host} keeps them in the host's memory; or ")
    return "".join(tiers)


def _may_wait(workload: Workload, space: Space, limits: Limits, size: int) -> bool:
    """Return True if weights of ``size`` bytes, with gradients and optimizer, could wait on the host."""
    alone = workload.cluster.ranks == 1 and workload.cluster.engine == "none"
    return alone and not limits.shared and space.fixed.get("weights") != "host" and size <= limits.host


def _host_too_small(workload: Workload, simulation: Simulation, limits: Limits) -> NothingFitsError | None:
    """Return the error if weights, gradients and optimizer state that wait on the host exceed it; else None."""
    if not exceeds_host(simulation, limits):
        return None
    fixed = _stays_on_host(simulation)
    largest = ", ".join(f"{name} {show_size(size)}" for name, size in sorted(fixed.items(), key=lambda item: -item[1]))
    ours = workload.cluster.engine == "none"
    place = "engine.weights" if "weights" in fixed else "engine.optimizer"
    freed = (
        ""
        if not ours or workload.step.gradients == "layer"
        else "write optim_in_backward: true, which holds few gradients; "
    )
    return NothingFitsError(
        f"no row fits, however short: the host holds {show_size(sum(fixed.values()))} of the step ({largest}), and "
        f"{show_size(limits.host)} are usable ({show_size(limits.host_bytes)} less {limits.margin:.0%})",
        where=place if ours else "deepspeed",
        fix=f"{freed}train adapters (finetuning_type: lora or qlora), share the state between more ranks, or take a "
        "machine with more memory",
    )


def exceeds_host(simulation: Simulation, limits: Limits) -> bool:
    """Return True if weights, gradients and optimizer state that wait on the host exceed it at any row length."""
    return not limits.shared and sum(_stays_on_host(simulation).values()) > limits.host


def _stays_on_host(simulation: Simulation) -> dict[str, int]:
    return {name: size for name, size in simulation.host_terms.items() if name not in STREAMED_TERMS}


def _describe(workload: Workload) -> str:
    scored = workload.scored
    if scored is None:
        return f"a row of {workload.length:,} tokens"
    return f"{scored.describe()} of up to {workload.length:,} tokens, {scored.rows * scored.length:,} in all"


def _needs(simulation: Simulation, limits: Limits) -> str:
    """Return ``the thriftiest takes 95.2 GiB of the device's 75.1 GiB (79.1 GiB less 5%), in the backward``."""
    tiers = [
        (
            "device",
            simulation.peak_bytes + (simulation.host_bytes if limits.shared else 0),
            limits.device,
            limits.device_bytes,
        ),
        ("host", 0 if limits.shared else simulation.host_bytes, limits.host, limits.host_bytes),
        ("disk", simulation.disk_bytes, limits.disk, limits.disk_bytes),
    ]
    name, used, usable, whole = max(tiers, key=lambda tier: tier[1] - tier[2])
    when = f", in the {simulation.phase}" if name == "device" else ""
    return (
        f"the thriftiest takes {show_size(used)} of the {name}'s {show_size(usable)} "
        f"({show_size(whole)} less {limits.margin:.0%}){when}"
    )


def _largest_terms(simulation: Simulation, count: int = 3) -> str:
    largest = sorted(simulation.terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {show_size(size)}" for name, size in largest)


MOST = 1 << 30
"""Tokens of the longest row that is tried."""

COARSE = 0.05
"""Relative tolerance of the length that another number of ranks would allow."""

SHORTEST, GRAIN = 64, 64
"""Tokens of the shortest length that is offered, and of the grain that lengths are rounded down to."""


def smallest_schedule(limits: Limits, written: Mapping[str, Any]) -> Schedule:
    """Return the schedule with the smallest chunks and nothing kept, and two levels.

    Layer inputs are on the furthest tier that has memory: disk, then host, then device. Fields in ``written`` stay,
    except ``offload_dir`` if nothing goes to disk.
    """
    tiers = ["device"]
    if limits.host_bytes and not limits.shared:
        tiers.insert(0, "host")
    if limits.disk_bytes and "offload_dir" in written:
        tiers.insert(0, "disk")
    tiers += [tier for tier in ("host", "disk") if tier not in tiers and (tier == "host" or "offload_dir" in written)]
    sizes = {"chunk_size": CHUNKS[0], "head_chunk_size": HEAD_CHUNKS[0], "stream_grads": True}
    for offload, levels in product(tiers, (2, 1)):
        chosen: dict[str, Any] = {**sizes, "offload": offload, "levels": levels, **written}
        if chosen["offload"] != "disk":
            chosen.pop("offload_dir", None)
        with suppress(ArgumentError):  # what is written goes with other tiers
            return Schedule(**chosen)
    return Schedule(**written)


def smallest_step(
    workload: Workload,
    limits: Limits,
    written: Mapping[str, Any],
    simulate: Simulate,
) -> tuple[Schedule, Simulation]:
    """Return the schedule of :func:`smallest_schedule` and its simulated step.

    If host or disk has no room for all layer inputs, the rest stay on the device, provided that the step then fits.
    """
    schedule = smallest_schedule(limits, written)
    found = simulate(workload, schedule)
    if (written.get("order") == "chunk" or excess_of(found, limits) > 0) and may_order_chunks(
        written, workload.cluster
    ):
        by_chunks = smallest_in_chunk_order(workload, limits, written, simulate)
        if by_chunks is not None and excess_of(by_chunks[1], limits) < excess_of(found, limits):
            return by_chunks
    usable, held = (limits.disk, found.disk_bytes) if schedule.offload == "disk" else (limits.host, found.host_bytes)
    if limits.shared or schedule.offload == "device" or "device_layers" in written or held <= usable:
        return schedule, found
    moving = found.host_terms.get("layer inputs", held) if schedule.offload == "host" else held
    layers = len(decoder_layers(workload.make_model()))
    count = min(layers, math.ceil((held - usable) / moving * layers)) if moving else layers
    mixed = replace(schedule, device_layers=count)
    step = simulate(workload, mixed)
    return (mixed, step) if excess_of(step, limits) <= 0 else (schedule, found)


def longest_of(workload: Workload, limits: Limits, written: Mapping[str, Any]) -> int:
    """Return the most tokens of a row that some schedule fits, within 5%; 0 if the workload's own length does not fit.

    The search begins at that length.
    """
    least = workload.length
    within = Range(first=least, least=least, most=MOST, step=1, share=COARSE, grain=1024)
    return _search(workload, limits, written, simulate, within)


def longest_below(workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate) -> int:
    """Return the most tokens of a row below the workload's that some schedule fits, within about 1%; 0 if none."""
    within = Range(first=workload.length, least=SHORTEST, most=workload.length, step=GRAIN, grain=GRAIN)
    return _search(workload, limits, written, simulate, within)


def _search(workload: Workload, limits: Limits, written: Mapping[str, Any], simulate: Simulate, within: Range) -> int:
    def attempt(length: int) -> Attempt:
        _, step = smallest_step(replace(workload, length=length), limits, written, simulate)
        filled = limits.filled(step.peak_bytes, step.host_bytes, step.disk_bytes)
        return Attempt(excess_of(step, limits) <= 0, filled)

    return search_largest(attempt, within).fits
