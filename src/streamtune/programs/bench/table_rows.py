"""Rows of the tables of ``streamtune bench --table``, and the JSON file from which an interrupted table resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from streamtune.engine.memory.placement import best_segment_size
from streamtune.plan.simulate.workload import LABELS, Mode
from streamtune.programs.bench.subject import SHARING, Case, Layout
from streamtune.schedule import Schedule
from streamtune.train.staging import check_output_files, write_output

TableName = Literal["bp-time", "max-length", "memory", "ablation", "prefix-sharing"]

DEFAULT = "the recipe's schedule"
"""Label of the ablation row to which all other rows are compared."""


@dataclass(frozen=True)
class Entry:
    """A row of a benchmark table, before it is measured.

    Attributes:
        case: Training method, length and schedule to measure.
        section: Heading above the row; empty if the table has no sections.
        to_checkpoint, to_default: True if the column of this name divides step times by this row's step time.
    """

    case: Case
    label: str
    section: str = ""
    to_checkpoint: bool = False
    to_default: bool = False

    def new_row(self) -> TableRow:
        """Return a row for this entry, without measurements."""
        case = self.case
        schedule = {**asdict(case.schedule), "offload_dir": None} if case.mode.startswith("stream") else None
        return TableRow(case.mode, case.length, self.label, self.section, schedule)


@dataclass(frozen=True)
class TableRow:
    """Measurements of one row of a benchmark table; a field is None if it was not measured.

    Attributes:
        schedule: Schedule of a streamed step; None for other training methods.
        error: Reason why the measurement failed; empty if it succeeded.
        peak_bytes: Peak memory on the device, with weights and gradients.
        terms: Parts of the peak in bytes: weights, gradients, activations and others.
        activation_bytes: Peak memory beyond weights, gradients and stored layer inputs.
        layer_activation_bytes: Same as ``activation_bytes``, in a step without the LM head.
        host_bytes, disk_bytes: Peak bytes of tensors offloaded to host memory and to disk.
        forward_s, backward_s: Median seconds of the forward and of the backward.
        to_checkpoint, to_default: Step time divided by the step time of gradient checkpointing, and of the recipe's
            schedule; medians over the timed steps.
        loss, grad_norm: Loss and gradient norm of the first step.
        max_length: Longest sequence that fits, in tokens; None if it was not searched.
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
        return None if self.forward_s is None or self.backward_s is None else self.forward_s + self.backward_s


@dataclass
class TableReport:
    """A measured table, with the command, settings and machine that produced it.

    Attributes:
        command: Command line that reproduces the table.
        asked: Settings that affect the measurements; saved rows are reused only if all settings are equal.
        env: Machine, library versions and size of the model.
        absent: {training method: reason why it could not run}.
    """

    table: TableName
    command: str
    asked: dict[str, Any]
    env: dict[str, Any]
    rows: list[TableRow] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """Name of the table's files without extension: table, budget (if any) and device."""
        device = "cpu" if self.env["device_type"] == "cpu" else self.env["device"]
        name = f"{self.table} {self.asked.get('budget', '')} {device}"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    @property
    def unit(self) -> tuple[str, int]:
        """Name and size of the unit of memory: GiB if a peak is 16 GiB or more, otherwise MiB."""
        largest = max((row.peak_bytes or 0 for row in self.rows), default=0)
        return ("GiB", 1 << 30) if largest >= 16 << 30 else ("MiB", 1 << 20)

    def describe(self) -> str:
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

    def find_row(self, entry: Entry) -> TableRow | None:
        asked = (entry.case.mode, entry.case.length, entry.label)
        return next((row for row in self.rows if (row.mode, row.length, row.label) == asked), None)

    def true_row(self, row: TableRow) -> TableRow | None:
        """Return the row whose loss and gradient norm are the true values at this row's length; None if there is none.

        It is plain autograd's row; if plain autograd was not measured, gradient checkpointing's.
        """
        for mode in ("plain", "checkpoint"):
            for other in self.rows:
                if (other.mode, other.length) == (mode, row.length) and other.loss is not None:
                    return other
        return None

    def relative_errors(self, row: TableRow) -> dict[str, float]:
        """Return the relative errors of a row's loss and gradient norm; empty if they cannot be computed."""
        truth = self.true_row(row)
        if truth is None or row.loss is None:
            return {}
        pairs = {"loss": (row.loss, truth.loss), "gradient norm": (row.grad_norm, truth.grad_norm)}
        return {name: abs(ours / theirs - 1) for name, (ours, theirs) in pairs.items() if ours and theirs}

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [{**asdict(row), "errors": self.relative_errors(row)} for row in self.rows]}

    def save(self, folder: Path) -> Path:
        """Write the JSON document atomically; return its path."""
        path = folder / f"{self.stem}.json"
        write_output(path, f"{json.dumps(self.to_json(), indent=1)}\n".encode())
        return path

    def check_writable(self, folder: Path) -> None:
        """Raise an error if one of the table's files in ``folder`` cannot be written, or is a link or a folder."""
        check_output_files(folder, [f"{self.stem}.{ending}" for ending in ("md", "json", "png")])

    def load_earlier_rows(self, folder: Path) -> None:
        """Load the rows of an earlier run's JSON file, if its settings and machine are equal."""
        path = folder / f"{self.stem}.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["asked"] == self.asked and before["env"] == self.env:
                names = {f.name for f in fields(TableRow)}
                self.rows = [TableRow(**{k: v for k, v in row.items() if k in names}) for row in before["rows"]]
        except (OSError, ValueError, KeyError, TypeError):  # missing, or another file
            return


# --- the rows of each table -------------------------------------------------------------------------------------------


