"""Learning-rate schedules: pure functions of the step, so there is no state to save or to restore.

Every schedule is a factor in [0, 1] times the peak learning rate: a linear warm-up, then a decay.

    factor  1 |      /‾‾\\__            warm-up over steps 0 .. W-1, the peak at step W,
              |    /       \\__         then the decay, which reaches 0 one step after the last
            0 |__/____________\\__
              0    W           total

Steps count from 0. Unlike a factor of ``step / W`` the warm-up starts above zero: a first step at a learning rate of
exactly 0 would compute a gradient and throw it away.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from streamtune.names import look_up

__all__ = ["SCHEDULES", "LearningRateSchedule", "build_schedule"]

LearningRateSchedule = Callable[[int], float]
"""Maps a step, counted from 0, to the learning rate of that step."""


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "cosine": _cosine, "linear": _linear}
"""Name -> the decay after the warm-up, a function of progress in [0, 1)."""


def build_schedule(name: str, *, learning_rate: float, total_steps: int, warmup_steps: int = 0) -> LearningRateSchedule:
    """Return the learning rate as a function of the step.

    Args:
        name: A key of :data:`SCHEDULES`.
        learning_rate: The peak.
        total_steps: Optimizer steps of the whole run.
        warmup_steps: Steps of the linear warm-up; more than ``total_steps`` never reaches the peak.

    Raises:
        ArgumentError: No schedule has this name.
    """
    decay = look_up(name, SCHEDULES, "learning-rate schedule", where="lr_scheduler_type")
    decay_steps = max(1, total_steps - warmup_steps)

    def learning_rate_at(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / (warmup_steps + 1)
        return learning_rate * decay(min(1.0, (step - warmup_steps) / decay_steps))

    return learning_rate_at
