"""Build the error for a step that no schedule fits: exceeded memory, its largest parts, and changes that would help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamtune.base.text import show_size
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits
from streamtune.plan.choices import excess_bytes
from streamtune.plan.estimate import Simulate
from streamtune.plan.least_memory import longest_row_up_to
from streamtune.plan.lower_bound import LeastBytes
from streamtune.plan.simulate.simulate import Simulation
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
    fixed: Mapping[str, Any],
    tried: Mapping[Schedule, Simulation] | LeastBytes,
    limits: Limits,
    simulate: Simulate,
) -> NothingFitsError:
    """Return the error for a step that does not fit.

    Args:
        workload: Step that does not fit.
        fixed: Fields of the schedule that the user set, by name.
        tried: Simulated steps, among them the one with the least memory; or a lower bound for all schedules.
        limits: Memory limits.
        simulate: Function that simulates a step, to find the longest row that fits.
    """
    if isinstance(tried, LeastBytes):
        simulation: Simulation | LeastBytes = tried
    else:
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
            f"{_offload_advice(workload, fixed, limits, simulation, fixed_bytes)}train adapters "
            "(finetuning_type: lora or qlora), keep the weights in bfloat16, or use a larger device"
        )
    elif longest := longest_row_up_to(workload, limits, fixed, simulate):
        advice.append(f"set max_length: {longest}, the longest that fits")
    chosen = (
        "offload",
        "levels",
        "chunk_size",
        *(() if fixed.get("weights") == "host" else ("keep_layers",)),
    )
    if given := [name for name in chosen if name in fixed]:
        advice.append(f"leave {', '.join(given)} to the planner")
    if not limits.shared and simulation.host_bytes > limits.host_limit:
        advice.append("use a machine with more memory, or set offload_dir to a directory on a fast disk")
    if workload.cluster.ranks > workload.cluster.sequence_size:
        ranks = workload.cluster.ranks
        advice.append(f"sequence_parallel_size: {ranks} divides each row among all {ranks} ranks")
    advice.append("larger chunks do not help, because they take more memory")
    return NothingFitsError(what, where="max_length", fix="; ".join(advice))


def _offload_advice(
    workload: Workload, fixed: Mapping[str, Any], limits: Limits, simulation: Simulation | LeastBytes, fixed_bytes: int
) -> str:
    """Return advice to offload optimizer state, or also weights and gradients, if the step would then fit."""
    advice = []
    state = simulation.terms.get("optimizer", 0)
    if (
        0 < state <= limits.host_limit
        and fixed_bytes - state <= limits.device_limit
        and _may_offload(workload, fixed, limits, state)
    ):
        advice.append(f"engine: {{optimizer: host}} offloads the {show_size(state)} of optimizer state; or ")
    if _may_offload(workload, fixed, limits, fixed_bytes):
        advice.append("engine: {weights: host} offloads weights, gradients and optimizer state to the host; or ")
    return "".join(advice)


def _may_offload(workload: Workload, fixed: Mapping[str, Any], limits: Limits, size: int) -> bool:
    alone = workload.cluster.ranks == 1 and workload.cluster.engine == "none"
    return alone and not limits.shared and fixed.get("weights") != "host" and size <= limits.host_limit


def _host_too_small_error(
    workload: Workload, simulation: Simulation | LeastBytes, limits: Limits
) -> NothingFitsError | None:
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


def fixed_terms_exceed_host(simulation: Simulation | LeastBytes, limits: Limits) -> bool:
    """Return True if offloaded weights, gradients and optimizer state alone exceed the host's memory."""
    return not limits.shared and sum(_fixed_host_terms(simulation).values()) > limits.host_limit


def _fixed_host_terms(simulation: Simulation | LeastBytes) -> dict[str, int]:
    return {name: size for name, size in simulation.host_terms.items() if name not in STREAMED_TERMS}


def _describe_rows(workload: Workload) -> str:
    scored = workload.scored
    if scored is None:
        return f"a row of {workload.length:,} tokens"
    total = scored.num_rows * scored.length
    return f"{scored.describe()}, up to {workload.length:,} tokens each with prompt, {total:,} in total"


def _describe_excess(simulation: Simulation | LeastBytes, limits: Limits) -> str:
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
    at_least = "at least " if isinstance(simulation, LeastBytes) else ""
    when = f" in the {simulation.phase}" if name == "device memory" else ""
    return (
        f"the schedule with the least memory needs {at_least}{show_size(used)} of {name}{when}, and "
        f"{show_size(usable)} are usable ({show_size(whole)} less {limits.margin:.0%})"
    )


def _largest_terms(simulation: Simulation | LeastBytes, count: int = 3) -> str:
    largest = sorted(simulation.terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {show_size(size)}" for name, size in largest)
