"""Keys of the sources of rows: entries of ``datasets``, eval sets, and rows that are read as training goes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamtune.recipe.rules import (
    DELETE,
    GIVEN,
    KEEP_ONE,
    ONE_OF_TWO,
    Clash,
    Count,
    Custom,
    Not,
    Refusal,
    Rules,
    Spec,
    Steps,
    Text,
    Where,
    at_most,
    is_given,
)

SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Name of an eval set: it is part of the name of a metric."""

RESERVED = {"held_out": "the rows that val_size holds out", "nll": "a loss of preferences, eval_nll_loss"}
"""Names that an eval set cannot have, and what has them."""


def _column_read_twice(spec: Any) -> Iterator[Refusal]:
    theirs = list((spec.columns or {}).values())
    if twice := next((name for name in theirs if theirs.count(name) > 1), None):
        yield Refusal("datasets", f"'columns' reads the column '{twice}' twice", "keep one of the two")


class DatasetSpec(Spec):
    """One source of rows."""

    path: Text
    """A .jsonl, .json, .parquet, .arrow, .csv or .txt file, compressed or not, a pattern such as `data/*.jsonl`, or a
    folder (relative to the recipe, then to the working directory); an address (`hf://datasets/...`, `s3://`, `gs://`,
    `https://`); the name of a dataset on the hub; or one that every machine has: `python-stdlib` (the corpus built from
    this interpreter's own library), `demo-preferences` (pairs of answers with a rule), `demo-arithmetic` (tasks on
    digits), `demo-passkey` (logs from short to long, with a question about one line)."""

    type: Literal[
        "auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "unpaired", "prompts"
    ] = "auto"
    """Shape of a row; `auto` looks at the columns and prints what it found. dpo reads `preference` and `unpaired` rows,
    grpo `prompts`, sft the others."""

    split: Text = "train"
    """Split of a folder or of a dataset on the hub; in a folder the names of its files and folders say it."""

    name: Text | None = None
    """Configuration of a dataset on the hub that has several; of `demo-arithmetic` its task: `copy`, `sort` or
    `add`."""

    columns: Annotated[dict[Text, Text], Field(min_length=1)] | None = None
    """Names of columns, ours and then that of the files: `{prompt: question}`. The others keep their names."""

    input_separator: str = "\n\n"
    """Text between `instruction` and `input` of an `alpaca` row, by default a blank line. LLaMA-Factory and
    ms-swift write one newline: `"\\n"`."""

    max_rows: Count | None = None
    """Use this many rows at most: the first ones, or with `shuffle` some of all."""

    shuffle: bool = False
    """Draw the `max_rows` rows among all of this entry, by the recipe's `seed`."""

    repeat: Count = 1
    """Visit each training row of this entry so many times in an epoch; held-out rows are evaluated once."""

    weight: Annotated[float, Field(ge=0), at_most(10**12)] | None = None
    """Share of this entry in an epoch, relative to the weights of the others, in `mix_by`: 3 and 1 are 75% and 25%. All
    entries have a weight, or none has; 0 trains nothing of an entry."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    rules = (
        Clash(
            {"shuffle": True, "max_rows": None},
            "'shuffle' of a dataset draws its 'max_rows', and there is none",
            "add max_rows, or delete the line: the recipe's own shuffle orders the rows",
            key="datasets",
        ),
        Clash(
            {"input_separator": GIVEN, "type": Not("auto", "alpaca")},
            "'input_separator' is read with 'type: alpaca', and the type is {type}",
            DELETE,
            key="datasets",
        ),
        Custom(_column_read_twice),
    )


class DataKeys(Spec):
    """Sources of rows, and how they are read."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]
    """Sources of the rows; `[data/train.jsonl]` is `[{path: data/train.jsonl}]`."""

    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of the shares that `weight` gives the datasets in an epoch."""

    eval_datasets: Annotated[
        dict[Text, Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]], Field(default_factory=dict)
    ]
    """Named sets of rows to evaluate on, never trained on: `{code: data/code.jsonl, prose: [{path: ...}]}`. Each has a
    loss of its own, `eval_code_loss`; `eval_loss` is that of all held-out rows."""

    on_bad_row: Literal["error", "skip"] = "error"
    """A row that is malformed or cannot be trained on: refuse the data and list the first ten, or leave such rows out
    and list them in `bad_rows.json`."""

    max_bad_rows: Steps = 100
    """Rows that `on_bad_row: skip` may leave out; more are an error."""

    dataset_num_proc: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that render and tokenise rows. The rows are the same with any number."""

    streaming: bool = False
    """`sft`: read, render and fit the rows of `datasets` as training goes, for data that does not fit on disk. Needs
    `max_steps`. Nothing of them is prepared before the first step, and nothing is kept."""

    shuffle_buffer: Count = 10_000
    """`streaming`: rows in memory that the next one is drawn from, fewer where they are long."""


