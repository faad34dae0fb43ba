"""Choose the fastest schedule of a training step that fits in memory.

1. A few simulated steps show how much memory and work each choice adds (``estimate``).
2. All combinations of choices are generated (``choices``) and sorted by predicted time (``rates``).
3. The fastest combination that should fit is simulated. If it does not fit, the planner subtracts the error of the
   estimate from the memory for this chunk size, and repeats step 2.

The returned schedule has been simulated; its alternatives are estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import model_device
from streamtune.base.text import parse_size, show_size
from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import first_differentiated_layer
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.engine.memory.placement import best_segment_size
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits, free_device_bytes, free_disk_bytes
from streamtune.plan.calibrate import load_rates
from streamtune.plan.choices import (
    Candidate,
    SearchSpace,
    allows_chunk_order,
    enumerate_candidates,
    excess_bytes,
    find_best_chunk_order,
)
from streamtune.plan.estimate import Estimator, Simulate, StepCost
from streamtune.plan.least_memory import least_excess_bound, simulate_least_memory_step
from streamtune.plan.rates import Rates, data_sheet_rates, nearest_device
from streamtune.plan.refusal import NothingFitsError, make_nothing_fits_error
from streamtune.plan.simulate.memory import device_model_bytes, host_model_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload, workload_flops
from streamtune.plan.traffic import StepTimeModel, Traffic
from streamtune.schedule import GIVEN, Schedule

MAX_TRIED = 6
"""Largest number of candidates that are simulated before the planner tries the schedule with the least memory."""

MIN_SAVING = 0.003
"""Fraction of the step time that each changed default must save, because predictions are not more accurate."""

MIN_SLOWDOWN = 1.1
"""Step time, relative to the same step without copies to host and disk, above which ``order: chunk`` is tried."""

MAX_SHOWN = 3
"""Largest number of alternatives in a plan."""

KEEPS_NOTHING: dict[str, Any] = {
    "order": "layer",
    "offload": "device",
    "levels": 1,
    "keep_kv": "no",
    "keep_attention": "no",
    "keep_layers": 0,
    "stream_grads": False,
}
"""Schedule fields of a step without a backward, which stores nothing."""


@dataclass(frozen=True)
class Alternative:
    """Schedule that was not chosen, with estimated bytes and step time; ``why_not`` is the reason as text."""

    schedule: Schedule
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    step_seconds: float
    fits: bool
    why_not: str


@dataclass(frozen=True)
class Plan:
    """Schedule to train with, its simulated memory and its predicted time.

    Attributes:
        schedule: Fastest schedule that fits, or the user's schedule.
        simulation: Simulated step with ``schedule``, at the planned length.
        step_seconds: Predicted seconds of the step.
        alternatives: Other schedules with estimated figures, the fastest first.
        binds: Largest part of the memory of the fullest tier, such as ``weights``.
        limits: Memory limits.
        rates: Rates from which the time is predicted.
        traffic: Messages that a rank sends in the step.
        seconds: Seconds that planning took.
        simulations: Number of simulations, including the simulations behind the estimates.
        flops: FLOPs of the model in the step, as in MFU, summed over the ranks that share a sequence.
    """

    schedule: Schedule
    simulation: Simulation
    step_seconds: float
    alternatives: tuple[Alternative, ...]
    binds: str
    limits: Limits
    rates: Rates
    traffic: Traffic
    seconds: float = 0.0
    simulations: int = 1
    flops: int = 0

    @property
    def fits(self) -> bool:
        """True if the simulated step is within the limits; always true for a schedule that the planner chose."""
        return excess_bytes(self.simulation, self.limits) <= 0

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": asdict(self.schedule),
            "peak_bytes": self.simulation.peak_bytes,
            "host_bytes": self.simulation.host_bytes,
            "disk_bytes": self.simulation.disk_bytes,
            "terms": dict(self.simulation.terms),
            "step_seconds": self.step_seconds,
            "fits": self.fits,
            "alternatives": [{**asdict(other), "schedule": asdict(other.schedule)} for other in self.alternatives],
            "binds": self.binds,
            "phase": self.simulation.phase,
            "phases": dict(self.simulation.phases),
            "work": asdict(self.simulation.work),
            "limits": asdict(self.limits),
            "rates": asdict(self.rates),
            "traffic": self.traffic.to_json(),
            "planning_seconds": self.seconds,
        }


def choose(
    workload: Workload,
    limits: Limits,
    rates: Rates,
    *,
    fixed: Mapping[str, Any] | None = None,
    simulate: Simulate = simulate,
    explain: bool = True,
) -> Plan:
    """Return the plan with the fastest schedule for ``workload`` that fits ``limits``.

    ``order: chunk`` (all layers of a chunk, then the chunk before) is tried if the user sets it, or if no other
    schedule fits. It is also tried if the fastest schedule with ``order: layer`` recomputes layers or waits for copies.

    Args:
        workload: Training step to plan, without its schedule.
        limits: Memory limits.
        rates: Rates of the device.
        fixed: Schedule fields that the user set, by name.
        simulate: Function that simulates a step.
        explain: True to run more simulations if no schedule fits, for advice in the error.

    Raises:
        NothingFitsError: No schedule fits; the error names the largest parts of the memory, and changes that would
            help.
    """
    fixed_fields, plan = dict(fixed or {}), None
    refuse = make_nothing_fits_error if explain else _make_short_error
    if workload.step.gradients == "none":  # no backward: only chunk sizes are chosen
        fixed_fields = {**KEEPS_NOTHING, **fixed_fields}
    if fixed_fields.get("weights") == "host":  # keep_layers and order: chunk need the weights on the device
        fixed_fields = {"keep_layers": 0, "order": "layer", **fixed_fields}
    if (bound := least_excess_bound(workload, limits, fixed_fields)).excess_bytes(limits) > 0:
        raise refuse(workload, fixed_fields, bound, limits, simulate)
    if fixed_fields.get("order") != "chunk":
        plan = _plan_layer_order(workload, limits, rates, fixed=fixed_fields, simulate=simulate, refuse=refuse)
        if not allows_chunk_order(fixed_fields, workload.cluster) or not _is_slowed(plan, workload):
            return plan
    started, time_model = time.perf_counter(), StepTimeModel(workload, rates)
    search_space = _make_search_space(workload, limits, fixed_fields)
    found = find_best_chunk_order(workload, search_space, simulate)
    if plan is None and found is None:
        found = simulate_least_memory_step(workload, limits, fixed_fields, simulate)
        if excess_bytes(found[1], limits) > 0:
            raise refuse(workload, fixed_fields, dict([found]), limits, simulate)
    if found is None or (
        plan is not None and plan.step_seconds <= (1 + MIN_SAVING) * time_model.seconds(found[1].work, found[0])
    ):
        assert plan is not None
        return plan
    return _make_plan(*found, limits, time_model, started)


def _is_slowed(plan: Plan, workload: Workload) -> bool:
    """Return True if the plan has ``levels: 2``, or if copies make its step :data:`MIN_SLOWDOWN` times as long."""
    work = replace(plan.simulation.work, moved_bytes=0, disk_moved_bytes=0)
    undelayed = StepTimeModel(workload, plan.rates).seconds(work, plan.schedule)
    return plan.schedule.levels == 2 or plan.step_seconds > MIN_SLOWDOWN * undelayed


def _make_search_space(workload: Workload, limits: Limits, fixed: Mapping[str, Any]) -> SearchSpace:
    """Return the values to try; only layers with a backward store tensors for it."""
    model: Any = workload.make_model()
    count, first = len(decoder_layers(model)), first_differentiated_layer(model)
    size = best_segment_size(count, first) if 0 < first < count else None
    return SearchSpace(count - first, workload.shard_tokens, limits, fixed, size)


def _make_short_error(*_: Any) -> NothingFitsError:
    return NothingFitsError("no schedule fits", where="max_length")


def _plan_layer_order(
    workload: Workload,
    limits: Limits,
    rates: Rates,
    *,
    fixed: Mapping[str, Any],
    simulate: Simulate,
    refuse: Callable[..., NothingFitsError],
) -> Plan:
    started = time.perf_counter()
    time_model = StepTimeModel(workload, rates)
    model: Any = workload.make_model()
    search_space = _make_search_space(workload, limits, fixed or {})
    if _may_keep_every_layer(search_space, workload, model.get_input_embeddings().weight) and (
        keeping_all := _keep_every_layer(search_space, workload, simulate)
    ):
        return _make_plan(*keeping_all, limits, time_model, started)
    estimator = Estimator(
        workload,
        len(decoder_layers(model)),
        simulate,
        chunks=search_space.candidate_values("chunk_size"),
        head_chunk=search_space.candidate_values("head_chunk_size")[-1],
        common_fields=search_space.common_fields,
    )
    tried: dict[Schedule, Simulation] = {}
    reduced_limits: dict[int, Limits] = {}  # by chunk size, because errors of estimates differ by chunk size
    found = None
    while found is None and len(tried) < MAX_TRIED:
        ranked = _rank_candidates(search_space, estimator, limits, time_model, reduced_limits)
        best = next(
            (
                c
                for c in ranked
                if c.excess_bytes(reduced_limits.get(c.schedule.chunk_size, limits)) <= 0 and c.schedule not in tried
            ),
            None,
        )
        if best is None:
            break
        simulation = tried[best.schedule] = simulate(workload, best.schedule)
        if excess_bytes(simulation, limits) <= 0:
            found = best
        else:
            size = best.schedule.chunk_size
            reduced_limits[size] = _reduce_limits(reduced_limits.get(size, limits), best, simulation)
    if found is None:
        ranked = _rank_candidates(search_space, estimator, limits, time_model)
        found = _simulate_least_excess(ranked, limits, workload, simulate, tried)
    if found is None:  # estimates may be wrong: simulate the smallest schedule
        schedule, simulation = simulate_least_memory_step(workload, limits, search_space.fixed, simulate)
        tried[schedule] = simulation
        if excess_bytes(simulation, limits) > 0:
            raise refuse(workload, search_space.fixed, tried, limits, simulate)
        if schedule.levels == 2 and not {"levels", "segment_size"} & set(search_space.fixed):  # less work, if it fits
            plainer = replace(schedule, levels=1)
            tried[plainer] = simulate(workload, plainer)
            schedule = plainer if excess_bytes(tried[plainer], limits) <= 0 else schedule
        found = Candidate(schedule, StepCost.from_simulation(tried[schedule]))
    others = _choose_alternatives(found, tried, ranked, limits, time_model)
    plan = _make_plan(found.schedule, tried[found.schedule], limits, time_model, started)
    return replace(plan, alternatives=others, simulations=estimator.simulations + len(tried))


def _make_plan(
    schedule: Schedule, simulation: Simulation, limits: Limits, time_model: StepTimeModel, started: float
) -> Plan:
    return Plan(
        schedule=schedule,
        simulation=simulation,
        step_seconds=time_model.seconds(simulation.work, schedule),
        alternatives=(),
        binds=_limiting_term(simulation, limits),
        limits=limits,
        rates=time_model.rates,
        traffic=time_model.traffic(schedule),
        seconds=time.perf_counter() - started,
        flops=workload_flops(time_model.workload),
    )


def evaluate_schedule(
    workload: Workload, schedule: Schedule, limits: Limits, rates: Rates, *, simulate: Simulate = simulate
) -> Plan:
    """Return the plan of a given schedule, with simulated memory and predicted time. The schedule need not fit."""
    started = time.perf_counter()
    simulation = simulate(workload, schedule)
    return _make_plan(schedule, simulation, limits, StepTimeModel(workload, rates), started)


def as_fixed_fields(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule by name, for the argument ``fixed`` of :func:`choose`."""
    return {f.name: getattr(schedule, f.name) for f in fields(schedule)}


