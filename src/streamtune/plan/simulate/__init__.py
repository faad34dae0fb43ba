"""Simulate memory, work and traffic of a training step from its configuration, on ``meta`` tensors."""

from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import ALL_MODES, Mode, Workload

__all__ = ["ALL_MODES", "LiveBytes", "Mode", "Simulation", "Workload", "simulate"]
