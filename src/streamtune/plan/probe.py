"""The longest sequence, or the largest batch, that can be trained: by trials on the device, or by simulation.

Trials are made one at a time by a function that the prober is given: :func:`measured` runs whole training steps in
processes of their own, :func:`streamtune.plan.simulate.simulate` walks them without a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from streamtune import interrupts
from streamtune.engine import Schedule
from streamtune.plan.search import Attempt, Range, search_largest
from streamtune.plan.steps import PrepareStep, Shape, StepBudget
from streamtune.plan.subject import Mode
from streamtune.plan.trial import Outcome, run_trial

__all__ = ["Limit", "ProbeReport", "ProbeTask", "RunTrial", "Trial", "measured", "run_probe"]

Scaled = Literal["length", "batch"]

RunTrial = Callable[[Shape, Callable[[str], None]], Outcome]
"""Tries a shape; told what it is doing it passes on."""


@dataclass(frozen=True)
class ProbeTask:
    """What is looked for.

    Attributes:
        method: ``measure`` or ``simulate``.
        objective: What is trained: ``sft``, ``dpo`` or ``grpo``.
        scaled: The length of a row, or the number of rows.
        fixed: The other of the two.
        within: Where to look, and when to stop.
        modes: Streaming, and what it is compared with.
        device_bytes, host_bytes, disk_bytes: The budget; None is what there is.
        schedule: The recipe's, or None where the planner picks one for every length.
        margin: Part of the budget that a simulated step leaves free, and one that the planner picks.
        unit: What a batch has so many of: ``row``, ``pair`` or ``completion``.
    """

    method: Literal["measure", "simulate"]
    objective: str
    scaled: Scaled
    fixed: int
    within: Range
    modes: tuple[Mode, ...]
    device_bytes: int | None
    host_bytes: int | None
    disk_bytes: int | None
    schedule: Schedule | None
    margin: float = 0.0
    unit: str = "row"

    def shape(self, mode: Mode, number: int) -> Shape:
        """The trial of a number."""
        return Shape(mode, number, self.fixed) if self.scaled == "length" else Shape(mode, self.fixed, number)


@dataclass(frozen=True)
class Trial:
    """A shape and how trying it ended."""

    shape: Shape
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """Flat, as ``--json`` has it."""
        flat = {**asdict(self.shape), **asdict(self.outcome)}
        left_out = {"env"} if self.outcome.traffic is not None else {"env", "traffic"}
        return {key: value for key, value in flat.items() if key not in left_out}


@dataclass(frozen=True)
class Limit:
    """The largest number that fits in one mode, and what the next would meet.

    Attributes:
        fits: The number; 0 where none does.
        fails: The smallest that does not; None where the search did not come to one.
        trial: The trial of ``fits``.
        failed: The trial of ``fails``.
        complete: Whether the search came to its end.
    """

    mode: Mode
    fits: int = 0
    fails: int | None = None
    trial: Trial | None = None
    failed: Trial | None = None
    complete: bool = False


@dataclass
class ProbeReport:
    """What was found, and every trial that led there."""

    task: ProbeTask
    env: dict[str, Any] = field(default_factory=dict)
    limits: dict[Mode, Limit] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every mode was searched to its end."""
        return all(mode in self.limits and self.limits[mode].complete for mode in self.task.modes)

    @property
    def device_bytes(self) -> int | None:
        """The budget on the device: what was asked for, or what the device turned out to have."""
        return self.env.get("device_bytes", self.task.device_bytes)

    @property
    def schedule(self) -> Schedule | None:
        """How the longest is streamed: the recipe's way, or what the planner picked for it."""
        limit = self.limits.get("stream")
        chosen = limit.trial.outcome.schedule if limit is not None and limit.trial is not None else None
        return chosen or self.task.schedule

    def _shared(self) -> dict[str, Any]:
        """The ranks, and what they send each other at the longest, where there are several."""
        if "cluster" not in self.env:
            return {}
        limit = self.limits.get("stream")
        outcome = limit.trial.outcome if limit is not None and limit.trial is not None else None
        return {"cluster": self.env["cluster"], "traffic": outcome.traffic if outcome is not None else None}

    def to_json(self) -> dict[str, Any]:
        """The document of ``streamtune probe-max-len --json``."""
        task = self.task
        found = {mode: limit.fits for mode, limit in self.limits.items()}
        scaled = "max_length" if task.scaled == "length" else "max_batch_size"
        fixed = {"batch_size": task.fixed} if task.scaled == "length" else {"length": task.fixed}
        return {
            scaled: found.get("stream"),
            **fixed,
            "method": task.method,
            "objective": task.objective,
            "unit": task.unit,
            "device_memory_bytes": self.device_bytes,
            "host_memory_bytes": task.host_bytes,
            "disk_memory_bytes": task.disk_bytes,
            "schedule": asdict(self.schedule) if self.schedule is not None else None,
            "baseline": {mode: count for mode, count in found.items() if mode != "stream"},
            "complete": self.complete,
            "margin": task.margin,
            "stops_at": {"share": task.within.share, "step": task.within.step},
            "limited_by": {mode: limit.failed.outcome.reason for mode, limit in self.limits.items() if limit.failed},
            **self._shared(),
            "env": self.env,
            "trials": [trial.to_json() for trial in self.trials],
        }


