"""Recipe keys of batches: packing, steps counted in rows or tokens, buckets, and selection of rows."""

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
    OnlyFor,
    Refusal,
    Rows,
    Rules,
    Spec,
    Where,
    at_most,
    mistake,
)


class BucketSpec(Spec):
    """Keys of the recipe key ``buckets``: the smallest piece length, and the order of lengths in an epoch."""

    curriculum: Literal["uniform", "grow-linear", "grow-p2"] = "grow-p2"
    """Odds with which each batch is drawn from the remaining batches of a cycle, by the length of its pieces. For the
    longest length, its half, its quarter and its eighth, the odds are 1:2:4:8 (`grow-p2`), 1:2:3:4 (`grow-linear`) or
    1:1:1:1 (`uniform`). Except with `uniform`, short pieces thus tend to come first."""

    cycles: Annotated[int, Field(ge=1), at_most(1000)] = 8
    """Number of cycles in an epoch. In each cycle pieces tend to grow from short to long, as `curriculum` sets."""

    min_length: Annotated[int, Field(ge=2), at_most(10**6)] = 64
    """Length of the shortest bucket in tokens; must be a power of two. A remainder at the end of a row that is shorter
    than this goes into the shortest bucket too."""

    @field_validator("min_length")
    @classmethod
    def _check_min_length(cls, min_length: int) -> int:
        if min_length & (min_length - 1):
            below = 1 << (min_length.bit_length() - 1)
            raise mistake(
                f"'buckets.min_length' must be a power of two; found {min_length}",
                key="buckets.min_length",
                fix=f"write {below} or {2 * below}",
            )
        return min_length


class BatchKeys(Spec):
    """Recipe keys that control packing, the batch size in tokens, row selection, and held-out rows."""

    packing: bool = False
    """Only for `sft`: pack several rows into one sequence of at most `max_length` tokens. Packed rows do not attend to
    each other and need no padding; the gradient stays the same. Set it if most rows are much shorter than `max_length`.
    `per_device_train_batch_size` then counts sequences."""

    batching: Literal["rows", "tokens", "buckets"] = "rows"
    """Unit that limits the size of an optimizer step. `rows`: a fixed number of rows. `tokens` (`sft`, `dpo`): as many
    rows as fit in `tokens_per_batch`. `buckets` (only `sft`): rows are cut into pieces of power-of-two length, and a
    step has as many pieces of one length as fit in `tokens_per_batch`."""

    tokens_per_batch: Count | None = None
    """Maximum number of tokens in one optimizer step over all ranks. Required with `batching: tokens` (`sft`, `dpo`)
    and `batching: buckets` (`sft`), not allowed otherwise."""

    buckets: BucketSpec | None = None
    """Only for `sft` with `batching: buckets` (dataset decomposition, arXiv 2405.13226): order and smallest length of
    the pieces, such as `{curriculum: grow-p2, cycles: 8, min_length: 64}`."""

    select_rows: Literal["colm"] | None = None
    """Only for `sft`: method that chooses the rows of each step. `colm` (arXiv 2407.19580) draws `select_from` times as
    many rows as a step trains on, and computes the forward pass of all of them. In each dataset it selects the
    rows whose gradients best represent the drawn rows. If a dataset has fewer rows than the average dataset, all its
    drawn rows are selected. `selected.jsonl` lists the selected rows. Default: all rows are trained on."""

    select_from: Annotated[int, Field(ge=2), at_most(10**4)] = 2
    """Only for `sft` with `select_rows`: number of drawn rows for each trained row. With 4, an epoch draws every row
    once and trains on a quarter of the rows."""

    val_size: Annotated[float, Field(ge=0), at_most(10**12)] = 0.0
    """Number of rows of `datasets` (1 or more), or fraction of the rows (below 1), to hold out for evaluation. 0: none.
    With `eval_datasets`, the held-out rows are one more evaluation set, named `held_out`."""

    @field_validator("val_size")
    @classmethod
    def _check_val_size(cls, val_size: float) -> float:
        if val_size >= 1 and val_size != int(val_size):
            raise mistake(
                f"'val_size' must be a fraction below 1 or a whole number of rows; found {val_size}", key="val_size"
            )
        return val_size

    @property
    def draws_per_row(self) -> int:
        """Number of rows that are drawn for each row that is trained on; 1 without ``select_rows``."""
        return 1 if self.select_rows is None else self.select_from


