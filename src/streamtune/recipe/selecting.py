"""The rules about ``select_rows``: steps on rows that are chosen among many by their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from streamtune.base.optimizer_table import OPTIMIZERS
from streamtune.recipe.spec import mistake

SELECT_FROM = 2
"""Times the rows of a step that it is chosen from, where the recipe does not say."""

ONE_BY_ONE = "rows are compared one by one"


def select_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys of chosen rows, and in what they are combined with."""
    if recipe.select_rows is None:
        if recipe.select_from != SELECT_FROM:
            yield mistake(
                "'select_from' says how many rows 'select_rows' chooses from",
                key="select_from",
                mend="add select_rows: colm, or delete the line",
            )
        return
    for key, why, mend in _not_combined(recipe):
        yield mistake(f"'select_rows: {recipe.select_rows}' does not combine with {why}", key=key, mend=mend)


def _not_combined(recipe: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each key that is in the way, what it is and why, and how to mend it."""
    delete, entry = "delete the line, or select_rows", OPTIMIZERS[recipe.optim]
    if recipe.objective != "sft":
        unit = "a pair has two completions" if recipe.objective == "dpo" else "grpo writes the rows it trains on"
        yield "select_rows", f"'objective: {recipe.objective}': {unit}", "delete the line"
    if recipe.batching != "rows":
        yield "batching", f"'batching: {recipe.batching}': a step is chosen by its rows", "write batching: rows"
    if recipe.packing:
        yield "packing", f"'packing': {ONE_BY_ONE}, and packs are made before", delete
    if recipe.reasoning == "per_turn":
        yield "reasoning", f"'reasoning: per_turn': {ONE_BY_ONE}, and turns share a sequence", "write reasoning: keep"
    if recipe.streaming:
        yield "streaming", "'streaming': the size of each source is not known", delete
    if recipe.dataloader_num_workers:
        why = "'dataloader_num_workers': rows are chosen with the weights of the step before, not ahead of it"
        yield "dataloader_num_workers", why, "write dataloader_num_workers: 0"
    for key in ("fsdp", "deepspeed"):
        if getattr(recipe, key):
            why = f"'{key}': the weight whose gradient compares rows, or its moments, are divided between ranks"
            yield key, why, f"delete '{key}'; ranks with whole weights (DDP) share the choice"
    if recipe.sequence_parallel_size > 1:
        why = "'sequence_parallel_size': each rank has the gradient of a part of a row"
        yield "sequence_parallel_size", why, "write sequence_parallel_size: 1"
    if entry.step.gradients == "none":
        why = f"'optim: {recipe.optim}': rows are compared by gradients, and the step has none"
        yield "optim", why, "write optim: adamw, or delete select_rows"
    if entry.step.gradients == "block":
        why = f"'optim: {recipe.optim}': the weight whose gradient compares rows is trained in one block of many"
        yield "optim", why, "write optim: adamw, or delete select_rows"