# --- shortcut: everything is kept ------------------------------------------------------------------------------------


SIZE_FIELDS = {"chunk_size", "head_chunk_size", "offload_dir", "order", *GIVEN}
"""Schedule fields that the user may set while the planner still tries to keep the activations of all layers."""

MIN_LAYER_BYTES_RATIO = 8
"""Lower bound of a layer's activation bytes, as a multiple of the bytes of its hidden states."""


def _may_keep_every_layer(search_space: SearchSpace, workload: Workload, embedding: Tensor) -> bool:
    """Return True if a lower bound of the activation bytes of all layers fits on the device."""
    if not set(search_space.fixed) <= SIZE_FIELDS:
        return False
    token_bytes = embedding.shape[-1] * (2 if workload.autocast else embedding.element_size())
    tokens = workload.shard_tokens * workload.num_rows
    return MIN_LAYER_BYTES_RATIO * token_bytes * tokens * search_space.layers <= search_space.limits.device_limit


def _keep_every_layer(
    search_space: SearchSpace, workload: Workload, simulate: Simulate
) -> tuple[Schedule, Simulation] | None:
    """Return the schedule that recomputes no layer, with its simulated step; None if the step does not fit."""
    sizes = {name: value for name, value in search_space.fixed.items() if name != "offload_dir"}
    schedule = Schedule(**sizes, keep_layers=search_space.layers)
    simulation = simulate(workload, schedule)
    return (schedule, simulation) if excess_bytes(simulation, search_space.limits) <= 0 else None


