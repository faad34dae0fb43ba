"""Optimizers by name. A dict literal, not a registry: to add one, write a function and a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from streamtune.errors import ArgumentError
from streamtune.names import look_up

__all__ = ["OPTIMIZERS", "build_optimizer"]

ParamGroups = list[dict[str, object]]


def _adamw(
    groups: ParamGroups, *, learning_rate: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    # The fused step updates in place, parameter by parameter. torch's default on an accelerator (foreach) holds
    # temporaries as large as all the parameters together, at the very moment when memory is fullest.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": _adamw}
"""Name -> function of parameter groups, learning rate, betas and eps."""


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
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
    return make([g for g in groups if g["params"]], learning_rate=learning_rate, betas=betas, eps=eps)
