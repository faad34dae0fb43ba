"""What a step costs and whether it is exact, measured: live bytes, the three-way benchmark, the longest
sequence, the verification.
"""

from streamtune.plan.bench import MODES, BenchReport, BenchRow, Mode, run_bench
from streamtune.plan.memory import LiveBytes
from streamtune.plan.plot import draw_bench
from streamtune.plan.probe import Limit, ProbeReport, ProbeTask, Trial, measured, run_probe
from streamtune.plan.probe_plot import draw_probe
from streamtune.plan.verify import run_verify, verify_schedules
from streamtune.plan.verify_report import VerifyReport

__all__ = [
    "MODES",
    "BenchReport",
    "BenchRow",
    "Limit",
    "LiveBytes",
    "Mode",
    "ProbeReport",
    "ProbeTask",
    "Trial",
    "VerifyReport",
    "draw_bench",
    "draw_probe",
    "measured",
    "run_bench",
    "run_probe",
    "run_verify",
    "verify_schedules",
]
