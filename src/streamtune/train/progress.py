"""Output of a run during training: console, ``loss.png``, and listeners (experiment trackers and callbacks).

A terminal shows a progress line that is redrawn; other outputs get ``key=value`` lines.
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from streamtune.base.palette import with_default_style
from streamtune.base.privacy import safe_text
from streamtune.base.text import eval_set_names
from streamtune.train.records import read_records
from streamtune.train.rundir import RunDirectory
from streamtune.train.staging import replace_file

SHOWN_METRICS = {"reward": "reward", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "kl": "kl"}
"""Metrics that the console shows -> their names on the console; ``metrics.jsonl`` has all metrics."""
SAMPLE_PROMPT_WIDTH, SAMPLE_WIDTH = 24, 80
"""Width of a sample's prompt, and of its completion without a terminal, in columns."""


@dataclass
class Progress:
    """Context manager that reports a run on ``console``.

    Args:
        console: Console of the output; a terminal shows a progress line that is redrawn.
        total_steps: Number of optimizer steps of the whole run.
        first_step: Step from which the run resumes, or 0.
        logging_steps: Number of steps between two lines on an output that is not a terminal.
        on_activity: Function called with the current step (counted from 1) and the current activity.
    """

    console: Console
    total_steps: int
    first_step: int = 0
    logging_steps: int = 1
    on_activity: Callable[[int, str], None] = lambda step, doing: None

    def __post_init__(self) -> None:
        self._record: dict[str, Any] = {"step": self.first_step}
        self._activity = ""
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._live_line, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        self.show_activity("")
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def report_step(self, record: dict[str, Any]) -> None:
        """Report a step; ``record`` is its line of ``metrics.jsonl``."""
        self._record = record
        self.show_activity("")
        step = record["step"]
        if "loss" not in record:
            if record.get("overflow"):
                text = f"skipped: the gradient overflowed float16 at loss scale {record['loss_scale']:,.0f}, now halved"
                self.report_note(step, text)
            else:
                self.report_note(step, "skipped: loss or gradient not finite")
            return
        if not self.console.is_terminal and (step % self.logging_steps == 0 or step == self.total_steps):
            self._print_values(
                step=f"{step}/{self.total_steps}",
                loss=f"{record['loss']:.4f}",
                **{SHOWN_METRICS[name]: f"{record[name]:.4f}" for name in SHOWN_METRICS if name in record},
                **({"aux_loss": f"{record['aux_loss']:.4f}"} if "aux_loss" in record else {}),
                lr=f"{record['lr']:.3g}",
                grad_norm=f"{record['grad_norm']:.3g}",
                tokens_per_s=f"{record['tokens_per_s']:.0f}",
                **({"mfu": f"{record['mfu']:.3f}"} if "mfu" in record else {}),
                peak_mem_gib=f"{record['peak_mem_gib']:.2f}",
                eta=format_duration(self._seconds_left()),
            )

    def show_activity(self, text: str) -> None:
        """Show ``text`` as the current activity in the progress line; an empty text shows none."""
        self._activity = text
        self.on_activity(self._record["step"] + 1, text or "training")

    def report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report the metrics of the evaluation after ``step``, overall and for each evaluation set."""
        self.show_activity("")
        names = {"eval_loss": "loss", **{f"eval_{name}": shown_name for name, shown_name in SHOWN_METRICS.items()}}
        for metric in ("loss", "reward"):
            for name in eval_set_names([self._record, metrics], metric):
                shown_name = name if metric == "loss" and self.console.is_terminal else f"{name}_{metric}"
                names[f"eval_{name}_{metric}"] = shown_name
        shown = {shown_name: f"{metrics[name]:.4f}" for name, shown_name in names.items() if name in metrics}
        if self.console.is_terminal:
            parts: list[Any] = ["held-out"]
            for shown_name, value in shown.items():
                parts += [f" {shown_name} ", (value, "bold")]
            self._print_event(step, Text.assemble(*parts))
        else:
            self._print_values(step=f"{step}/{self.total_steps}", **{f"eval_{name}": v for name, v in shown.items()})

    def report_sample(self, step: int, prompt: str, completion: str) -> None:
        """Report the completion of a sample prompt, shortened to one line."""
        prompt_text, shown = shorten(prompt, SAMPLE_PROMPT_WIDTH), " ".join(completion.split())
        if self.console.is_terminal:
            left = self.console.width - cell_len(prompt_text) - len(str(self.total_steps)) - 20
            shown = shorten(shown, max(left, 20)) or "(nothing)"
            self._print_event(step, Text.assemble("wrote ", (shown, "green"), (f"  to: {prompt_text}", "dim")))
        else:
            shown = json.dumps(shorten(shown, SAMPLE_WIDTH), ensure_ascii=False)
            self._print_values(
                step=f"{step}/{self.total_steps}", prompt=json.dumps(prompt_text, ensure_ascii=False), sample=shown
            )

    def report_checkpoint(self, step: int, path: object) -> None:
        self.show_activity("")
        if self.console.is_terminal:
            self._print_event(step, Text.assemble("saved ", (str(path), "cyan")))
        else:
            self._print_values(step=f"{step}/{self.total_steps}", saved=str(path))

    def report_note(self, step: int, text: str) -> None:
        if self.console.is_terminal:
            self._print_event(step, Text(text))
        else:
            self._print_values(step=f"{step}/{self.total_steps}", note=text)

    def _print_event(self, step: int, event: Text) -> None:
        event = Text(safe_text(event.plain)) if safe_text(event.plain) != event.plain else event
        self.console.print(
            Text.assemble((f"step {step:>{len(str(self.total_steps))}}  ", "dim"), event), soft_wrap=True
        )

    def _print_values(self, **pairs: str) -> None:
        line = " ".join(f"{key}={value}" for key, value in pairs.items())
        self.console.print(Text(safe_text(line)), soft_wrap=True)
        self.console.file.flush()

    def _seconds_left(self) -> float | None:
        done = int(self._record["step"]) - self.first_step
        if done <= 0:
            return None
        return (time.monotonic() - self._started) / done * (self.total_steps - self._record["step"])

    def _live_line(self) -> Text:
        """Return the progress line for a terminal; the least important fields are left out if it is too wide."""
        record, width = self._record, self.console.width
        step = Text(f"step {record['step']}/{self.total_steps}", style="bold")
        # (text, priority: fields with the highest number are left out first)
        fields: list[tuple[Text, int]] = [(step, 0)]
        if "loss" in record:
            fields += [
                (Text.assemble("loss ", (f"{record['loss']:.3f}", "bold green")), 1),
                *[
                    (Text.assemble(f"{called} ", (f"{record[name]:.2f}", "bold")), 6)
                    for name, called in SHOWN_METRICS.items()
                    if name in record
                ],
                (Text(f"lr {record['lr']:.2g}"), 5),
                *([(Text(f"grad {record['grad_norm']:.2f}"), 7)] if width >= 100 else []),  # the bar needs the space
                (Text(f"{format_rate(record['tokens_per_s'])} tok/s"), 3),
                *([(Text(f"MFU {record['mfu']:.0%}"), 5)] if "mfu" in record else []),
                (Text(f"{record['peak_mem_gib']:.1f} GiB"), 4),
                (Text(f"ETA {format_duration(self._seconds_left())}"), 2),
            ]
        fields.append((Text(self._activity or " ", style="dim"), 8))
        while len(fields) > 1 and _fields_width(fields) > width:
            fields.remove(max(fields, key=lambda field: field[1]))
        room = min(width - _fields_width(fields) - 2, 40)
        if room >= 8:
            fields.insert(1, (_progress_bar(int(record["step"]), self.total_steps, room), 9))
        return Text("  ", end="").join(text for text, _ in fields)


def _fields_width(fields: list[tuple[Text, int]]) -> int:
    return sum(cell_len(text.plain) for text, _ in fields) + 2 * (len(fields) - 1)


def _progress_bar(done: int, total: int, width: int) -> Text:
    filled = round(width * done / max(total, 1))
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "bright_black"))


def shorten(text: str, width: int) -> str:
    """Return a text as one line of at most ``width`` columns; a shortened text ends with ``...``."""
    text = " ".join(text.split())
    return text if cell_len(text) <= width else set_cell_size(text, width - 3).rstrip() + "..."


def format_duration(seconds: float | None) -> str:
    """Return a duration as ``0:42``, ``1:02:03`` or ``2d 03:04``; ``-:--`` for None."""
    if seconds is None:
        return "-:--"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_rate(per_second: float) -> str:
    """Return a rate as ``853`` or ``12.3k``."""
    return f"{per_second:.0f}" if per_second < 1000 else f"{per_second / 1000:.1f}k"


TEXT, GRID_COLOUR, TRAINING_COLOUR, HELD_OUT_COLOUR = "#1f2430", "#8a909c", "#2f6fde", "#e4572e"
SECOND_TRAINING_COLOUR, SECOND_HELD_OUT_COLOUR = "#7a5cc9", "#c98a1b"
SET_STYLES = (
    ("#c98a1b", "s"),
    ("#2a9d6f", "^"),
    ("#7a5cc9", "D"),
    ("#b03a78", "v"),
    ("#4a6b8a", "P"),
    ("#6b4f2a", "X"),
)
"""Colour and marker of each named held-out set."""

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Panel:
    """Axes of the plot for one or two metrics, drawn if the run has the first metric."""

    label: str
    """Label of the vertical axis."""
    metrics: tuple[str, ...]
    """Metrics to draw, at most two; each has a training curve, and an evaluation curve if it was evaluated."""
    legend_prefixes: tuple[str, ...] = ("",)
    """Prefix of each metric's labels in the legend."""
    limits: tuple[float, float] | None = None


