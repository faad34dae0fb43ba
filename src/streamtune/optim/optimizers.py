"""Optimizers by name.

To add one, write an entry in ``streamtune.base.optimizer_table``. With ``made_by`` it is made of a class in its
library. Without, write a rule in ``streamtune.optim.libraries``, which steps a weight at a time, or a row in
:data:`TOGETHER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from streamtune.base.names import look_up
from streamtune.base.optimizer_table import OPTIMIZERS, check_installed
from streamtune.errors import ArgumentError
from streamtune.optim.blocks import EVERY_NAME, BlockAdamW
from streamtune.optim.narrow_states import NarrowStatesAdamW, Rounding, StatesDtype
from streamtune.optim.weightwise import WeightwiseOptimizer
from streamtune.optim.zeroth_order import ZerothOrderSGD

ParamGroup = dict[str, Any]
ParamGroups = list[ParamGroup]
ScaleOf = Callable[[str], float]
"""Maps the name of a parameter to the factor of its learning rate."""


@dataclass(frozen=True)
class Settings:
    """The options of an optimizer that steps all of its weights together, beside their groups."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    states: StatesDtype
    rounding: Rounding
    seed: int
    args: Mapping[str, Any]
    """``optim_args``, with the defaults of the table."""
    names: Mapping[int, str]
    """Identity of a parameter -> its name."""


