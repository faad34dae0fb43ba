"""Build optimizers by name, with separate learning rates for some parameters.

To add an optimizer, write an entry in ``streamtune.base.optimizer_table``. With ``made_by`` it is made from a class of
its library. Without ``made_by``, also write a rule in ``streamtune.optim.libraries``, which steps one weight at a time,
or an entry in :data:`TOGETHER`.
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
        rounding: Rounding of bfloat16 weights after a step. ``badam`` ignores it, because its block is in float32, and
            so does ``mezo``, which always rounds stochastically.
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
    def adam(self) -> dict[str, Any]:
        """Options of AdamW except the weight decay, which each group sets."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.eps}


def build_optimizer(
    choice: OptimChoice,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    scale_of: ScaleOf = lambda name: 1.0,
    decay_of: Callable[[str], float | None] = lambda name: None,
    is_in_layer: Callable[[str], bool] = lambda name: True,
) -> torch.optim.Optimizer:
    """Return the optimizer for the parameters that require a gradient.

    Weight decay applies only to matrices (``ndim >= 2``): pulling norm gains and biases to zero has no use.

    Args:
        choice: Optimizer and its settings.
        named_parameters: Result of ``model.named_parameters()``; frozen parameters are left out.
        scale_of: Function that returns the factor of a parameter's learning rate.
        decay_of: Function that returns the weight decay of a parameter; None for the default above.
        is_in_layer: Function that returns True for parameters of decoder layers. Some optimizers step only matrices
            there, and AdamW steps the rest.

    Raises:
        ArgumentError: No optimizer has this name, its library is not installed, or no parameter requires a gradient.

    Example:
        >>> optimizer = build_optimizer(OptimChoice("adamw", learning_rate=1e-4), model.named_parameters())
        >>> optimizer.param_groups[0]["lr"]
        0.0001
    """
    name = choice.name
    entry = look_up(name, OPTIMIZERS, "optimizer", where="optim")
    trainable = [(own, parameter) for own, parameter in named_parameters if parameter.requires_grad]
    if not trainable:
        raise ArgumentError("no parameter of the model requires a gradient: there is nothing to train")
    for kind in {parameter.device.type for _, parameter in trainable}:
        check_optimizer(name, kind)
    args: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in {**entry.options, **choice.args}.items()
    }
    adam = {"betas": choice.betas, "eps": choice.eps}
    if "projection" in entry.options:
        _check_rank(args["rank"], [p for own, p in trainable if p.ndim == 2 and is_in_layer(own)])
    groups: dict[Any, ParamGroup] = {}
    for matrices in (True, False):
        for own, parameter in trainable:
            if (parameter.ndim >= 2) != matrices:
                continue
            by_adamw = entry.adamw_for_rest and not (parameter.ndim == 2 and is_in_layer(own))
            decay = decay_of(own)
            decay = (choice.weight_decay if matrices else 0.0) if decay is None else decay
            scale = scale_of(own)
            group: ParamGroup = {"params": [], "weight_decay": decay, "lr": choice.learning_rate * scale}
            if scale != 1.0:
                group["lr_scale"] = scale
            if by_adamw:
                group |= {"rule": "adamw", **adam, "fused": True}
            elif name not in TOGETHER:
                group |= {"rule": name, **args, **(adam if entry.is_adam else {}), "seed": choice.seed}
            if choice.rounding == "stochastic" and (by_adamw or "rule" in group):
                group |= {"rounding": choice.rounding, "seed": choice.seed}
            groups.setdefault((matrices, by_adamw, scale, decay), group)["params"].append(parameter)
    if name not in TOGETHER:
        return WeightwiseOptimizer(list(groups.values()))
    names = {id(parameter): own for own, parameter in trainable}
    return TOGETHER[name](list(groups.values()), replace(choice, args=args), names)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of each group to ``learning_rate`` times the group's own factor.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> set_learning_rate(optimizer, 0.01)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def _adamw(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    dtypes = {p.dtype for group in groups for p in group["params"]}
    rounds = choice.rounding == "stochastic" and torch.bfloat16 in dtypes
    if rounds or choice.states == "bfloat16" or (choice.states == "float32" and dtypes != {torch.float32}):
        return NarrowStatesAdamW(
            groups, **choice.adam, states=choice.states, seed=choice.seed, rounding=choice.rounding
        )
    # The fused step updates in place, parameter by parameter. torch's default on an accelerator (foreach) allocates
    # temporaries as large as all parameters together, at the moment of the highest memory use.
    return torch.optim.AdamW(groups, **choice.adam, fused=True)


