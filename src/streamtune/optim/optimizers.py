"""Optimizers and learning-rate schedules by name: dict literals; to add one, write a function and a line.

Schedules are pure functions of the step, so there is no state to save or to restore. Each is a factor in [0, 1] times
the peak learning rate: a linear warm-up, then a decay.

    factor  1 |      /‾‾\\__            warm-up over steps 0 .. W-1, the peak at step W,
              |    /       \\__         then the decay, which reaches 0 one step after the last
            0 |__/____________\\__
              0    W           total

Steps count from 0. Unlike a factor of ``step / W`` the warm-up starts above zero: a first step at a learning rate of
exactly 0 would compute a gradient and throw it away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import nn

from streamtune.errors import ArgumentError
from streamtune.names import look_up
from streamtune.optim.narrow_states import NarrowStatesAdamW, StatesDtype

__all__ = ["OPTIMIZERS", "SCHEDULES", "LearningRateSchedule", "build_optimizer", "build_schedule"]

ParamGroups = list[dict[str, object]]


def _adamw(
    groups: ParamGroups,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    states: StatesDtype,
    seed: int,
) -> torch.optim.Optimizer:
    dtypes = {p.dtype for group in groups for p in cast("list[nn.Parameter]", group["params"])}
    if states == "bfloat16" or (states == "float32" and dtypes != {torch.float32}):
        return NarrowStatesAdamW(groups, lr=learning_rate, betas=betas, eps=eps, states=states, seed=seed)
    # The fused step updates in place, parameter by parameter. torch's default on an accelerator (foreach) holds
    # temporaries as large as all the parameters together, at the very moment when memory is fullest.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw}
"""Name -> function of parameter groups, learning rate, betas, eps, dtype of states and seed."""


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    states: StatesDtype = "param",
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that require a gradient.

    Weight decay goes to matrices only (``ndim >= 2``): pulling norm gains and biases to zero serves nothing.

    Args:
        name: A key of :data:`OPTIMIZERS`.
        named_parameters: As ``model.named_parameters()`` gives them; frozen ones are left out.
        learning_rate: The first learning rate; the loop sets it anew at each step.
        weight_decay: Decoupled decay of the matrices.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        states: The dtype of the optimizer's states.
        seed: Of the random numbers that an optimizer takes.

    Raises:
        ArgumentError: No optimizer has this name, or no parameter requires a gradient.
    """
    make = look_up(name, OPTIMIZERS, "optimizer", where="optim")
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ArgumentError("no parameter of the model requires a gradient: there is nothing to train")
    groups: ParamGroups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    chosen = [group for group in groups if group["params"]]
    return make(chosen, learning_rate=learning_rate, betas=betas, eps=eps, states=states, seed=seed)


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
