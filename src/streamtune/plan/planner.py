"""The fastest exact schedule that fits the memory there is.

1. A few short simulations tell what every choice adds to the memory and to the work of a step (``estimate``).
2. All combinations are sized to the room there is (``choices``) and put in order of predicted time (``cost``).
3. The first that is estimated to fit is simulated whole, at its real length. If it does not fit after all, the room is
   made smaller by what was missing, and 2 is done again.

What is returned has been simulated; the alternatives beside it are estimates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamtune.engine import Schedule, decoder_layers
from streamtune.errors import ArgumentError
from streamtune.plan.choices import Candidate, Limits, Space, candidates
from streamtune.plan.cost import Rates, predict_seconds
from streamtune.plan.estimate import Estimator, Simulate
from streamtune.plan.refusal import nothing_fits
from streamtune.plan.simulate import Simulation, Workload, simulate

__all__ = ["Alternative", "Limits", "Plan", "choose"]

MOST_TRIED = 6
"""Whole simulations of candidates before the thriftiest is the last."""

WORTH = 0.003
"""Part of a step that a departure from the default schedule must save. A prediction says no more than that."""

SHOWN = 3
"""Alternatives that are told."""


@dataclass(frozen=True)
class Alternative:
    """A schedule that was not chosen: its estimated bytes and seconds, and why not."""

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
        simulation: Its step, simulated at its length.
        step_seconds: Its predicted time.
        alternatives: Others, the fastest first, as far as they were estimated.
        binds: What takes the memory that is scarcest: the largest term of that tier.
        limits: What was planned with.
        rates: What the time is predicted from.
        seconds: What planning took.
        simulations: How many were made, the short ones included.
    """

    schedule: Schedule
    simulation: Simulation
    step_seconds: float
    alternatives: tuple[Alternative, ...]
    binds: str
    limits: Limits
    rates: Rates
    seconds: float = 0.0
    simulations: int = 1

    def to_json(self) -> dict[str, Any]:
        """The document of ``streamtune plan --json``."""
        return {
            "schedule": asdict(self.schedule),
            "peak_bytes": self.simulation.peak_bytes,
            "host_bytes": self.simulation.host_bytes,
            "disk_bytes": self.simulation.disk_bytes,
            "terms": dict(self.simulation.terms),
            "step_seconds": self.step_seconds,
            "fits": True,
            "alternatives": [
                {**asdict(other), "schedule": asdict(other.schedule)} for other in self.alternatives
            ],
            "binds": self.binds,
            "phase": self.simulation.phase,
            "phases": dict(self.simulation.phases),
            "work": asdict(self.simulation.work),
            "limits": asdict(self.limits),
            "rates": asdict(self.rates),
            "planning_seconds": self.seconds,
        }


def choose(
    workload: Workload,
    limits: Limits,
    rates: Rates,
    *,
    fixed: Mapping[str, Any] | None = None,
    simulate: Simulate = simulate,
) -> Plan:
    """Choose the fastest exact schedule for ``workload`` within ``limits``.

    Args:
        workload: What is trained, at the length to plan for.
        limits: The memory.
        rates: How fast the device is.
        fixed: Fields of the schedule that are given and stay.
        simulate: Simulates a step.

    Raises:
        ArgumentError: Nothing fits: which term is in the way, and what would help.
    """
    started = time.perf_counter()
    space = Space(len(decoder_layers(workload.make_model())), workload.length, limits, fixed or {})
    estimator = Estimator(workload, simulate, space.reference())
    found: tuple[Candidate, Simulation] | None = None
    room, tried = limits, dict[Schedule, Simulation]()
    while found is None and len(tried) < MOST_TRIED:
        ranked = _ranked(space, estimator, room, rates)
        fitting = [candidate for candidate in ranked if candidate.excess(room) <= 0]
        best = next((c for c in fitting if c.schedule not in tried), None)
        if best is None:
            break
        simulation = tried[best.schedule] = simulate(workload, best.schedule)
        excess = _excess(simulation, limits)
        if excess <= 0:
            found = best, simulation
        else:
            room = _less(room, best, simulation)
    if found is None:
        ranked = _ranked(space, estimator, limits, rates)
        found = _thriftiest(ranked, limits, workload, simulate, tried)
    if found is None:
        raise nothing_fits(workload, space, estimator, ranked, tried, limits, simulate)
    candidate, simulation = found
    return Plan(
        schedule=candidate.schedule,
        simulation=simulation,
        step_seconds=predict_seconds(simulation.work, rates),
        alternatives=_alternatives(candidate, simulation, ranked, limits, rates),
        binds=_binds(simulation, limits),
        limits=limits,
        rates=rates,
        seconds=time.perf_counter() - started,
        simulations=estimator.simulations + len(tried),
    )


# --- the order --------------------------------------------------------------------------------------------------------


