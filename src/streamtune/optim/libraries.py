"""Rules for the optimizers by name: how a library makes the optimizer of one weight, and how its state is saved.

A rule's ``make`` imports its library when it is called. It takes the options of the group: ``optim_args``, or the
defaults in ``streamtune.base.optimizer_table``. An AdamW also gets ``betas`` and ``eps`` of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.optim.badam import RatioAdamW
from streamtune.optim.matrix_optimizers import GaLoreAdamW, NaturalGaLoreAdamW, SinkGD
from streamtune.optim.narrow_states import ExpandedFp8AdamW

Options = Mapping[str, Any]
Maker = Callable[[list[nn.Parameter], Options], torch.optim.Optimizer]


@dataclass(frozen=True)
class Rule:
    """Describes how a library's optimizer steps one weight at a time, and how its state is saved."""

    make: Maker
    counts: Mapping[str, Any] = field(default_factory=dict)
    """First value of each number that the library stores once per group; here each weight has its own."""
    shared: tuple[str, ...] = ()
    """State tensors that all weights share in the library; here each weight has a copy, which can be saved."""
    runs_on_meta: bool = True
    """False if the library's step needs values; then a plan takes the bytes from the table of optimizers."""
    eager: bool = False
    """True if the library compiles its step; here it does so only on an accelerator."""
    begin: Callable[[int], dict[str, Any]] = lambda number: {}
    """Function of a weight's number, counted from 1, that returns the weight's first state."""
    draws: str = ""
    """Option that makes a step draw random numbers; here they depend only on the seed, the step and the weight."""
    objects: Mapping[str, Callable[[Mapping[str, Any], Options], Any]] = field(default_factory=dict)
    """By name: function that rebuilds an object in the state from its saved tensors and integers, and the options."""
    average: Callable[[Tensor, Mapping[str, Any], Options], Tensor] | None = None
    """Function of the trained weight, its state and the options that returns the weight to evaluate and save."""
    own_shapes: bool = False
    """True if tensors in the state have other shapes than the weight."""
    rebuild: Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor] | None = None
    """Function of name, parts and weight dtype that rebuilds a quantised tensor in the state."""


