"""Choose the fastest exact schedule that fits the available memory.

1. A few simulations give what every choice adds to the memory and to the work of a step (``estimate``).
2. All combinations are sized to the available memory (``choices``) and sorted by predicted time (``rates``).
3. The first that is estimated to fit is simulated itself, at its real length. If it does not fit, the memory to plan
   with is reduced for its chunk size by what the estimate left out, and step 2 is repeated.

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
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits, free_device_bytes, free_disk_bytes
from streamtune.plan.calibrate import load_rates
from streamtune.plan.choices import Candidate, Space, best_in_chunk_order, candidates, excess_of, may_order_chunks
from streamtune.plan.estimate import Estimator, Figures, Simulate
from streamtune.plan.rates import Rates, nearest_device, sheet_rates
from streamtune.plan.refusal import NothingFitsError, nothing_fits, smallest_step
from streamtune.plan.simulate.memory import device_held_bytes, host_held_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload, workload_flops
from streamtune.plan.traffic import Pace, Traffic
from streamtune.schedule import GIVEN, Schedule

MOST_TRIED = 6
"""Simulations of candidates before the smallest one is the last."""

LEAST_SAVING = 0.003
"""Fraction of a step that a departure from the default schedule must save: predictions are not more precise."""

LEAST_SLOWDOWN = 1.1
"""Step time relative to the same step without copies to host and disk, from which the other order is tried."""

MOST_SHOWN = 3

KEEPS_NOTHING: dict[str, Any] = {
    "order": "layer",
    "offload": "device",
    "levels": 1,
    "keep_kv": "no",
    "keep_attention": "no",
    "keep_layers": 0,
    "stream_grads": False,
}
"""Choices of a step without a backward, for which nothing is stored."""


@dataclass(frozen=True)
class Alternative:
    """A schedule that was not chosen: its estimated bytes and seconds, and the reason why not."""

    schedule: Schedule
    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    step_seconds: float
    fits: bool
    why_not: str


@dataclass(frozen=True)
class Plan:
    """The schedule to train with.

    Attributes:
        schedule: The fastest found that fits.
        simulation: Its simulated step, at its length.
        step_seconds: Its predicted time.
        alternatives: Other estimated schedules, the fastest first.
        binds: The largest term of the tier in which memory is scarcest.
        limits: The memory that was planned with.
        rates: The rates that the time is predicted from.
        traffic: Messages between ranks in the step.
        seconds: Seconds that planning took.
        simulations: Number of simulations, including those for the estimates.
        flops: FLOPs that the model needs for the step, of the ranks that share a sequence (``simulate.workload``).
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
        """True if the simulated step is within the limits: always of a chosen schedule, not always of a given one."""
        return excess_of(self.simulation, self.limits) <= 0

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
    """Choose the fastest exact schedule for ``workload`` within ``limits``.

    The order of chunks is tried if it is given, if nothing else fits, and if the fastest schedule in the order of
    layers recomputes layers or waits for copies.

    Args:
        workload: The step that is trained, at the length to plan for.
        limits: The memory.
        rates: Rates of the device.
        fixed: Given fields of the schedule.
        simulate: Simulates a step.
        explain: Find out what would help if nothing fits, by more simulations.

    Raises:
        NothingFitsError: Nothing fits; the error names the largest terms, and what would help.
    """
    written, plan = dict(fixed or {}), None
    refuse = nothing_fits if explain else _nothing_fits
    if workload.step.gradients == "none":  # nothing is kept: a schedule is its chunks
        written = {**KEEPS_NOTHING, **written}
    if written.get("weights") == "host":  # layers that are kept whole, or taken again for every chunk, need theirs
        written = {"keep_layers": 0, "order": "layer", **written}
    if written.get("order") != "chunk":
        plan = _choose_in_layer_order(workload, limits, rates, fixed=written, simulate=simulate, refuse=refuse)
        if not may_order_chunks(written, workload.cluster) or not _is_slowed(plan, workload):
            return plan
    started, pace = time.perf_counter(), Pace(workload, rates)
    space = Space(len(decoder_layers(workload.make_model())), workload.shard_tokens, limits, written)
    found = best_in_chunk_order(workload, space, simulate)
    if plan is None and found is None:
        found = smallest_step(workload, limits, written, simulate)
        if excess_of(found[1], limits) > 0:
            raise refuse(workload, space, dict([found]), limits, simulate)
    if found is None or (
        plan is not None and plan.step_seconds <= (1 + LEAST_SAVING) * pace.seconds(found[1].work, found[0])
    ):
        assert plan is not None
        return plan
    return _plan(*found, limits, pace, started)