class StepKeys(Spec):
    """Recipe keys that set the rows of an optimizer step and the number of steps."""

    per_device_train_batch_size: Rows = 1
    """Number of rows in one forward and backward of each rank; for `dpo`, number of pairs; with `packing`, number of
    packed sequences. A larger number takes more memory."""

    per_device_eval_batch_size: Rows = 1
    """Number of rows in one forward of each rank during an evaluation. More rows take more memory."""

    gradient_accumulation_steps: Rows = 1
    """Number of micro-batches (one forward and backward each) whose gradients each rank sums before an optimizer step.
    For `sft`, the loss is the mean over the trained tokens of all micro-batches."""

    num_train_epochs: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """Number of passes through the training data; a fraction such as 0.5 is allowed."""

    max_steps: Literal[-1] | Count = -1
    """Number of optimizer steps after which the run ends; replaces `num_train_epochs`. -1: `num_train_epochs`
    decides."""


def _refuse_small_token_budget(recipe: Any) -> Iterator[Refusal]:
    tokens, rows = recipe.tokens_per_batch, 2 if recipe.objective == "dpo" else 1
    if tokens < rows * recipe.max_length:
        what = "a pair of completions" if rows == 2 else "a row"
        yield Refusal(
            "tokens_per_batch",
            f"'max_length' allows {what} of {rows * recipe.max_length:,} tokens, and 'tokens_per_batch' is {tokens:,}",
            f"write at least {rows * recipe.max_length}, or lower max_length",
        )


def _refuse_missing_token_budget(recipe: Any) -> Iterator[Refusal]:
    what = f"'batching: {recipe.batching}' needs 'tokens_per_batch', the tokens of an optimizer step"
    yield Refusal("batching", what, f"add tokens_per_batch: {8 * recipe.max_length}")


def _refuse_bucket_above_max_length(recipe: Any) -> Iterator[Refusal]:
    least = (recipe.buckets or BucketSpec()).min_length
    if least > recipe.max_length:
        yield Refusal(
            "buckets" if recipe.buckets is None else "buckets.min_length",
            f"the smallest bucket has {least:,} tokens, and 'max_length' is {recipe.max_length:,}",
            "add buckets: {min_length: ...} with a smaller power of two",
        )


def _refuse_weights_with_buckets(recipe: Any) -> Iterator[Refusal]:
    weighted = [index for index, source in enumerate(recipe.datasets) if source.weight is not None]
    if weighted:
        yield Refusal(
            f"datasets.{weighted[0]}.weight",
            "'batching: buckets' visits every piece once an epoch, and 'weight' visits some rows more often",
            "write batching: tokens, or replace each weight by repeat: N, which visits that dataset's rows N times",
        )


