"""Learning-rate schedules by name. To add a schedule, write a function and a line in :data:`SCHEDULES`.

Schedules are pure functions of the step, so there is no state to save. A schedule is a factor in [0, 1] of the peak
learning rate: first a linear warm-up, then a decay.

    factor  1 |      /‾‾\\__            warm-up over steps 0 .. W-1, the peak at step W,
              |    /       \\__         then the decay, which reaches 0 one step after the last
            0 |__/____________\\__
              0    W           total

Steps count from 0. Unlike a factor ``step / W`` the warm-up starts above zero: a first step at learning rate 0 would
waste a gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamtune.base.text import look_up
from streamtune.errors import ArgumentError, did_you_mean

LearningRateSchedule = Callable[[int], float]
"""Function that returns the learning rate of a step; steps are counted from 0."""


@dataclass(frozen=True)
class Decay:
    """Position of a step after the warm-up.

    Attributes:
        step: Number of steps since the peak of the learning rate.
        steps: Number of steps from the peak to the end of the run, at least 1.
        warmup_steps: Number of steps before the peak.
        learning_rate: Peak learning rate.
    """

    step: int
    steps: int
    warmup_steps: int
    learning_rate: float

    @property
    def progress(self) -> float:
        return min(1.0, self.step / self.steps)


def _constant_factor(position: Decay) -> float:
    return 1.0


def _linear_factor(position: Decay) -> float:
    return 1.0 - position.progress


def _cosine_factor(position: Decay, num_cycles: float = 0.5) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * 2.0 * num_cycles * position.progress))


def _cosine_with_min_lr_factor(
    position: Decay, min_lr: float | None = None, min_lr_rate: float = 0.0, num_cycles: float = 0.5
) -> float:
    min_factor = min_lr_rate if min_lr is None or position.learning_rate == 0 else min_lr / position.learning_rate
    return _cosine_factor(position, num_cycles) * (1.0 - min_factor) + min_factor


def _cosine_with_restarts_factor(position: Decay, num_cycles: float = 1) -> float:
    if position.progress >= 1:
        return 0.0
    return 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * position.progress) % 1.0)))


def _polynomial_factor(position: Decay, lr_end: float = 1e-7, power: float = 1.0) -> float:
    min_factor = min(1.0, lr_end / position.learning_rate) if position.learning_rate > 0 else 0.0
    return float((1.0 - min_factor) * (1.0 - position.progress) ** power + min_factor)


def _inverse_sqrt_factor(position: Decay, timescale: float | None = None) -> float:
    scale = timescale or position.warmup_steps or 10_000
    return 1.0 / math.sqrt((position.step + scale) / scale)


def _warmup_stable_decay_factor(
    position: Decay,
    num_decay_steps: float | None = None,
    decay_ratio: float = 0.1,
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    total = position.steps + position.warmup_steps
    decay_steps = min(
        position.steps, math.ceil(decay_ratio * total) if num_decay_steps is None else round(num_decay_steps)
    )
    decayed_steps = position.step - (position.steps - decay_steps)
    if decayed_steps < 0 or decay_steps == 0:
        return 1.0
    progress = min(1.0, decayed_steps / decay_steps)
    if decay_type == "linear":
        factor = 1.0 - progress
    elif decay_type == "1-sqrt":
        factor = 1.0 - math.sqrt(progress)
    else:
        factor = 0.5 * (1.0 + math.cos(math.pi * 2.0 * num_cycles * progress))
    return factor * (1.0 - min_lr_ratio) + min_lr_ratio


def _power_factor(
    position: Decay,
    *,
    batch_size: float,
    tokens_per_step: float,
    a: float = 4.0,
    b: float = -0.51,
    decay_ratio: float = 0.1,
) -> float:
    """Return ``min(peak, batch_size a tokens^b) / peak``, with a linear decay at the end (arXiv 2408.13359)."""
    if position.learning_rate == 0:
        return 0.0
    total = position.steps + position.warmup_steps
    decay_steps = min(position.steps, math.ceil(decay_ratio * total))

    def factor_before_decay(step: int) -> float:
        tokens = float((step + position.warmup_steps + 1) * tokens_per_step)
        return float(min(1.0, batch_size * a * tokens**b / position.learning_rate))

    decayed_steps = position.step - (position.steps - decay_steps)
    if decayed_steps < 0 or decay_steps == 0:
        return factor_before_decay(position.step)
    return factor_before_decay(position.steps - decay_steps) * (1.0 - min(1.0, decayed_steps / decay_steps))


SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": _constant_factor,
    "constant_with_warmup": _constant_factor,
    "cosine": _cosine_factor,
    "cosine_with_min_lr": _cosine_with_min_lr_factor,
    "cosine_with_restarts": _cosine_with_restarts_factor,
    "inverse_sqrt": _inverse_sqrt_factor,
    "linear": _linear_factor,
    "polynomial": _polynomial_factor,
    "power": _power_factor,
    "warmup_stable_decay": _warmup_stable_decay_factor,
}
"""By name: function of a :class:`Decay` and the schedule's options that returns the factor after the warm-up."""


def build_schedule(
    name: str,
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    options: Mapping[str, Any] | None = None,
) -> LearningRateSchedule:
    """Return the learning rate as a function of the step.

    Args:
        name: Key of :data:`SCHEDULES`.
        learning_rate: Peak learning rate.
        total_steps: Number of optimizer steps of the whole run.
        warmup_steps: Number of steps of the linear warm-up. With ``total_steps`` or more, the peak is never reached.
        options: Arguments of the schedule's function, by name.

    Raises:
        ArgumentError: The schedule is unknown, or has no such option.

    Example:
        >>> rate = build_schedule("linear", learning_rate=1.0, total_steps=10, warmup_steps=2)
        >>> [round(rate(step), 2) for step in (0, 1, 2, 9)]
        [0.33, 0.67, 1.0, 0.12]
    """
    factor = look_up(name, SCHEDULES, "learning-rate schedule", where="lr_scheduler_type")
    given, option_names = dict(options or {}), list(inspect.signature(factor).parameters)[1:]
    for option in given:
        if option not in option_names:
            fix = did_you_mean(option, option_names) or f"options: {', '.join(option_names) or 'none'}"
            raise ArgumentError(f"the schedule '{name}' has no option '{option}'", where="lr_scheduler_kwargs", fix=fix)
    decay_steps = max(1, total_steps - warmup_steps)

    def learning_rate_at(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / (warmup_steps + 1)
        return learning_rate * factor(Decay(step - warmup_steps, decay_steps, warmup_steps, learning_rate), **given)

    return learning_rate_at