def _is_slowed(plan: Plan, workload: Workload) -> bool:
    """Return True if a plan recomputes layers, or takes longer for its copies to host or disk."""
    work = replace(plan.simulation.work, moved_bytes=0, disk_moved_bytes=0)
    undelayed = Pace(workload, plan.rates).seconds(work, plan.schedule)
    return plan.schedule.levels == 2 or plan.step_seconds > LEAST_SLOWDOWN * undelayed


def _nothing_fits(*_: Any) -> NothingFitsError:
    """Return the error alone, where nobody reads what would help."""
    return NothingFitsError("no schedule fits", where="max_length")


def _choose_in_layer_order(
    workload: Workload,
    limits: Limits,
    rates: Rates,
    *,
    fixed: Mapping[str, Any],
    simulate: Simulate,
    refuse: Callable[..., NothingFitsError],
) -> Plan:
    started = time.perf_counter()
    pace = Pace(workload, rates)
    model: Any = workload.make_model()
    layers = decoder_layers(model)
    space = Space(len(layers), workload.shard_tokens, limits, fixed or {})
    if _may_hold_all(space, workload, model.get_input_embeddings().weight) and (
        easy := _nothing_recomputed(space, workload, simulate)
    ):
        return _plan(*easy, limits, pace, started)
    estimator = Estimator(
        workload,
        len(layers),
        simulate,
        chunks=space.options("chunk_size"),
        head_chunk=space.options("head_chunk_size")[-1],
        given=space.given,
    )
    tried: dict[Schedule, Simulation] = {}
    reduced: dict[int, Limits] = {}  # by chunk size: an estimate of long chunks says nothing of short ones
    found = None
    while found is None and len(tried) < MOST_TRIED:
        ranked = _ranked(space, estimator, limits, pace, reduced)
        best = next(
            (
                c
                for c in ranked
                if c.excess(reduced.get(c.schedule.chunk_size, limits)) <= 0 and c.schedule not in tried
            ),
            None,
        )
        if best is None:
            break
        simulation = tried[best.schedule] = simulate(workload, best.schedule)
        if excess_of(simulation, limits) <= 0:
            found = best
        else:
            size = best.schedule.chunk_size
            reduced[size] = _less(reduced.get(size, limits), best, simulation)
    if found is None:
        ranked = _ranked(space, estimator, limits, pace)
        found = _least_excess(ranked, limits, workload, simulate, tried)
    if found is None:  # estimates err: what reaches furthest is asked itself
        schedule, simulation = smallest_step(workload, limits, space.fixed, simulate)
        tried[schedule] = simulation
        if excess_of(simulation, limits) > 0:
            raise refuse(workload, space, tried, limits, simulate)
        if schedule.levels == 2 and not {"levels", "segment_size"} & set(space.fixed):  # less work, where it fits
            plainer = replace(schedule, levels=1)
            tried[plainer] = simulate(workload, plainer)
            schedule = plainer if excess_of(tried[plainer], limits) <= 0 else schedule
        found = Candidate(schedule, Figures.of(tried[schedule]))
    others = _alternatives(found, tried, ranked, limits, pace)
    plan = _plan(found.schedule, tried[found.schedule], limits, pace, started)
    return replace(plan, alternatives=others, simulations=estimator.simulations + len(tried))


def _plan(schedule: Schedule, simulation: Simulation, limits: Limits, pace: Pace, started: float) -> Plan:
    return Plan(
        schedule=schedule,
        simulation=simulation,
        step_seconds=pace.seconds(simulation.work, schedule),
        alternatives=(),
        binds=_binds(simulation, limits),
        limits=limits,
        rates=pace.rates,
        traffic=pace.traffic(schedule),
        seconds=time.perf_counter() - started,
        flops=workload_flops(pace.workload),
    )


def evaluate_schedule(
    workload: Workload, schedule: Schedule, limits: Limits, rates: Rates, *, simulate: Simulate = simulate
) -> Plan:
    """Return the plan of a given schedule, its simulated memory and predicted time, whether it fits or not."""
    started = time.perf_counter()
    simulation = simulate(workload, schedule)
    return _plan(schedule, simulation, limits, Pace(workload, rates), started)


def as_fixed(schedule: Schedule) -> dict[str, Any]:
    """Return every field of a schedule as the argument ``fixed`` of :func:`choose`."""
    return {f.name: getattr(schedule, f.name) for f in fields(schedule)}


# --- the short way ---------------------------------------------------------------------------------------------------


SIZES = {"chunk_size", "head_chunk_size", "offload_dir", "order", *GIVEN}
"""Fields that may be given without deciding what is kept."""

LEAST_OF_A_LAYER = 8
"""Bytes of a layer's activations at least, in hidden states."""


