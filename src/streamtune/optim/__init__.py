"""Optimizers and learning-rate schedules, each a small table of plain functions."""

from __future__ import annotations

from streamtune.optim.optimizers import OPTIMIZERS, build_optimizer
from streamtune.optim.schedules import SCHEDULES, LearningRateSchedule, build_schedule

__all__ = ["OPTIMIZERS", "SCHEDULES", "LearningRateSchedule", "build_optimizer", "build_schedule"]
