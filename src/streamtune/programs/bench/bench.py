"""Measure plain autograd, gradient checkpointing and streaming: same weights, same batch, one process each.

Time and memory are measured in different steps, since following every storage slows a step down. Timed steps of the
modes alternate, so a ratio compares consecutive steps; the median of the ratios is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from streamtune.plan.simulate.workload import MODES, Mode
from streamtune.programs.bench.subject import Case, Job, Layout, Worker
from streamtune.schedule import Schedule

BASELINE: Mode = "checkpoint"

MEMORY = ("peak_bytes", "activation_bytes", "layer_activation_bytes", "host_bytes", "disk_bytes")


@dataclass(frozen=True)
class BenchRow:
    """The cost of one mode at one length; times are medians over the repeats.

    Attributes:
        peak_bytes: Peak of a step: the allocator's on an accelerator; weights and live storages on a CPU.
        activation_bytes: Peak beyond weights, gradients and stored layer inputs, with the head.
        layer_activation_bytes: The same peak without the head.
        rss_bytes: Peak resident memory of the process.
        ratio: Step time relative to gradient checkpointing, median of paired steps.
        layout: Layout of the tokens in rows.
        row_ratio: Step time relative to the same tokens as one row, median of paired steps.
        host_bytes, disk_bytes: Peaks of the bytes kept there for the backward.
        error: Reason why there are no figures.
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
    host_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class BenchReport:
    """All rows of a benchmark, and the machine."""

    env: dict[str, Any]
    schedule: Schedule
    rows: list[BenchRow] = field(default_factory=list)
    packed_rows: int = 0
    """Rows of the layouts with several rows; 0 if only one row was measured."""
    objective: str = "sft"

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``streamtune bench --json``."""
        return {**vars(self), "schedule": asdict(self.schedule), "rows": [asdict(row) for row in self.rows]}

    def row(self, mode: Mode, length: int, layout: Layout = "row") -> BenchRow:
        return next(row for row in self.rows if (row.mode, row.length, row.layout) == (mode, length, layout))


def run_bench(
    report: BenchReport,
    job: Job,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode] = MODES,
    repeats: int = 3,
    notify: Callable[[str], None] = lambda message: None,
) -> BenchReport:
    """Measure every mode at every length, and add the rows to the report.

    Args:
        report: An empty report with the schedule. With ``packed_rows`` each length is also measured as so many rows in
            one sequence, and as the same rows one after another.
        job: The model and its batches. If the batches score completions, modes without streaming have a row for each
            completion. The loss is the negative mean log-probability; no reference model runs.
        lengths: Tokens of a row.
        modes: Some of ``ALL_MODES``.
        repeats: Timed steps of each mode; the modes alternate.
        notify: Called with the current measurement.
    """
    layouts: list[Layout] = ["row", "packed", "separate"] if report.packed_rows else ["row"]
    for length in lengths:
        cases = [
            Case(mode, length, report.schedule, layout, report.packed_rows) for mode in modes for layout in layouts
        ]
        report.rows.extend(_measure_length(job, cases, repeats, notify, report.env))
    return report


def _measure_length(
    job: Job, cases: Sequence[Case], repeats: int, notify: Callable[[str], None], env: dict[str, Any]
) -> list[BenchRow]:
    """Measure all cases at one length, each in its own process: memory first, then alternating timed steps."""
    rows = {case: BenchRow(case.mode, case.length, layout=case.layout) for case in cases}
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    workers: dict[Case, Worker] = {}

    def ask(case: Case, request: str) -> dict[str, Any]:
        answer = {} if rows[case].error else workers[case].ask(request, case)
        if workers[case].failed:
            rows[case] = replace(rows[case], error=workers[case].failed)
        return answer

    try:
        for case in cases:
            notify(f"{case.length:,} tokens, {_named(case)}: memory")
            workers[case] = Worker(job)
            memory = ask(case, "memory")
            rows[case] = replace(rows[case], **{name: value for name, value in memory.items() if name in MEMORY})
            env.update(workers[case].ask("env") if not rows[case].error else {})
        for turn in range(repeats + 1):  # the first turn warms up
            for case in cases:
                notify(f"{case.length:,} tokens, {_named(case)}: step {turn} of {repeats}")
                answer = ask(case, "time")
                if turn and answer:
                    times[case].append((answer["forward_s"], answer["backward_s"]))
                    rows[case] = replace(rows[case], rss_bytes=answer["rss_bytes"])
    finally:
        for worker in workers.values():
            worker.close()
    timed = {case: steps for case, steps in times.items() if steps and not rows[case].error}
    return [_with_times(row, case, timed, job) if case in timed else row for case, row in rows.items()]


def _named(case: Case) -> str:
    return case.mode if case.layout == "row" else f"{case.mode}, rows {case.layout}"


def _with_times(row: BenchRow, case: Case, times: dict[Case, list[tuple[float, float]]], job: Job) -> BenchRow:
    own = times[case]
    return replace(
        row,
        forward_s=statistics.median(forward for forward, _ in own),
        backward_s=statistics.median(backward for _, backward in own),
        tokens_per_s=job.tokens(case.length) / statistics.median(map(sum, own)),
        ratio=paired(own, times.get(replace(case, mode=BASELINE), [])),
        row_ratio=paired(own, times.get(replace(case, layout="row"), [])),
    )


def paired(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float | None:
    """Return the median ratio of consecutive steps; None without steps."""
    ratios = [sum(our) / sum(their) for our, their in zip(ours, theirs, strict=False)]
    return statistics.median(ratios) if ratios else None
