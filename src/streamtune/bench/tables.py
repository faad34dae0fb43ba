"""Tables of a benchmark: the rows to measure, their figures, and the file that they are saved in.

One process holds one model and enters one mode after the other, so a table costs the memory of one model and compares
the same weights. The steps that are compared in a group alternate, and a ratio is the median over pairs of steps.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from streamtune import interrupts
from streamtune.bench.bench import paired
from streamtune.bench.named_tables import TABLES, Wanted
from streamtune.bench.subject import Case, Job
from streamtune.bench.worker import Worker
from streamtune.errors import RunError
from streamtune.schedule import Schedule
from streamtune.simulate.workload import Mode

__all__ = ["DEFAULT", "Entry", "MeasureGroup", "TableName", "TableReport", "TableRow", "fill", "run_table"]

TableName = Literal["bp-time", "max-length", "memory", "ablation", "prefix-sharing"]

DEFAULT = "the recipe's schedule"
"""Label of the row that the others of an ablation are compared with."""


@dataclass(frozen=True)
class Entry:
    """A row to measure: its case and its name.

    Attributes:
        label: Its name, by what is special about it.
        section: The heading above it; empty where the table has none.
        to_checkpoint, to_default: True if others of its group are compared with it.
    """

    case: Case
    label: str
    section: str = ""
    to_checkpoint: bool = False
    to_default: bool = False

    def new_row(self) -> TableRow:
        """Return its row, without figures."""
        case = self.case
        schedule = {**asdict(case.schedule), "offload_dir": None} if case.mode.startswith("stream") else None
        return TableRow(case.mode, case.length, self.label, self.section, schedule)


@dataclass(frozen=True)
class TableRow:
    """The figures of an entry; None where it was not measured or could not be.

    Attributes:
        label, section: Those of the entry.
        schedule: The schedule of a streamed step; None for a mode without one.
        error: The reason why there are no figures.
        peak_bytes: Peak on the device, weights and gradients included.
        terms: Bytes of that peak by what they are.
        activation_bytes: Peak beyond weights, gradients and stored layer inputs, head included.
        layer_activation_bytes: The same without the head.
        host_bytes, disk_bytes: Peaks of the bytes kept there.
        forward_s, backward_s: Seconds, medians.
        to_checkpoint, to_default: Time over that of gradient checkpointing and of the default schedule, medians of
            paired steps.
        loss, grad_norm: Those of the first step.
        max_length: The longest sequence that fits, where that was searched for.
    """

    mode: Mode
    length: int
    label: str
    section: str = ""
    schedule: dict[str, Any] | None = None
    error: str = ""
    peak_bytes: int | None = None
    terms: dict[str, int] = field(default_factory=dict)
    activation_bytes: int | None = None
    layer_activation_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    to_checkpoint: float | None = None
    to_default: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    max_length: int | None = None

    @property
    def step_s(self) -> float | None:
        """Seconds of forward and backward together."""
        return None if self.forward_s is None or self.backward_s is None else self.forward_s + self.backward_s


@dataclass
class TableReport:
    """A table with the origin of its figures.

    Attributes:
        command: The command line that measures it again.
        asked: The settings that the figures depend on: a finished row is used again only where all are the same.
        env: The machine and the versions.
        absent: Modes that could not run here, with the reason.
    """

    table: TableName
    command: str
    asked: dict[str, Any]
    env: dict[str, Any]
    rows: list[TableRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """Name of its files, without the extension: the table, the budget if it has one, the device."""
        device = "cpu" if self.env["device_type"] == "cpu" else self.env["device"]
        name = f"{self.table} {self.asked.get('budget', '')} {device}"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    @property
    def unit(self) -> tuple[str, int]:
        """The unit its bytes are shown in, and the bytes of that unit: GiB if a peak is 16 GiB or more, else MiB."""
        largest = max((row.peak_bytes or 0 for row in self.rows), default=0)
        return ("GiB", 1 << 30) if largest >= 16 << 30 else ("MiB", 1 << 20)

    def describe(self) -> str:
        """Return one line on the model and the machine."""
        env = self.env
        million = env["parameters"] / 1e6
        size = f"{million / 1000:.1f}B" if million >= 1000 else f"{million:.1f}M"
        model = f"{size} parameters, {env['layers']} layers, {env['dtype']}"
        machine = (
            f"{env['device']}, {env['threads']} thread{'s' * (env['threads'] > 1)}"
            if env["device_type"] == "cpu"
            else env["device"]
        )
        return f"{model}, batch {env['batch_size']}; {machine}, torch {env['torch']}"

    def row(self, entry: Entry) -> TableRow | None:
        """Return the row of an entry; None if there is none yet."""
        asked = (entry.case.mode, entry.case.length, entry.label)
        return next((row for row in self.rows if (row.mode, row.length, row.label) == asked), None)

    def errors_of(self, row: TableRow) -> dict[str, float]:
        """Return the relative errors of loss and gradient norm to plain autograd's (if missing, checkpointing's)."""
        for mode in ("plain", "checkpoint"):
            truth = next(
                (r for r in self.rows if (r.mode, r.length) == (mode, row.length) and r.loss is not None), None
            )
            if truth is not None and row.loss is not None:
                pairs = {"loss": (row.loss, truth.loss), "gradient norm": (row.grad_norm, truth.grad_norm)}
                return {name: abs(ours / theirs - 1) for name, (ours, theirs) in pairs.items() if ours and theirs}
        return {}

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``streamtune bench --table NAME --json``."""
        return {**vars(self), "rows": [{**asdict(row), "errors": self.errors_of(row)} for row in self.rows]}

    def save(self, folder: Path) -> Path:
        """Write the document, so that there is never half of one, and return its path."""
        path = folder / f"{self.stem}.json"
        part = path.with_suffix(".json.part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return path

    def resume(self, folder: Path) -> None:
        """Take over the rows of an earlier run with the same settings on the same machine."""
        path = folder / f"{self.stem}.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["asked"] == self.asked and before["env"] == self.env:
                names = {f.name for f in fields(TableRow)}
                self.rows = [TableRow(**{k: v for k, v in row.items() if k in names}) for row in before["rows"]]
        except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours: measured anew
            return


MeasureGroup = Callable[[Sequence[Entry], Sequence[Entry]], Iterator[TableRow]]
"""Measures the first entries; the second are what they are compared with. Gives a row as soon as it is known."""


def run_table(
    table: TableName,
    job: Job,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    schedule: Schedule,
    repeats: int,
    folder: Path,
    command: str,
    asked: dict[str, Any],
    notify: Callable[[str], None] = lambda message: None,
) -> TableReport:
    """Measure a table, except for rows that its file in the folder has already.

    Args:
        table: Any but ``max-length``.
        job: The model.
        lengths: Tokens of a row, or of a prompt that is shared.
        modes: Modes to compare; an ablation compares schedules instead, a shared prompt layouts.
        schedule: The schedule of streamed steps.
        repeats: Timed steps of each row; the rows of a group alternate.
        folder: Directory of the table's file; it exists.
        command: Command line that measures the table again.
        asked: Settings that the figures depend on, as JSON values.
        notify: Called with what is being measured.
    """
    declared, worker = TABLES[table], Worker(job)
    try:
        notify("building the model")
        env = worker.ask("env")
        if worker.failed:
            raise RunError(f"the model cannot be built: {worker.failed}")
        report = TableReport(table, command, asked, env)
        with interrupts.temporary_directory(dir=folder, prefix=".offload-") as scratch:
            report.absent = declared.absent(modes, env["device_type"])
            here = [mode for mode in modes if mode not in report.absent]
            assert declared.groups is not None
            groups = declared.groups(Wanted(lengths, here, schedule, env["layers"], scratch))
            measure = _measured(worker, repeats=repeats if declared.timed else 0, memory=declared.memory, notify=notify)
            fill(report, groups, measure, folder=folder)
    finally:
        worker.close()
    return report


def fill(report: TableReport, groups: Sequence[Sequence[Entry]], measure: MeasureGroup, *, folder: Path) -> None:
    """Measure the rows that a report lacks; its file is written after each of them.

    Args:
        report: The report, without rows; those in its file are read first.
        groups: The entries, in groups whose steps alternate.
        measure: Measures a group.
        folder: Directory of the file; it exists.
    """
    report.resume(folder)
    entries = [entry for group in groups for entry in group]
    report.rows = [row for entry in entries if (row := report.row(entry)) is not None]
    for group in groups:
        todo = [entry for entry in group if report.row(entry) is None]
        same = [e for e in entries if e.case.length == group[0].case.length and (e.to_checkpoint or e.to_default)]
        for row in measure(todo, same) if todo else ():
            report.rows.append(row)
            report.rows = [known for entry in entries if (known := report.row(entry)) is not None]
            report.save(folder)
    report.save(folder)


def _measured(
    worker: Worker, *, repeats: int, memory: bool, notify: Callable[[str], None] = lambda message: None
) -> MeasureGroup:
    """Return a function that measures rows by real steps.

    Args:
        worker: The process with the model.
        repeats: Timed steps of each entry, which alternate; 0 runs one step for its loss.
        memory: Measure the memory of a step as well.
        notify: Called with what is being measured.
    """

    def measure(todo: Sequence[Entry], references: Sequence[Entry]) -> Iterator[TableRow]:
        rows = {entry: entry.new_row() for entry in todo}
        steps: dict[Entry, list[tuple[float, float]]] = {}
        failed: dict[Entry, str] = {}

        def ask(entry: Entry, request: str, about: str) -> dict[str, Any]:
            if entry in failed:
                return {}
            notify(f"{entry.case.length:,} tokens, {entry.label}: {about}")
            answer = worker.ask(request, entry.case)
            if worker.failed:
                failed[entry] = worker.failed
            return answer

        for entry in todo if memory else ():
            rows[entry] = replace(rows[entry], **ask(entry, "memory", "memory"))
        again = [entry for entry in references if repeats and entry not in rows]
        for turn in range(repeats + 1):  # the first turn warms up, and is where the loss is from
            for entry in [*again, *todo]:
                answer = ask(entry, "time", f"step {turn} of {repeats}")
                if turn and answer:
                    steps.setdefault(entry, []).append((answer["forward_s"], answer["backward_s"]))
                elif answer and entry in rows:
                    rows[entry] = replace(rows[entry], loss=answer["loss"], grad_norm=answer["grad_norm"])
        for entry, row in rows.items():
            if entry in failed:
                yield replace(entry.new_row(), error=failed[entry])
            else:
                yield _with_times(row, steps[entry], references, steps) if entry in steps else row

    return measure


def _with_times(
    row: TableRow,
    own: list[tuple[float, float]],
    references: Sequence[Entry],
    steps: dict[Entry, list[tuple[float, float]]],
) -> TableRow:
    compared: dict[str, Any] = {
        name: paired(own, steps.get(entry, []))
        for name in ("to_checkpoint", "to_default")
        for entry in references
        if getattr(entry, name)
    }
    forward, backward = (statistics.median(part) for part in zip(*own, strict=True))
    return replace(row, forward_s=forward, backward_s=backward, **compared)