def _make_class(kind: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Maker:
    return lambda params, options: kind(params, **fixed, **options)


def _make_imported(module: str, name: str, **fixed: Any) -> Maker:
    def make(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(import_module(module), name)(params, **fixed, **options)
        return made

    return make


def _make_pytorch_optimizer(name: str, *, foreach: bool | None = False, **fixed: Any) -> Maker:
    return _make_imported("pytorch_optimizer", name, foreach=foreach, **fixed)


def _torchao_rule(name: str, kind: str) -> Rule:
    make = _make_imported("torchao.optim", name)
    return Rule(make, eager=True, draws="bf16_stochastic_round", own_shapes=True, rebuild=_rebuild_torchao_state(kind))


def _rebuild_torchao_state(kind: str) -> Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor]:
    def rebuild(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8

        if kind == "fp8":
            state: Tensor = OptimStateFp8(parts["codes"], parts["scale"], dtype)
            return state
        signed = name == "exp_avg"
        found = (parts["codes"], parts["scale"], parts["qmap"], signed)
        if kind == "4bit":
            state = OptimState4bit(*found, torch.Size(parts["shape"].tolist()), dtype)
        else:
            state = OptimState8bit(*found, dtype)
        return state

    return rebuild


def _adafactor(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    given = dict(options)
    eps, threshold = (None, given.pop("eps2")), given.pop("clip_threshold")
    return torch.optim.Adafactor(params, eps=eps, d=threshold, foreach=False, **given)


def _apollo(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    from apollo_torch import APOLLOAdamW

    given = dict(options)
    own = {key: given.pop(key) for key in ("rank", "scale", "scale_type", "update_proj_gap")}
    made: torch.optim.Optimizer = APOLLOAdamW(
        [{"params": params, "proj": "random", "proj_type": "std", **own}], **given
    )
    return made


def _projector(found: Mapping[str, Any], options: Options) -> Any:
    from apollo_torch.random_projector import GradientProjector

    made = GradientProjector(options["rank"], update_proj_gap=options["update_proj_gap"], scale=options["scale"])
    made.seed, made.ortho_matrix = found["seed"], found["ortho_matrix"]
    return made


def _schedule_free(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    made: Any = AdamWScheduleFree(params, foreach=False, **options)
    made.train()
    return made


def _average(weight: Tensor, state: Mapping[str, Any], options: Options) -> Tensor:
    """Return the averaged weight x, where the trained weight is y = (1 - beta1) z + beta1 x."""
    if "z" not in state:
        return weight.clone()
    z = state["z"].to(weight.device)  # float32 if a bfloat16 weight is rounded stochastically
    return weight.to(z.dtype).lerp(z, 1 - 1 / options["betas"][0])


def _clip_of_adopt(step: int) -> float:
    """Return the authors' bound on an update: 1 for their first update, which is the library's second step."""
    return max(step - 1, 1) ** 0.25


_TABLES = ("qmap1", "qmap2")
_STEP = {"step": 0}


def _seed(number: int) -> dict[str, Any]:
    return {"seed": number}


LIBRARIES: dict[str, Callable[[str], Rule]] = {
    "bitsandbytes": lambda made_by: Rule(_make_imported("bitsandbytes.optim", made_by), shared=_TABLES),
    "pytorch_optimizer": lambda made_by: Rule(_make_pytorch_optimizer(made_by), _STEP),
}
"""By library: function that makes the rule for one of its classes, which takes the options unchanged."""

RULES: dict[str, Rule] = {
    **{name: LIBRARIES[entry.library](entry.made_by) for name, entry in OPTIMIZERS.items() if entry.made_by},
    "adamw": Rule(_make_class(torch.optim.AdamW)),
    "paged_adamw_8bit": Rule(
        _make_imported("bitsandbytes.optim", "PagedAdamW8bit"), shared=_TABLES, runs_on_meta=False
    ),
    "adamw_torch_8bit": _torchao_rule("AdamW8bit", "8bit"),
    "adamw_torch_4bit": _torchao_rule("AdamW4bit", "4bit"),
    "adamw_torch_fp8": _torchao_rule("AdamWFp8", "fp8"),
    "adamw_coat": Rule(_make_class(ExpandedFp8AdamW), own_shapes=True),
    "adafactor": Rule(_adafactor, runs_on_meta=False, own_shapes=True),
    "adopt": Rule(_make_pytorch_optimizer("ADOPT", weight_decouple=True, clip_lambda=_clip_of_adopt), _STEP),
    "apollo": Rule(_apollo, runs_on_meta=False, begin=_seed, objects={"projector": _projector}, own_shapes=True),
    "badam_ratio": Rule(_make_class(RatioAdamW), begin=_seed, own_shapes=True),
    "came": Rule(_make_pytorch_optimizer("CAME"), _STEP, own_shapes=True),
    "galore": Rule(_make_class(GaLoreAdamW), begin=_seed, own_shapes=True),
    # Lamb would clip by the norm of all gradients, which one weight does not know; the training loop clips before. The
    # plain implementation reads values on the host; `foreach` of one weight takes the same memory.
    "lamb": Rule(_make_pytorch_optimizer("Lamb", foreach=None, weight_decouple=False, max_grad_norm=0.0), _STEP),
    "muon": Rule(_make_class(torch.optim.Muon)),
    "natural_galore": Rule(_make_class(NaturalGaLoreAdamW), begin=_seed, own_shapes=True),
    "schedule_free": Rule(_schedule_free, {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}, average=_average),
    "sgd": Rule(_make_class(torch.optim.SGD, foreach=False)),
    "sinkgd": Rule(_make_class(SinkGD)),
}
"""Rules by the names in ``streamtune.base.optimizer_table.OPTIMIZERS``."""
