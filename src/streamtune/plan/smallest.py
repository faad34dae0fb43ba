"""Find the schedule that holds fewest bytes on the device: for the longest sequence, and where nothing else fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError
from streamtune.plan.choices import CHUNKS, HEAD_CHUNKS, Limits
from streamtune.schedule import Schedule
from streamtune.simulate.cluster import Cluster
from streamtune.simulate.simulate import Simulation
from streamtune.simulate.workload import Workload

__all__ = ["excess_of", "furthest", "thriftiest"]


def excess_of(simulation: Simulation, limits: Limits) -> float:
    """Return by how many bytes a simulated step exceeds its memory, in the worst tier; negative is what is left."""
    return limits.excess(simulation.peak_bytes, simulation.host_bytes, simulation.disk_bytes)


def thriftiest(limits: Limits, written: Mapping[str, Any], cluster: Cluster) -> Schedule:
    """Return the schedule with the smallest chunks and nothing kept.

    Layer inputs are on the furthest tier that has memory: disk, then host, then device. It has two levels if the
    cluster may run layers again.

    Args:
        limits: The memory.
        written: Fields of the schedule that are given, and stay; but for ``offload_dir`` where nothing goes to disk.
        cluster: The ranks that run it.

    Raises:
        ArgumentError: The given fields contradict each other.
    """
    tiers = ["device"]
    if limits.host_bytes and not limits.shared:
        tiers.insert(0, "host")
    if limits.disk_bytes and "offload_dir" in written:
        tiers.insert(0, "disk")
    tiers += [tier for tier in ("host", "disk") if tier not in tiers and (tier == "host" or "offload_dir" in written)]
    sizes = {"chunk_size": CHUNKS[0], "head_chunk_size": HEAD_CHUNKS[0], "stream_grads": True}
    for offload, levels in product(tiers, (2, 1) if cluster.runs_layers_again else (1,)):
        chosen: dict[str, Any] = {**sizes, "offload": offload, "levels": levels, **written}
        if chosen["offload"] != "disk":
            chosen.pop("offload_dir", None)
        with suppress(ArgumentError):  # what is written goes with other tiers
            return Schedule(**chosen)
    return Schedule(**written)


def furthest(
    workload: Workload,
    limits: Limits,
    written: Mapping[str, Any],
    simulate: Callable[[Workload, Schedule], Simulation],
) -> tuple[Schedule, Simulation]:
    """Return the schedule of :func:`thriftiest` and its simulated step.

    If host or disk has no room for all layer inputs, the rest stay on the device, provided that the step fits so.

    Args:
        workload: What is trained.
        limits: The memory.
        written: Fields of the schedule that are given.
        simulate: Simulates a step.
    """
    schedule = thriftiest(limits, written, workload.cluster)
    found = simulate(workload, schedule)
    usable, held = (limits.disk, found.disk_bytes) if schedule.offload == "disk" else (limits.host, found.host_bytes)
    if limits.shared or schedule.offload == "device" or "device_layers" in written or held <= usable:
        return schedule, found
    moving = found.host_terms.get("layer inputs", held) if schedule.offload == "host" else held
    layers = len(decoder_layers(workload.make_model()))
    count = min(layers, math.ceil((held - usable) / moving * layers)) if moving else layers
    mixed = replace(schedule, device_layers=count)
    step = simulate(workload, mixed)
    return (mixed, step) if excess_of(step, limits) <= 0 else (schedule, found)