def _badam(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    args = dict(choice.args)
    if all(parameter.is_meta for group in groups for parameter in group["params"]):
        args["blocks"] = (EVERY_NAME,)  # the planner has frozen all but the largest block
    named = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
    return BlockAdamW(named, seed=choice.seed, **choice.adam, **args)


def _mezo(groups: ParamGroups, choice: OptimChoice, names: Mapping[int, str]) -> torch.optim.Optimizer:
    eps, directions = choice.args["eps"], choice.args["n"]
    return ZerothOrderSGD(groups, lr=choice.learning_rate, eps=eps, directions=directions, seed=choice.seed)


TOGETHER: dict[str, Callable[[ParamGroups, OptimChoice, Mapping[int, str]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "badam": _badam,
    "mezo": _mezo,
}
"""By name: function that makes an optimizer which steps all its weights together.

Its arguments are the groups, the choice with all options, and the parameters' names by ``id(parameter)``. Every other
optimizer steps one weight at a time.
"""


def _check_rank(rank: int, matrices: list[nn.Parameter]) -> None:
    sides = [min(parameter.shape) for parameter in matrices]
    if not sides or rank >= max(sides):
        why = f"the largest layer matrix has {max(sides)} rows or columns" if sides else "the layers have no matrices"
        raise ArgumentError(
            f"rank {rank} saves nothing: {why}",
            where="optim_args.rank",
            fix="write a lower rank, such as a quarter of that" if sides else "write optim: adamw",
        )


def check_optimizer(name: str, device_type: str) -> None:
    """Refuse an optimizer that is not installed or does not run on a device type; ``meta`` is always accepted."""
    check_installed(name)
    only = OPTIMIZERS[name].only_on
    if only and device_type not in (only, "meta"):
        raise ArgumentError(
            f"'optim: {name}' runs only on {only}, but the weights are on {device_type}",
            where="optim",
            fix=f"write optim: {name.removeprefix('paged_')}, or use another device",
        )


# --- parameters by name -----------------------------------------------------------------------------------------------

MOST_SHOWN = 12
"""Most names of parameters in an error."""


class NameGroups:
    """Finds the learning-rate group of a parameter: the first pattern that matches its name.

    A pattern matches whole parts of a name: ``mlp`` matches ``layers.0.mlp.up_proj.weight``, but not ``mlp_norm``.

    Args:
        patterns: Patterns of ``fnmatch``, one for each group.
        names: Names of the trained parameters.

    Raises:
        ArgumentError: A pattern matches no trained parameter.
    """

    def __init__(self, patterns: Sequence[str], names: Sequence[str]) -> None:
        self._patterns = patterns
        for number, pattern in enumerate(patterns):
            if not any(_matches(pattern, name) for name in names):
                raise _no_match(pattern, number, names)

    def find(self, name: str) -> int | None:
        """Return the index of the first pattern that matches a name, or None."""
        return next((number for number, pattern in enumerate(self._patterns) if _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(f".{name}.", f"*.{pattern}.*")


def _no_match(pattern: str, number: int, names: Sequence[str]) -> ArgumentError:
    parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdigit())
    shown = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
    rest = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    nearest = did_you_mean(pattern, parts)
    return ArgumentError(
        f"'{pattern}' matches no trained parameter; they are {', '.join(shown[:MOST_SHOWN])}{rest}",
        where=f"lr_groups.{number}.match",
        fix=nearest or "write a part of one of these names",
    )


class LayerPlaces:
    """Finds the decoder layer of a parameter by its name; ``layers`` are the model's decoder layers, in order."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        numbers = {id(p): number for number, layer in enumerate(layers) for p in layer.parameters()}
        self._count = len(layers)
        self._layer_numbers = {name: numbers.get(id(parameter)) for name, parameter in model.named_parameters()}
        embeddings = {id(p) for p in _embeddings(model)}
        self._embedded = {name for name, parameter in model.named_parameters() if id(parameter) in embeddings}

    def is_in_layer(self, name: str) -> bool:
        """Return True for a parameter of a decoder layer."""
        return self._layer_numbers[name] is not None

    def layers_above(self, name: str) -> int:
        """Return how many layers below the head a parameter is: 0 for head and last norm, 1 for the last layer."""
        number = self._layer_numbers[name]
        if number is not None:
            return self._count - number
        return self._count + 1 if name in self._embedded else 0


def _embeddings(model: nn.Module) -> list[nn.Parameter]:
    get = getattr(model, "get_input_embeddings", None)
    return [] if get is None else list(get().parameters())
