"""The optimizers that a recipe can select: library, options and bytes of optimizer state.

Recipes are checked against this table, and ``streamtune optim ls`` prints it, so this module does not import torch.
``streamtune.optim`` builds the optimizers.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from streamtune.base.patterns import pattern_error
from streamtune.base.text import Status
from streamtune.errors import ArgumentError, did_you_mean

OptimizerName = Literal[
    "adamw", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit", "adamw_torch_fp8", "adamw_coat",
    "adafactor", "adan", "adopt", "apollo", "badam", "badam_ratio", "came", "galore", "lamb", "lion", "lion_8bit",
    "mezo", "muon", "natural_galore", "schedule_free", "sgd", "sinkgd",
]  # fmt: skip

ADAM_KEYS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
"""Keys of a recipe with AdamW's options -> default, for optimizers that are AdamW or use it for some weights."""

Shape = tuple[int, ...]
STEP = 4
"""Bytes of a step count, which a library stores as a float32 tensor."""


Gradients = Literal["all", "layer", "block", "none"]
States = Literal["device", "host", "none"]


@dataclass(frozen=True)
class StepKind:
    """Forward and backward passes of an optimizer step, and where its gradients and states are.

    Attributes:
        forwards: Number of forward passes per micro-batch.
        backwards: Number of backward passes per micro-batch; 0 for a zeroth-order optimizer.
        gradients: Gradients that exist at the same time. ``all``: gradients of all trained weights. ``layer``:
            gradients of one layer, because the backward pass updates each weight and frees its gradient; this needs
            one micro-batch per step. ``block``: gradients of the block of layers that is being trained. ``none``: no
            gradients, because there is no backward pass.
        states: Place of the optimizer states. ``device``: the device of the weights. ``host``: host memory, where the
            optimizer runs too. ``none``: the optimizer has no state.
    """

    forwards: int = 1
    backwards: int = 1
    gradients: Gradients = "all"
    states: States = "device"

    def with_step_in_backward(self, *, norm_first: bool = False) -> StepKind:
        """Return a copy for an optimizer that updates each weight in the backward pass, as soon as its gradient exists.

        Args:
            norm_first: True if an additional forward and backward pass measures the gradient norm for clipping.
        """
        times = 2 if norm_first else 1
        return replace(self, forwards=times, backwards=times, gradients="layer")

    def with_host_states(self) -> StepKind:
        return replace(self, states="host")


PLAIN_STEP = StepKind()
"""One forward, one backward, and the update when all gradients exist."""


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that a recipe can select with ``optim``."""

    text: str
    """Description in one line."""
    library: str
    """Package that implements the optimizer."""
    size: Callable[[Shape, int, Mapping[str, Any]], int]
    """Function that returns a weight's bytes of optimizer state, from shape, bytes per value, and ``optim_args``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option of ``optim_args`` -> default."""
    library_class: str = ""
    """Name of the library's class, if it takes the options unchanged; empty if ``streamtune.optim`` has code for it."""
    extra: str = ""
    """Extra of this package that installs the library (``streamtune[optim]``); empty if it is always installed."""
    is_adam: bool = False
    """True if it reads the recipe keys ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``."""
    adamw_for_rest: bool = False
    """True if it updates only the matrices of decoder layers; AdamW updates all other weights."""
    averages: bool = False
    """True if it averages the trained weights over steps, and the average is evaluated and saved."""
    scratch: Callable[[Shape, int], int] | None = None
    """Function that returns the temporary bytes of a weight's update, from shape and bytes per value. None: they are
    measured by running the optimizer on meta tensors."""
    only_on: str = ""
    """The only supported device type, such as ``cuda``; empty if all are supported."""
    step: StepKind = PLAIN_STEP
    """Passes, gradients and states of a step, unless other recipe keys change them."""
    repeated_by: str = ""
    """Option of ``optim_args`` that multiplies the forward passes of a step; empty if there is none."""
    cannot_shard_reason: str = ""
    """Reason why the optimizer states cannot be sharded (DeepSpeed, FSDP2); empty if they can."""
    status: Status = "stable"

    @property
    def install_command(self) -> str:
        """Command that installs the library with pip; empty if it is always installed."""
        return f"pip install 'streamtune[{self.extra}]'" if self.extra else ""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def _value_count(shape: Shape) -> int:
    return math.prod(shape)


def _moments_size(num_tensors: int, *, num_scalars: int = 0) -> Callable[[Shape, int, Mapping[str, Any]], int]:
    return lambda shape, value_bytes, _: (num_tensors * _value_count(shape) + num_scalars) * value_bytes


