"""Benchmark a training step: plain autograd, gradient checkpointing and streaming (layers run chunk by chunk).

All methods use the same weights and the same batch, each in its own process. Time and memory are measured in different
steps, because tracking every tensor storage slows a step down. The methods take turns with their timed steps, so that
ratios compare steps of the same turn. The reported ratio is the median.
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
    """Memory and step time of one training method at one sequence length. Times are medians over the timed steps.

    Attributes:
        mode: Training method, such as ``stream`` or ``checkpoint`` (gradient checkpointing).
        length: Sequence length in tokens.
        peak_bytes: Peak memory of a step. On CUDA, the peak of PyTorch's allocator; on a CPU, weights plus the peak of
            all other tensor storages.
        activation_bytes: Peak memory of a step beyond weights, gradients and stored layer inputs.
        layer_activation_bytes: Same as ``activation_bytes``, in a step without the LM head.
        rss_bytes: Peak resident memory of the process.
        forward_s, backward_s: Seconds of the forward and of the backward.
        tokens_per_s: Tokens of a step divided by the median step time.
        ratio: Step time divided by the step time of gradient checkpointing; median over the timed steps.
        layout: ``row`` for one sequence; ``packed`` or ``separate`` if the same tokens are split into several rows.
        row_ratio: Step time divided by the step time of the layout ``row``; median over the timed steps.
        host_bytes, disk_bytes: Peak bytes of tensors offloaded to host memory and to disk.
        error: Reason why the measurement failed; None if it succeeded.
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
    """Results of ``streamtune bench``: a row for each training method, sequence length and layout."""

    env: dict[str, Any]
    schedule: Schedule
    rows: list[BenchRow] = field(default_factory=list)
    packed_rows: int = 0
    """Number of rows into which the layouts ``packed`` and ``separate`` split a sequence; 0 without these layouts."""
    objective: str = "sft"

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "schedule": asdict(self.schedule), "rows": [asdict(row) for row in self.rows]}

    def find_row(self, mode: Mode, length: int, layout: Layout = "row") -> BenchRow:
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
        report: Report without rows. Its ``schedule`` is the schedule of streaming. If ``packed_rows`` is set, each
            length is also measured as that many rows, packed into one sequence and one by one.
        job: Model and batches. If the batches score completions, methods without streaming compute one row for each
            completion. The loss is then the negative mean log-probability, without a reference model.
        modes: Training methods, from ``ALL_MODES``.
        repeats: Number of timed steps of each method.
        notify: Callback for text about the current measurement.
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
    """Measure the memory of each case, then the time of steps in turns: in each turn, one step of every case."""
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
    """Return the median ratio of corresponding step times; None if there are none.

    Each step time is a pair: seconds of the forward and of the backward.
    """
    ratios = [sum(our) / sum(their) for our, their in zip(step_times, reference_times, strict=False)]
    return statistics.median(ratios) if ratios else None
