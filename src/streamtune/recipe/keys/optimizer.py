"""Keys of the optimizer: its options, groups of learning rates, clipping, and what each does not combine with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.base.optimizer_table import ADAM_KEYS, OPTIMIZERS, OptimizerName, argument_mistakes
from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    Clash,
    Custom,
    Fraction,
    Not,
    Refusal,
    Rules,
    Spec,
    Text,
    Where,
    at_most,
    having,
    is_given,
)


class LearningRateGroup(Spec):
    """A learning rate or weight decay of the parameters that a pattern matches."""

    match: Text
    """Parameters by whole parts of their names: `embed_tokens`, `layers.0`, `lora_B`, `layers.*.mlp`; `*` is any text,
    `?` a character. Of several patterns that match, the first counts."""

    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of these parameters; the schedule is that of all."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight decay of these parameters, vectors too."""

    rules = (
        Clash(
            {"learning_rate": None, "weight_decay": None},
            "the group of '{match}' sets nothing",
            "add learning_rate: ... or weight_decay: ...",
            key="lr_groups",
        ),
    )


class OptimizerKeys(Spec):
    """The optimizer, its rates by parameter, and how gradients are clipped."""

    optim: OptimizerName = "adamw"
    """Optimizer; `streamtune optim ls` lists them, with bytes of state, library and what they do not combine with."""

    optim_args: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Options of the optimizer, which `streamtune optim ls` lists: `{momentum: 0.9}`. Those of AdamW are keys of their
    own."""

    lr_groups: Annotated[tuple[LearningRateGroup, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or weight decay of their own, by name:
    `[{match: embed_tokens, learning_rate: 1.0e-6}]`. LoRA+ is `[{match: lora_B, learning_rate: ...}]`, with 16 times
    `learning_rate`."""

    lr_layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from each layer to the one below: the head has `learning_rate`, the last layer this
    times that, the embeddings, below the first layer, the least. A rate of `lr_groups` is taken as it is."""

    optim_states: Literal["param", "float32", "bfloat16"] = "param"
    """Dtype of the two moments that AdamW keeps of each weight: `param` is that of the weight. `bfloat16` takes half of
    float32's bytes and is rounded stochastically, so that small changes add up; a step is computed in float32. Not with
    DeepSpeed or FSDP2, which have states of their own."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Decoupled weight decay, on matrices only."""

    adam_beta1: Fraction = 0.9
    """AdamW's decay of the mean of the gradient, in all of its forms."""

    adam_beta2: Fraction = 0.999
    """AdamW's decay of the mean of its square."""

    adam_epsilon: Annotated[float, Field(gt=0), at_most(10**9)] = 1e-8
    """AdamW's term against division by zero."""

    max_grad_norm: Annotated[float, Field(ge=0), at_most(10**9)] = 1.0
    """Clip the gradient to this norm; 0 does not clip."""

    optim_in_backward: bool = False
    """Step each weight as soon as its gradient is there, and free the gradient: the same step, with the gradients of
    two layers instead of all. With `max_grad_norm` a first backward measures the norm, which doubles the time;
    `max_grad_norm: 0` and `clip_norm: lagged` need one. One device."""

    clip_norm: Literal["exact", "lagged"] = "exact"
    """Norm that `optim_in_backward` clips by: `exact` is the gradient's own, which takes a first backward; `lagged` is
    that of the step before (of the first step its own), another trajectory for half of the time. `metrics.jsonl` then
    has the norm that each step was clipped by, `clip_norm`, beside its own, `grad_norm`."""


FORWARD_ONLY = having(OPTIMIZERS, {"step.gradients": "none"})
ONE_BLOCK = having(OPTIMIZERS, {"step.gradients": "block"})
AVERAGING = having(OPTIMIZERS, {"averages": True})

USE_ADAMW = "write optim: adamw"


def _optimizer_options(recipe: Any) -> Iterator[Refusal]:
    if found := argument_mistakes(recipe.optim, recipe.optim_args):
        option, what, fix = found
        yield Refusal(f"optim_args.{option}", what, fix)


def _keys_of_adam(recipe: Any) -> Iterator[Refusal]:
    name, options = recipe.optim, OPTIMIZERS[recipe.optim].options
    for key in ADAM_KEYS:
        if is_given(recipe, key):
            fix = f"delete the line; the options of {name} are optim_args: {', '.join(options)}"
            yield Refusal(key, f"'{key}' is AdamW's, and 'optim' is {name}", fix)


