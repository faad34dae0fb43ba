"""Find the longest sequence that trains, by whole training steps in processes of their own."""

from streamtune.probe.plot import draw_probe
from streamtune.probe.probe import Limit, ProbeReport, ProbeTask, Trial, run_probe

__all__ = ["Limit", "ProbeReport", "ProbeTask", "Trial", "draw_probe", "run_probe"]
