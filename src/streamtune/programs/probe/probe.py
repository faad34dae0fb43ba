"""Search for the longest sequence or the largest batch that fits in memory, and draw a plot of the result.

A trial tests one length or batch size by a training step that is measured (:func:`measured_trials`) or simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from streamtune.base import interrupts
from streamtune.base.palette import COLOURS, INK, to_png, with_default_style
from streamtune.plan.budget import Attempt, Budget, Range, search_largest
from streamtune.plan.simulate.workload import LABELS, Mode
from streamtune.programs.probe.trial import Outcome, PrepareStep, Shape, run_trial
from streamtune.schedule import Schedule

Scaled = Literal["length", "batch"]

RunTrial = Callable[[Shape, Callable[[str], None]], Outcome]
"""Function ``(shape, tell) -> outcome`` that runs one trial and calls ``tell`` with the name of each phase."""

LENGTHS = Range(first=2048, least=256, most=1 << 27, step=256, grain=64)
"""Default range, first value and tolerance of a search over sequence lengths, in tokens."""


@dataclass(frozen=True)
class ProbeTask:
    """Settings of a search for the longest sequence or the largest batch.

    Attributes:
        scaled: Quantity to maximise: sequence length, or batch size.
        fixed: Value of the other quantity.
        within: Smallest and largest value of ``scaled`` to try, and the tolerance of the search.
        modes: Training methods to search: streaming, and baselines such as gradient checkpointing.
        device_bytes, host_bytes, disk_bytes: Memory budgets; None is all available memory.
        schedule: Fixed streaming schedule of the recipe; None if the planner chooses a schedule for each length.
        margin: Fraction of the budgets that simulated and planned steps leave free.
        unit: Name of the items that the batch size counts: ``row``, ``pair`` or ``completion``.
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

    def trial_shape(self, mode: Mode, number: int) -> Shape:
        return Shape(mode, number, self.fixed) if self.scaled == "length" else Shape(mode, self.fixed, number)


@dataclass(frozen=True)
class Trial:
    """A finished trial: training method, sequence length and batch size, and whether the step fits in memory."""

    shape: Shape
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        flat = {**asdict(self.shape), **asdict(self.outcome)}
        left_out = {"env"} if self.outcome.traffic is not None else {"env", "traffic"}
        return {key: value for key, value in flat.items() if key not in left_out}


@dataclass(frozen=True)
class Limit:
    """Result of the search with one training method. Numbers are sequence lengths or batch sizes.

    Attributes:
        fits: Largest number that fits; 0 if none fits.
        fails: Smallest number that does not fit; None if every trial fits.
        trial: Trial of ``fits``.
        failed: Trial of ``fails``.
        complete: True if the search has ended.
    """

    mode: Mode
    fits: int = 0
    fails: int | None = None
    trial: Trial | None = None
    failed: Trial | None = None
    complete: bool = False