def measured(prepare: PrepareStep, budget: StepBudget, *, seconds: float) -> RunTrial:
    """Trials by whole training steps on the device.

    Args:
        prepare: Builds what is stepped, in the process of a trial: must be picklable.
        budget: Bytes a step may take.
        seconds: Time of a trial at most.
    """
    return lambda shape, tell: run_trial(prepare, shape, budget, seconds=seconds, tell=tell)


def run_probe(
    task: ProbeTask,
    run: RunTrial,
    *,
    notify: Callable[[str], None] = lambda message: None,
    tried: Callable[[Trial], None] = lambda trial: None,
) -> tuple[ProbeReport, bool]:
    """Search every mode; a trial that fails, however it does, is only that.

    Args:
        task: What is looked for.
        run: Makes a trial.
        notify: Told what is being tried, how far it is, and what is known to fit.
        tried: Told every trial when it is over.

    Returns:
        The report, and whether Ctrl-C ended it: then it holds what was known by then.
    """
    report = ProbeReport(task)
    try:
        with interrupts.postponed():
            for mode in task.modes:
                _search(task, mode, run, report, notify, tried)
    except KeyboardInterrupt:
        return report, True
    return report, False


def _search(
    task: ProbeTask,
    mode: Mode,
    run: RunTrial,
    report: ProbeReport,
    notify: Callable[[str], None],
    tried: Callable[[Trial], None],
) -> None:
    def attempt(number: int) -> Attempt:
        shape = task.shape(mode, number)
        known = report.limits[mode]
        say = _Sayer(
            f"{mode}, {_amount(shape)}", known.fits, "tokens" if task.scaled == "length" else f"{task.unit}s", notify
        )
        say("")
        outcome = run(shape, say)
        interrupts.check()
        report.env = report.env or outcome.env
        trial = Trial(shape, outcome)
        report.trials.append(trial)
        report.limits[mode] = _updated(known, number, trial)
        tried(trial)
        return Attempt(outcome.fits, _filled(outcome, report))

    report.limits[mode] = Limit(mode)
    search_largest(attempt, task.within)
    report.limits[mode] = replace(report.limits[mode], complete=True)


def _updated(limit: Limit, number: int, trial: Trial) -> Limit:
    if trial.outcome.fits:
        return replace(limit, fits=number, trial=trial) if number > limit.fits else limit
    if limit.fails is None or number < limit.fails:
        return replace(limit, fails=number, failed=trial)
    return limit


def _filled(outcome: Outcome, report: ProbeReport) -> float | None:
    """The part of the budget that a step took.

    None of a measured one that was broken off, or whose schedule the planner picked: it takes what there is.
    """
    task = report.task
    if task.method == "measure" and (task.schedule is None or not outcome.fits):
        return None
    pairs = [
        (outcome.peak_bytes, report.device_bytes),
        (outcome.host_bytes, task.host_bytes),
        (outcome.disk_bytes, task.disk_bytes),
    ]
    usable = 1.0 if task.method == "measure" else 1 - task.margin
    parts = [used / (usable * limit) for used, limit in pairs if used is not None and limit]
    return max(parts, default=None)


def _amount(shape: Shape) -> str:
    rows = f"{shape.batch_size:,} x " if shape.batch_size > 1 else ""
    return f"{rows}{shape.length:,} tokens"


@dataclass(frozen=True)
class _Sayer:
    """What is shown while a trial runs: what is tried, how far it is, what is known to fit."""

    trying: str
    fits: int
    unit: str
    notify: Callable[[str], None]

    def __call__(self, phase: str) -> None:
        interrupts.check()  # a simulated trial speaks of what it does
        known = f" (fits: {self.fits:,} {self.unit})" if self.fits else ""
        self.notify(f"{self.trying}{f': {phase}' if phase else ''}{known}")
