"""Output of a run while it trains: a live line on a terminal, ``key=value`` lines elsewhere, ``loss.png``, and calls of
listeners (experiment trackers, and the user's callbacks).
"""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from streamtune.base.privacy import plain
from streamtune.base.text import eval_set_names
from streamtune.train.records import read_records
from streamtune.train.rundir import RunDirectory
from streamtune.train.staging import replace_file

SHOWN = {"reward": "reward", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "kl": "kl"}
"""Metrics of an objective that are shown, and their names on the screen; a file has them all."""


SAMPLE_PROMPT, SAMPLE_WIDTH = 24, 80
"""Columns of a sample's prompt on the screen, and of its completion without a terminal."""


@dataclass
class Progress:
    """Reports a run of ``total_steps`` on ``console``; enter it around the loop.

    Args:
        console: Console of the output; a terminal gets the live line.
        total_steps: Optimizer steps of the whole run.
        first_step: Steps taken before a resume: the time left is estimated from this session alone.
        logging_steps: Steps between two lines without a terminal.
        on_activity: Called with the number of the current step, from 1, and the current activity in it.
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
        self._live = Live(get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        self.activity("")
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Report a step that is done; ``record`` is its line of ``metrics.jsonl``."""
        self._record = record
        self.activity("")
        done = record["step"]
        if "loss" not in record:
            self.note(done, "skipped: not finite")
            return
        if not self.console.is_terminal and (done % self.logging_steps == 0 or done == self.total_steps):
            self._print_pairs(
                step=f"{done}/{self.total_steps}",
                loss=f"{record['loss']:.4f}",
                **{SHOWN[name]: f"{record[name]:.4f}" for name in SHOWN if name in record},
                **({"aux_loss": f"{record['aux_loss']:.4f}"} if "aux_loss" in record else {}),
                lr=f"{record['lr']:.3g}",
                grad_norm=f"{record['grad_norm']:.3g}",
                tokens_per_s=f"{record['tokens_per_s']:.0f}",
                **({"mfu": f"{record['mfu']:.3f}"} if "mfu" in record else {}),
                peak_mem_gib=f"{record['peak_mem_gib']:.2f}",
                eta=format_duration(self._seconds_left()),
            )

    def activity(self, text: str) -> None:
        """Show the current activity within a step, at the end of the live line."""
        self._activity = text
        self.on_activity(self._record["step"] + 1, text or "training")

    def evaluated(self, step: int, found: Mapping[str, float]) -> None:
        """Report an evaluation after ``step`` steps: ``eval_loss``, ``eval_`` metrics, and the same of each set."""
        self.activity("")
        names = {"eval_loss": "loss", **{f"eval_{name}": called for name, called in SHOWN.items()}}
        for metric in ("loss", "reward"):
            for name in eval_set_names([self._record, found], metric):
                called = name if metric == "loss" and self.console.is_terminal else f"{name}_{metric}"
                names[f"eval_{name}_{metric}"] = called
        shown = {called: f"{found[name]:.4f}" for name, called in names.items() if name in found}
        if self.console.is_terminal:
            parts: list[Any] = ["held-out"]
            for called, value in shown.items():
                parts += [f" {called} ", (value, "bold")]
            self._print_event(step, Text.assemble(*parts))
        else:
            self._print_pairs(step=f"{step}/{self.total_steps}", **{f"eval_{name}": v for name, v in shown.items()})

    def sampled(self, step: int, prompt: str, completion: str) -> None:
        """Report a completion of a sample prompt, cut to one line; ``samples.jsonl`` has all of it."""
        asked, wrote = shorten(prompt, SAMPLE_PROMPT), " ".join(completion.split())
        if self.console.is_terminal:
            left = self.console.width - cell_len(asked) - len(str(self.total_steps)) - 20
            wrote = shorten(wrote, max(left, 20)) or "(nothing)"
            self._print_event(step, Text.assemble("wrote ", (wrote, "green"), (f"  to: {asked}", "dim")))
        else:
            wrote = json.dumps(shorten(wrote, SAMPLE_WIDTH), ensure_ascii=False)
            self._print_pairs(
                step=f"{step}/{self.total_steps}", prompt=json.dumps(asked, ensure_ascii=False), sample=wrote
            )

    def saved(self, step: int, path: object) -> None:
        self.activity("")
        if self.console.is_terminal:
            self._print_event(step, Text.assemble("saved ", (str(path), "cyan")))
        else:
            self._print_pairs(step=f"{step}/{self.total_steps}", saved=str(path))

    def note(self, step: int, text: str) -> None:
        """Report an event in or after ``step``."""
        if self.console.is_terminal:
            self._print_event(step, Text(text))
        else:
            self._print_pairs(step=f"{step}/{self.total_steps}", note=text)

    def _print_event(self, step: int, what: Text) -> None:
        what = Text(plain(what.plain)) if plain(what.plain) != what.plain else what
        self.console.print(Text.assemble((f"step {step:>{len(str(self.total_steps))}}  ", "dim"), what), soft_wrap=True)

    def _print_pairs(self, **pairs: str) -> None:
        line = " ".join(f"{key}={value}" for key, value in pairs.items())
        self.console.print(Text(plain(line)), soft_wrap=True)
        self.console.file.flush()

    def _seconds_left(self) -> float | None:
        done = int(self._record["step"]) - self.first_step
        if done <= 0:
            return None
        return (time.monotonic() - self._started) / done * (self.total_steps - self._record["step"])

    def _line(self) -> Text:
        """Return the live line, cut to the width of the terminal: the least important fields go first."""
        record, width = self._record, self.console.width
        step = Text(f"step {record['step']}/{self.total_steps}", style="bold")
        # (what is shown, how soon it goes: the highest number first)
        fields: list[tuple[Text, int]] = [(step, 0)]
        if "loss" in record:
            fields += [
                (Text.assemble("loss ", (f"{record['loss']:.3f}", "bold green")), 1),
                *[
                    (Text.assemble(f"{called} ", (f"{record[name]:.2f}", "bold")), 6)
                    for name, called in SHOWN.items()
                    if name in record
                ],
                (Text(f"lr {record['lr']:.2g}"), 5),
                *([(Text(f"grad {record['grad_norm']:.2f}"), 7)] if width >= 100 else []),  # else room for the bar
                (Text(f"{format_rate(record['tokens_per_s'])} tok/s"), 3),
                *([(Text(f"MFU {record['mfu']:.0%}"), 5)] if "mfu" in record else []),
                (Text(f"{record['peak_mem_gib']:.1f} GiB"), 4),
                (Text(f"ETA {format_duration(self._seconds_left())}"), 2),
            ]
        fields.append((Text(self._activity or " ", style="dim"), 8))
        while len(fields) > 1 and _width(fields) > width:
            fields.remove(max(fields, key=lambda field: field[1]))
        room = min(width - _width(fields) - 2, 40)
        if room >= 8:
            fields.insert(1, (_bar(int(record["step"]), self.total_steps, room), 9))
        return Text("  ", end="").join(text for text, _ in fields)