BATCH_RULES: Rules = (
    Clash(
        {"batching": "buckets", "objective": "dpo"},
        "'batching: buckets' cuts rows into pieces, and dpo compares whole completions",
        "write batching: tokens or rows",
    ),
    Clash(
        {"batching": "buckets", "objective": "grpo"},
        "'batching: buckets' cuts rows into pieces, and grpo trains on completions that the model writes",
        DELETE,
    ),
    Clash(
        {"batching": "tokens", "objective": "grpo"},
        "'batching: tokens' counts the tokens of rows, and the completions of grpo are not written yet",
        DELETE,
    ),
    Clash(
        {"tokens_per_batch": GIVEN, "objective": "grpo"},
        "'tokens_per_batch' counts the tokens of rows, and the completions of grpo are not written yet",
        DELETE,
    ),
    Clash(
        {"tokens_per_batch": GIVEN, "batching": "rows"},
        "'tokens_per_batch' needs 'batching: tokens' or 'batching: buckets', and 'batching' is rows",
        "add batching: tokens, or delete the line",
    ),
    Where({"batching": Not("rows"), "tokens_per_batch": None}, Custom(_refuse_missing_token_budget)),
    Where(
        {"batching": Not("rows"), "tokens_per_batch": GIVEN},
        *(
            Clash(
                {key: GIVEN},
                f"'{key}' sets the rows of an optimizer step, and 'batching: {{batching}}' sets its tokens",
                "delete the line; tokens_per_batch sets the size of a step, on any number of ranks",
            )
            for key in ("gradient_accumulation_steps", "train_batch_size")
        ),
        Custom(_refuse_small_token_budget),
    ),
    OnlyFor("sft", "buckets", what="'buckets' needs 'batching: buckets', which is not for {objective}"),
    Clash(
        {"buckets": GIVEN, "batching": Not("buckets")},
        "'buckets' needs 'batching: buckets', and 'batching' is {batching}",
        "write batching: buckets, or delete the group",
    ),
    Where(
        {"batching": "buckets"},
        Custom(_refuse_bucket_above_max_length),
        Custom(_refuse_weights_with_buckets),
        Clash(
            {"shuffle": False},
            "'batching: buckets' orders pieces by length, and 'shuffle: false' keeps the order of the rows",
            ONE_OF_TWO,
        ),
    ),
)

ONE_BY_ONE = "rows are compared one by one"
DELETE_EITHER = "delete the line, or select_rows"
ADAMW = "write optim: adamw, or delete select_rows"
DIVIDED = "ranks shard the weight whose gradients are compared, or its moments"

SELECTION_RULES: Rules = (
    OnlyFor("sft", "select_from"),
    Clash(
        {"select_from": GIVEN, "select_rows": None},
        "'select_from' needs 'select_rows', which chooses among the drawn rows",
        "add select_rows: colm, or delete the line",
    ),
    Where(
        {"select_rows": Not(None)},
        Clash({"objective": "dpo"}, "'objective: dpo': a pair has two completions", DELETE, key="select_rows"),
        Clash(
            {"objective": "grpo"},
            "'objective: grpo': the model writes the rows it trains on",
            DELETE,
            key="select_rows",
        ),
        Clash(
            {"batching": Not("rows")},
            "'batching: {batching}': a step must have a fixed number of whole rows",
            "write batching: rows",
        ),
        Clash(
            {"packing": True}, f"'packing': {ONE_BY_ONE}, and packed sequences are made before training", DELETE_EITHER
        ),
        Clash(
            {"reasoning": "per_turn"},
            f"'reasoning: per_turn': {ONE_BY_ONE}, and turns share a sequence",
            "write reasoning: keep",
        ),
        Clash({"streaming": True}, "'streaming': the number of rows of each dataset is unknown", DELETE_EITHER),
        Clash(
            {"dataloader_num_workers": GIVEN},
            "'dataloader_num_workers': rows are chosen with the current weights, so batches cannot be prepared ahead",
            "write dataloader_num_workers: 0",
        ),
        *(
            Clash({key: GIVEN}, f"'{key}': {DIVIDED}", f"delete '{key}'; select_rows works with DDP")
            for key in ("fsdp", "deepspeed")
        ),
        Clash(
            {"sequence_parallel_size": GIVEN},
            "'sequence_parallel_size': each rank has only the gradient of a part of a row",
            "write sequence_parallel_size: 1",
        ),
        Clash(
            {"optim": FORWARD_ONLY},
            "'optim: {optim}': rows are compared by gradients, and this optimizer computes none",
            ADAMW,
        ),
        Clash(
            {"optim": ONE_BLOCK},
            "'optim: {optim}': one weight's gradient compares rows, but is computed only while its block is active",
            ADAMW,
        ),
        text="'select_rows: {select_rows}' does not combine with {}",
    ),
)