def build_optimizer(
    name: str,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    states: StatesDtype = "param",
    rounding: Rounding = "nearest",
    seed: int = 0,
    args: Mapping[str, Any] = MappingProxyType({}),
    scale_of: ScaleOf = lambda name: 1.0,
    decay_of: Callable[[str], float | None] = lambda name: None,
    is_in_layer: Callable[[str], bool] = lambda name: True,
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters that require a gradient.

    Weight decay goes to matrices only (``ndim >= 2``): pulling norm gains and biases to zero serves nothing.

    Args:
        name: A key of ``streamtune.base.optimizer_table.OPTIMIZERS``.
        named_parameters: As ``model.named_parameters()`` gives them; frozen ones are left out.
        learning_rate: The first learning rate; the loop sets it anew at each step, by :func:`set_learning_rate`.
        weight_decay: Decoupled decay of the matrices.
        betas: Decay rates of AdamW's first and second moment.
        eps: Added to AdamW's denominator.
        states: The dtype of the states of ``adamw``.
        rounding: How bfloat16 weights are rounded after a step. An optimizer that trains one block at a time keeps the
            block in float32, and one without a backward steps as it perturbs: both leave it out.
        seed: Of the random numbers that an optimizer takes.
        args: Options of the optimizer; the table has the others.
        scale_of: Gives the factor of the learning rate of each parameter.
        decay_of: Gives the weight decay of a parameter, in place of ``weight_decay`` for matrices; or None.
        is_in_layer: Returns True for a parameter of a decoder layer: some optimizers step only the matrices there.

    Raises:
        ArgumentError: No optimizer has this name, its library is not installed, or no parameter requires a gradient.
    """
    entry = look_up(name, OPTIMIZERS, "optimizer", where="optim")
    trainable = [(own, parameter) for own, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ArgumentError("no parameter of the model requires a gradient: there is nothing to train")
    for kind in {parameter.device.type for _, parameter in trainable}:
        check_optimizer(name, kind)
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in {**entry.options, **args}.items()
    }
    adam = {"betas": betas, "eps": eps}
    if "projection" in entry.options:
        _check_rank(given["rank"], [p for own, p in trainable if p.ndim == 2 and is_in_layer(own)])
    names = {id(parameter): own for own, parameter in trainable}
    found: dict[Any, ParamGroup] = {}
    for matrices in (True, False):
        for own, parameter in trainable:
            if (parameter.ndim >= 2) != matrices:
                continue
            by_adamw = entry.adamw_for_rest and not (parameter.ndim == 2 and is_in_layer(own))
            decay = decay_of(own)
            decay = (weight_decay if matrices else 0.0) if decay is None else decay
            scale = scale_of(own)
            group: ParamGroup = {"params": [], "weight_decay": decay, "lr": learning_rate * scale}
            if scale != 1.0:
                group["lr_scale"] = scale
            if by_adamw:
                group |= {"rule": "adamw", **adam, "fused": True}
            elif name not in TOGETHER:
                group |= {"rule": name, **given, **(adam if entry.is_adam else {}), "seed": seed}
            if rounding == "stochastic" and (by_adamw or "rule" in group):
                group |= {"rounding": rounding, "seed": seed}
            found.setdefault((matrices, by_adamw, scale, decay), group)["params"].append(parameter)
    groups = list(found.values())
    if name not in TOGETHER:
        return WeightwiseOptimizer(groups)
    return TOGETHER[name](groups, Settings(learning_rate, betas, eps, states, rounding, seed, given, names))


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the rate of each group to ``learning_rate`` times the group's own factor.

    Args:
        optimizer: Anything with ``param_groups``.
        learning_rate: That of the step.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def _adamw(groups: ParamGroups, settings: Settings) -> torch.optim.Optimizer:
    adam: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    states, rounding = settings.states, settings.rounding
    dtypes = {p.dtype for group in groups for p in group["params"]}
    rounds = rounding == "stochastic" and torch.bfloat16 in dtypes
    if rounds or states == "bfloat16" or (states == "float32" and dtypes != {torch.float32}):
        return NarrowStatesAdamW(groups, **adam, states=states, seed=settings.seed, rounding=rounding)
    # The fused step updates in place, parameter by parameter. torch's default on an accelerator (foreach) holds
    # temporaries as large as all the parameters together, at the very moment when memory is fullest.
    return torch.optim.AdamW(groups, **adam, fused=True)


def _badam(groups: ParamGroups, settings: Settings) -> torch.optim.Optimizer:
    names, args = settings.names, dict(settings.args)
    if all(parameter.is_meta for group in groups for parameter in group["params"]):
        args["blocks"] = (EVERY_NAME,)  # a plan has frozen all but the largest block
    named = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    adam: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    return BlockAdamW(named, **adam, seed=settings.seed, **args)


def _mezo(groups: ParamGroups, settings: Settings) -> torch.optim.Optimizer:
    eps, directions = settings.args["eps"], settings.args["n"]
    return ZerothOrderSGD(groups, lr=settings.learning_rate, eps=eps, directions=directions, seed=settings.seed)


TOGETHER: dict[str, Callable[[ParamGroups, Settings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "badam": _badam,
    "mezo": _mezo,
}
"""Name -> how an optimizer is made that steps all of its weights together. Any other steps a weight at a time."""


def _check_rank(rank: int, matrices: list[nn.Parameter]) -> None:
    """Refuse a rank that makes no gradient smaller.

    Raises:
        ArgumentError: It is at least as large as the smaller side of every matrix.
    """
    sides = [min(parameter.shape) for parameter in matrices]
    if not sides or rank >= max(sides):
        what = f"the largest has {max(sides)} rows or columns" if sides else "there are none"
        raise ArgumentError(
            f"a rank of {rank} makes the gradient of no matrix in the layers smaller: {what}",
            where="optim_args.rank",
            mend="write a lower rank, such as a quarter of that" if sides else "write optim: adamw",
        )


def check_optimizer(name: str, device_type: str) -> None:
    """Refuse an optimizer whose library is not installed, or does not run on a type of device.

    Args:
        name: A key of ``streamtune.base.optimizer_table.OPTIMIZERS``.
        device_type: That of the weights; ``meta`` is a plan for any device.

    Raises:
        ArgumentError: It is not installed, or does not run there.
    """
    check_installed(name)
    only = OPTIMIZERS[name].only_on
    if only and device_type not in (only, "meta"):
        raise ArgumentError(
            f"'optim: {name}' runs on {only}, and the weights are on {device_type}",
            where="optim",
            mend=f"write optim: {name.removeprefix('paged_')}, or take another device",
        )