def _width(fields: list[tuple[Text, int]]) -> int:
    return sum(cell_len(text.plain) for text, _ in fields) + 2 * (len(fields) - 1)


def _bar(done: int, total: int, width: int) -> Text:
    filled = round(width * done / max(total, 1))
    return Text.assemble(("━" * filled, "green"), ("─" * (width - filled), "bright_black"))


def shorten(text: str, width: int) -> str:
    """Return a text on one line of at most ``width`` columns, with dots where it is cut."""
    text = " ".join(text.split())
    return text if cell_len(text) <= width else set_cell_size(text, width - 3).rstrip() + "..."


def format_duration(seconds: float | None) -> str:
    """Return ``0:42``, ``1:02:03``, ``2d 03:04``, or ``-:--`` for None."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(per_second: float) -> str:
    """Return a rate such as ``853`` or ``12.3k``."""
    return f"{per_second:.0f}" if per_second < 1000 else f"{per_second / 1000:.1f}k"


INK, MUTED, TRAIN, HELD_OUT = "#1f2430", "#8a909c", "#2f6fde", "#e4572e"
OTHER_TRAIN, OTHER_HELD_OUT = "#7a5cc9", "#c98a1b"
OF_SETS = (("#c98a1b", "s"), ("#2a9d6f", "^"), ("#7a5cc9", "D"), ("#b03a78", "v"), ("#4a6b8a", "P"), ("#6b4f2a", "X"))
"""Colour and marker of each named held-out set."""

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Panel:
    """One set of axes, drawn if a run has the first of its metrics."""

    label: str
    """Label of the vertical axis."""
    metrics: tuple[str, ...]
    """One curve each, or two with held-out values; two metrics at most."""
    names: tuple[str, ...] = ("",)
    """Prefix of each metric's labels in the legend."""
    limits: tuple[float, float] | None = None


