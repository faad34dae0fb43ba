"""The rules about optimizers: their options, groups of learning rates, and what each does not combine with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from streamtune.base.optimizer_table import ADAM_KEYS, OPTIMIZERS, argument_mistakes
from streamtune.recipe.spec import Spec, Text, at_most, mistake


class LearningRateGroup(Spec):
    """A learning rate or weight decay of the parameters that a pattern matches."""

    match: Text
    """Parameters by whole parts of their names: `embed_tokens`, `layers.0`, `lora_B`, `layers.*.mlp`; `*` is any text,
    `?` a character. Of several patterns that match, the first counts."""

    learning_rate: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of these parameters; the schedule is that of all."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Weight decay of these parameters, vectors too."""

    @model_validator(mode="after")
    def _sets_something(self) -> LearningRateGroup:
        if self.learning_rate is None and self.weight_decay is None:
            raise mistake(
                f"the group of '{self.match}' sets nothing",
                key="lr_groups",
                mend="add learning_rate: ... or weight_decay: ...",
            )
        return self


def optimizer_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys of the optimizer, and in what it is combined with."""
    name, entry = recipe.optim, OPTIMIZERS[recipe.optim]
    if found := argument_mistakes(name, recipe.optim_args):
        option, what, mend = found
        yield mistake(what, key=f"optim_args.{option}", mend=mend)
    if not (entry.is_adam or entry.adamw_for_rest):
        for key, default in ADAM_KEYS.items():
            if getattr(recipe, key) != default:
                mend = f"delete the line; the options of {name} are optim_args: {', '.join(entry.options)}"
                yield mistake(f"'{key}' is AdamW's, and 'optim' is {name}", key=key, mend=mend)
    if recipe.optim_states != "param" and name != "adamw":
        yield mistake(
            f"'optim_states' is of AdamW's two moments, and 'optim' is {name}",
            key="optim_states",
            mend="delete the line, or write optim: adamw",
        )
    shares = "fsdp" if recipe.fsdp else "deepspeed" if recipe.deepspeed is not None else None
    yield from _rounding_mistakes(recipe, shares)
    if shares and entry.not_divided:
        yield mistake(
            f"'optim: {name}' does not combine with '{shares}', which divides the optimizer between ranks: "
            f"{entry.not_divided}",
            key="optim",
            mend=f"write optim: adamw, or delete '{shares}'",
        )
    on_host = next((key for key in ("weights", "optimizer") if getattr(recipe.engine, key) == "host"), None)
    if entry.only_on and on_host:
        yield mistake(
            f"'optim: {name}' runs on {entry.only_on}, and 'engine.{on_host}: host' steps on the host",
            key="optim",
            mend=f"write optim: {name.removeprefix('paged_')}, or delete 'engine.{on_host}'",
        )
    if entry.step.gradients == "block":
        yield from _block_mistakes(recipe, on_host)
    if entry.step.gradients == "none":
        yield from _forward_mistakes(recipe, on_host)
    if entry.averages and recipe.lr_scheduler_type not in ("constant", "constant_with_warmup"):
        yield mistake(
            f"'optim: {name}' averages weights in place of a rate that decays, and 'lr_scheduler_type' is "
            f"{recipe.lr_scheduler_type}",
            key="lr_scheduler_type" if "lr_scheduler_type" in recipe.model_fields_set else "optim",
            mend="write lr_scheduler_type: constant; warmup_steps stay",
        )
    if entry.averages and recipe.objective == "grpo":
        yield mistake(
            f"'optim: {name}' trains other weights than it evaluates, and grpo writes its completions with those that "
            "it trains",
            key="optim",
            mend="write optim: adamw",
        )
    grouped = any(group.learning_rate is not None for group in recipe.lr_groups)
    if grouped and recipe.learning_rate == 0:
        yield mistake(
            "'lr_groups' follow the schedule of 'learning_rate', which is 0",
            key="lr_groups",
            mend="write a learning_rate above 0; lr_groups: [{match: '*', learning_rate: 0.0}] stops the others",
        )


def _rounding_mistakes(recipe: Any, shares: str | None) -> Iterator[PydanticCustomError]:
    """Yield the mistakes of a recipe that rounds its weights stochastically."""
    name, entry, key = recipe.optim, OPTIMIZERS[recipe.optim], "weight_rounding"
    if recipe.weight_rounding == "nearest":
        return
    if shares:
        keeps = "keeps float32 weights beside bfloat16 ones" if shares == "deepspeed" else "divides weights"
        yield mistake(
            f"'weight_rounding: stochastic' is of whole weights, and '{shares}' {keeps}",
            key=key,
            mend=f"delete the line, or '{shares}'",
        )
    if entry.step.gradients == "block":
        yield mistake(
            f"'optim: {name}' keeps the block that it trains in float32, and rounds it once",
            key=key,
            mend="delete the line",
        )
    if entry.step.gradients == "none":
        yield mistake(
            f"'optim: {name}' steps along the direction that it perturbed in the dtype of the weights, and a rounding "
            "would be another direction",
            key=key,
            mend="delete the line, or write another optim",
        )
    whole = recipe.finetuning_type != "full" and (recipe.modules_to_save or recipe.adapter_name_or_path)
    if recipe.dtype != "bfloat16" and not whole:
        yield mistake(
            f"'weight_rounding: stochastic' is of bfloat16 weights that are trained, and 'dtype' is {recipe.dtype}",
            key=key,
            mend="write dtype: bfloat16, or delete the line: dtype: auto chooses it where float32 does not fit",
        )


TAKEN_FOR_CONSTANT = {"dft": "the probability of each token", "kto": "the mean log-ratio of other completions"}
"""Losses whose gradient takes a number that depends on the weights for a constant, and that number."""


def _forward_mistakes(recipe: Any, on_host: str | None) -> Iterator[PydanticCustomError]:
    """Yield the mistakes of a recipe that steps by losses alone."""
    name = recipe.optim
    if on_host:
        yield mistake(
            f"'optim: {name}' perturbs weights while their layer computes and keeps no states, and 'engine.{on_host}: "
            "host' is for weights that are fetched and for states",
            key="optim",
            mend=f"delete 'engine.{on_host}', or write optim: adamw",
        )
    if recipe.optim_in_backward:
        yield mistake(
            f"'optim_in_backward' frees gradients as they come, and 'optim: {name}' has none",
            key="optim_in_backward",
            mend="delete the line",
        )
    if recipe.objective == "grpo":
        yield mistake(
            f"'optim: {name}' compares losses at different weights, and the loss of grpo compares the policy with "
            "itself: its gradient depends on the weights, its value does not",
            key="optim",
            mend="write optim: adamw",
        )
    elif recipe.loss_type in TAKEN_FOR_CONSTANT:
        yield mistake(
            f"the gradient of 'loss_type: {recipe.loss_type}' takes {TAKEN_FOR_CONSTANT[recipe.loss_type]} for a "
            f"constant, and in the losses that 'optim: {name}' compares it changes",
            key="loss_type",
            mend="write another loss_type, or optim: adamw",
        )


def _block_mistakes(recipe: Any, on_host: str | None) -> Iterator[PydanticCustomError]:
    """Yield the mistakes of a recipe that trains one block of the weights at a time."""
    name = recipe.optim
    if on_host:
        yield mistake(
            f"'optim: {name}' freezes weights and trains others as it goes, and 'engine.{on_host}: host' takes those "
            "that are trained to the host once",
            key="optim",
            mend=f"delete 'engine.{on_host}': moments are there for one block alone",
        )
    if recipe.optim_in_backward:
        yield mistake(
            f"'optim_in_backward' frees gradients of all weights, and 'optim: {name}' has those of one block",
            key="optim_in_backward",
            mend="delete the line",
        )
    if recipe.sequence_parallel_size > 1:
        yield mistake(
            f"'optim: {name}' is for one device by itself, and 'sequence_parallel_size' is for several",
            key="optim",
            mend="write optim: adamw, or sequence_parallel_size: 1",
        )
    if recipe.optim_args.get("blocks") and any(
        recipe.optim_args.get(key) for key in ("include_embedding", "include_lm_head", "layers_per_block")
    ):
        yield mistake(
            "'blocks' says what is trained together, and so do 'layers_per_block', 'include_embedding' and "
            "'include_lm_head'",
            key="optim_args.blocks",
            mend="delete it, or the others",
        )
