"""Recipe keys of the optimizer: its options, learning rates by parameter, and gradient clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.base.optimizer_table import ADAM_KEYS, OPTIMIZERS, OptimizerName, find_argument_mistake
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
    is_given,
    names_where,
)


class LearningRateGroup(Spec):
    """Keys of one entry of the recipe key ``lr_groups``: a learning rate or weight decay for some parameters."""

    match: Text
    """Pattern of one or more complete components of a parameter name: `embed_tokens`, `layers.0`, `lora_B`,
    `layers.*.mlp`. `*` matches any text, `?` one character. If several patterns match, the first applies."""

    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of the matching parameters. It rises and falls with the schedule of the recipe
    (`lr_scheduler_type`). Default: the recipe's `learning_rate`."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight decay of the matching parameters, applied to vectors (biases, norms) too. Default: the recipe's
    `weight_decay` for matrices, 0 for vectors."""

    rules = (
        Clash(
            {"learning_rate": None, "weight_decay": None},
            "the group of '{match}' has neither learning_rate nor weight_decay",
            "add learning_rate: ... or weight_decay: ...",
            key="lr_groups",
        ),
    )


class OptimizerKeys(Spec):
    """Recipe keys of the optimizer, learning rates by parameter, and gradient clipping."""

    optim: OptimizerName = "adamw"
    """Name of the optimizer. `streamtune optim ls` lists all optimizers with library, bytes of state per parameter, and
    unsupported combinations."""

    optim_args: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Options of `optim` if it is not AdamW, such as `{momentum: 0.9}`; `streamtune optim ls` lists them. AdamW's
    options are recipe keys: `adam_beta1`, `adam_beta2`, `adam_epsilon`."""

    lr_groups: Annotated[tuple[LearningRateGroup, ...], Field(strict=False)] = ()
    """List of learning rates or weight decays for parameters with matching names: `[{match: embed_tokens,
    learning_rate: 1.0e-6}]`. For LoRA+, write `[{match: lora_B, learning_rate: ...}]` with 16 times `learning_rate`."""

    lr_layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Ratio between the learning rates of a layer and of the layer above. The head has `learning_rate`, the last layer
    `learning_rate` times this ratio, and so on down to the embeddings. Rates in `lr_groups` are not changed. 1: all
    layers have the same rate."""

    optim_states: Literal["param", "float32", "bfloat16"] = "param"
    """Dtype of AdamW's two moments. `param`: the dtype of the weight. `bfloat16` takes half the bytes of float32; it is
    rounded stochastically, and the step is computed in float32. Not with DeepSpeed or FSDP2, which decide the dtype
    themselves."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Decoupled weight decay, applied to matrices but not to vectors (biases, norms). 0 disables it."""

    adam_beta1: Fraction = 0.9
    """Decay rate of the running mean of the gradient (beta1), in AdamW and its variants."""

    adam_beta2: Fraction = 0.999
    """Decay rate of the running mean of the squared gradient (beta2), in AdamW and its variants."""

    adam_epsilon: Annotated[float, Field(gt=0), at_most(10**9)] = 1e-8
    """Small number that AdamW and its variants add to the denominator of a step, to prevent division by zero."""

    max_grad_norm: Annotated[float, Field(ge=0), at_most(10**9)] = 1.0
    """Maximum norm of the gradient; a gradient with a larger norm is scaled down to this norm. 0 disables clipping."""

    optim_in_backward: bool = False
    """Update each weight during the backward, as soon as its gradient is complete, then free the gradient. Set it if
    the gradients of all layers do not fit in memory. The update is the same, but the gradients of only one layer are in
    memory at once. If the optimizer runs on the host, up to 16 more gradients wait for it. With several micro-batches
    per step, or with `engine.order: chunk`, the gradients of all layers are in memory all the same. With clipping
    (`max_grad_norm`) the backward runs twice, first to measure the norm, unless `clip_norm` is `lagged`. One device
    only."""

    clip_norm: Literal["exact", "lagged"] = "exact"
    """With `optim_in_backward`: gradient norm that is compared with `max_grad_norm`. `exact`: the norm of this step's
    gradient, for which a step runs forward and backward twice. `lagged`: the norm of the previous step's gradient (the
    first step uses its own norm). A step with `lagged` takes half the time of a step with `exact`, but its update
    differs. With `lagged`, `metrics.jsonl` has `clip_norm`, the compared norm, and `grad_norm`, the norm of this
    step."""


FORWARD_ONLY = names_where(OPTIMIZERS, {"step.gradients": "none"})
ONE_BLOCK = names_where(OPTIMIZERS, {"step.gradients": "block"})
AVERAGING = names_where(OPTIMIZERS, {"averages": True})

USE_ADAMW = "write optim: adamw"


