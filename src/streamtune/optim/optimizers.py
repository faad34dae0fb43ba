"""Build optimizers by name, with separate learning rates for some parameters.

To add an optimizer, write an entry in ``streamtune.base.optimizer_table``. An entry with ``library_class`` names a
class of its library. Without ``library_class``, also write a rule in ``streamtune.optim.libraries``, which updates one
weight at a time, or an entry in :data:`WHOLE_STEP_MAKERS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from streamtune.base.optimizer_table import OPTIMIZERS, check_installed
from streamtune.base.text import look_up
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.optim.badam import EVERY_NAME, BlockAdamW
from streamtune.optim.narrow_states import NarrowStatesAdamW, Rounding, StatesDtype
from streamtune.optim.weightwise import WeightwiseOptimizer
from streamtune.optim.zeroth_order import ZerothOrderSGD

ParamGroup = dict[str, Any]
ParamGroups = list[ParamGroup]
ScaleOf = Callable[[str], float]
"""Function that returns the factor of a parameter's learning rate, by the parameter's name."""


@dataclass(frozen=True)
class OptimChoice:
    """An optimizer and its settings, as a recipe has them.

    Attributes:
        name: Key of ``streamtune.base.optimizer_table.OPTIMIZERS``.
        learning_rate: Learning rate of the first step; :func:`set_learning_rate` sets it for each later step.
        weight_decay: Decoupled weight decay of matrices.
        betas: Decay rates of AdamW's first and second moment.
        eps: Constant that is added to AdamW's denominator.
        states: Dtype of the moments of ``adamw``.
        rounding: Rounding of bfloat16 weights after an update. ``badam``, which updates weights in float32, and
            ``mezo``, which always rounds stochastically, ignore this setting.
        seed: Seed of the random numbers that an optimizer draws.
        args: Options of the optimizer; missing options have the table's defaults.
    """

    name: str
    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    states: StatesDtype = "param"
    rounding: Rounding = "nearest"
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adam_options(self) -> dict[str, Any]:
        """Options of AdamW except the weight decay, which each group sets."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}


def build_optimizer(
    choice: OptimChoice,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr_scale_of: ScaleOf = lambda name: 1.0,
    weight_decay_of: Callable[[str], float | None] = lambda name: None,
    is_in_layer: Callable[[str], bool] = lambda name: True,
) -> torch.optim.Optimizer:
    """Return the optimizer for the parameters that require a gradient.

    By default, weight decay applies only to parameters of two or more dimensions, so not to norm gains and biases.

    Args:
        choice: Optimizer and its settings.
        named_parameters: Result of ``model.named_parameters()``; frozen parameters are left out.
        lr_scale_of: Function that returns the factor of a parameter's learning rate.
        weight_decay_of: Function that returns the weight decay of a parameter; None for the default above.
        is_in_layer: Function that returns True for parameters of decoder layers. Some optimizers update only matrices
            in decoder layers; AdamW then updates all other parameters.

    Raises:
        ArgumentError: No optimizer has this name, its library is not installed, or no parameter requires a gradient.

    Example:
        >>> optimizer = build_optimizer(OptimChoice("adamw", learning_rate=1e-4), model.named_parameters())
        >>> optimizer.param_groups[0]["lr"]
        0.0001
    """
    name = choice.name
    table_entry = look_up(name, OPTIMIZERS, "optimizer", where="optim")
    trainable = [
        (parameter_name, parameter) for parameter_name, parameter in named_parameters if parameter.requires_grad
    ]
    if not trainable:
        raise ArgumentError("no parameter of the model requires a gradient: there is nothing to train")
    for kind in {parameter.device.type for _, parameter in trainable}:
        check_optimizer(name, kind)
    args: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in {**table_entry.options, **choice.args}.items()
    }
    adam = {"betas": choice.betas, "eps": choice.eps}
    if "projection" in table_entry.options:
        _check_projection_rank(
            args["rank"], [p for parameter_name, p in trainable if p.ndim == 2 and is_in_layer(parameter_name)]
        )
    groups: dict[Any, ParamGroup] = {}
    for matrices in (True, False):
        for parameter_name, parameter in trainable:
            if (parameter.ndim >= 2) != matrices:
                continue
            by_adamw = table_entry.adamw_for_rest and not (parameter.ndim == 2 and is_in_layer(parameter_name))
            decay = weight_decay_of(parameter_name)
            decay = (choice.weight_decay if matrices else 0.0) if decay is None else decay
            scale = lr_scale_of(parameter_name)
            group: ParamGroup = {"params": [], "weight_decay": decay, "lr": choice.learning_rate * scale}
            if scale != 1.0:
                group["lr_scale"] = scale
            if by_adamw:
                group |= {"rule": "adamw", **adam, "fused": True}
            elif name not in WHOLE_STEP_MAKERS:
                group |= {"rule": name, **args, **(adam if table_entry.is_adam else {}), "seed": choice.seed}
            if choice.rounding == "stochastic" and (by_adamw or "rule" in group):
                group |= {"rounding": choice.rounding, "seed": choice.seed}
            groups.setdefault((matrices, by_adamw, scale, decay), group)["params"].append(parameter)
    if name not in WHOLE_STEP_MAKERS:
        return WeightwiseOptimizer(list(groups.values()))
    names = {id(parameter): parameter_name for parameter_name, parameter in trainable}
    return WHOLE_STEP_MAKERS[name](list(groups.values()), replace(choice, args=args), names)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of each group to ``learning_rate`` times the group's ``lr_scale``, by default 1.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> set_learning_rate(optimizer, 0.01)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def _make_adamw(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    dtypes = {p.dtype for group in groups for p in group["params"]}
    rounds = choice.rounding == "stochastic" and torch.bfloat16 in dtypes
    if rounds or choice.states == "bfloat16" or (choice.states == "float32" and dtypes != {torch.float32}):
        return NarrowStatesAdamW(
            groups, **choice.adam_options, states=choice.states, seed=choice.seed, rounding=choice.rounding
        )
    # The fused step updates in place, parameter by parameter. On an accelerator, torch's default (foreach) allocates
    # temporaries as large as all parameters together, at the peak of memory use.
    return torch.optim.AdamW(groups, **choice.adam_options, fused=True)


