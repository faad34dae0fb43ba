"""What a step costs and whether it is exact, measured: live bytes, the benchmark and its tables, the longest sequence,
the verification.
"""

from streamtune.plan.bench import BenchReport, BenchRow, run_bench
from streamtune.plan.memory import LiveBytes
from streamtune.plan.modes import ALL_MODES, MODES, Mode
from streamtune.plan.plot import draw_bench
from streamtune.plan.probe import Limit, ProbeReport, ProbeTask, Trial, measured, run_probe
from streamtune.plan.probe_plot import draw_probe
from streamtune.plan.subject import Job
from streamtune.plan.tables import TableName, TableReport
from streamtune.plan.tables_plot import draw_table
from streamtune.plan.tables_report import markdown
from streamtune.plan.tabulate import run_table
from streamtune.plan.verify import run_verify, verify_schedules
from streamtune.plan.verify_report import VerifyReport

__all__ = [
    "ALL_MODES",
    "MODES",
    "BenchReport",
    "BenchRow",
    "Job",
    "Limit",
    "LiveBytes",
    "Mode",
    "ProbeReport",
    "ProbeTask",
    "TableName",
    "TableReport",
    "Trial",
    "VerifyReport",
    "draw_bench",
    "draw_probe",
    "draw_table",
    "markdown",
    "measured",
    "run_bench",
    "run_probe",
    "run_table",
    "run_verify",
    "verify_schedules",
]
