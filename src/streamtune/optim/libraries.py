"""A rule for each optimizer of a library: how to build it for one weight, and how to save its state.

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
from streamtune.optim.weight_step import hash_integers

Options = Mapping[str, Any]
Maker = Callable[[list[nn.Parameter], Options], torch.optim.Optimizer]


@dataclass(frozen=True)
class Rule:
    """Rule for an optimizer of a library: how to build it for a single weight, and how to save the weight's state."""

    make: Maker
    group_numbers: Mapping[str, Any] = field(default_factory=dict)
    """Initial value of each number that the library stores once per group; here each weight has separate numbers."""
    shared_tensors: tuple[str, ...] = ()
    """Names of state tensors that all weights share in the library; here each weight has a copy, to be saved."""
    runs_on_meta: bool = True
    """False if the library's step needs values; then a plan reads the state's size from the table of optimizers."""
    is_compiled: bool = False
    """True if the library compiles its step; here the step is compiled only on an accelerator."""
    initial_state: Callable[[int, int], dict[str, Any]] = lambda seed, number: {}
    """Function of the run's seed and a weight's number, counted from 1, that returns the weight's initial state."""
    random_option: str = ""
    """Option that makes a step draw random numbers; here the numbers depend only on the seed, step and weight."""
    rebuild_objects: Mapping[str, Callable[[Mapping[str, Any], Options], Any]] = field(default_factory=dict)
    """By name in the state: function that rebuilds an object from its saved tensors and integers, and the options."""
    average: Callable[[Tensor, Mapping[str, Any], Options], Tensor] | None = None
    """Function of the trained weight, its state and the options that returns the weight to evaluate and save."""
    has_other_shapes: bool = False
    """True if tensors in the state have other shapes than the weight."""
    rebuild_quantised: Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor] | None = None
    """Function of name, saved parts and weight dtype that rebuilds a quantised tensor in the state."""


def _class_maker(optimizer_class: Callable[..., torch.optim.Optimizer], **fixed_options: Any) -> Maker:
    return lambda params, options: optimizer_class(params, **fixed_options, **options)