def _refuse_wrong_optim_args(recipe: Any) -> Iterator[Refusal]:
    if found := find_argument_mistake(recipe.optim, recipe.optim_args):
        option, what, fix = found
        yield Refusal(f"optim_args.{option}", what, fix)


def _refuse_unread_adam_keys(recipe: Any) -> Iterator[Refusal]:
    name, options = recipe.optim, OPTIMIZERS[recipe.optim].options
    for key in ADAM_KEYS:
        if is_given(recipe, key):
            fix = f"delete the line; optim_args of {name}: {', '.join(options)}"
            yield Refusal(key, f"'{key}' is an option of AdamW, and 'optim' is {name}", fix)


def _refuse_sharded_optimizer(recipe: Any) -> Iterator[Refusal]:
    name, sharding_key = recipe.optim, recipe.sharding_key
    if sharding_key and (why := OPTIMIZERS[name].cannot_shard_reason):
        what = (
            f"'optim: {name}' does not combine with '{sharding_key}', which shards the optimizer between ranks: {why}"
        )
        yield Refusal("optim", what, f"write optim: adamw, or delete '{sharding_key}'")


def _refuse_optimizer_on_host(recipe: Any) -> Iterator[Refusal]:
    name, key = recipe.optim, recipe.engine.host_optimizer_key
    if key and (only := OPTIMIZERS[name].only_on):
        what = f"'optim: {name}' runs only on {only}, and 'engine.{key}: host' steps on the host"
        yield Refusal("optim", what, f"write optim: {name.removeprefix('paged_')}, or delete 'engine.{key}'")


def _refuse_rounding_without_bfloat16(recipe: Any) -> Iterator[Refusal]:
    trains_modules = recipe.finetuning_type != "full" and (recipe.modules_to_save or recipe.adapter_name_or_path)
    if recipe.dtype != "bfloat16" and not trains_modules:
        yield Refusal(
            "weight_rounding",
            f"'weight_rounding: stochastic' needs trained bfloat16 weights, and 'dtype' is {recipe.dtype}",
            "write dtype: bfloat16, or delete the line; dtype: auto uses stochastic rounding if float32 does not fit",
        )


def _refuse_conflicting_block_options(recipe: Any) -> Iterator[Refusal]:
    args = recipe.optim_args
    if args.get("blocks") and any(
        args.get(key) for key in ("include_embedding", "include_lm_head", "layers_per_block")
    ):
        yield Refusal(
            "optim_args.blocks",
            "'blocks' and any of 'layers_per_block', 'include_embedding', 'include_lm_head' exclude each other",
            "delete 'blocks', or the others",
        )


def _refuse_learning_rate_decay(recipe: Any) -> Iterator[Refusal]:
    yield Refusal(
        "lr_scheduler_type" if "lr_scheduler_type" in recipe.model_fields_set else "optim",
        f"'optim: {recipe.optim}' averages weights instead of decaying the learning rate, and 'lr_scheduler_type' is "
        f"{recipe.lr_scheduler_type}",
        "write lr_scheduler_type: constant; a warm-up stays allowed",
    )


def _refuse_groups_without_rate(recipe: Any) -> Iterator[Refusal]:
    if any(group.learning_rate is not None for group in recipe.lr_groups):
        yield Refusal(
            "lr_groups",
            "'lr_groups' scale the schedule of 'learning_rate', which is 0",
            "write a learning_rate above 0; to freeze other weights, add lr_groups: [{match: '*', learning_rate: 0.0}]",
        )


ROUNDING_RULES: Rules = (
    Clash(
        {"weight_rounding": GIVEN, "sharding_key": "deepspeed"},
        "'weight_rounding: stochastic' needs whole bfloat16 weights, and 'deepspeed' keeps a float32 copy of them",
        "delete the line, or delete 'deepspeed'",
    ),
    Clash(
        {"weight_rounding": GIVEN, "sharding_key": "fsdp"},
        "'weight_rounding: stochastic' needs whole weights, and 'fsdp' shards them",
        "delete the line, or delete 'fsdp'",
    ),
    Clash(
        {"weight_rounding": GIVEN, "optim": ONE_BLOCK},
        "'weight_rounding' has no effect: 'optim: {optim}' keeps the trained block in float32 and rounds it once",
        DELETE,
    ),
    Clash(
        {"weight_rounding": GIVEN, "optim": FORWARD_ONLY},
        "'optim: {optim}' steps along the perturbation that it applied in the weights' dtype; stochastic rounding "
        "would change the direction",
        "delete the line, or write another optim",
    ),
    Where({"weight_rounding": GIVEN}, Custom(_refuse_rounding_without_bfloat16)),
)