def _ranked(space: Space, estimator: Estimator, room: Limits, rates: Rates) -> list[Candidate]:
    """All candidates, the fastest first; of two as fast the plainer."""
    return sorted(candidates(space, estimator, room), key=lambda candidate: _score(candidate, rates))


def _score(candidate: Candidate, rates: Rates) -> float:
    return predict_seconds(candidate.figures.work, rates) * (1 + WORTH * _departures(candidate.schedule))


def _departures(schedule: Schedule) -> int:
    """How many choices differ from a plain schedule; sizes are no choices."""
    plain = Schedule()
    names = ("offload", "levels", "keep_kv", "keep_attention", "stream_grads")
    changed = sum(getattr(schedule, name) != getattr(plain, name) for name in names)
    return changed + bool(schedule.keep_layers) + bool(schedule.device_layers)


def _excess(simulation: Simulation, limits: Limits) -> float:
    return limits.excess(simulation.peak_bytes, simulation.host_bytes, simulation.disk_bytes)


def _less(room: Limits, candidate: Candidate, simulation: Simulation) -> Limits:
    """The room without what the estimate of a candidate left out."""
    figures = candidate.figures

    def shrunk(size: int, real: int, estimated: float) -> int:
        return int(size - max(0.0, (real - estimated) / (1 - room.margin)) - 1)

    return replace(
        room,
        device_bytes=shrunk(room.device_bytes, simulation.peak_bytes, figures.device_bytes),
        host_bytes=shrunk(room.host_bytes, simulation.host_bytes, figures.host_bytes),
        disk_bytes=shrunk(room.disk_bytes, simulation.disk_bytes, figures.disk_bytes),
    )


def _thriftiest(
    ranked: list[Candidate],
    limits: Limits,
    workload: Workload,
    simulate: Simulate,
    tried: dict[Schedule, Simulation],
) -> tuple[Candidate, Simulation] | None:
    """The candidate that misses the limits by least, if it fits when it is simulated."""
    best = min(ranked, key=lambda candidate: candidate.excess(limits))
    if best.schedule not in tried:
        tried[best.schedule] = simulate(workload, best.schedule)
    simulation = tried[best.schedule]
    return (best, simulation) if _excess(simulation, limits) <= 0 else None


# --- what there is to say about it ------------------------------------------------------------------------------------


def _kind(schedule: Schedule) -> tuple[object, ...]:
    """What a schedule does, whatever its sizes: alternatives of one kind are one alternative."""
    names = ("offload", "levels", "keep_kv", "keep_attention", "stream_grads")
    return (*(getattr(schedule, name) for name in names), bool(schedule.keep_layers))


def _alternatives(
    chosen: Candidate, simulation: Simulation, ranked: list[Candidate], limits: Limits, rates: Rates
) -> tuple[Alternative, ...]:
    """The fastest that does not fit, the next that does, and the thriftiest: one of each kind."""
    own = predict_seconds(simulation.work, rates)
    others: dict[tuple[object, ...], Candidate] = {}
    for candidate in ranked:
        if _kind(candidate.schedule) != _kind(chosen.schedule):
            others.setdefault(_kind(candidate.schedule), candidate)
    rest = list(others.values())
    fitting = [c for c in rest if c.excess(limits) <= 0]
    faster = [c for c in rest if c.excess(limits) > 0 and _score(c, rates) < _score(chosen, rates)]
    thrifty = sorted(rest, key=lambda c: c.figures.device_bytes)
    picked: list[Candidate] = []
    for group in (faster[:1], fitting[:1], thrifty[:1], fitting[1:]):
        picked += [c for c in group if c not in picked]
    picked = sorted(picked[:SHOWN], key=lambda c: predict_seconds(c.figures.work, rates))
    return tuple(_alternative(candidate, own, limits, rates) for candidate in picked)


def _alternative(candidate: Candidate, own: float, limits: Limits, rates: Rates) -> Alternative:
    from streamtune.sizes import show_size

    figures, excess = candidate.figures, candidate.excess(limits)
    seconds = predict_seconds(figures.work, rates)
    why = f"{show_size(excess)} too much" if excess > 0 else f"{seconds / own:.2f}x the time"
    return Alternative(
        schedule=candidate.schedule,
        peak_bytes=round(figures.device_bytes),
        host_bytes=round(figures.host_bytes),
        disk_bytes=round(figures.disk_bytes),
        step_seconds=seconds,
        fits=excess <= 0,
        why_not=why,
    )


def _binds(simulation: Simulation, limits: Limits) -> str:
    """The largest term of the tier with the least room left, in proportion."""
    used = {
        "host": simulation.host_bytes / max(1, limits.host),
        "disk": simulation.disk_bytes / max(1, limits.disk),
        "device": simulation.peak_bytes / max(1, limits.device),
    }
    tier = max(used, key=lambda name: used[name])
    if tier != "device":
        return f"layer inputs on {tier}"
    return max(simulation.terms, key=lambda name: simulation.terms[name])
