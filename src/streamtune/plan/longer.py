"""How far the thriftiest schedule reaches: what asks for the longest sequence, not for the fastest step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from streamtune.engine import Schedule
from streamtune.errors import ArgumentError
from streamtune.plan.choices import CHUNKS, HEAD_CHUNKS, Limits
from streamtune.plan.cluster import Cluster
from streamtune.plan.refusal import excess_of
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.plan.simulate import Simulation, Workload, simulate

__all__ = ["kept_on_device", "longest_of", "thriftiest"]

MOST = 1 << 30
"""Tokens beyond which nothing is looked for."""

COARSE = 0.05
"""Part of a length to which it is told what another number of ranks would allow."""


def thriftiest(limits: Limits, written: Mapping[str, Any], cluster: Cluster) -> Schedule:
    """Everything small, nothing kept, layer inputs as far away as there is room, at two levels where they may be.

    Args:
        limits: The memory.
        written: Fields of the schedule that are given.
        cluster: Whose ranks run it.
    """
    tiers = ["device"]
    if limits.host_bytes and not limits.shared:
        tiers.insert(0, "host")
    if limits.disk_bytes and "offload_dir" in written:
        tiers.insert(0, "disk")
    sizes = {"chunk_size": CHUNKS[0], "head_chunk_size": HEAD_CHUNKS[0], "stream_grads": True}
    for offload, levels in product(tiers, (2, 1) if cluster.runs_layers_again else (1,)):
        chosen: dict[str, Any] = {**sizes, "offload": offload, "levels": levels, **written}
        if chosen["offload"] != "disk":
            chosen.pop("offload_dir", None)
        with suppress(ArgumentError):  # what is written goes with other tiers
            return Schedule(**chosen)
    return Schedule()


def kept_on_device(schedule: Schedule, found: Simulation, usable: int, held: int, layers: int) -> Schedule:
    """The schedule with so many layer inputs on the device that the others have room elsewhere.

    Args:
        schedule: Which has too many elsewhere.
        found: Its step.
        usable: Bytes that are there.
        held: Bytes that it wants there.
        layers: Of the model.
    """
    moving = found.host_terms.get("layer inputs", held) if schedule.offload == "host" else held
    fewer = (held - usable) / moving if moving else 1.0
    return replace(schedule, device_layers=min(layers, math.ceil(fewer * layers)))


def longest_of(workload: Workload, limits: Limits, written: Mapping[str, Any]) -> int:
    """The most tokens of a row that some schedule fits, to some percent; 0 where not even the workload's own length.

    Args:
        workload: Its length is where to begin.
        limits: The memory of a rank.
        written: Fields of the schedule that are given.
    """
    schedule = thriftiest(limits, written, workload.cluster)

    def attempt(length: int) -> Attempt:
        step = simulate(replace(workload, length=length), schedule)
        filled = limits.filled(step.peak_bytes, step.host_bytes, step.disk_bytes)
        return Attempt(excess_of(step, limits) <= 0, filled)

    least = workload.length
    within = Range(first=least, least=least, most=MOST, step=1, share=COARSE, grain=1024)
    return search_largest(attempt, within).fits
