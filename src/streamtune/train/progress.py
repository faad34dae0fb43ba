"""The output of a run while it trains: one live line on a terminal, ``key=value`` lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from streamtune.secrets import plain

__all__ = ["Progress", "format_duration", "format_rate"]


SHOWN = {"reward": "reward", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "kl": "kl"}
"""Metrics of an objective that are shown as it trains, and what they are called there; a file has them all."""


@dataclass
class Progress:
    """Reports a run of ``total_steps`` on ``console``; enter it around the loop.

    Args:
        console: Where to; a terminal gets the live line.
        total_steps: Optimizer steps of the whole run.
        first_step: Steps taken before, where a run is resumed: the time left is estimated from this session alone.
        logging_steps: Without a terminal, one line every so many steps.
        told: Called with the number of the current step, from 1, and the current activity in it.
    """

    console: Console
    total_steps: int
    first_step: int = 0
    logging_steps: int = 1
    told: Callable[[int, str], None] = lambda step, doing: None

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
                peak_mem_gib=f"{record['peak_mem_gib']:.2f}",
                eta=format_duration(self._seconds_left()),
            )

    def activity(self, text: str) -> None:
        """Show the current activity within a step, at the end of the live line until the step is done."""
        self._activity = text
        self.told(self._record["step"] + 1, text or "training")

    def evaluated(self, step: int, found: Mapping[str, float]) -> None:
        """Report the results of an evaluation after ``step`` steps: ``eval_loss`` and ``eval_`` metrics."""
        self.activity("")
        names = {"eval_loss": "loss", **{f"eval_{name}": called for name, called in SHOWN.items()}}
        shown = {called: f"{found[name]:.4f}" for name, called in names.items() if name in found}
        if self.console.is_terminal:
            parts: list[Any] = ["held-out"]
            for called, value in shown.items():
                parts += [f" {called} ", (value, "bold")]
            self._print_event(step, Text.assemble(*parts))
        else:
            self._print_pairs(step=f"{step}/{self.total_steps}", **{f"eval_{name}": v for name, v in shown.items()})

    def saved(self, step: int, path: object) -> None:
        """Report that a checkpoint is committed."""
        self.activity("")
        if self.console.is_terminal:
            self._print_event(step, Text.assemble("saved ", (str(path), "cyan")))
        else:
            self._print_pairs(step=f"{step}/{self.total_steps}", saved=str(path))

    def note(self, step: int, text: str) -> None:
        """Report something that happened in or after ``step``."""
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


def format_duration(seconds: float | None) -> str:
    """Return ``0:42``, ``1:02:03``, ``2d 03:04`` or ``-:--`` where it is not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_rate(per_second: float) -> str:
    """Return ``853``, ``12.3k``, as a rate is shown."""
    return f"{per_second:.0f}" if per_second < 1000 else f"{per_second / 1000:.1f}k"