PANELS = (
    _Panel("accuracy", ("rewards/accuracies",), limits=(-0.03, 1.03)),
    _Panel("reward", ("rewards/chosen", "rewards/rejected"), ("chosen, ", "rejected, ")),
    _Panel("mean reward", ("reward",)),
    _Panel("tokens per completion", ("completions/mean_length",)),
)
"""Panels below the loss, for metrics of preference and reward objectives."""


@dataclass
class LossPlot:
    """Plot ``loss.png`` of a run. Drawing takes at most about 1/50 of the run's time."""

    run: RunDirectory
    _next_time: float = field(default=0.0, init=False)

    def draw(self, *, last: bool = False) -> None:
        """Draw the plot, unless ``last`` is False and it was drawn a short time ago."""
        began = time.monotonic()
        if began < self._next_time and not last:
            return
        with suppress(OSError):  # a plot must not stop a run; its values are in metrics.jsonl
            draw_loss(read_records(self.run.metrics), self.run.loss_plot, title=self.run.path.name)
        now = time.monotonic()
        self._next_time = now + 50 * (now - began)


def moving_average(values: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average over about ``window`` values, with bias correction at the start."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


@with_default_style
def draw_loss(records: Records, path: Path, *, title: str) -> None:
    """Write a plot of training loss, its moving average and evaluation loss; below, the metrics of :data:`PANELS`.

    Nothing is written if no record has a loss.

    Args:
        records: Lines of ``metrics.jsonl``.
        path: Path of the PNG file.
        title: Title of the plot.
    """
    # Slow to import and only needed here. Figures made without pyplot need no display and have no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not any("loss" in record for record in records):
        return
    panels = [panel for panel in PANELS if any(panel.metrics[0] in record for record in records)]
    loss = _Panel("loss" if panels else "loss per trained token (nats)", ("loss",))
    ratios = [1.6] + [1.0] * len(panels)
    figure = Figure(figsize=(9, 5 + 2.6 * len(panels)), dpi=150, layout="constrained")
    grid = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, panel in zip(grid, [loss, *panels], strict=True):
        _draw_panel(axes, panel, records)
    # A name is not a formula: `$` is shown literally.
    grid[0].set_title(
        safe_text(title), loc="left", parse_math=False, color=TEXT, fontsize=13, fontweight="bold", pad=12
    )
    grid[-1].set_xlabel("optimizer step", color=TEXT)
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1].set_xlim(left=0)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font may lack letters of a name
        FigureCanvasAgg(figure).print_png(picture)
    replace_file(path, picture.getvalue(), durably=False)