# --- the order --------------------------------------------------------------------------------------------------------


def _rank_candidates(
    search_space: SearchSpace,
    estimator: Estimator,
    limits: Limits,
    time_model: StepTimeModel,
    reduced_limits: Mapping[int, Limits] | None = None,
) -> list[Candidate]:
    """Return all candidates, the fastest first; each changed default counts as :data:`MIN_SAVING` more time."""
    found = enumerate_candidates(search_space, estimator, limits, reduced_limits)
    return sorted(found, key=lambda candidate: _score(candidate, time_model))


def _predict_seconds(candidate: Candidate, time_model: StepTimeModel) -> float:
    return time_model.seconds(candidate.cost.work, candidate.schedule)


def _score(candidate: Candidate, time_model: StepTimeModel) -> float:
    return _predict_seconds(candidate, time_model) * (1 + MIN_SAVING * _count_deviations(candidate.schedule))


def _count_deviations(schedule: Schedule) -> int:
    plain = Schedule()
    names = ("offload", "levels", "keep_kv", "keep_attention", "stream_grads")
    changed = sum(getattr(schedule, name) != getattr(plain, name) for name in names)
    return changed + bool(schedule.keep_layers) + bool(schedule.device_layers)


def _reduce_limits(limits: Limits, candidate: Candidate, simulation: Simulation) -> Limits:
    """Return the limits minus the bytes by which the candidate's estimate was below the simulation."""
    cost = candidate.cost

    def reduced(limit: int, simulated: int, estimated: float) -> int:
        return int(limit - max(0.0, (simulated - estimated) / (1 - limits.margin)) - 1)

    return replace(
        limits,
        device_bytes=reduced(limits.device_bytes, simulation.peak_bytes, cost.device_bytes),
        host_bytes=reduced(limits.host_bytes, simulation.host_bytes, cost.host_bytes),
        disk_bytes=reduced(limits.disk_bytes, simulation.disk_bytes, cost.disk_bytes),
    )


