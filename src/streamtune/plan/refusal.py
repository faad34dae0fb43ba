"""What to say where no schedule fits: which memory, which term of it, and what would help."""

from __future__ import annotations

from dataclasses import replace

from streamtune.engine import Schedule
from streamtune.errors import ArgumentError
from streamtune.plan.choices import Limits, Space
from streamtune.plan.estimate import Simulate
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.plan.simulate import Simulation, Workload
from streamtune.sizes import show_size

__all__ = ["excess_of", "longest_that_fits", "nothing_fits"]

FIXED_TERMS = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""What does not grow with the sequence."""

SHORTEST, GRAIN = 64, 64
"""Tokens: the shortest length that is offered, and what lengths are rounded down to."""


def nothing_fits(
    workload: Workload,
    space: Space,
    tried: dict[Schedule, Simulation],
    limits: Limits,
    simulate: Simulate,
) -> ArgumentError:
    """The error for a workload that fits under no schedule.

    Args:
        workload: What was to be planned.
        space: What there was to choose from.
        tried: Those simulated whole; the thriftiest is among them.
        limits: What there is.
        simulate: For the length that does fit.
    """
    schedule, simulation = min(tried.items(), key=lambda item: excess_of(item[1], limits))
    base = sum(simulation.terms.get(name, 0) for name in FIXED_TERMS)
    what = f"no schedule fits {_describe(workload)}: {_needs(simulation, limits)}; of that {_largest_terms(simulation)}"
    helps: list[str] = []
    beside = "weights, the reference's" if workload.reference_bytes else "weights"
    if base > limits.device:
        helps.append(
            f"{beside}, gradients and optimizer state alone are {show_size(base)}: train adapters (finetuning_type: "
            "lora or qlora), keep the weights in bfloat16, or take a larger device"
        )
    elif longest := longest_that_fits(workload, schedule, simulation, limits, simulate):
        helps.append(f"set max_length: {longest}, the longest that fits")
    if given := [name for name in ("offload", "levels", "chunk_size", "keep_layers") if name in space.fixed]:
        helps.append(f"leave {', '.join(given)} to the planner")
    if not limits.shared and simulation.host_bytes > limits.host:
        helps.append("a machine with more memory, or offload_dir: a directory on a fast disk, holds more layer inputs")
    if workload.cluster.ranks > workload.cluster.sequence_size:
        ranks = workload.cluster.ranks
        helps.append(f"sequence_parallel_size: {ranks} shares each row between all {ranks} ranks")
    helps.append("longer chunks never help: they only make the working set larger")
    return ArgumentError(what, where="max_length", mend="; ".join(helps))


def longest_that_fits(
    workload: Workload, schedule: Schedule, simulation: Simulation, limits: Limits, simulate: Simulate
) -> int:
    """The most tokens of a row that ``schedule`` fits, to about a percent, simulated; 0 where it fits none.

    It is the schedule that lacks least at the workload's own length. At a shorter one another may reach a little
    further: to know that, each length that is tried would have to be planned.

    Args:
        workload: What does not fit at its length.
        schedule: The thriftiest.
        simulation: Its step at that length.
        limits: What there is.
        simulate: Simulates a step.
    """

    def attempt(length: int) -> Attempt:
        known = length == workload.length
        step = simulation if known else simulate(replace(workload, length=length), schedule)
        return Attempt(excess_of(step, limits) <= 0, limits.filled(step.peak_bytes, step.host_bytes, step.disk_bytes))

    within = Range(first=workload.length, least=SHORTEST, most=workload.length, step=GRAIN, grain=GRAIN)
    return search_largest(attempt, within).fits


def _describe(workload: Workload) -> str:
    scored = workload.scored
    if scored is None:
        return f"a row of {workload.length:,} tokens"
    return f"{scored.describe()} of up to {workload.length:,} tokens, {scored.rows * scored.length:,} in all"


def excess_of(simulation: Simulation, limits: Limits) -> float:
    """By how many bytes a simulated step does not fit; negative is what is left."""
    return limits.excess(simulation.peak_bytes, simulation.host_bytes, simulation.disk_bytes)


def _needs(simulation: Simulation, limits: Limits) -> str:
    """``it takes 95.2 GiB of the device's 75.1 (79.1 less 5%), in the backward``"""
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