def _draw_panel(axes: Any, panel: _Panel, records: Records) -> None:
    colours = ((TRAINING_COLOUR, HELD_OUT_COLOUR), (SECOND_TRAINING_COLOUR, SECOND_HELD_OUT_COLOUR))
    for metric, name, (colour, held_out_colour) in zip(panel.metrics, panel.legend_prefixes, colours, strict=False):
        steps, values = _read_series(records, metric)
        if not steps:
            continue
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        smoothed = moving_average(values, window=len(values) / 20)
        axes.plot(steps, smoothed, color=colour, linewidth=2.2, label=f"{name}training (smoothed)  {smoothed[-1]:.3f}")
        steps, values = _read_series(records, f"eval_{metric}")
        sets = eval_set_names(records, metric)
        if steps:
            shape = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "linewidth": 1.4}
            label = f"{name}all held out" if sets else f"{name}held out"
            axes.plot(steps, values, color=held_out_colour, label=f"{label}  {values[-1]:.3f}", **shape)
        for set_name, (set_colour, marker) in zip(sets, cycle(SET_STYLES), strict=False):
            steps, values = _read_series(records, f"eval_{set_name}_{metric}")
            shape = {"marker": marker, "markersize": 5, "linewidth": 1.1, "linestyle": "--"}
            axes.plot(steps, values, color=set_colour, label=f"{name}{set_name}  {values[-1]:.3f}", **shape)
    axes.set_ylabel(panel.label, color=TEXT)
    axes.margins(x=0.02)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.grid(axis="y", color=GRID_COLOUR, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID_COLOUR)
    axes.tick_params(colors=TEXT)
    # Four curves leave no free corner for the legend.
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2} if len(panel.metrics) > 1 else {}
    axes.legend(frameon=False, labelcolor=TEXT, **above)


