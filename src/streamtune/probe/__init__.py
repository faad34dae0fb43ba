"""Find the longest sequence that trains, by whole training steps in processes of their own."""

from streamtune.probe.probe import Limit, ProbeReport, ProbeTask, Trial, draw_probe, run_probe

__all__ = ["Limit", "ProbeReport", "ProbeTask", "Trial", "draw_probe", "run_probe"]