def _simulate_least_excess(
    ranked: list[Candidate],
    limits: Limits,
    workload: Workload,
    simulate: Simulate,
    tried: dict[Schedule, Simulation],
) -> Candidate | None:
    """Simulate the candidate with the smallest estimated excess; return the candidate if it fits, else None."""
    best = min(ranked, key=lambda candidate: candidate.excess_bytes(limits))
    if best.schedule not in tried:
        tried[best.schedule] = simulate(workload, best.schedule)
    return best if excess_bytes(tried[best.schedule], limits) <= 0 else None


# --- alternatives and limiting term -----------------------------------------------------------------------------------


def _schedule_kind(schedule: Schedule) -> tuple[object, ...]:
    """Return the choices of which two shown alternatives must differ in at least one."""
    return schedule.offload, schedule.levels, schedule.keep_attention, bool(schedule.keep_layers)


def _choose_alternatives(
    chosen: Candidate,
    tried: Mapping[Schedule, Simulation],
    ranked: list[Candidate],
    limits: Limits,
    time_model: StepTimeModel,
) -> tuple[Alternative, ...]:
    """Return up to :data:`MAX_SHOWN` alternatives, the fastest first, at most one of each :func:`_schedule_kind`.

    The fastest alternative that does not fit is taken first, if it is faster than the chosen schedule. Then follow the
    fastest that fits, the alternative with the least device memory, and others that fit.
    """
    chosen_seconds = _predict_seconds(chosen, time_model)
    # The factor between the simulated and the estimated time of the chosen schedule also corrects alternatives.
    time_correction = time_model.seconds(tried[chosen.schedule].work, chosen.schedule) / chosen_seconds
    others: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        if _schedule_kind(candidate.schedule) != _schedule_kind(chosen.schedule):
            others.setdefault(_schedule_kind(candidate.schedule), candidate)
    rest = list(others.values())
    fitting = [c for c in rest if c.excess_bytes(limits) <= 0]
    faster = [c for c in rest if c.excess_bytes(limits) > 0 and _score(c, time_model) < _score(chosen, time_model)]
    thrifty = sorted(rest, key=lambda c: c.cost.device_bytes)
    picked: list[Candidate] = []
    for group in (faster[:1], fitting[:1], thrifty[:1], fitting[1:]):
        picked += [c for c in group if c not in picked]
    picked = sorted(picked[:MAX_SHOWN], key=lambda c: _predict_seconds(c, time_model))
    return tuple(
        _make_alternative(candidate, chosen_seconds, time_correction, limits, time_model) for candidate in picked
    )


