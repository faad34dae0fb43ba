"""What a step costs, measured: live bytes and the three-way benchmark."""

from streamtune.plan.bench import MODES, BenchReport, BenchRow, Mode, run_bench
from streamtune.plan.memory import LiveBytes
from streamtune.plan.plot import draw_bench

__all__ = ["MODES", "BenchReport", "BenchRow", "LiveBytes", "Mode", "draw_bench", "run_bench"]
