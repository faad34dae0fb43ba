"""The rules about ``streaming``: rows that are read, rendered and fitted as training goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from streamtune.recipe.spec import mistake

SHUFFLE_BUFFER = 10_000
"""Rows that the next one is drawn from."""

PREPARED = "delete the line, or streaming: true"


def streaming_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys that a stream of rows needs, and in those that it cannot be combined with."""
    if not recipe.streaming:
        if recipe.shuffle_buffer != SHUFFLE_BUFFER:
            yield mistake(
                "'shuffle_buffer' belongs to 'streaming: true'; rows that are prepared are shuffled all together",
                key="shuffle_buffer",
                mend="add streaming: true, or delete the line",
            )
        return
    if recipe.objective != "sft":
        yield mistake(
            f"'streaming' is for sft; {recipe.objective} needs all rows before its first step",
            key="streaming",
            mend="delete the line; prepared rows are kept on disk, not in memory",
        )
    if recipe.max_steps < 0:
        yield mistake(
            "'streaming' needs 'max_steps': how many rows there are is not known before they are read",
            key="streaming",
            mend="add max_steps: 1000",
        )
    for key, what, mend in _not_combined(recipe):
        yield mistake(f"{what}, and 'streaming' reads rows as training goes", key=key, mend=mend)


def _not_combined(recipe: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each key whose value needs all rows, what it does, and how to mend it."""
    if recipe.overlength == "error":
        what = "'overlength: error' looks for rows over 'max_length' before training begins"
        key = "overlength" if "overlength" in recipe.model_fields_set else "streaming"
        yield key, what, "write overlength: drop, truncate or split"
    if recipe.packing:
        yield "packing", "'packing' lays all rows out before training begins", PREPARED
    if recipe.batching == "buckets":
        yield "batching", "'batching: buckets' cuts all rows before training begins", "write batching: tokens or rows"
    if recipe.num_train_epochs != 1.0:
        what = "'num_train_epochs' counts times through all rows"
        yield "num_train_epochs", what, "delete the line; max_steps says how long the run is"
    if recipe.val_size > 0:
        what = "'val_size' holds rows out that are drawn from all"
        yield "val_size", what, "write eval_datasets: {NAME: PATH}"
    if recipe.mix_by != "rows":
        what = f"'mix_by: {recipe.mix_by}' needs the lengths of all rows"
        yield "mix_by", what, "delete the line: weights are odds of the next row"
    if recipe.tokenizer is not None and recipe.tokenizer.train is not None:
        what = "'tokenizer.train' reads all texts before training begins"
        yield "tokenizer.train", what, "write tokenizer: {path: NAME}"
    if not recipe.shuffle and recipe.shuffle_buffer != SHUFFLE_BUFFER:
        what = "'shuffle_buffer' shuffles, 'shuffle: false' keeps the order of the rows"
        yield "shuffle_buffer", what, "delete one of the two"
    for number, dataset in enumerate(recipe.datasets):
        if dataset.shuffle:
            what = "'shuffle' of a dataset draws among all of its rows"
            yield f"datasets.{number}.shuffle", what, "delete the line; max_rows takes the first rows"