BLOCK_RULES = Where(
    {"optim": ONE_BLOCK},
    Clash(
        {"engine.host_optimizer_key": Not(None)},
        "'optim: {optim}' changes which weights are trained, and 'engine.{engine.host_optimizer_key}: host' moves the "
        "trained weights to the host only once",
        "delete 'engine.{engine.host_optimizer_key}'; moments exist only for one block",
        key="optim",
    ),
    Clash(
        {"optim_in_backward": True},
        "'optim_in_backward' saves the memory of all gradients, and 'optim: {optim}' has gradients of one block only",
        DELETE,
    ),
    Clash(
        {"sequence_parallel_size": GIVEN},
        "'optim: {optim}' needs a single device, and 'sequence_parallel_size' needs several",
        "write optim: adamw, or sequence_parallel_size: 1",
        key="optim",
    ),
    Custom(_refuse_conflicting_block_options),
)

FORWARD_RULES = Where(
    {"optim": FORWARD_ONLY},
    Clash(
        {"engine.host_optimizer_key": Not(None)},
        "'optim: {optim}' perturbs each weight while its layer computes and keeps no states; "
        "'engine.{engine.host_optimizer_key}: host' is for weights that are fetched and for states",
        "delete 'engine.{engine.host_optimizer_key}', or write optim: adamw",
        key="optim",
    ),
    Clash(
        {"optim_in_backward": True},
        "'optim_in_backward' frees gradients early, and 'optim: {optim}' computes none",
        DELETE,
    ),
    Clash(
        {"objective": "grpo"},
        "'optim: {optim}' compares losses at different weights, and the value of grpo's loss does not depend on the "
        "weights: only its gradient does",
        USE_ADAMW,
        key="optim",
    ),
    *(
        Clash(
            {"loss_type": loss},
            f"the gradient of 'loss_type: {loss}' treats {number} as a constant, but this number differs "
            "between the losses that 'optim: {optim}' compares",
            "write another loss_type, or optim: adamw",
        )
        for loss, number in (
            ("dft", "the probability of each token"),
            ("kto", "the mean log-ratio of other completions"),
        )
    ),
)

OPTIMIZER_RULES: Rules = (
    Custom(_refuse_wrong_optim_args),
    Where(
        {"optim": names_where(OPTIMIZERS, {"is_adam": False, "adamw_for_rest": False})},
        Custom(_refuse_unread_adam_keys),
    ),
    Clash(
        {"optim_states": GIVEN, "optim": Not("adamw")},
        "'optim_states' sets the dtype of AdamW's moments, and 'optim' is {optim}",
        "delete the line, or write optim: adamw",
    ),
    *ROUNDING_RULES,
    Custom(_refuse_sharded_optimizer),
    Custom(_refuse_optimizer_on_host),
    BLOCK_RULES,
    FORWARD_RULES,
    Where(
        {"optim": AVERAGING, "lr_scheduler_type": Not("constant", "constant_with_warmup")},
        Custom(_refuse_learning_rate_decay),
    ),
    Clash(
        {"optim": AVERAGING, "objective": "grpo"},
        "'optim: {optim}' evaluates an average of the weights, and grpo writes completions with the trained weights",
        USE_ADAMW,
    ),
    Where({"learning_rate": 0}, Custom(_refuse_groups_without_rate)),
)

STATE_RULES: Rules = (
    Clash(
        {"optim_states": GIVEN, "sharding_key": Not(None)},
        "'optim_states' needs whole optimizer states on each rank, and '{sharding_key}' shards them in its own dtype",
        "delete the line, or delete '{sharding_key}'",
    ),
    Clash(
        {"clip_norm": "lagged", "optim_in_backward": False},
        "'clip_norm: lagged' needs 'optim_in_backward: true'; otherwise the norm is known before the step",
        "add optim_in_backward: true, or delete the line",
    ),
    Clash(
        {"clip_norm": "lagged", "max_grad_norm": 0},
        "'clip_norm: lagged' needs clipping, and 'max_grad_norm: 0' disables it",
        "delete the line, or write max_grad_norm: 1.0",
    ),
    Clash(
        {"optim_in_backward": True, "sharding_key": Not(None)},
        "'optim_in_backward' needs a single device, and '{sharding_key}' brings its own optimizer",
        "delete the line, or delete '{sharding_key}'",
    ),
    *(
        Clash(
            {"on_nan": "skip", "optim_in_backward": True, **setting},
            "'on_nan: skip' drops a step before the optimizer runs, and 'optim_in_backward' has updated weights by "
            "then",
            f"write {first}, which measures the gradient first, or on_nan: stop",
        )
        for setting, first in (
            ({"max_grad_norm": 0}, "max_grad_norm: 1.0"),
            ({"clip_norm": "lagged"}, "clip_norm: exact"),
        )
    ),
)
"""Rules of optimizer states, clipping and steps in the backward. They run after the rules of adapters and engine."""
