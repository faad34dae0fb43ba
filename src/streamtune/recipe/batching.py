"""The keys of optimizer steps that are counted in tokens, and the rules about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from streamtune.recipe.spec import Spec, at_most, mistake


class BucketSpec(Spec):
    """Pieces of rows by length, and the order of the lengths in an epoch."""

    curriculum: Literal["uniform", "grow-linear", "grow-p2"] = "grow-p2"
    """Odds of the batch that comes next: `uniform` the same for all; `grow-p2` halves them each time the length
    doubles, so that short pieces come first in a cycle; `grow-linear` lowers them by as much each time."""

    cycles: Annotated[int, Field(ge=1), at_most(1000)] = 8
    """Times in an epoch that lengths grow from short to long."""

    min_length: Annotated[int, Field(ge=2), at_most(10**6)] = 64
    """Tokens of the smallest bucket, a power of two; it has the ends of rows that are shorter, too."""

    @field_validator("min_length")
    @classmethod
    def _power_of_two(cls, min_length: int) -> int:
        if min_length & (min_length - 1):
            below = 1 << (min_length.bit_length() - 1)
            raise mistake(
                f"'buckets.min_length' takes a power of two; found {min_length}",
                key="buckets.min_length",
                mend=f"write {below} or {2 * below}",
            )
        return min_length


NOT_FOR = {
    ("dpo", "buckets"): ("cuts rows into pieces, and dpo compares whole completions", "write batching: tokens or rows"),
    ("grpo", "buckets"): ("cuts rows into pieces, and grpo trains on what the model writes", "delete the line"),
    ("grpo", "tokens"): ("counts the tokens of rows, and those of grpo are not written yet", "delete the line"),
}
"""Objectives that a way of batching is not for: the reason, and how to mend it."""


def batching_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys that say what an optimizer step holds; for dpo a row is a pair."""
    tokens, buckets = recipe.tokens_per_batch, recipe.buckets
    if (recipe.objective, recipe.batching) in NOT_FOR:
        what, mend = NOT_FOR[recipe.objective, recipe.batching]
        yield mistake(f"'batching: {recipe.batching}' {what}", key="batching", mend=mend)
    if recipe.batching == "rows":
        if tokens is not None:
            yield mistake(
                "'tokens_per_batch' is the budget of 'batching: tokens' and 'batching: buckets', and steps are "
                "counted in rows",
                key="tokens_per_batch",
                mend="add batching: tokens, or delete the line",
            )
    elif tokens is None:
        yield mistake(
            f"'batching: {recipe.batching}' needs the tokens of an optimizer step",
            key="batching",
            mend=f"add tokens_per_batch: {8 * recipe.max_length}",
        )
    else:
        yield from _budget_mistakes(recipe, tokens)
    if buckets is not None and recipe.batching != "buckets":
        yield mistake(
            f"'buckets' belongs to 'batching: buckets', and 'batching' is {recipe.batching}",
            key="buckets",
            mend="write batching: buckets, or delete the group",
        )
    if recipe.batching == "buckets":
        least = (buckets or BucketSpec()).min_length
        if least > recipe.max_length:
            yield mistake(
                f"the smallest bucket has {least:,} tokens, and 'max_length' is {recipe.max_length:,}",
                key="buckets" if buckets is None else "buckets.min_length",
                mend="add buckets: {min_length: ...} with a smaller power of two",
            )
        weighted = [index for index, source in enumerate(recipe.datasets) if source.weight is not None]
        if weighted:
            yield mistake(
                "'batching: buckets' visits every piece once an epoch, and 'weight' some rows more often than others",
                key=f"datasets.{weighted[0]}.weight",
                mend="write batching: tokens, or delete the weights; repeat: N visits the rows of a dataset N times",
            )
        if not recipe.shuffle:
            yield mistake(
                "'batching: buckets' orders pieces by their length, and 'shuffle: false' keeps the order of the rows",
                key="shuffle",
                mend="delete one of the two",
            )


def turn_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the keys that exclude turns as rows that share their beginnings."""
    if recipe.reasoning != "per_turn":
        return
    allowed = {
        "objective": ("sft", "other objectives train the completions of a prompt"),
        "train_on": ("assistant", "every turn is a row, and its last answer is trained"),
        "batching": ("rows", "the turns of a conversation are one sequence"),
        "packing": (False, "the turns of a conversation are one sequence already"),
        "streaming": (False, "conversations are laid out before the first step"),
        "per_device_train_batch_size": (1, "the turns of a conversation are one sequence"),
        "per_device_eval_batch_size": (1, "the turns of a conversation are one sequence"),
    }
    for key, (value, why) in allowed.items():
        if getattr(recipe, key) != value:
            yield mistake(
                f"'reasoning: per_turn' needs '{key}: {str(value).lower()}': {why}",
                key=key if key != "objective" else "reasoning",
                mend="write reasoning: keep" if key == "objective" else f"write {key}: {str(value).lower()}",
            )


def _budget_mistakes(recipe: Any, tokens: int) -> Iterator[PydanticCustomError]:
    for key in ("gradient_accumulation_steps", "train_batch_size"):
        if getattr(recipe, key) != type(recipe).model_fields[key].default:
            yield mistake(
                f"'{key}' counts the rows of an optimizer step, and 'batching: {recipe.batching}' its tokens",
                key=key,
                mend="delete the line; tokens_per_batch says how large a step is, on any number of ranks",
            )
    rows = 2 if recipe.objective == "dpo" else 1
    if tokens < rows * recipe.max_length:
        what = "a pair of two answers" if rows == 2 else "a row"
        yield mistake(
            f"{what} may have {rows * recipe.max_length:,} tokens by 'max_length', and a step "
            f"{tokens:,} by 'tokens_per_batch'",
            key="tokens_per_batch",
            mend=f"write at least {rows * recipe.max_length}, or lower max_length",
        )