def ablation_entries(schedule: Schedule, length: int, num_layers: int, folder: str) -> list[Entry]:
    """Return the rows of the table ``ablation``: baselines, and schedules that change one or a few settings.

    Args:
        schedule: Schedule to change.
        folder: Folder for tensors that schedules offload to disk.
    """
    entries = [
        Entry(Case("plain", length), LABELS["plain"], "compared with"),
        Entry(Case("checkpoint", length), LABELS["checkpoint"], "compared with", to_checkpoint=True),
        Entry(Case("stream", length, schedule), DEFAULT, "compared with", to_default=True),
    ]
    seen = {schedule}
    for section, label, changes in _ablation_schedules(schedule, length, num_layers, folder):
        changed = replace(schedule, **changes)
        if changed not in seen:
            entries.append(Entry(Case("stream", length, changed), label, section))
            seen.add(changed)
    return entries


def _ablation_schedules(
    schedule: Schedule, length: int, num_layers: int, folder: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (section, label, changed fields) of each schedule of an ablation."""
    disk = {"offload": "disk", "offload_dir": folder}
    half = max(1, num_layers // 2)
    for size in _nearby_chunk_sizes(schedule.chunk_size, length):
        yield "chunk of a layer", f"{size:,} tokens", {"chunk_size": size}
    for size in _nearby_chunk_sizes(schedule.head_chunk_size, length):
        yield "chunk of the head", f"{size:,} tokens of the head", {"head_chunk_size": size}
    yield "layer inputs", "on host", {"offload": "host"}
    yield "layer inputs", "on disk", disk
    yield "layer inputs", f"on host, the last {half} on the device", {"offload": "host", "device_layers": half}
    yield "layer inputs", "on host, gradients streamed with them", {"offload": "host", "stream_grads": True}
    yield "layer inputs", "gradients streamed in their place", {"stream_grads": True}
    yield "two levels", f"segments of {best_segment_size(num_layers)}, the best size", {"levels": 2}
    for size in sorted({2, half} - {1, best_segment_size(num_layers)}):
        yield "two levels", f"segments of {size}", {"levels": 2, "segment_size": size}
    yield "two levels", "inputs of segments on host", {"levels": 2, "offload": "host"}
    yield "kept", "keys and values on device", {"keep_kv": "device"}
    yield "kept", "keys and values on host", {"keep_kv": "host"}
    yield "kept", "attention outputs on device", {"keep_attention": "device"}
    yield "kept", "attention outputs on host", {"keep_attention": "host"}
    for count in sorted({1, half, num_layers}):
        yield "kept", f"the last {count} layers whole" if count > 1 else "the last layer whole", {"keep_layers": count}
    fastest = {"keep_attention": "device", "keep_kv": "device", "keep_layers": half}
    yield "together", "keys, values, attention and half the layers kept", fastest
    far = {"offload": "host", "keep_attention": "host", "keep_kv": "host", "stream_grads": True}
    yield "together", "layer inputs, keys, values, attention on host", far
    small = max(1, schedule.chunk_size // 4)
    least = {"levels": 2, "stream_grads": True, "chunk_size": small, "head_chunk_size": min(small, 128), **disk}
    yield "together", "least memory: two levels, disk, small chunks", least


def _nearby_chunk_sizes(chunk_size: int, length: int) -> list[int]:
    """Return 1/4, 1/2, 2 and 4 times ``chunk_size``, at least 1 and at most ``length``, without ``chunk_size``."""
    return sorted(
        {min(length, max(1, s)) for s in (chunk_size // 4, chunk_size // 2, 2 * chunk_size, 4 * chunk_size)}
        - {chunk_size}
    )


def maxlen_entries(schedule: Schedule, folder: str) -> list[Entry]:
    """Return the rows of the table ``max-length``: plain autograd, gradient checkpointing, and schedules of streaming.

    Args:
        schedule: Base schedule; the other schedules change the fields that their labels name.
        folder: Folder for tensors that schedules offload to disk.
    """
    host, disk = {"offload": "host"}, {"offload": "disk", "offload_dir": folder}
    least = {"levels": 2, "stream_grads": True}
    changes: dict[str, dict[str, Any]] = {
        DEFAULT: {},
        "attention outputs kept": {"keep_attention": "device"},
        "two levels": {"levels": 2},
        "layer inputs on host": host,
        "layer inputs and gradients on host": {**host, "stream_grads": True},
        "two levels, on host": {**host, **least},
        "layer inputs and gradients on disk": {**disk, "stream_grads": True},
        "two levels, on disk": {**disk, **least},
    }
    entries = [Entry(Case(mode, 0, schedule), LABELS[mode]) for mode in ("plain", "checkpoint")]
    for label, changed in changes.items():
        entries.append(Entry(Case("stream", 0, replace(schedule, **changed)), label))
    return entries


def mode_entries(modes: Sequence[Mode], length: int, schedule: Schedule) -> list[Entry]:
    return [
        Entry(
            Case(mode, length, schedule),
            LABELS[mode],
            to_checkpoint=mode == "checkpoint",
            to_default=mode == "stream",
        )
        for mode in modes
    ]


def prefix_sharing_entries(prompt_length: int, schedule: Schedule) -> list[Entry]:
    """Return the rows of the table ``prefix-sharing``: three layouts with streaming, and gradient checkpointing."""
    layouts: tuple[Layout, ...] = ("batch", "turns", "shared")
    rows = [
        Entry(
            Case("stream", prompt_length, schedule, layout), SHARING[layout], "StreamTune", to_default=layout == "batch"
        )
        for layout in layouts
    ]
    last = Case("checkpoint", prompt_length, layout="turns")
    return [*rows, Entry(last, SHARING["turns"], LABELS["checkpoint"], to_checkpoint=True)]