def _may_hold_all(space: Space, workload: Workload, embedding: Tensor) -> bool:
    """Return True if the activations of all layers may fit, so that a simulation is worth its time."""
    if not set(space.fixed) <= SIZES:
        return False
    token_bytes = embedding.shape[-1] * (2 if workload.autocast else embedding.element_size())
    tokens = workload.shard_tokens * workload.rows
    return LEAST_OF_A_LAYER * token_bytes * tokens * space.layers <= space.limits.device


def _nothing_recomputed(space: Space, workload: Workload, simulate: Simulate) -> tuple[Schedule, Simulation] | None:
    """Return the fastest schedule, which keeps every layer whole, and its step; None if it does not fit."""
    sizes = {name: value for name, value in space.fixed.items() if name != "offload_dir"}
    schedule = Schedule(**sizes, keep_layers=space.layers)
    simulation = simulate(workload, schedule)
    return (schedule, simulation) if excess_of(simulation, space.limits) <= 0 else None


# --- the order --------------------------------------------------------------------------------------------------------


def _ranked(
    space: Space, estimator: Estimator, limits: Limits, pace: Pace, reduced: Mapping[int, Limits] | None = None
) -> list[Candidate]:
    """Return all candidates, the fastest first; of two that are about as fast, the plainer first.

    ``reduced`` has the memory for some chunk sizes, where it is less than ``limits``.
    """
    return sorted(candidates(space, estimator, limits, reduced), key=lambda candidate: _score(candidate, pace))


def _seconds(candidate: Candidate, pace: Pace) -> float:
    return pace.seconds(candidate.figures.work, candidate.schedule)


def _score(candidate: Candidate, pace: Pace) -> float:
    return _seconds(candidate, pace) * (1 + LEAST_SAVING * _departures(candidate.schedule))


def _departures(schedule: Schedule) -> int:
    plain = Schedule()
    names = ("offload", "levels", "keep_kv", "keep_attention", "stream_grads")
    changed = sum(getattr(schedule, name) != getattr(plain, name) for name in names)
    return changed + bool(schedule.keep_layers) + bool(schedule.device_layers)


def _less(limits: Limits, candidate: Candidate, simulation: Simulation) -> Limits:
    """Return the limits, reduced by what the estimate of a candidate left out."""
    figures = candidate.figures

    def shrunk(size: int, real: int, estimated: float) -> int:
        return int(size - max(0.0, (real - estimated) / (1 - limits.margin)) - 1)

    return replace(
        limits,
        device_bytes=shrunk(limits.device_bytes, simulation.peak_bytes, figures.device_bytes),
        host_bytes=shrunk(limits.host_bytes, simulation.host_bytes, figures.host_bytes),
        disk_bytes=shrunk(limits.disk_bytes, simulation.disk_bytes, figures.disk_bytes),
    )


def _least_excess(
    ranked: list[Candidate],
    limits: Limits,
    workload: Workload,
    simulate: Simulate,
    tried: dict[Schedule, Simulation],
) -> Candidate | None:
    """Return the candidate that is least above the limits, if it fits when it is simulated; else None."""
    best = min(ranked, key=lambda candidate: candidate.excess(limits))
    if best.schedule not in tried:
        tried[best.schedule] = simulate(workload, best.schedule)
    return best if excess_of(tried[best.schedule], limits) <= 0 else None


# --- what there is to say about it ------------------------------------------------------------------------------------


def _kind(schedule: Schedule) -> tuple[object, ...]:
    """Return the kind of a schedule, regardless of its sizes: at most one alternative of each kind is shown."""
    return schedule.offload, schedule.levels, schedule.keep_attention, bool(schedule.keep_layers)


def _alternatives(
    chosen: Candidate,
    tried: Mapping[Schedule, Simulation],
    ranked: list[Candidate],
    limits: Limits,
    pace: Pace,
) -> tuple[Alternative, ...]:
    """Return the fastest that does not fit, the next that does, and the one with the least device memory: one of each
    kind.
    """
    own = _seconds(chosen, pace)
    real = pace.seconds(tried[chosen.schedule].work, chosen.schedule) / own  # what estimates are off by, there
    others: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        if _kind(candidate.schedule) != _kind(chosen.schedule):
            others.setdefault(_kind(candidate.schedule), candidate)
    rest = list(others.values())
    fitting = [c for c in rest if c.excess(limits) <= 0]
    faster = [c for c in rest if c.excess(limits) > 0 and _score(c, pace) < _score(chosen, pace)]
    thrifty = sorted(rest, key=lambda c: c.figures.device_bytes)
    picked: list[Candidate] = []
    for group in (faster[:1], fitting[:1], thrifty[:1], fitting[1:]):
        picked += [c for c in group if c not in picked]
    picked = sorted(picked[:MOST_SHOWN], key=lambda c: _seconds(c, pace))
    return tuple(_alternative(candidate, own, real, limits, pace) for candidate in picked)


