"""Plain autograd, gradient checkpointing and streaming side by side: the same weights, the same batch, a process each.

Time and memory are measured in different steps: following every storage slows a step down. Timed steps of the modes
take turns, so a ratio compares neighbours in time; the median of the ratios is what is reported.
"""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from streamtune.engine import Schedule
from streamtune.errors import RunError
from streamtune.plan.subject import Layout, MakeModel, Mode, Subject, Task, Variant
from streamtune.quiet import packed_call, run_packed

__all__ = ["MODES", "BenchReport", "BenchRow", "Layout", "Mode", "run_bench"]

MODES: tuple[Mode, ...] = ("plain", "checkpoint", "stream")
BASELINE: Mode = "checkpoint"


@dataclass(frozen=True)
class BenchRow:
    """What one mode took at one length: bytes, seconds, tokens per second; medians over the repeats.

    Attributes:
        peak_bytes: Peak of a step: the device allocator's on an accelerator; on the CPU weights and live storages.
        activation_bytes: Peak beyond weights, gradients and stored layer inputs, head included.
        layer_activation_bytes: The same for the decoder layers alone, without the head.
        rss_bytes: Peak resident memory of the process.
        ratio: Forward and backward time over that of gradient checkpointing, median of paired steps.
        layout: How the tokens are laid out in rows.
        row_ratio: Forward and backward time over that of the same tokens as one row, median of paired steps.
        error: Why there are no figures, where there are none.
    """

    mode: Mode
    length: int
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    layer_activation_bytes: int | None = None
    rss_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    tokens_per_s: float | None = None
    ratio: float | None = None
    error: str | None = None
    layout: Layout = "row"
    row_ratio: float | None = None


@dataclass(frozen=True)
class BenchReport:
    """All rows of a benchmark and the machine they were measured on."""

    env: dict[str, Any]
    schedule: Schedule
    rows: list[BenchRow] = field(default_factory=list)
    packed_rows: int = 0
    """Rows of the layouts that have several; 0 where only one row was measured."""

    def to_json(self) -> dict[str, Any]:
        """The document of ``streamtune bench --json``."""
        return {**vars(self), "schedule": asdict(self.schedule), "rows": [asdict(row) for row in self.rows]}

    def row(self, mode: Mode, length: int, layout: Layout = "row") -> BenchRow:
        """The row of a mode at a length."""
        return next(row for row in self.rows if (row.mode, row.length, row.layout) == (mode, length, layout))


def run_bench(
    make_model: MakeModel,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode] = MODES,
    schedule: Schedule,
    batch_size: int = 1,
    packed_rows: int = 0,
    repeats: int = 3,
    autocast: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> BenchReport:
    """Measure every mode at every length.

    Args:
        make_model: Builds the model; called in every process, so it must give the same weights each time.
        lengths: Tokens of a row.
        modes: Which of ``plain``, ``checkpoint`` and ``stream``.
        schedule: How streaming cuts the sequence.
        batch_size: Rows of the batch.
        packed_rows: Also measure each length as so many rows in one sequence, and as the same rows one after another.
        repeats: Timed steps of each mode, taken in turns.
        autocast: Compute in bf16.
        notify: Told what is being measured.
    """
    rows: list[BenchRow] = []
    env: dict[str, Any] = {}
    layouts: list[Layout] = ["row", "packed", "separate"] if packed_rows else ["row"]
    variants: list[Variant] = [(mode, layout) for mode in modes for layout in layouts]
    for length in lengths:
        task = Task(make_model, length, batch_size, packed_rows, schedule, autocast)
        measured = _measure_length(task, variants, repeats, notify, env)
        rows += [measured[variant] for variant in variants]
    return BenchReport(env, schedule, rows, packed_rows)


def _measure_length(
    task: Task, variants: Sequence[Variant], repeats: int, notify: Callable[[str], None], env: dict[str, Any]
) -> dict[Variant, BenchRow]:
    """All variants at one length: first the memory of each, then timed steps in turns by processes that stay alive."""
    rows = {(mode, layout): BenchRow(mode, task.length, layout=layout) for mode, layout in variants}
    workers: dict[Variant, _Worker] = {}
    try:
        for variant in variants:
            notify(f"{task.length:,} tokens, {_named(variant)}: memory")
            workers[variant] = _Worker(task, variant)
            rows[variant] = replace(rows[variant], **workers[variant].ask("memory"))
            env.update(workers[variant].ask("env"))
            if workers[variant].failed:
                rows[variant] = replace(rows[variant], error=workers[variant].failed)
        times: dict[Variant, list[tuple[float, float]]] = {variant: [] for variant in variants}
        for turn in range(repeats + 1):  # the first turn warms up
            for variant in variants:
                notify(f"{task.length:,} tokens, {_named(variant)}: step {turn} of {repeats}")
                answer = workers[variant].ask("time")
                if turn and answer:
                    times[variant].append((answer["forward_s"], answer["backward_s"]))
                    rows[variant] = replace(rows[variant], rss_bytes=answer["rss_bytes"])
        for variant in variants:
            if workers[variant].failed:
                rows[variant] = replace(rows[variant], error=workers[variant].failed)
            elif times[variant]:
                rows[variant] = _with_times(rows[variant], times, task)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def _named(variant: Variant) -> str:
    mode, layout = variant
    return mode if layout == "row" else f"{mode}, rows {layout}"


def _with_times(row: BenchRow, times: dict[Variant, list[tuple[float, float]]], task: Task) -> BenchRow:
    own = times[row.mode, row.layout]
    return replace(
        row,
        forward_s=statistics.median(forward for forward, _ in own),
        backward_s=statistics.median(backward for _, backward in own),
        tokens_per_s=task.batch_size * task.length / statistics.median(map(sum, own)),
        ratio=_paired(own, times.get((BASELINE, row.layout), [])),
        row_ratio=_paired(own, times.get((row.mode, "row"), [])),
    )


def _paired(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float | None:
    """Median of the ratios of steps that were neighbours in time."""
    ratios = [sum(one) / sum(other) for one, other in zip(ours, theirs, strict=False)]
    return statistics.median(ratios) if ratios else None


class _Worker:
    """A process that holds one model in one mode, with its rows in one layout, and answers one request at a time."""

    def __init__(self, task: Task, variant: Variant) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        call = packed_call(_serve, task, variant)
        self.process = context.Process(target=run_packed, args=(theirs, *call), daemon=True)
        self.process.start()
        theirs.close()
        self.failed: str | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """The answer to a request; empty once the process has failed, with the reason in ``failed``."""
        if self.failed:
            return {}
        try:
            self.connection.send(request)
            answer: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):  # the process is gone: on the CPU that is what running out of memory looks like
            self.process.join()
            self.failed = f"the process ended with exit code {self.process.exitcode} (out of memory?)"
            return {}
        if "fault" in answer:  # not a limit of the machine but a defect: it must not pass for one
            raise RunError("the benchmark failed", mend=answer["fault"])
        if "error" in answer:
            self.failed = answer["error"]
            return {}
        return answer

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, task: Task, variant: Variant) -> None:
    """Body of the process: build once, then measure on request until the other end closes."""
    try:
        subject = Subject(task, variant)
        while True:
            request = connection.recv()
            connection.send(getattr(subject, request)())
    except EOFError:
        pass
    except (torch.OutOfMemoryError, MemoryError):
        connection.send({"error": "out of memory"})
    except Exception as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "can't allocate memory" in text:
            connection.send({"error": "out of memory"})
        else:
            connection.send({"fault": traceback.format_exc()})