def _import_maker(module: str, class_name: str, **fixed_options: Any) -> Maker:
    def make_optimizer(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(import_module(module), class_name)(params, **fixed_options, **options)
        return made

    return make_optimizer


def _pytorch_optimizer_maker(class_name: str, *, foreach: bool | None = False, **fixed_options: Any) -> Maker:
    return _import_maker("pytorch_optimizer", class_name, foreach=foreach, **fixed_options)


def _torchao_rule(class_name: str, state_format: str) -> Rule:
    make = _import_maker("torchao.optim", class_name)
    rebuild = _make_torchao_state_rebuilder(state_format)
    return Rule(
        make, is_compiled=True, random_option="bf16_stochastic_round", has_other_shapes=True, rebuild_quantised=rebuild
    )


def _make_torchao_state_rebuilder(state_format: str) -> Callable[[str, Mapping[str, Tensor], torch.dtype], Tensor]:
    def rebuild_state(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8

        if state_format == "fp8":
            state: Tensor = OptimStateFp8(parts["codes"], parts["scale"], dtype)
            return state
        signed = name == "exp_avg"
        arguments = (parts["codes"], parts["scale"], parts["qmap"], signed)
        if state_format == "4bit":
            state = OptimState4bit(*arguments, torch.Size(parts["shape"].tolist()), dtype)
        else:
            state = OptimState8bit(*arguments, dtype)
        return state

    return rebuild_state


def _make_adafactor(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    arguments = dict(options)
    eps, threshold = (None, arguments.pop("eps2")), arguments.pop("clip_threshold")
    return torch.optim.Adafactor(params, eps=eps, d=threshold, foreach=False, **arguments)


def _make_apollo(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    from apollo_torch import APOLLOAdamW

    arguments = dict(options)
    group_options = {key: arguments.pop(key) for key in ("rank", "scale", "scale_type", "update_proj_gap")}
    made: torch.optim.Optimizer = APOLLOAdamW(
        [{"params": params, "proj": "random", "proj_type": "std", **group_options}], **arguments
    )
    return made


def _rebuild_projector(saved: Mapping[str, Any], options: Options) -> Any:
    from apollo_torch.random_projector import GradientProjector

    made = GradientProjector(options["rank"], update_proj_gap=options["update_proj_gap"], scale=options["scale"])
    made.seed, made.ortho_matrix = saved["seed"], saved["ortho_matrix"]
    return made


def _make_schedule_free(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    made: Any = AdamWScheduleFree(params, foreach=False, **options)
    made.train()
    return made


def _weight_average(weight: Tensor, state: Mapping[str, Any], options: Options) -> Tensor:
    """Return the averaged weight x of Schedule-Free AdamW, where the trained weight is y = (1 - beta1) z + beta1 x."""
    if "z" not in state:
        return weight.clone()
    z = state["z"].to(weight.device)  # float32 if a bfloat16 weight is rounded stochastically
    return weight.to(z.dtype).lerp(z, 1 - 1 / options["betas"][0])


def _clip_bound_of_adopt(step_number: int) -> float:
    """Return ADOPT's bound on an update, ``t ** 0.25``: the library's second step is the authors' first (t = 1)."""
    return max(step_number - 1, 1) ** 0.25


_CODE_TABLES = ("qmap1", "qmap2")
_STEP = {"step": 0}


def _make_seed_state(seed: int, weight_number: int) -> dict[str, Any]:
    """Return the seed of a weight's random numbers; with seed 0 the library apollo_torch has the same."""
    return {"seed": hash_integers(seed, weight_number) >> 1 if seed else weight_number}


LIBRARIES: dict[str, Callable[[str], Rule]] = {
    "bitsandbytes": lambda library_class: Rule(
        _import_maker("bitsandbytes.optim", library_class), shared_tensors=_CODE_TABLES
    ),
    "pytorch_optimizer": lambda library_class: Rule(_pytorch_optimizer_maker(library_class), _STEP),
}
"""By library: function that makes the rule for a class of the library, which gets the options unchanged."""

RULES: dict[str, Rule] = {
    **{
        name: LIBRARIES[entry.library](entry.library_class) for name, entry in OPTIMIZERS.items() if entry.library_class
    },
    "adamw": Rule(_class_maker(torch.optim.AdamW)),
    "paged_adamw_8bit": Rule(
        _import_maker("bitsandbytes.optim", "PagedAdamW8bit"), shared_tensors=_CODE_TABLES, runs_on_meta=False
    ),
    "adamw_torch_8bit": _torchao_rule("AdamW8bit", "8bit"),
    "adamw_torch_4bit": _torchao_rule("AdamW4bit", "4bit"),
    "adamw_torch_fp8": _torchao_rule("AdamWFp8", "fp8"),
    "adamw_coat": Rule(_class_maker(ExpandedFp8AdamW), has_other_shapes=True),
    "adafactor": Rule(_make_adafactor, runs_on_meta=False, has_other_shapes=True),
    "adopt": Rule(_pytorch_optimizer_maker("ADOPT", weight_decouple=True, clip_lambda=_clip_bound_of_adopt), _STEP),
    "apollo": Rule(
        _make_apollo,
        runs_on_meta=False,
        initial_state=_make_seed_state,
        rebuild_objects={"projector": _rebuild_projector},
        has_other_shapes=True,
    ),
    "badam_ratio": Rule(_class_maker(RatioAdamW), initial_state=_make_seed_state, has_other_shapes=True),
    "came": Rule(_pytorch_optimizer_maker("CAME"), _STEP, has_other_shapes=True),
    "galore": Rule(_class_maker(GaLoreAdamW), initial_state=_make_seed_state, has_other_shapes=True),
    # Lamb would clip by the norm of all gradients, but a step has only one weight; the training loop clips before. The
    # plain implementation reads values on the host; `foreach` of one weight needs the same memory.
    "lamb": Rule(_pytorch_optimizer_maker("Lamb", foreach=None, weight_decouple=False, max_grad_norm=0.0), _STEP),
    "muon": Rule(_class_maker(torch.optim.Muon)),
    "natural_galore": Rule(_class_maker(NaturalGaLoreAdamW), initial_state=_make_seed_state, has_other_shapes=True),
    "schedule_free": Rule(_make_schedule_free, {"k": 0, "weight_sum": 0.0, "lr_max": -1.0}, average=_weight_average),
    "sgd": Rule(_class_maker(torch.optim.SGD, foreach=False)),
    "sinkgd": Rule(_class_maker(SinkGD)),
}
"""Rules by the names in ``streamtune.base.optimizer_table.OPTIMIZERS``."""