class CacheKeys(Spec):
    """Files that are kept for the next start."""

    cache: bool = True
    """Keep prepared rows and a trained tokenizer on disk, under a hash of the files, the tokenizer and the options that
    they are made of, for the next start."""


def _weights_of_some(recipe: Any) -> Iterator[Refusal]:
    datasets, mix_by = recipe.datasets, recipe.mix_by
    without = [number for number, dataset in enumerate(datasets) if dataset.weight is None]
    if len(without) == len(datasets):
        if mix_by != "rows":
            yield Refusal(
                "mix_by",
                f"'mix_by: {mix_by}' is the unit of weights, and no dataset has one",
                "give each entry of datasets a weight, or delete the line",
            )
        return
    if without:
        yield Refusal(
            f"datasets.{without[0]}",
            f"{len(datasets) - len(without)} of {len(datasets)} datasets have a 'weight', and datasets[{without[0]}] "
            "has none",
            "give each entry one, or none",
        )
    if sum(dataset.weight or 0.0 for dataset in datasets) == 0:
        yield Refusal("datasets.0.weight", "the weights of the datasets sum to 0", "give one of them a weight above 0")
    for number, dataset in enumerate(datasets):
        if dataset.repeat != 1:
            what = "'weight' says how often rows are visited, and so does 'repeat'"
            yield Refusal(f"datasets.{number}.repeat", what, KEEP_ONE)


def _eval_sets(recipe: Any) -> Iterator[Refusal]:
    for name, datasets in recipe.eval_datasets.items():
        if not SET_NAME.fullmatch(name):
            yield Refusal(
                "eval_datasets",
                f"'{name}' is no name of an eval set, which is a part of the name of its loss",
                "use letters, digits, _ and -, with a letter first",
            )
        if name in RESERVED:
            what = f"'{name}' is the name of {RESERVED[name]}"
            yield Refusal(f"eval_datasets.{name}", what, "give the set another name")
        for number, dataset in enumerate(datasets):
            for key in ("weight", "repeat"):
                if is_given(dataset, key):
                    what = f"'{key}' is about training, and the eval set '{name}' is evaluated once each time"
                    yield Refusal(f"eval_datasets.{name}.{number}.{key}", what, "delete it")


def _datasets_that_draw(recipe: Any) -> Iterator[Refusal]:
    for number, dataset in enumerate(recipe.datasets):
        if dataset.shuffle:
            what = "'shuffle' of a dataset draws among all of its rows"
            yield Refusal(f"datasets.{number}.shuffle", what, "delete the line; max_rows takes the first rows")


def _overlength_looks_first(recipe: Any) -> Iterator[Refusal]:
    if recipe.overlength == "error":
        key = "overlength" if "overlength" in recipe.model_fields_set else "streaming"
        what = "'overlength: error' looks for rows over 'max_length' before training begins"
        yield Refusal(key, what, "write overlength: drop, truncate or split")


DATASET_RULES: Rules = (Custom(_weights_of_some), Custom(_eval_sets))

PREPARED = "delete the line, or streaming: true"

STREAMING_RULES: Rules = (
    Clash(
        {"shuffle_buffer": GIVEN, "streaming": False},
        "'shuffle_buffer' belongs to 'streaming: true'; rows that are prepared are shuffled all together",
        "add streaming: true, or delete the line",
    ),
    Clash(
        {"streaming": True, "objective": Not("sft")},
        "'streaming' is for sft; {objective} needs all rows before its first step",
        "delete the line; prepared rows are kept on disk, not in memory",
    ),
    Clash(
        {"streaming": True, "max_steps": -1},
        "'streaming' needs 'max_steps': how many rows there are is not known before they are read",
        "add max_steps: 1000",
    ),
    Where(
        {"streaming": True},
        Custom(_overlength_looks_first),
        Clash({"packing": True}, "'packing' lays all rows out before training begins", PREPARED),
        Clash(
            {"batching": "buckets"},
            "'batching: buckets' cuts all rows before training begins",
            "write batching: tokens or rows",
        ),
        Clash(
            {"num_train_epochs": GIVEN},
            "'num_train_epochs' counts times through all rows",
            "delete the line; max_steps says how long the run is",
        ),
        Clash(
            {"val_size": GIVEN},
            "'val_size' holds rows out that are drawn from all",
            "write eval_datasets: {NAME: PATH}",
        ),
        Clash(
            {"mix_by": GIVEN},
            "'mix_by: {mix_by}' needs the lengths of all rows",
            "delete the line: weights are odds of the next row",
        ),
        Clash(
            {"tokenizer.train": Not(None)},
            "'tokenizer.train' reads all texts before training begins",
            "write tokenizer: {path: NAME}",
        ),
        Clash(
            {"shuffle_buffer": GIVEN, "shuffle": False},
            "'shuffle_buffer' shuffles, 'shuffle: false' keeps the order of the rows",
            ONE_OF_TWO,
        ),
        Custom(_datasets_that_draw),
        text="{}, and 'streaming' reads rows as training goes",
    ),
)