def _alternative(candidate: Candidate, own: float, real: float, limits: Limits, pace: Pace) -> Alternative:
    figures, excess = candidate.figures, candidate.excess(limits)
    seconds = _seconds(candidate, pace)
    why = f"{seconds / own:.2f}x the time"
    if excess > 0:
        why = f"does not fit, {show_size(excess)} too much on the {candidate.tier_that_lacks(limits)}"
    return Alternative(
        schedule=candidate.schedule,
        peak_bytes=round(figures.device_bytes),
        host_bytes=round(figures.host_bytes),
        disk_bytes=round(figures.disk_bytes),
        step_seconds=seconds * real,
        fits=excess <= 0,
        why_not=why,
    )


def _binds(simulation: Simulation, limits: Limits) -> str:
    used = {
        "host": simulation.host_bytes / max(1, limits.host),
        "disk": simulation.disk_bytes / max(1, limits.disk),
        "device": simulation.peak_bytes / max(1, limits.device),
    }
    tier = max(used, key=lambda name: used[name])
    if tier == "host" and simulation.host_terms:
        return f"{max(simulation.host_terms, key=lambda name: simulation.host_terms[name])} on host"
    if tier != "device":
        return f"layer inputs on {tier}"
    return max(simulation.terms, key=lambda name: simulation.terms[name])


def plan_schedule(model: nn.Module, **how: Any) -> Schedule:
    """Plan a step, and return its schedule, as :meth:`streamtune.Schedule.plan` does."""
    return plan_step(model, **how).schedule


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
    """Plan a step of a model, with its simulation; takes the arguments of :meth:`streamtune.Schedule.plan`.

    Args:
        schedule: A given schedule: it is simulated, and no other is looked for.

    Raises:
        ArgumentError: No schedule fits, or the model is streamed already; a given schedule is not refused.
    """
    device = model_device(model)
    if any("forward" in module.__dict__ for module in model.modules()):
        raise ArgumentError("the model is streamed already", fix="plan before stream(model), or .remove() it first")
    unknown = sorted(set(fixed) - set(Schedule.__dataclass_fields__))
    if unknown:
        raise ArgumentError(f"a schedule has no {unknown[0]!r}", fix=", ".join(Schedule.__dataclass_fields__))
    planned_for = "cpu" if device.type == "cpu" else "cuda"  # a model on meta is planned for an accelerator
    given = _bytes(device_memory, "device_memory")
    if device.type == "meta" and given is None:
        raise ArgumentError("a model on meta has no device", fix="say device_memory='80GiB'")
    device_bytes = given if given is not None else _free(device) + device_held_bytes(model)
    host_bytes = _bytes(host_memory, "host_memory")
    offload_dir = fixed.get("offload_dir")
    limits = Limits(
        device_bytes=device_bytes,
        host_bytes=usable_host_bytes() if host_bytes is None else host_bytes,
        disk_bytes=free_disk_bytes(offload_dir) if offload_dir is not None else 0,
        margin=margin,
        shared=planned_for == "cpu",
    )
    limits = with_waiting_weights(limits, model, device_given=given is not None, host_given=host_bytes is not None)
    dtype = torch.bfloat16 if autocast else next(p.dtype for p in model.parameters() if p.is_floating_point())
    rates = sheet_rates(nearest_device(device_bytes)) if device.type == "meta" else load_rates(device, dtype)
    shape = model if device.type == "meta" else meta_copy(model)
    workload = Workload(
        make_model=lambda: shape,
        length=max_length,
        batch_size=batch_size,
        micro_batches=2 if accumulated else 1,
        make_optimizer=optimizer or _adamw,
        autocast=autocast,
        device_type=planned_for,
    )
    if schedule is not None:
        return evaluate_schedule(workload, schedule, limits, rates)
    return choose(workload, limits, rates, fixed=fixed)


def with_waiting_weights(limits: Limits, model: nn.Module, *, device_given: bool, host_given: bool) -> Limits:
    """Return the limits, raised by the bytes that weights of ``model`` on the host already take there.

    They are part of what a step holds, and the free memory was measured besides them. Given memory is not raised.
    """
    away = host_held_bytes(model)
    if limits.shared:
        return limits if device_given else replace(limits, device_bytes=limits.device_bytes + away)
    return limits if host_given else replace(limits, host_bytes=limits.host_bytes + away)


def _free(device: torch.device) -> int:
    return usable_host_bytes() if device.type == "cpu" else free_device_bytes(device)


def _bytes(size: int | str | None, name: str) -> int | None:
    return parse_size(size, where=name) if isinstance(size, str) else size


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