def _make_alternative(
    candidate: Candidate, chosen_seconds: float, time_correction: float, limits: Limits, time_model: StepTimeModel
) -> Alternative:
    cost, excess = candidate.cost, candidate.excess_bytes(limits)
    seconds = _predict_seconds(candidate, time_model)
    reason = f"{seconds / chosen_seconds:.2f}x the time"
    if excess > 0:
        reason = f"does not fit: exceeds the {candidate.most_exceeded_tier(limits)} memory by {show_size(excess)}"
    return Alternative(
        schedule=candidate.schedule,
        peak_bytes=round(cost.device_bytes),
        host_bytes=round(cost.host_bytes),
        disk_bytes=round(cost.disk_bytes),
        step_seconds=seconds * time_correction,
        fits=excess <= 0,
        why_not=reason,
    )


def _limiting_term(simulation: Simulation, limits: Limits) -> str:
    used = {
        "host": simulation.host_bytes / max(1, limits.host_limit),
        "disk": simulation.disk_bytes / max(1, limits.disk_limit),
        "device": simulation.peak_bytes / max(1, limits.device_limit),
    }
    tier = max(used, key=lambda name: used[name])
    if tier == "host" and simulation.host_terms:
        return f"{max(simulation.host_terms, key=lambda name: simulation.host_terms[name])} on host"
    if tier != "device":
        return f"layer inputs on {tier}"
    return max(simulation.terms, key=lambda name: simulation.terms[name])


