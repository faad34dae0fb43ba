"""What a step costs and whether it is exact: live bytes, the simulated step, the benchmark, the probe, verification."""

from streamtune.plan.bench import MODES, BenchReport, BenchRow, Mode, run_bench
from streamtune.plan.choices import Limits
from streamtune.plan.cost import Rates
from streamtune.plan.memory import LiveBytes
from streamtune.plan.planner import Alternative, Plan, as_fixed, choose, judge
from streamtune.plan.plot import draw_bench
from streamtune.plan.probe import Limit, ProbeReport, ProbeTask, Trial, measured, run_probe
from streamtune.plan.probe_plot import draw_probe
from streamtune.plan.simulate import Simulation, Work, Workload, simulate
from streamtune.plan.verify import run_verify, verify_schedules
from streamtune.plan.verify_report import VerifyReport

__all__ = [
    "MODES",
    "Alternative",
    "BenchReport",
    "BenchRow",
    "Limit",
    "Limits",
    "LiveBytes",
    "Mode",
    "Plan",
    "ProbeReport",
    "ProbeTask",
    "Rates",
    "Simulation",
    "Trial",
    "VerifyReport",
    "Work",
    "Workload",
    "as_fixed",
    "choose",
    "draw_bench",
    "draw_probe",
    "judge",
    "measured",
    "run_bench",
    "run_probe",
    "run_verify",
    "simulate",
    "verify_schedules",
]
