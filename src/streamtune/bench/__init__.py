"""Measure plain autograd, gradient checkpointing and streaming side by side, in processes of their own."""

from streamtune.bench.bench import BenchReport, BenchRow, run_bench
from streamtune.bench.named_tables import draw_table, markdown
from streamtune.bench.plots import draw_bench
from streamtune.bench.subject import Job
from streamtune.bench.tables import TableReport
from streamtune.bench.tabulate import run_table

__all__ = [
    "BenchReport",
    "BenchRow",
    "Job",
    "TableReport",
    "draw_bench",
    "draw_table",
    "markdown",
    "run_bench",
    "run_table",
]