def _read_series(records: Records, metric: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[metric]) for record in records if metric in record]
    return [step for step, _ in points], [value for _, value in points]


@dataclass(frozen=True)
class RunFacts:
    """Description of a run before its first step; secrets are removed from texts."""

    run: str
    """Id of the run, also after it is resumed."""
    name: str
    """Name of the run directory."""
    directory: Path
    step: int
    """Step from which the run resumes, or 0."""
    total_steps: int
    recipe: Mapping[str, Any]
    """Key -> value of the recipe, with defaults."""
    versions: Mapping[str, str]
    plan: Mapping[str, Any]
    """``schedule``; if it was planned, also ``peak_bytes``, ``step_seconds``, and ``terms`` (bytes by kind of
    memory)."""


class Listener:
    """Base class of listeners; each method does nothing unless it is overridden.

        started -> (step | evaluated | sampled | saved | event)* -> finished

    Only rank 0 calls listeners, in the thread that trains. Arguments are copies, so changes do not affect the run. If a
    listener raises an error, the loop saves a checkpoint after the current step, ends, and raises the error.
    """

    def started(self, facts: RunFacts) -> None:
        """Receive the description of a new or resumed run, before its first step."""

    def step(self, record: dict[str, Any]) -> None:
        """Receive the line of ``metrics.jsonl`` of a finished step."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Receive the line of ``metrics.jsonl`` of an evaluation: ``step``, ``eval_loss`` and other metrics."""

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        """Receive new lines of ``samples.jsonl``, with ``step``, ``prompt`` and ``completion``."""

    def saved(self, step: int, path: Path) -> None:
        """Receive the step and folder of a checkpoint that is complete on disk."""

    def event(self, name: str, details: dict[str, Any]) -> None:
        """Receive an event ``resume``, ``finish``, ``stop`` or ``failure``, as in ``events.jsonl``."""

    def finished(self, outcome: dict[str, Any]) -> None:
        """Receive the outcome at the end of the run.

        Args:
            outcome: ``status`` (``finished``, ``stopped`` or ``failed``), ``step``, and ``error`` if failed.
        """


@dataclass
class Listeners(Listener):
    """Calls several listeners, each with its own copy of the arguments."""

    listeners: Sequence[Listener] = ()
    while_called: Callable[[], AbstractContextManager[None]] = nullcontext
    """Function that returns a context manager, in which listeners are called."""
    error: Exception | None = field(default=None, init=False)
    """First error that a listener raised; this listener is no longer called."""
    _failed: Listener | None = field(default=None, init=False)

    def started(self, facts: RunFacts) -> None:
        self._call_each(lambda listener: listener.started(copy.deepcopy(facts)))

    def step(self, record: dict[str, Any]) -> None:
        self._call_each(lambda listener: listener.step(copy.deepcopy(record)))

    def evaluated(self, record: dict[str, Any]) -> None:
        self._call_each(lambda listener: listener.evaluated(copy.deepcopy(record)))

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        self._call_each(lambda listener: listener.sampled(copy.deepcopy(samples)))

    def saved(self, step: int, path: Path) -> None:
        self._call_each(lambda listener: listener.saved(step, path))

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._call_each(lambda listener: listener.event(name, copy.deepcopy(details)))

    def finished(self, outcome: dict[str, Any]) -> None:
        self._call_each(lambda listener: listener.finished(copy.deepcopy(outcome)))

    def raise_first_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _call_each(self, call: Callable[[Listener], None]) -> None:
        if not self.listeners:
            return
        with self.while_called():
            for listener in self.listeners:
                if listener is self._failed:
                    continue
                if self.error is not None:  # only the first error is reported
                    with suppress(Exception):
                        call(listener)
                    continue
                try:
                    call(listener)
                except Exception as error:
                    self.error, self._failed = error, listener