def _adamw_size(shape: Shape, value_bytes: int, _: Mapping[str, Any]) -> int:
    return 2 * _value_count(shape) * value_bytes + STEP


def _sgd_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    return _value_count(shape) * value_bytes if args["momentum"] else 0


def _mean_value_count(shape: Shape) -> int:
    return _value_count(shape[:-1]) + _value_count((*shape[:-2], shape[-1]))


def _adafactor_size(shape: Shape, value_bytes: int, _: Mapping[str, Any]) -> int:
    return STEP + (_mean_value_count(shape) if len(shape) > 1 else _value_count(shape)) * value_bytes


def _came_size(shape: Shape, value_bytes: int, _: Mapping[str, Any]) -> int:
    means = 2 * _mean_value_count(shape) if len(shape) > 1 else _value_count(shape)
    return (_value_count(shape) + means + 1) * value_bytes


def _apollo_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    """Count two moments of the projected gradient, the projection matrix, and a norm."""
    long, short = max(shape), min(shape)
    return (args["rank"] * (2 * long + short) + 1) * value_bytes


SMALLEST_QUANTISED = 4096
"""Minimum number of values of a weight for which bitsandbytes and torchao quantise the states."""


def _bitsandbytes_size(num_states: int) -> Callable[[Shape, int, Mapping[str, Any]], int]:
    """Return a function that counts the bytes of 8-bit states, with a float32 scale per 256 values and a table."""

    def state_size(shape: Shape, value_bytes: int, _: Mapping[str, Any]) -> int:
        count = _value_count(shape)
        if count < SMALLEST_QUANTISED:
            return num_states * 4 * count
        return num_states * (count + 4 * -(-count // 256) + 4 * 256)

    return state_size


def _torchao_size(bits: int, table_values: int) -> Callable[[Shape, int, Mapping[str, Any]], int]:
    """Return a function that counts the bytes of two quantised moments, with a float32 scale per block and a table."""

    def state_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
        count, block = _value_count(shape), args["block_size"]
        if count < SMALLEST_QUANTISED or count % block:
            return STEP + 2 * count * value_bytes
        return STEP + 2 * (count * bits // 8 + 4 * (count // block) + 4 * table_values)

    return state_size


def _badam_size(shape: Shape, value_bytes: int, _: Mapping[str, Any]) -> int:
    """Count two float32 moments, and a float32 copy of a 16-bit weight."""
    return STEP + 4 * _value_count(shape) * (2 + (value_bytes < 4))


def _galore_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    rank = args["rank"]
    if len(shape) != 2 or rank >= min(shape):
        return _adamw_size(shape, value_bytes, args)
    sides = shape if args["proj_type"] == "full" else (min(shape),)
    stored = sum(8 * rank if args["projection"] == "dct" else rank * side * value_bytes for side in sides)
    return STEP + 2 * _projected_value_count(shape, args) * value_bytes + stored


def _projected_value_count(shape: Shape, args: Mapping[str, Any]) -> int:
    rank: int = args["rank"]
    return rank * (rank if args["proj_type"] == "full" else max(shape))


def _natural_galore_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    low_rank = len(shape) == 2 and args["rank"] < min(shape)
    return _galore_size(shape, value_bytes, args) + (
        args["history"] * _projected_value_count(shape, args) * value_bytes if low_rank else 0
    )


def _badam_ratio_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    """Count two float32 moments of the trained values; for a 16-bit weight, also a float32 copy of the trained
    values."""
    count = _value_count(shape)
    return STEP + 4 * min(count, max(1, round(args["update_ratio"] * count))) * (2 + (value_bytes < 4))


def _coat_size(shape: Shape, value_bytes: int, args: Mapping[str, Any]) -> int:
    """Count two moments, with one byte per value and two float32 numbers per group."""
    return STEP + 2 * -(-_value_count(shape) // args["group_size"]) * (args["group_size"] + 8)


_WHOLE_MATRICES = "the optimizer needs whole matrices, and each rank has a part of them"
_BLOCKS = "the optimizer's states are quantised in blocks of whole weights, and each rank has a part of them"
_AVERAGE = "the optimizer averages whole weights, and each rank has a part of them"

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        "AdamW; optim_states sets the dtype of its moments",
        "torch", _adamw_size, is_adam=True,
    ),
    "adamw_8bit": OptimizerEntry(
        "AdamW with 8-bit moments, in blocks of 256",
        "bitsandbytes", _bitsandbytes_size(2), library_class="AdamW8bit", extra="quant", is_adam=True,
        cannot_shard_reason=_BLOCKS,
    ),
    "paged_adamw_8bit": OptimizerEntry(
        "adamw_8bit in CUDA unified memory, which moves to the host when the device is full",
        "bitsandbytes", _bitsandbytes_size(2), extra="quant", is_adam=True, only_on="cuda", cannot_shard_reason=_BLOCKS,
        scratch=lambda shape, value_bytes: 0,
    ),
    "adamw_torch_8bit": OptimizerEntry(
        "AdamW with 8-bit moments; optional stochastic rounding of bfloat16 weights",
        "torchao", _torchao_size(8, 256), {"block_size": 256, "bf16_stochastic_round": False},
        extra="quant", is_adam=True, cannot_shard_reason=_BLOCKS,
    ),
    "adamw_torch_4bit": OptimizerEntry(
        "AdamW with 4-bit moments",
        "torchao", _torchao_size(4, 16), {"block_size": 128, "bf16_stochastic_round": False},
        extra="quant", is_adam=True, cannot_shard_reason=_BLOCKS,
    ),
    "adamw_torch_fp8": OptimizerEntry(
        "AdamW with float8 moments",
        "torchao", _torchao_size(8, 0), {"block_size": 256, "bf16_stochastic_round": False},
        extra="quant", is_adam=True, cannot_shard_reason=_BLOCKS,
    ),
    "adamw_coat": OptimizerEntry(
        "AdamW with float8 moments of expanded range, in groups of 128 (arXiv 2410.19313)",
        "streamtune", _coat_size, {"group_size": 128}, is_adam=True, cannot_shard_reason=_BLOCKS, status="experimental",
    ),
    "adafactor": OptimizerEntry(
        "second moment factored into rows and columns; step relative to the weight's RMS (arXiv 1804.04235)",
        "torch", _adafactor_size, {"beta2_decay": -0.8, "eps2": 1e-3, "clip_threshold": 1.0},
        scratch=lambda shape, value_bytes: _value_count(shape) * value_bytes, cannot_shard_reason=_WHOLE_MATRICES,
    ),
    "adan": OptimizerEntry(
        "Nesterov momentum from differences of gradients (arXiv 2208.06677)",
        "pytorch_optimizer", _moments_size(4), {"betas": [0.98, 0.92, 0.99], "eps": 1e-8},
        library_class="Adan", extra="optim",
    ),
    "adopt": OptimizerEntry(
        "Adam that converges with any beta2 (arXiv 2411.02853)",
        "pytorch_optimizer", _moments_size(2), {"betas": [0.9, 0.9999], "eps": 1e-6},
        extra="optim",
    ),
    "apollo": OptimizerEntry(
        "AdamW's scale per row or column, from a random projection of the gradient, for matrices of layers; AdamW for "
        "the rest",
        "apollo_torch", _apollo_size, {"rank": 256, "scale": 1.0, "scale_type": "channel", "update_proj_gap": 200},
        extra="optim", is_adam=True, adamw_for_rest=True,
        scratch=lambda shape, value_bytes: 2 * _value_count(shape) * value_bytes, cannot_shard_reason=_WHOLE_MATRICES,
    ),
    "badam": OptimizerEntry(
        "AdamW on one block of weights at a time; the backward stops at the block (arXiv 2404.02827)",
        "streamtune", _badam_size,
        {"switch_block_every": 50, "switch_mode": "random", "layers_per_block": 1, "include_embedding": False,
         "include_lm_head": False, "blocks": []},
        is_adam=True, step=StepKind(gradients="block"),
        cannot_shard_reason="the set of trained weights changes, and ranks shard them only once",
    ),
    "badam_ratio": OptimizerEntry(
        "AdamW on a part of each weight's values at a time; all gradients are computed (arXiv 2404.02827)",
        "streamtune", _badam_ratio_size, {"update_ratio": 0.01, "switch_block_every": 50},
        is_adam=True,
        cannot_shard_reason="the optimizer trains a part of whole weights, and each rank has a part of them",
    ),
    "came": OptimizerEntry(
        "Adafactor with confidence-guided momentum (arXiv 2307.02047)",
        "pytorch_optimizer", _came_size,
        {"betas": [0.9, 0.999, 0.9999], "eps1": 1e-30, "eps2": 1e-16, "clip_threshold": 1.0},
        extra="optim", cannot_shard_reason=_WHOLE_MATRICES,
    ),
    "galore": OptimizerEntry(
        "AdamW on low-rank projections of the gradients of layers' matrices; AdamW for the rest (arXiv 2403.03507)",
        "streamtune", _galore_size,
        {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection": "svd", "proj_type": "std"},
        is_adam=True, adamw_for_rest=True, cannot_shard_reason=_WHOLE_MATRICES,
    ),
    "lamb": OptimizerEntry(
        "AdamW with a trust ratio per weight, for large batches (arXiv 1904.00962)",
        "pytorch_optimizer", _moments_size(2, num_scalars=3), {"betas": [0.9, 0.999], "eps": 1e-6},
        extra="optim",
        cannot_shard_reason="the trust ratio uses norms of whole weights, and each rank has a part of them",
    ),
    "lion": OptimizerEntry(
        "sign of the momentum; use a third to a tenth of AdamW's rate (arXiv 2302.06675)",
        "pytorch_optimizer", _moments_size(1), {"betas": [0.9, 0.99]},
        library_class="Lion", extra="optim",
    ),
    "lion_8bit": OptimizerEntry(
        "Lion with 8-bit momentum, in blocks of 256",
        "bitsandbytes", _bitsandbytes_size(1), {"betas": [0.9, 0.99]}, library_class="Lion8bit", extra="quant",
        cannot_shard_reason=_BLOCKS,
    ),
    "mezo": OptimizerEntry(
        "SGD along random directions, each with two forward passes and no backward pass (arXiv 2305.17333)",
        "streamtune", _moments_size(0), {"eps": 1e-3, "n": 1},
        step=StepKind(forwards=2, backwards=0, gradients="none", states="none"), repeated_by="n", status="experimental",
        cannot_shard_reason="the optimizer perturbs and steps whole weights, which must be equal on all ranks",
    ),
    "muon": OptimizerEntry(
        "orthogonalised momentum for matrices of layers; AdamW for the rest",
        "torch", _moments_size(1),
        {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw"},
        adamw_for_rest=True, cannot_shard_reason=_WHOLE_MATRICES,
    ),
    "natural_galore": OptimizerEntry(
        "galore with a natural gradient, from the last projected gradients (arXiv 2410.16029)",
        "streamtune", _natural_galore_size,
        {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection": "svd", "proj_type": "std", "history": 8,
         "damping": 1.0},
        is_adam=True, adamw_for_rest=True, cannot_shard_reason=_WHOLE_MATRICES, status="experimental",
    ),
    "schedule_free": OptimizerEntry(
        "AdamW that evaluates and saves an average of the weights instead of decaying the rate (arXiv 2405.15682)",
        "schedulefree", _moments_size(2), {"r": 0.0, "weight_lr_power": 2.0}, extra="optim", is_adam=True,
        averages=True,
        cannot_shard_reason=_AVERAGE,
    ),
    "sgd": OptimizerEntry(
        "gradient descent with momentum; weight decay is added to the gradient",
        "torch", _sgd_size, {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
    ),
    "sinkgd": OptimizerEntry(
        "gradients normalised by rows and columns, without state, for matrices of layers; AdamW for the rest",
        "torch", _moments_size(0), {"iterations": 5, "scale": 1.0}, adamw_for_rest=True,
        cannot_shard_reason=_WHOLE_MATRICES,
    ),
}  # fmt: skip
"""Name -> entry. ``optim.libraries`` builds each, under the same name."""
assert set(get_args(OptimizerName)) == set(OPTIMIZERS)


def state_bytes(name: str, shape: Shape, value_bytes: int, args: Mapping[str, Any], *, in_layer: bool = True) -> int:
    """Return how many bytes of optimizer state a weight has.

    Args:
        name: Key of :data:`OPTIMIZERS`.
        shape: Shape of the weight.
        value_bytes: Bytes per value of the weight, or of the states if their dtype is set.
        args: ``optim_args``; missing options have their defaults.
        in_layer: True if the weight is in a decoder layer.
    """
    entry = OPTIMIZERS[name]
    if entry.adamw_for_rest and not (in_layer and len(shape) == 2):
        return _adamw_size(shape, value_bytes, {})
    return entry.size(shape, value_bytes, {**entry.options, **args})


def step_kind(name: str, args: Mapping[str, Any]) -> StepKind:
    """Return the passes, gradients and states of a step of the optimizer ``name`` with these ``optim_args``."""
    entry = OPTIMIZERS[name]
    times = int({**entry.options, **args}[entry.repeated_by]) if entry.repeated_by else 1
    return replace(entry.step, forwards=entry.step.forwards * times)


def find_argument_mistake(name: str, args: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first invalid option in ``optim_args`` as (option, error, fix); None if all are valid."""
    options = OPTIMIZERS[name].options
    for key, value in args.items():
        if key not in options:
            listed = f"options: {', '.join(options)}" if options else f"delete the option; {name} has none"
            if OPTIMIZERS[name].is_adam and key in ("betas", "eps"):
                listed = "write adam_beta1, adam_beta2 and adam_epsilon at the top level"
            return key, f"'{name}' has no option '{key}'", did_you_mean(key, options) or listed
        if not _has_type_of(value, options[key]):
            return (
                key,
                f"'{key}' of '{name}' must be {_describe_type(options[key])}; found {value!r}",
                f"write a value such as {options[key]}",
            )
        low, high = LIMITS.get(f"{name}.{key}", LIMITS.get(key, (-math.inf, math.inf)))
        if isinstance(value, (int, float)) and not low <= value <= high:
            return (
                key,
                f"'{key}' of '{name}' must be from {low:g} to {high:g}; found {value!r}",
                f"write a value such as {options[key]}",
            )
        if key == "blocks" and (wrong := next(filter(None, map(_pattern_mistake, value)), None)):
            return key, wrong, "write a part of a parameter's name, such as mlp"
        choices = CHOICES.get(key, ())
        if choices and value not in choices:
            *others, last = (f"'{choice}'" for choice in choices)
            shown = f"{', '.join(others)} or {last}"
            return key, f"'{key}' must be {shown}; found {value!r}", did_you_mean(str(value), choices)
    arguments = {**options, **args}
    if (
        arguments.get("nesterov")
        and "dampening" in arguments
        and (arguments["momentum"] == 0 or arguments["dampening"] != 0)
    ):
        return (
            "nesterov",
            "Nesterov momentum needs momentum above 0 and no dampening",
            "write momentum: 0.9, dampening: 0.0",
        )
    return None


SMALLEST, LARGEST = 1e-12, 10**9
LIMITS: dict[str, tuple[float, float]] = {
    "adafactor.clip_threshold": (1.0, LARGEST),
    "beta2_decay": (-10.0, 0.0),
    "block_size": (1, 2**20),
    "clip_threshold": (SMALLEST, LARGEST),
    "dampening": (0.0, 1.0),
    "damping": (SMALLEST, LARGEST),
    "eps": (0.0, 1.0),
    "eps1": (0.0, 1.0),
    "eps2": (0.0, 1.0),
    "group_size": (8, 2**16),
    "history": (1, 1024),
    "iterations": (1, 1000),
    "layers_per_block": (1, LARGEST),
    "mezo.eps": (1e-6, 1.0),
    "momentum": (0.0, 1.0),
    "n": (1, 10**6),
    "ns_steps": (1, 99),
    "r": (0.0, 100.0),
    "rank": (1, 2**20),
    "scale": (SMALLEST, LARGEST),
    "switch_block_every": (1, LARGEST),
    "update_proj_gap": (1, LARGEST),
    "update_ratio": (SMALLEST, 1.0),
    "weight_lr_power": (0.0, 100.0),
}
"""Option, or ``optimizer.option`` -> smallest and largest value. With other values the library fails, or nothing is
trained."""

CHOICES = {
    "adjust_lr_fn": ("original", "match_rms_adamw"),
    "proj_type": ("std", "full"),
    "projection": ("svd", "randomized", "dct"),
    "scale_type": ("channel", "tensor"),
    "switch_mode": ("random", "ascending", "descending"),
}
"""Option -> the words that it accepts."""


def _has_type_of(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if default == []:
        return isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    if isinstance(default, list):
        return isinstance(value, list) and len(value) == len(default) and all(map(_is_number_below_one, value))
    if isinstance(default, int):
        return isinstance(value, int) and value > 0
    if isinstance(default, float):
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, str)


def _is_number_below_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


def _pattern_mistake(pattern: str) -> str | None:
    reason = pattern_error(pattern)
    return None if reason is None else f"'{pattern}' is not a regular expression: {reason}"


def _describe_type(default: Any) -> str:
    if default == []:
        return "a list of texts"
    if isinstance(default, list):
        return f"a list of {len(default)} numbers from 0 to below 1"
    return {bool: "true or false", int: "a whole number of at least 1", float: "a number"}.get(type(default), "text")


def check_installed(name: str) -> None:
    """Check that the library of an optimizer is installed.

    Raises:
        ArgumentError: The library is not installed; the error has the command that installs it.
    """
    entry = OPTIMIZERS[name]
    if not entry.is_installed:
        raise ArgumentError(
            f"'optim: {name}' needs {entry.library}, which is not installed", where="optim", fix=entry.install_command
        )