PANELS = (
    _Panel("accuracy", ("rewards/accuracies",), limits=(-0.03, 1.03)),
    _Panel("reward", ("rewards/chosen", "rewards/rejected"), ("chosen, ", "rejected, ")),
    _Panel("mean reward", ("reward",)),
    _Panel("tokens per completion", ("completions/mean_length",)),
)
"""Panels below the loss, from the metrics of an objective."""


@dataclass
class LossPlot:
    """Draws the picture of a run, in at most a fiftieth of the run's time."""

    run: RunDirectory
    _next: float = field(default=0.0, init=False)

    def draw(self, *, last: bool = False) -> None:
        """Draw it, unless it was drawn a short while ago and this is not the ``last`` time."""
        began = time.monotonic()
        if began < self._next and not last:
            return
        with suppress(OSError):  # a picture is not worth a run; what it shows is in metrics.jsonl
            draw_loss(read_records(self.run.metrics), self.run.loss_plot, title=self.run.path.name)
        now = time.monotonic()
        self._next = now + 50 * (now - began)


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average over about ``window`` values, without a bias towards the start."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


@with_default_style
def draw_loss(records: Records, path: Path, *, title: str) -> None:
    """Draw the training loss, its moving average and the held-out loss; below them the metrics of :data:`PANELS`."""
    # Slow to import, and only needed here. Figures made without pyplot need no display and leave nothing behind.
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
    # A name is no formula: `$` is shown as it is.
    grid[0].set_title(plain(title), loc="left", parse_math=False, color=INK, fontsize=13, fontweight="bold", pad=12)
    grid[-1].set_xlabel("optimizer step", color=INK)
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1].set_xlim(left=0)
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that the font lacks
        FigureCanvasAgg(figure).print_png(picture)
    replace_file(path, picture.getvalue(), durably=False)


def _draw_panel(axes: Any, panel: _Panel, records: Records) -> None:
    """Draw each metric of a panel over the steps: as measured, smoothed, and held out."""
    colours = ((TRAIN, HELD_OUT), (OTHER_TRAIN, OTHER_HELD_OUT))
    for metric, name, (colour, other) in zip(panel.metrics, panel.names, colours, strict=False):
        steps, values = _course(records, metric)
        if not steps:
            continue
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        smoothed = smooth(values, window=len(values) / 20)
        axes.plot(steps, smoothed, color=colour, linewidth=2.2, label=f"{name}training (smoothed)  {smoothed[-1]:.3f}")
        steps, values = _course(records, f"eval_{metric}")
        sets = eval_set_names(records, metric)
        if steps:
            shape = {"marker": "o", "markersize": 6, "markeredgecolor": "white", "linewidth": 1.4}
            whole = f"{name}all held out" if sets else f"{name}held out"
            axes.plot(steps, values, color=other, label=f"{whole}  {values[-1]:.3f}", **shape)
        for called, (set_colour, marker) in zip(sets, cycle(OF_SETS), strict=False):
            steps, values = _course(records, f"eval_{called}_{metric}")
            shape = {"marker": marker, "markersize": 5, "linewidth": 1.1, "linestyle": "--"}
            axes.plot(steps, values, color=set_colour, label=f"{name}{called}  {values[-1]:.3f}", **shape)
    axes.set_ylabel(panel.label, color=INK)
    axes.margins(x=0.02)
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.grid(axis="y", color=MUTED, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK)
    # Four curves leave no corner free.
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2} if len(panel.metrics) > 1 else {}
    axes.legend(frameon=False, labelcolor=INK, **above)


