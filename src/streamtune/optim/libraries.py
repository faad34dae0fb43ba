"""Rules: how the library behind a name makes the optimizer of one weight, and how its state is saved.

A rule's ``make`` imports its library when it is called. It takes the options of the group: ``optim_args``, or the
defaults of ``streamtune.base.optimizer_table``, with ``betas`` and ``eps`` of the recipe where the optimizer is AdamW.
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
    """The optimizer of one weight at a time."""

    make: Maker
    counts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that the library keeps in a group of weights -> first value; here each weight has its own."""
    shared: tuple[str, ...] = ()
    """Tensors of the state that all weights share in the library: here each weight has a copy, which can be saved."""
    runs_on_meta: bool = True
    """False for a library that needs values: a plan takes the bytes of the table."""
    eager: bool = False
    """True for a library that compiles its step: it does so on an accelerator only."""
    begin: Callable[[int], dict[str, Any]] = lambda number: {}
    """Makes the first state of a weight, by the weight's number from 1 on."""
    draws: str = ""
    """The option with which a step draws random numbers: here they follow from the seed, the step and the weight."""
    objects: Mapping[str, Callable[[Mapping[str, Any], Options], Any]] = field(default_factory=dict)
    """Makes an object of the state from the tensors and whole numbers that it has, and the options."""
    average: Callable[[Tensor, Mapping[str, Any], Options], Tensor] | None = None
    """Computes the weight that is evaluated and saved from the one that is trained, its state and the options."""
    own_shapes: bool = False
    """True for a state with tensors of other shapes than the weight's."""
    rebuild: Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor] | None = None
    """Makes a quantised tensor of the state from the tensors it consists of: name, parts, dtype of the weight."""


def _of(kind: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Maker:
    return lambda params, options: kind(params, **fixed, **options)


def _imported(module: str, name: str, **fixed: Any) -> Maker:
    def make(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(import_module(module), name)(params, **fixed, **options)
        return made

    return make


def _of_pytorch_optimizer(name: str, *, foreach: bool | None = False, **fixed: Any) -> Maker:
    return _imported("pytorch_optimizer", name, foreach=foreach, **fixed)


def _of_torchao(name: str, kind: str) -> Rule:
    make = _imported("torchao.optim", name)
    return Rule(make, eager=True, draws="bf16_stochastic_round", own_shapes=True, rebuild=_state_of_torchao(kind))


def _state_of_torchao(kind: str) -> Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor]:
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
    """Return x, where the weight is y = (1 - beta1) z + beta1 x."""
    if "z" not in state:
        return weight.clone()
    z = state["z"].to(weight.device)  # float32, where a bfloat16 weight is rounded stochastically
    return weight.to(z.dtype).lerp(z, 1 - 1 / options["betas"][0])


def _clip_of_adopt(step: int) -> float:
    """Return the bound of the authors: their first update, which is the library's second step, is bounded by 1."""
    return max(step - 1, 1) ** 0.25


_TABLES = ("qmap1", "qmap2")
_STEP = {"step": 0}


def _seed(number: int) -> dict[str, Any]:
    return {"seed": number}


LIBRARIES: dict[str, Callable[[str], Rule]] = {
    "bitsandbytes": lambda made_by: Rule(_imported("bitsandbytes.optim", made_by), shared=_TABLES),
    "pytorch_optimizer": lambda made_by: Rule(_of_pytorch_optimizer(made_by), _STEP),
}
"""Library -> the rule of one of its classes that takes the options as they are."""

RULES: dict[str, Rule] = {
    **{name: LIBRARIES[entry.library](entry.made_by) for name, entry in OPTIMIZERS.items() if entry.made_by},
    "adamw": Rule(_of(torch.optim.AdamW)),
    "paged_adamw_8bit": Rule(_imported("bitsandbytes.optim", "PagedAdamW8bit"), shared=_TABLES, runs_on_meta=False),
    "adamw_torch_8bit": _of_torchao("AdamW8bit", "8bit"),
    "adamw_torch_4bit": _of_torchao("AdamW4bit", "4bit"),
    "adamw_torch_fp8": _of_torchao("AdamWFp8", "fp8"),
    "adamw_coat": Rule(_of(ExpandedFp8AdamW), own_shapes=True),
    "adafactor": Rule(_adafactor, runs_on_meta=False, own_shapes=True),
    "adopt": Rule(_of_pytorch_optimizer("ADOPT", weight_decouple=True, clip_lambda=_clip_of_adopt), _STEP),
    "apollo": Rule(_apollo, runs_on_meta=False, begin=_seed, objects={"projector": _projector}, own_shapes=True),
    "badam_ratio": Rule(_of(RatioAdamW), begin=_seed, own_shapes=True),
    "came": Rule(_of_pytorch_optimizer("CAME"), _STEP, own_shapes=True),
    "galore": Rule(_of(GaLoreAdamW), begin=_seed, own_shapes=True),
    # Gradients are clipped by the norm of all of them before, which a weight by itself does not have. Its plain form
    # reads values on the host; `foreach` of one weight holds the same.
    "lamb": Rule(_of_pytorch_optimizer("Lamb", foreach=None, weight_decouple=False, max_grad_norm=0.0), _STEP),
    "muon": Rule(_of(torch.optim.Muon)),
    "natural_galore": Rule(_of(NaturalGaLoreAdamW), begin=_seed, own_shapes=True),
    "schedule_free": Rule(_schedule_free, {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}, average=_average),
    "sgd": Rule(_of(torch.optim.SGD, foreach=False)),
    "sinkgd": Rule(_of(SinkGD)),
}
"""Name -> rule, under the names of ``streamtune.base.optimizer_table.OPTIMIZERS``."""