def _divided_optimizer(recipe: Any) -> Iterator[Refusal]:
    name, divides = recipe.optim, recipe.divides
    if divides and (why := OPTIMIZERS[name].not_divided):
        what = f"'optim: {name}' does not combine with '{divides}', which divides the optimizer between ranks: {why}"
        yield Refusal("optim", what, f"write optim: adamw, or delete '{divides}'")


def _on_another_device(recipe: Any) -> Iterator[Refusal]:
    name, on_host = recipe.optim, recipe.engine.on_host
    if on_host and (only := OPTIMIZERS[name].only_on):
        what = f"'optim: {name}' runs on {only}, and 'engine.{on_host}: host' steps on the host"
        yield Refusal("optim", what, f"write optim: {name.removeprefix('paged_')}, or delete 'engine.{on_host}'")


def _nothing_is_bfloat16(recipe: Any) -> Iterator[Refusal]:
    whole = recipe.finetuning_type != "full" and (recipe.modules_to_save or recipe.adapter_name_or_path)
    if recipe.dtype != "bfloat16" and not whole:
        yield Refusal(
            "weight_rounding",
            f"'weight_rounding: stochastic' is of bfloat16 weights that are trained, and 'dtype' is {recipe.dtype}",
            "write dtype: bfloat16, or delete the line: dtype: auto chooses it where float32 does not fit",
        )


def _blocks_twice(recipe: Any) -> Iterator[Refusal]:
    args = recipe.optim_args
    if args.get("blocks") and any(
        args.get(key) for key in ("include_embedding", "include_lm_head", "layers_per_block")
    ):
        yield Refusal(
            "optim_args.blocks",
            "'blocks' says what is trained together, and so do 'layers_per_block', 'include_embedding' and "
            "'include_lm_head'",
            "delete it, or the others",
        )


def _decays_twice(recipe: Any) -> Iterator[Refusal]:
    yield Refusal(
        "lr_scheduler_type" if "lr_scheduler_type" in recipe.model_fields_set else "optim",
        f"'optim: {recipe.optim}' averages weights in place of a rate that decays, and 'lr_scheduler_type' is "
        f"{recipe.lr_scheduler_type}",
        "write lr_scheduler_type: constant; warmup_steps stay",
    )


def _groups_of_no_rate(recipe: Any) -> Iterator[Refusal]:
    if any(group.learning_rate is not None for group in recipe.lr_groups):
        yield Refusal(
            "lr_groups",
            "'lr_groups' follow the schedule of 'learning_rate', which is 0",
            "write a learning_rate above 0; lr_groups: [{match: '*', learning_rate: 0.0}] stops the others",
        )


ROUNDING_RULES: Rules = (
    Clash(
        {"weight_rounding": GIVEN, "divides": "deepspeed"},
        "'weight_rounding: stochastic' is of whole weights, and 'deepspeed' keeps float32 weights beside bfloat16 ones",
        "delete the line, or 'deepspeed'",
    ),
    Clash(
        {"weight_rounding": GIVEN, "divides": "fsdp"},
        "'weight_rounding: stochastic' is of whole weights, and 'fsdp' divides weights",
        "delete the line, or 'fsdp'",
    ),
    Clash(
        {"weight_rounding": GIVEN, "optim": ONE_BLOCK},
        "'optim: {optim}' keeps the block that it trains in float32, and rounds it once",
        DELETE,
    ),
    Clash(
        {"weight_rounding": GIVEN, "optim": FORWARD_ONLY},
        "'optim: {optim}' steps along the direction that it perturbed in the dtype of the weights, and a rounding "
        "would be another direction",
        "delete the line, or write another optim",
    ),
    Where({"weight_rounding": GIVEN}, Custom(_nothing_is_bfloat16)),
)