def _course(records: Records, metric: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[metric]) for record in records if metric in record]
    return [step for step, _ in found], [value for _, value in found]


@dataclass(frozen=True)
class RunFacts:
    """Everything about a run that is known before its first step; secrets are removed from its texts."""

    run: str
    """Id, the same for a run and its resumptions."""
    name: str
    """Name of its directory."""
    directory: Path
    step: int
    """Steps taken before: 0, or the step of the checkpoint that is resumed."""
    total_steps: int
    recipe: Mapping[str, Any]
    """Every key of the recipe."""
    versions: Mapping[str, str]
    plan: Mapping[str, Any]
    """The schedule; a planned one also has ``peak_bytes``, ``step_seconds`` and ``terms``, bytes by name."""


class Listener:
    """The contract of a listener; each method does nothing unless it is overridden.

        started -> (step | evaluated | sampled | saved | event)* -> finished

    Rank 0 alone calls listeners, in its training thread, with copies: changes to them do not reach the run. If a
    listener raises, the loop saves a checkpoint at the next boundary between steps and leaves, and the error is raised
    then.
    """

    def started(self, facts: RunFacts) -> None:
        """Take the facts known before the first step, also of a resumed run."""

    def step(self, record: dict[str, Any]) -> None:
        """Take the line of ``metrics.jsonl`` of a step that is done."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Take the line of ``metrics.jsonl`` of an evaluation: ``step``, ``eval_loss`` and other metrics."""

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        """Take lines of ``samples.jsonl``: ``step``, ``prompt``, ``completion``."""

    def saved(self, step: int, path: Path) -> None:
        """Take the step and folder of a checkpoint that is complete and on disk."""

    def event(self, name: str, details: dict[str, Any]) -> None:
        """Take ``resume``, ``finish``, ``stop`` or ``failure``, as ``events.jsonl`` has them."""

    def finished(self, outcome: dict[str, Any]) -> None:
        """Take the outcome: ``status`` (``finished``, ``stopped`` or ``failed``), ``step``, and ``error`` if failed."""


@dataclass
class Listeners(Listener):
    """Calls several listeners with a copy for each, until one raises. Ranks other than 0 have none."""

    each: Sequence[Listener] = ()
    error: Exception | None = field(default=None, init=False)
    """Error of a listener; that listener is not called any more."""
    _failed: Listener | None = field(default=None, init=False)

    def started(self, facts: RunFacts) -> None:
        self._tell(lambda one: one.started(copy.deepcopy(facts)))

    def step(self, record: dict[str, Any]) -> None:
        self._tell(lambda one: one.step(copy.deepcopy(record)))

    def evaluated(self, record: dict[str, Any]) -> None:
        self._tell(lambda one: one.evaluated(copy.deepcopy(record)))

    def sampled(self, samples: list[dict[str, Any]]) -> None:
        self._tell(lambda one: one.sampled(copy.deepcopy(samples)))

    def saved(self, step: int, path: Path) -> None:
        self._tell(lambda one: one.saved(step, path))

    def event(self, name: str, details: dict[str, Any]) -> None:
        self._tell(lambda one: one.event(name, copy.deepcopy(details)))

    def finished(self, outcome: dict[str, Any]) -> None:
        """Call all of them, whichever raises."""
        self._tell(lambda one: one.finished(copy.deepcopy(outcome)))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _tell(self, call: Callable[[Listener], None]) -> None:
        for one in self.each:
            if one is self._failed:
                continue
            if self.error is not None:  # the first error is the one that is shown
                with suppress(Exception):
                    call(one)
                continue
            try:
                call(one)
            except Exception as error:
                self.error, self._failed = error, one