@dataclass
class ProbeReport:
    """Results of a search: the limit of each training method, and all trials."""

    task: ProbeTask
    env: dict[str, Any] = field(default_factory=dict)
    limits: dict[Mode, Limit] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    positions: str | None = None
    """Warning that the found length exceeds the model's maximum position; None if it does not."""
    not_measured: tuple[str, ...] = ()
    """Recipe keys about several devices, which measured trials leave out."""

    @property
    def complete(self) -> bool:
        return all(mode in self.limits and self.limits[mode].complete for mode in self.task.modes)

    @property
    def device_bytes(self) -> int | None:
        """Device memory budget of the trials, in bytes; before the first trial, the budget of the task."""
        return self.env.get("device_bytes", self.task.device_bytes)

    @property
    def schedule(self) -> Schedule | None:
        """Streaming schedule of the longest trial that fits; without such a trial, the recipe's fixed schedule."""
        limit = self.limits.get("stream")
        chosen = limit.trial.outcome.schedule if limit is not None and limit.trial is not None else None
        return chosen or self.task.schedule

    def _cluster_facts(self) -> dict[str, Any]:
        """Return the simulated cluster, and the traffic of a rank at the longest length; empty with one rank."""
        if "cluster" not in self.env:
            return {}
        limit = self.limits.get("stream")
        outcome = limit.trial.outcome if limit is not None and limit.trial is not None else None
        return {"cluster": self.env["cluster"], "traffic": outcome.traffic if outcome is not None else None}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that ``streamtune probe-max-len --json`` prints."""
        task = self.task
        found = {mode: limit.fits for mode, limit in self.limits.items()}
        scaled = "max_length" if task.scaled == "length" else "max_batch_size"
        fixed = {"batch_size": task.fixed} if task.scaled == "length" else {"length": task.fixed}
        return {
            scaled: found.get("stream"),
            **fixed,
            "method": task.method,
            "objective": task.objective,
            "positions": self.positions,
            "not_measured": list(self.not_measured),
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
            **self._cluster_facts(),
            "env": self.env,
            "trials": [trial.to_json() for trial in self.trials],
        }


def measured_trials(prepare: PrepareStep, budget: Budget, *, timeout_seconds: float) -> RunTrial:
    """Return a function that runs a trial in a process of its own, with whole training steps on the device."""
    return lambda shape, tell: run_trial(prepare, shape, budget, timeout_seconds=timeout_seconds, notify_phase=tell)


def run_probe(
    task: ProbeTask,
    run_trial: RunTrial,
    *,
    notify: Callable[[str], None] = lambda message: None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[ProbeReport, bool]:
    """Search the limit of every training method. A failed trial does not end the search.

    Args:
        notify: Callback for text about the current trial, its phase, and the largest number known to fit.
        on_trial: Callback for each finished trial.

    Returns:
        The report, and True if Ctrl-C ended the search. The report then holds the finished trials.
    """
    report = ProbeReport(task)
    try:
        with interrupts.postpone_ctrl_c():
            for mode in task.modes:
                _search_limit(task, mode, run_trial, report, notify, on_trial)
    except KeyboardInterrupt:
        return report, True
    return report, False


def _search_limit(
    task: ProbeTask,
    mode: Mode,
    run_trial: RunTrial,
    report: ProbeReport,
    notify: Callable[[str], None],
    on_trial: Callable[[Trial], None],
) -> None:
    def attempt(number: int) -> Attempt:
        shape = task.trial_shape(mode, number)
        known = report.limits[mode]
        progress = _Progress(
            f"{mode}, {_describe_shape(shape)}",
            known.fits,
            "tokens" if task.scaled == "length" else f"{task.unit}s",
            notify,
        )
        progress("")
        outcome = run_trial(shape, progress)
        interrupts.raise_if_postponed()
        report.env = report.env or outcome.env
        trial = Trial(shape, outcome)
        report.trials.append(trial)
        report.limits[mode] = _update_limit(known, number, trial)
        on_trial(trial)
        return Attempt(outcome.fits, _budget_share(outcome, report))

    report.limits[mode] = Limit(mode)
    search_largest(attempt, task.within)
    report.limits[mode] = replace(report.limits[mode], complete=True)


def _update_limit(limit: Limit, quantity: int, trial: Trial) -> Limit:
    if trial.outcome.fits:
        return replace(limit, fits=quantity, trial=trial) if quantity > limit.fits else limit
    if limit.fails is None or quantity < limit.fails:
        return replace(limit, fails=quantity, failed=trial)
    return limit


def _budget_share(outcome: Outcome, report: ProbeReport) -> float | None:
    """Return the fraction of the budget that a step used; None if it does not help to predict longer steps.

    A measured step does not help if it was stopped, or if the planner chose its schedule: such a schedule uses all
    memory.
    """
    task = report.task
    if task.method == "measure" and (task.schedule is None or not outcome.fits):
        return None
    budget = Budget(report.device_bytes, task.host_bytes, task.disk_bytes)
    usable = 1.0 if task.method == "measure" else 1 - task.margin
    return budget.used_fraction(outcome.peak_bytes, outcome.host_bytes, outcome.disk_bytes, usable=usable)


def _describe_shape(shape: Shape) -> str:
    rows = f"{shape.batch_size:,} x " if shape.batch_size > 1 else ""
    return f"{rows}{shape.length:,} tokens"


@dataclass(frozen=True)
class _Progress:
    """Callback that reports the current trial, its phase and the largest number known to fit."""

    trying: str
    fits: int
    unit: str
    notify: Callable[[str], None]

    def __call__(self, phase: str) -> None:
        interrupts.raise_if_postponed()
        known = f" (fits: {self.fits:,} {self.unit})" if self.fits else ""
        self.notify(f"{self.trying}{f': {phase}' if phase else ''}{known}")


GIB, MIB = 1 << 30, 1 << 20


@with_default_style
def draw_probe(report: ProbeReport, *, title: str) -> bytes:
    """Return a PNG: a bar for each training method on the left, the peak device memory of each trial on the right."""
    from matplotlib.figure import Figure  # slow to import; without pyplot it needs no display

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    bars, bytes_ = figure.subplots(1, 2)
    _draw_bars(bars, report)
    _draw_trials(bytes_, report)
    return to_png(figure, title)


def _draw_bars(axes: Any, report: ProbeReport) -> None:
    limits = sorted(report.limits.values(), key=lambda limit: limit.fits, reverse=True)
    names = [LABELS[limit.mode] for limit in limits]
    axes.barh(names, [limit.fits for limit in limits], color=[COLOURS[limit.mode] for limit in limits], height=0.55)
    for row, limit in enumerate(limits):
        text = f"{limit.fits:,}" if limit.complete else f"{limit.fits:,} so far"
        axes.annotate(f" {text}", (limit.fits, row), va="center", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlim(0, 1.25 * max((limit.fits for limit in limits), default=1) or 1)
    axes.set_title(f"Largest that fits ({_unit_name(report)})", loc="left", color=INK, fontsize=11)
    _style_axes(axes)


def _draw_trials(axes: Any, report: ProbeReport) -> None:
    """Draw a dot for each trial that fits, a cross for each failed trial, and the budget as a line."""
    budget = report.device_bytes
    largest = max([budget or 0, *(t.outcome.peak_bytes or 0 for t in report.trials)])
    unit, name = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    for mode in report.limits:
        trials = [trial for trial in report.trials if trial.shape.mode == mode]
        fitted = sorted(
            (_searched_quantity(report, t), t.outcome.peak_bytes / unit)
            for t in trials
            if t.outcome.fits and t.outcome.peak_bytes
        )
        if fitted:
            axes.plot(*zip(*fitted, strict=True), color=COLOURS[mode], marker="o", linewidth=2.2, label=LABELS[mode])
        # A stopped trial reached the budget: it is drawn there.
        failed = [
            (_searched_quantity(report, t), min(t.outcome.peak_bytes or largest, budget or largest) / unit)
            for t in trials
            if not t.outcome.fits
        ]
        if failed:
            axes.plot(
                *zip(*failed, strict=True),
                color=COLOURS[mode],
                marker="x",
                markersize=8,
                markeredgewidth=2,
                linestyle="none",
            )
    if budget:
        axes.axhline(budget / unit, color=INK, linewidth=1.2, linestyle="--")
        axes.annotate(
            "budget",
            (0.01, budget / unit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=INK,
        )
    axes.set_title(f"Peak device memory ({name}); x: does not fit", loc="left", color=INK, fontsize=11)
    axes.set_xlabel(_unit_name(report), color=INK)
    axes.set_ylim(0, 1.12 * largest / unit if largest else 1)
    axes.set_xlim(left=0)
    _style_axes(axes)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, labelcolor=INK, loc="lower right")


def _searched_quantity(report: ProbeReport, trial: Trial) -> int:
    return trial.shape.length if report.task.scaled == "length" else trial.shape.batch_size


def _unit_name(report: ProbeReport) -> str:
    task = report.task
    if task.scaled == "batch":
        return f"{task.unit}s of {task.fixed:,} tokens"
    if task.objective == "sft":
        return "tokens" if task.fixed == 1 else f"tokens per row, {task.fixed:,} rows"
    return f"tokens, {task.fixed:,} {task.unit}{'s' if task.fixed > 1 else ''}"


def _style_axes(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(alpha=0.25, axis="x")
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
