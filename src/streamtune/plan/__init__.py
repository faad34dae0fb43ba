"""What a step costs and whether it is exact, measured: live bytes, the three-way benchmark, the verification."""

from streamtune.plan.bench import MODES, BenchReport, BenchRow, Mode, run_bench
from streamtune.plan.memory import LiveBytes
from streamtune.plan.plot import draw_bench
from streamtune.plan.verify import run_verify, verify_schedules
from streamtune.plan.verify_report import VerifyReport

__all__ = [
    "MODES",
    "BenchReport",
    "BenchRow",
    "LiveBytes",
    "Mode",
    "VerifyReport",
    "draw_bench",
    "run_bench",
    "run_verify",
    "verify_schedules",
]
