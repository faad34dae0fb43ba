"""Simulate the memory and work of a training step on ``meta`` tensors, which have shapes but no values."""

from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import ALL_MODES, Mode, Workload

__all__ = ["ALL_MODES", "LiveBytes", "Mode", "Simulation", "Workload", "simulate"]
