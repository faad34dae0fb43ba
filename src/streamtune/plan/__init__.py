"""The cost and the exactness of a step: live bytes, the simulated step, the planner, the benchmark and its tables, the
longest sequence, the verification.
"""

from streamtune.plan.bench import BenchReport, BenchRow, run_bench
from streamtune.plan.choices import Limits
from streamtune.plan.cost import Rates
from streamtune.plan.memory import LiveBytes
from streamtune.plan.planner import Alternative, Plan, as_fixed, choose, judge
from streamtune.plan.plot import draw_bench
from streamtune.plan.probe import Limit, ProbeReport, ProbeTask, Trial, measured, run_probe
from streamtune.plan.probe_plot import draw_probe
from streamtune.plan.simulate import Simulation, Work, simulate
from streamtune.plan.subject import Job
from streamtune.plan.tables import TableName, TableReport
from streamtune.plan.tables_plot import draw_table
from streamtune.plan.tables_report import markdown
from streamtune.plan.tabulate import run_table
from streamtune.plan.verify import run_verify, verify_schedules
from streamtune.plan.verify_report import VerifyReport
from streamtune.plan.workload import ALL_MODES, MODES, Mode, Workload

__all__ = [
    "ALL_MODES",
    "MODES",
    "Alternative",
    "BenchReport",
    "BenchRow",
    "Job",
    "Limit",
    "Limits",
    "LiveBytes",
    "Mode",
    "Plan",
    "ProbeReport",
    "ProbeTask",
    "Rates",
    "Simulation",
    "TableName",
    "TableReport",
    "Trial",
    "VerifyReport",
    "Work",
    "Workload",
    "as_fixed",
    "choose",
    "draw_bench",
    "draw_probe",
    "draw_table",
    "judge",
    "markdown",
    "measured",
    "run_bench",
    "run_probe",
    "run_table",
    "run_verify",
    "simulate",
    "verify_schedules",
]
