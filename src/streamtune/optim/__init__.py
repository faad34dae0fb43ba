"""Optimizers and learning-rate schedules, each a small table of plain functions."""

from __future__ import annotations

from streamtune.optim.narrow_states import NarrowStatesAdamW, StatesDtype
from streamtune.optim.optimizers import OPTIMIZERS, SCHEDULES, LearningRateSchedule, build_optimizer, build_schedule

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "LearningRateSchedule",
    "NarrowStatesAdamW",
    "StatesDtype",
    "build_optimizer",
    "build_schedule",
]
