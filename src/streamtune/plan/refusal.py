"""The error where no schedule fits: the memory that is too small, its largest terms, and what would help."""

from __future__ import annotations

from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits
from streamtune.plan.choices import Space
from streamtune.plan.estimate import Simulate
from streamtune.plan.smallest import excess_of, longest_below
from streamtune.schedule import Schedule
from streamtune.simulate.simulate import Simulation
from streamtune.simulate.workload import Workload
from streamtune.sizes import show_size

__all__ = ["nothing_fits"]

FIXED_TERMS = ("weights", "gathered weights", "fp32 weights", "reference", "gradients", "optimizer")
"""The terms that do not grow with the sequence."""


def nothing_fits(
    workload: Workload,
    space: Space,
    tried: dict[Schedule, Simulation],
    limits: Limits,
    simulate: Simulate,
) -> ArgumentError:
    """Return the error for a workload that fits under no schedule.

    Args:
        workload: The step that was to be planned.
        space: The schedules there were to choose from.
        tried: The schedules that were simulated; that with the least memory is among them.
        limits: The available memory.
        simulate: Simulates a step, to find the length that does fit.
    """
    simulation = min(tried.values(), key=lambda simulation: excess_of(simulation, limits))
    base = sum(simulation.terms.get(name, 0) for name in FIXED_TERMS)
    what = f"no schedule fits {_describe(workload)}: {_needs(simulation, limits)}; of that {_largest_terms(simulation)}"
    helps: list[str] = []
    beside = "weights, the reference's" if workload.reference_bytes else "weights"
    if base > limits.device:
        helps.append(
            f"{beside}, gradients and optimizer state alone are {show_size(base)}: train adapters (finetuning_type: "
            "lora or qlora), keep the weights in bfloat16, or take a larger device"
        )
    elif longest := longest_below(workload, limits, space.fixed, simulate):
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
