"""Measure plain autograd, gradient checkpointing and streaming: same weights, same batch, one process each.

Time and memory are measured in different steps, because following every storage slows a step down. Timed steps of the
modes alternate. A ratio compares consecutive steps, and the median of the ratios is reported.
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
    """Memory and time of one training method (``mode``) at one row length; times are medians over the timed steps.

    Attributes:
        mode: Training method, such as ``stream`` or ``checkpoint``.
        length: Number of tokens in a row.
        peak_bytes: Peak memory of a step: the allocator's peak on an accelerator, weights plus live storages on a CPU.
        activation_bytes: Peak beyond weights, gradients and stored layer inputs, including the head.
        layer_activation_bytes: The same peak in a step without the LM head.
        rss_bytes: Peak resident memory of the process.
        forward_s, backward_s: Seconds of the forward and of the backward.
        tokens_per_s: Tokens of a step divided by its median time.
        ratio: Step time divided by the step time of gradient checkpointing; median over paired steps.
        layout: Layout of the tokens: ``row``, ``packed`` or ``separate`` rows.
        row_ratio: Step time divided by the time of the same tokens as one row; median over paired steps.
        host_bytes, disk_bytes: Peaks of the bytes offloaded to host and disk.
        error: Reason why there are no figures; None if there are.
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
    """Results of ``streamtune bench``: a row for each training method, length and layout, with machine and versions."""

    env: dict[str, Any]
    schedule: Schedule
    rows: list[BenchRow] = field(default_factory=list)
    packed_rows: int = 0
    """Number of rows in the layouts ``packed`` and ``separate``; 0 if these are not measured."""
    objective: str = "sft"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of ``streamtune bench --json``."""
        return {**vars(self), "schedule": asdict(self.schedule), "rows": [asdict(row) for row in self.rows]}

    def find_row(self, mode: Mode, length: int, layout: Layout = "row") -> BenchRow:
        """Return the measured row of ``report.rows`` with this training method, row length and layout."""
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
    """Measure time and memory of every training method at every length; add them to ``report`` and return it.

    Args:
        report: Report without rows, with the streaming schedule. If its ``packed_rows`` is set, each length is also
            measured as that many rows in one sequence, and as the same rows one by one.
        job: Model and batches. If the batches score completions, modes without streaming use a row for each
            completion. The loss is then the negative mean log-probability, and no reference model runs.
        lengths: Row lengths, in tokens.
        modes: Modes to measure, from ``ALL_MODES``.
        repeats: Number of timed steps of each mode; the modes alternate.
        notify: Called with text about the current measurement.
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
    """Return the results of cases of one length: each case's memory, then timed steps in which the cases alternate."""
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
            notify(f"{case.length:,} tokens, {_describe_case(case)}: memory")
            workers[case] = Worker(job)
            memory = ask(case, "measure_memory")
            rows[case] = replace(rows[case], **{name: value for name, value in memory.items() if name in MEMORY})
            env.update(workers[case].ask("environment") if not rows[case].error else {})
        for turn in range(repeats + 1):  # the first turn warms up
            for case in cases:
                notify(f"{case.length:,} tokens, {_describe_case(case)}: step {turn} of {repeats}")
                answer = ask(case, "measure_time")
                if turn and answer:
                    times[case].append((answer["forward_s"], answer["backward_s"]))
                    rows[case] = replace(rows[case], rss_bytes=answer["rss_bytes"])
    finally:
        for worker in workers.values():
            worker.close()
    timed = {case: steps for case, steps in times.items() if steps and not rows[case].error}
    return [_add_times_to_row(row, case, timed, job) if case in timed else row for case, row in rows.items()]


def _describe_case(case: Case) -> str:
    return case.mode if case.layout == "row" else f"{case.mode}, rows {case.layout}"


def _add_times_to_row(row: BenchRow, case: Case, times: dict[Case, list[tuple[float, float]]], job: Job) -> BenchRow:
    case_times = times[case]
    return replace(
        row,
        forward_s=statistics.median(forward for forward, _ in case_times),
        backward_s=statistics.median(backward for _, backward in case_times),
        tokens_per_s=job.tokens(case.length) / statistics.median(map(sum, case_times)),
        ratio=median_ratio(case_times, times.get(replace(case, mode=BASELINE), [])),
        row_ratio=median_ratio(case_times, times.get(replace(case, layout="row"), [])),
    )


def median_ratio(
    step_times: Sequence[tuple[float, float]], reference_times: Sequence[tuple[float, float]]
) -> float | None:
    """Return the median of ``step_times / reference_times`` over paired steps; None without steps."""
    ratios = [sum(our) / sum(their) for our, their in zip(step_times, reference_times, strict=False)]
    return statistics.median(ratios) if ratios else None