def plan_schedule(model: nn.Module, **arguments: Any) -> Schedule:
    """Return the schedule of the plan that :func:`plan_step` makes with the same arguments."""
    return plan_step(model, **arguments).schedule


def plan_step(
    model: nn.Module,
    *,
    max_length: int,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch_size: int = 1,
    accumulated: bool = False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    autocast: bool = False,
    margin: float = 0.05,
    schedule: Schedule | None = None,
    **fixed: Any,
) -> Plan:
    """Return the plan of a training step of ``model``.

    Arguments other than ``schedule`` are the same as in :meth:`streamtune.Schedule.plan`.

    Args:
        schedule: Schedule to evaluate; None chooses the fastest schedule that fits.

    Raises:
        ArgumentError: No schedule fits, the model is already streamed, a field is unknown, or the model is on ``meta``
            and ``device_memory`` is not set. ``schedule`` may exceed the memory without an error.
    """
    device = model_device(model)
    if any("forward" in module.__dict__ for module in model.modules()):
        raise ArgumentError("the model is already streamed", fix="plan before stream(model), or call .remove() first")
    unknown = sorted(set(fixed) - set(Schedule.__dataclass_fields__))
    if unknown:
        names = ", ".join(Schedule.__dataclass_fields__)
        raise ArgumentError(f"unknown schedule field {unknown[0]!r}", fix=f"fields: {names}")
    device_type = "cpu" if device.type == "cpu" else "cuda"  # a model on meta is planned for an accelerator
    requested = _parse_bytes(device_memory, "device_memory")
    if device.type == "meta" and requested is None:
        raise ArgumentError(
            "a model on meta has no device, so its memory is unknown", fix="pass device_memory, such as '80GiB'"
        )
    device_bytes = requested if requested is not None else _free_bytes(device) + device_model_bytes(model)
    host_bytes = _parse_bytes(host_memory, "host_memory")
    offload_dir = fixed.get("offload_dir")
    limits = Limits(
        device_bytes=device_bytes,
        host_bytes=usable_host_bytes() if host_bytes is None else host_bytes,
        disk_bytes=free_disk_bytes(offload_dir) if offload_dir is not None else 0,
        margin=margin,
        shared=device_type == "cpu",
    )
    limits = add_offloaded_weights(limits, model, device_given=requested is not None, host_given=host_bytes is not None)
    dtype = torch.bfloat16 if autocast else next(p.dtype for p in model.parameters() if p.is_floating_point())
    rates = data_sheet_rates(nearest_device(device_bytes)) if device.type == "meta" else load_rates(device, dtype)
    meta_model = model if device.type == "meta" else meta_copy(model)
    workload = Workload(
        make_model=lambda: meta_model,
        length=max_length,
        batch_size=batch_size,
        micro_batches=2 if accumulated else 1,
        make_optimizer=optimizer or _make_adamw,
        autocast=autocast,
        device_type=device_type,
    )
    if schedule is not None:
        return evaluate_schedule(workload, schedule, limits, rates)
    return choose(workload, limits, rates, fixed=fixed)


def add_offloaded_weights(limits: Limits, model: nn.Module, *, device_given: bool, host_given: bool) -> Limits:
    """Return the limits, raised by the bytes of ``model``'s weights that are already offloaded to the host.

    The memory of a simulated step includes these weights, but the measured free memory does not. Limits that the user
    set are not raised.
    """
    away = host_model_bytes(model)
    if limits.shared:
        return limits if device_given else replace(limits, device_bytes=limits.device_bytes + away)
    return limits if host_given else replace(limits, host_bytes=limits.host_bytes + away)


def _free_bytes(device: torch.device) -> int:
    return usable_host_bytes() if device.type == "cpu" else free_device_bytes(device)


def _parse_bytes(size: int | str | None, name: str) -> int | None:
    return parse_size(size, where=name) if isinstance(size, str) else size


def _make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
