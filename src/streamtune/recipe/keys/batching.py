"""Keys of batches: packs, steps that are counted in rows or tokens, buckets, and rows that are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from streamtune.recipe.keys.optimizer import FORWARD_ONLY, ONE_BLOCK
from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    ONE_OF_TWO,
    Clash,
    Count,
    Custom,
    Not,
    Refusal,
    Rows,
    Rules,
    Spec,
    Where,
    at_most,
    mistake,
)


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
                fix=f"write {below} or {2 * below}",
            )
        return min_length


class BatchKeys(Spec):
    """Contents of a batch, and the rows that are held out."""

    packing: bool = False
    """Lay several rows end to end in one sequence of at most `max_length` tokens, where none sees another: no padding,
    the same gradient. `per_device_train_batch_size` then counts sequences."""

    batching: Literal["rows", "tokens", "buckets"] = "rows"
    """Contents of an optimizer step: so many `rows`; rows with at most `tokens_per_batch` tokens together (`tokens`);
    or as many pieces of one power-of-two length, which rows are cut into, as `tokens_per_batch` holds (`buckets`)."""

    tokens_per_batch: Count | None = None
    """Tokens of one optimizer step over all ranks, with `batching: tokens` and `batching: buckets`."""

    buckets: BucketSpec | None = None
    """`batching: buckets`: order of the lengths and smallest length: `{curriculum: grow-p2, cycles: 8, min_length: 64}`
    (dataset decomposition, arXiv 2405.13226)."""

    select_rows: Literal["colm"] | None = None
    """`sft`: train a step on a few rows that stand for many (`colm`, arXiv 2407.19580). `select_from` times the rows of
    a step are drawn, each is run forward, and of each dataset those are chosen whose gradients are nearest to all; rows
    of datasets smaller than the mean are kept. `selected.jsonl` has the choices."""

    select_from: Annotated[int, Field(ge=2), at_most(10**4)] = 2
    """`select_rows`: times the rows of a step that are drawn for it. An epoch draws each row once, and one of so many
    is trained."""

    val_size: Annotated[float, Field(ge=0), at_most(10**12)] = 0.0
    """Rows of `datasets` held out for evaluation: a fraction below 1, or a number of rows. Beside `eval_datasets` they
    are the set `held_out`."""

    @field_validator("val_size")
    @classmethod
    def _whole_rows(cls, val_size: float) -> float:
        if val_size >= 1 and val_size != int(val_size):
            raise mistake(
                f"'val_size' takes a fraction below 1 or a whole number of rows; found {val_size}", key="val_size"
            )
        return val_size

    @property
    def draws(self) -> int:
        """Times the rows of a step that are drawn for it; 1 where all that are drawn are trained on."""
        return 1 if self.select_rows is None else self.select_from


class StepKeys(Spec):
    """Size of an optimizer step, and their number."""

    per_device_train_batch_size: Rows = 1
    """Rows in one forward and backward."""

    per_device_eval_batch_size: Rows = 1
    """Rows in one forward when evaluating."""

    gradient_accumulation_steps: Rows = 1
    """Forwards and backwards to one optimizer step; the loss is the mean over the tokens of all of them."""

    num_train_epochs: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """Times to go through the data."""

    max_steps: Literal[-1] | Count = -1
    """Optimizer steps of the run, in place of `num_train_epochs`; -1 goes by the epochs."""


def _budget_of_a_row(recipe: Any) -> Iterator[Refusal]:
    tokens, rows = recipe.tokens_per_batch, 2 if recipe.objective == "dpo" else 1
    if tokens < rows * recipe.max_length:
        what = "a pair of two answers" if rows == 2 else "a row"
        yield Refusal(
            "tokens_per_batch",
            f"{what} may have {rows * recipe.max_length:,} tokens by 'max_length', and a step {tokens:,} by "
            "'tokens_per_batch'",
            f"write at least {rows * recipe.max_length}, or lower max_length",
        )


def _no_budget(recipe: Any) -> Iterator[Refusal]:
    what = f"'batching: {recipe.batching}' needs the tokens of an optimizer step"
    yield Refusal("batching", what, f"add tokens_per_batch: {8 * recipe.max_length}")


def _smallest_bucket(recipe: Any) -> Iterator[Refusal]:
    least = (recipe.buckets or BucketSpec()).min_length
    if least > recipe.max_length:
        yield Refusal(
            "buckets" if recipe.buckets is None else "buckets.min_length",
            f"the smallest bucket has {least:,} tokens, and 'max_length' is {recipe.max_length:,}",
            "add buckets: {min_length: ...} with a smaller power of two",
        )


def _buckets_of_weights(recipe: Any) -> Iterator[Refusal]:
    weighted = [index for index, source in enumerate(recipe.datasets) if source.weight is not None]
    if weighted:
        yield Refusal(
            f"datasets.{weighted[0]}.weight",
            "'batching: buckets' visits every piece once an epoch, and 'weight' some rows more often than others",
            "write batching: tokens, or delete the weights; repeat: N visits the rows of a dataset N times",
        )


BATCH_RULES: Rules = (
    Clash(
        {"batching": "buckets", "objective": "dpo"},
        "'batching: buckets' cuts rows into pieces, and dpo compares whole completions",
        "write batching: tokens or rows",
    ),
    Clash(
        {"batching": "buckets", "objective": "grpo"},
        "'batching: buckets' cuts rows into pieces, and grpo trains on what the model writes",
        DELETE,
    ),
    Clash(
        {"batching": "tokens", "objective": "grpo"},
        "'batching: tokens' counts the tokens of rows, and those of grpo are not written yet",
        DELETE,
    ),
    Clash(
        {"tokens_per_batch": GIVEN, "batching": "rows"},
        "'tokens_per_batch' is the budget of 'batching: tokens' and 'batching: buckets', and steps are counted in rows",
        "add batching: tokens, or delete the line",
    ),
    Where({"batching": Not("rows"), "tokens_per_batch": None}, Custom(_no_budget)),
    Where(
        {"batching": Not("rows"), "tokens_per_batch": GIVEN},
        *(
            Clash(
                {key: GIVEN},
                f"'{key}' counts the rows of an optimizer step, and 'batching: {{batching}}' its tokens",
                "delete the line; tokens_per_batch says how large a step is, on any number of ranks",
            )
            for key in ("gradient_accumulation_steps", "train_batch_size")
        ),
        Custom(_budget_of_a_row),
    ),
    Clash(
        {"buckets": GIVEN, "batching": Not("buckets")},
        "'buckets' belongs to 'batching: buckets', and 'batching' is {batching}",
        "write batching: buckets, or delete the group",
    ),
    Where(
        {"batching": "buckets"},
        Custom(_smallest_bucket),
        Custom(_buckets_of_weights),
        Clash(
            {"shuffle": False},
            "'batching: buckets' orders pieces by their length, and 'shuffle: false' keeps the order of the rows",
            ONE_OF_TWO,
        ),
    ),
)

ONE_BY_ONE = "rows are compared one by one"
DELETE_EITHER = "delete the line, or select_rows"
ADAMW = "write optim: adamw, or delete select_rows"
DIVIDED = "the weight whose gradient compares rows, or its moments, are divided between ranks"

SELECTION_RULES: Rules = (
    Clash(
        {"select_from": GIVEN, "select_rows": None},
        "'select_from' says how many rows 'select_rows' chooses from",
        "add select_rows: colm, or delete the line",
    ),
    Where(
        {"select_rows": Not(None)},
        Clash({"objective": "dpo"}, "'objective: dpo': a pair has two completions", DELETE, key="select_rows"),
        Clash({"objective": "grpo"}, "'objective: grpo': grpo writes the rows it trains on", DELETE, key="select_rows"),
        Clash(
            {"batching": Not("rows")}, "'batching: {batching}': a step is chosen by its rows", "write batching: rows"
        ),
        Clash({"packing": True}, f"'packing': {ONE_BY_ONE}, and packs are made before", DELETE_EITHER),
        Clash(
            {"reasoning": "per_turn"},
            f"'reasoning: per_turn': {ONE_BY_ONE}, and turns share a sequence",
            "write reasoning: keep",
        ),
        Clash({"streaming": True}, "'streaming': the size of each source is not known", DELETE_EITHER),
        Clash(
            {"dataloader_num_workers": GIVEN},
            "'dataloader_num_workers': rows are chosen with the weights of the step before, not ahead of it",
            "write dataloader_num_workers: 0",
        ),
        *(
            Clash(
                {key: GIVEN}, f"'{key}': {DIVIDED}", f"delete '{key}'; ranks with whole weights (DDP) share the choice"
            )
            for key in ("fsdp", "deepspeed")
        ),
        Clash(
            {"sequence_parallel_size": GIVEN},
            "'sequence_parallel_size': each rank has the gradient of a part of a row",
            "write sequence_parallel_size: 1",
        ),
        Clash(
            {"optim": FORWARD_ONLY}, "'optim: {optim}': rows are compared by gradients, and the step has none", ADAMW
        ),
        Clash(
            {"optim": ONE_BLOCK},
            "'optim: {optim}': the weight whose gradient compares rows is trained in one block of many",
            ADAMW,
        ),
        text="'select_rows: {select_rows}' does not combine with {}",
    ),
)