BLOCK_RULES = Where(
    {"optim": ONE_BLOCK},
    Clash(
        {"engine.on_host": Not(None)},
        "'optim: {optim}' freezes weights and trains others as it goes, and 'engine.{engine.on_host}: host' takes "
        "those that are trained to the host once",
        "delete 'engine.{engine.on_host}': moments are there for one block alone",
        key="optim",
    ),
    Clash(
        {"optim_in_backward": True},
        "'optim_in_backward' frees gradients of all weights, and 'optim: {optim}' has those of one block",
        DELETE,
    ),
    Clash(
        {"sequence_parallel_size": GIVEN},
        "'optim: {optim}' is for one device by itself, and 'sequence_parallel_size' is for several",
        "write optim: adamw, or sequence_parallel_size: 1",
        key="optim",
    ),
    Custom(_blocks_twice),
)

FORWARD_RULES = Where(
    {"optim": FORWARD_ONLY},
    Clash(
        {"engine.on_host": Not(None)},
        "'optim: {optim}' perturbs weights while their layer computes and keeps no states, and "
        "'engine.{engine.on_host}: host' is for weights that are fetched and for states",
        "delete 'engine.{engine.on_host}', or write optim: adamw",
        key="optim",
    ),
    Clash(
        {"optim_in_backward": True},
        "'optim_in_backward' frees gradients as they come, and 'optim: {optim}' has none",
        DELETE,
    ),
    Clash(
        {"objective": "grpo"},
        "'optim: {optim}' compares losses at different weights, and the loss of grpo compares the policy with itself: "
        "its gradient depends on the weights, its value does not",
        USE_ADAMW,
        key="optim",
    ),
    *(
        Clash(
            {"loss_type": loss},
            f"the gradient of 'loss_type: {loss}' takes {number} for a constant, and in the losses that "
            "'optim: {optim}' compares it changes",
            "write another loss_type, or optim: adamw",
        )
        for loss, number in (
            ("dft", "the probability of each token"),
            ("kto", "the mean log-ratio of other completions"),
        )
    ),
)

OPTIMIZER_RULES: Rules = (
    Custom(_optimizer_options),
    Where({"optim": having(OPTIMIZERS, {"is_adam": False, "adamw_for_rest": False})}, Custom(_keys_of_adam)),
    Clash(
        {"optim_states": GIVEN, "optim": Not("adamw")},
        "'optim_states' is of AdamW's two moments, and 'optim' is {optim}",
        "delete the line, or write optim: adamw",
    ),
    *ROUNDING_RULES,
    Custom(_divided_optimizer),
    Custom(_on_another_device),
    BLOCK_RULES,
    FORWARD_RULES,
    Where({"optim": AVERAGING, "lr_scheduler_type": Not("constant", "constant_with_warmup")}, Custom(_decays_twice)),
    Clash(
        {"optim": AVERAGING, "objective": "grpo"},
        "'optim: {optim}' trains other weights than it evaluates, and grpo writes its completions with those that it "
        "trains",
        USE_ADAMW,
    ),
    Where({"learning_rate": 0}, Custom(_groups_of_no_rate)),
)

STATE_RULES: Rules = (
    Clash(
        {"optim_states": GIVEN, "divides": Not(None)},
        "'optim_states' is of an optimizer whose states each rank has whole, and '{divides}' divides them in a dtype "
        "of its own",
        "delete the line, or '{divides}'",
    ),
    Clash(
        {"clip_norm": "lagged", "optim_in_backward": False},
        "'clip_norm: lagged' spares 'optim_in_backward' a first backward, and without it the norm is known before "
        "anything is stepped",
        "add optim_in_backward: true, or delete the line",
    ),
    Clash(
        {"clip_norm": "lagged", "max_grad_norm": 0},
        "'clip_norm: lagged' says how gradients are clipped, and 'max_grad_norm: 0' does not clip",
        "delete the line, or write max_grad_norm: 1.0",
    ),
    Clash(
        {"optim_in_backward": True, "divides": Not(None)},
        "'optim_in_backward' is for one device by itself, and '{divides}' has an optimizer of its own",
        "delete the line, or '{divides}'",
    ),
    *(
        Clash(
            {"on_nan": "skip", "optim_in_backward": True, **setting},
            "'on_nan: skip' leaves out a step before its optimizer, which has stepped in the backward by then",
            f"write {first}, which measures the gradient first, or on_nan: stop",
        )
        for setting, first in (
            ({"max_grad_norm": 0}, "max_grad_norm: 1.0"),
            ({"clip_norm": "lagged"}, "clip_norm: exact"),
        )
    ),
)
"""Rules of states, clipping and steps in the backward. They are asked after the rules of adapters and the engine."""