def _make_badam(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    args = dict(choice.args)
    if all(parameter.is_meta for group in groups for parameter in group["params"]):
        args["blocks"] = (EVERY_NAME,)  # the planner has frozen all weights except the largest block
    named = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    return BlockAdamW(named, seed=choice.seed, **choice.adam_options, **args)


def _make_mezo(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    eps, directions = choice.args["eps"], choice.args["n"]
    return ZerothOrderSGD(groups, lr=choice.learning_rate, eps=eps, directions=directions, seed=choice.seed)


WHOLE_STEP_MAKERS: dict[str, Callable[[ParamGroups, OptimChoice, Mapping[int, str]], torch.optim.Optimizer]] = {
    "adamw": _make_adamw,
    "badam": _make_badam,
    "mezo": _make_mezo,
}
"""By name: function that makes an optimizer that updates all weights together; other optimizers update them one by one.

Its arguments are the groups, the choice with all options, and the parameters' names by ``id(parameter)``.
"""


def _check_projection_rank(rank: int, matrices: list[nn.Parameter]) -> None:
    sides = [min(parameter.shape) for parameter in matrices]
    if not sides or rank >= max(sides):
        why = f"the largest layer matrix has {max(sides)} rows or columns" if sides else "the layers have no matrices"
        raise ArgumentError(
            f"rank {rank} saves no memory: {why}",
            where="optim_args.rank",
            fix="write a lower rank, such as a quarter of that number" if sides else "write optim: adamw",
        )


def check_optimizer(name: str, device_type: str) -> None:
    """Refuse an optimizer that is not installed or does not run on a device type; ``meta`` is always accepted."""
    check_installed(name)
    required_device = OPTIMIZERS[name].only_on
    if required_device and device_type not in (required_device, "meta"):
        raise ArgumentError(
            f"'optim: {name}' runs only on {required_device}, but the weights are on {device_type}",
            where="optim",
            fix=f"write optim: {name.removeprefix('paged_')}, or use another device",
        )


# --- parameters by name -----------------------------------------------------------------------------------------------

MOST_SHOWN = 12
"""Largest number of parameter names in an error."""


class NameGroups:
    """Maps a parameter to its learning-rate group: the group of the first pattern that matches the parameter's name.

    A pattern matches whole parts of a name: ``mlp`` matches ``layers.0.mlp.up_proj.weight``, but not ``mlp_norm``.

    Args:
        patterns: Patterns of ``fnmatch``, one for each group.
        parameter_names: Names of the trained parameters.

    Raises:
        ArgumentError: A pattern matches no trained parameter.
    """

    def __init__(self, patterns: Sequence[str], parameter_names: Sequence[str]) -> None:
        self._patterns = patterns
        for number, pattern in enumerate(patterns):
            if not any(_matches_name_parts(pattern, name) for name in parameter_names):
                raise _no_match_error(pattern, number, parameter_names)

    def group_index(self, parameter_name: str) -> int | None:
        """Return the index of the first pattern that matches a parameter name; None if no pattern matches."""
        return next(
            (number for number, pattern in enumerate(self._patterns) if _matches_name_parts(pattern, parameter_name)),
            None,
        )


def _matches_name_parts(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _no_match_error(pattern: str, group_index: int, parameter_names: Sequence[str]) -> ArgumentError:
    parts = dict.fromkeys(part for name in parameter_names for part in name.split(".") if not part.isdigit())
    shown = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in parameter_names))
    rest = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    nearest = did_you_mean(pattern, parts)
    return ArgumentError(
        f"'{pattern}' matches no trained parameter ({', '.join(shown[:MOST_SHOWN])}{rest})",
        where=f"lr_groups.{group_index}.match",
        fix=nearest or "write a part of the name of a trained parameter",
    )


class LayerPositions:
    """Maps the names of parameters to decoder layers; ``layers`` are the model's decoder layers, in order."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        numbers = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
        self._count = len(layers)
        self._layer_numbers = {name: numbers.get(id(parameter)) for name, parameter in model.named_parameters()}
        embeddings = {id(p) for p in _embedding_parameters(model)}
        self._embedded = {name for name, parameter in model.named_parameters() if id(parameter) in embeddings}

    def is_in_layer(self, name: str) -> bool:
        return self._layer_numbers[name] is not None

    def depth_below_head(self, name: str) -> int:
        """Return how many layers a parameter is below the head: 0 for head and last norm, 1 for the last layer."""
        number = self._layer_numbers[name]
        if number is not None:
            return self._count - number
        return self._count + 1 if name in self._embedded else 0


def _embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    get = getattr(model, "get_input_embeddings", None)
    return [] if get is None else list(get().parameters())
