"""Recipe keys of the data: entries of ``datasets``, named eval sets, and streaming."""

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
    OnlyFor,
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
"""Pattern of an eval set's name, which becomes part of a metric's name."""

RESERVED = {"held_out": "the rows that val_size holds out", "nll": "a loss of preferences, eval_nll_loss"}
"""Name that an eval set cannot have -> what already has this name."""


def _refuse_duplicate_columns(spec: Any) -> Iterator[Refusal]:
    theirs = list((spec.columns or {}).values())
    if twice := next((name for name in theirs if theirs.count(name) > 1), None):
        yield Refusal("datasets", f"'columns' reads the column '{twice}' twice", "delete one of the two entries")


Pixels = Annotated[int, Field(ge=4), at_most(1 << 26)]
"""Number of pixels of an image, its width times its height."""


class DatasetSpec(Spec):
    """Keys of one entry of the recipe key ``datasets``, a source of rows."""

    path: Text
    """Source of the rows: a local file or folder, a URL, a dataset of the Hugging Face Hub, or a built-in dataset.
    Local files: .jsonl, .json, .parquet, .arrow, .csv or .txt, compressed or not, or a pattern such as `data/*.jsonl`.
    Relative paths are searched in the recipe's folder, then in the working directory. URLs: `hf://datasets/...`,
    `s3://`, `gs://`, `https://`. Built in: `python-stdlib` (documented functions, classes and modules of the running
    Python); `demo-preferences` (pairs of a good answer and a wrong or rude answer); `demo-arithmetic` (tasks on
    digits); `demo-passkey` (short to long logs, with a question about one line); `demo-pages` (images of pages, with a
    question about the digit on a page)."""

    type: Literal[
        "auto", "messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "unpaired", "prompts"
    ] = "auto"
    """Format of the rows. `auto` infers the format from the columns and prints it. For `sft`: `messages`,
    `prompt_completion`, `text`, `alpaca` or `sharegpt`. For `dpo`: `preference` (pairs of completions) or `unpaired`
    (single completions with a label). For `grpo`: `prompts`."""

    split: Text = "train"
    """Split to read from a hub dataset or a folder, such as `train` or `test`. In a folder, the split is recognised by
    the names of files and subfolders."""

    name: Text | None = None
    """Name of the configuration (subset) to read, for a hub dataset that has several. With `path: demo-arithmetic`: the
    task `copy`, `sort` or `add`."""

    columns: Annotated[dict[Text, Text], Field(min_length=1)] | None = None
    """Mapping from the column names that StreamTune reads to the column names in the files, such as `{prompt:
    question}`. Set it if the names differ. Unlisted columns keep their names."""

    input_separator: str = "\n\n"
    """Text between `instruction` and `input` of an `alpaca` row. Default: a blank line. LLaMA-Factory and ms-swift use
    one newline: `"\\n"`."""

    max_rows: Count | None = None
    """Maximum number of rows to use from this entry: the first rows, or random rows with `shuffle: true`. Default: all
    rows."""

    shuffle: bool = False
    """Choose the `max_rows` rows of this entry at random, with the recipe's `seed`, instead of the first rows."""

    repeat: Count = 1
    """Number of times that each training row of this entry is visited in an epoch. Held-out rows are evaluated once."""

    weight: Annotated[float, Field(ge=0), at_most(10**12)] | None = None
    """Share of this entry in an epoch, relative to the weights of the other entries: weights 3 and 1 give 75% and 25%.
    `mix_by` sets whether these are shares of the rows or of the tokens. Set a weight for all entries or for none; 0
    excludes an entry from training. Not for `grpo`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    rules = (
        Clash(
            {"shuffle": True, "max_rows": None},
            "'shuffle' of a dataset draws its 'max_rows' rows, and 'max_rows' is missing",
            "add max_rows, or delete the line: the recipe's own shuffle orders the rows",
            key="datasets",
        ),
        Clash(
            {"input_separator": GIVEN, "type": Not("auto", "alpaca")},
            "'input_separator' is read only with 'type: alpaca', and 'type' is {type}",
            DELETE,
            key="datasets",
        ),
        Custom(_refuse_duplicate_columns),
    )


class DataKeys(Spec):
    """Recipe keys that name the data sources and control how rows are read."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]
    """List of the sources of training rows. `[data/train.jsonl]` is short for `[{path: data/train.jsonl}]`."""

    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of a dataset's `weight`: its share of the `rows` or of the `tokens` of an epoch. The two shares
    differ if some datasets have longer rows than others. Not for `grpo`."""

    eval_datasets: Annotated[
        dict[Text, Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]], Field(default_factory=dict)
    ]
    """Named sets of rows for evaluation only: `{code: data/code.jsonl, prose: [{path: ...}]}`. Each set has its own
    metrics, such as `eval_code_loss`; `eval_loss` covers the rows of all sets and of `val_size`."""

    on_bad_row: Literal["error", "skip"] = "error"
    """Action on rows that are malformed or cannot be trained on. `error` ends the run before training and lists the
    first ten such rows. `skip` leaves the rows out and lists them in `bad_rows.json`."""

    max_bad_rows: Steps = 100
    """Maximum number of rows that `on_bad_row: skip` leaves out. With more bad rows the run ends with an error."""

    max_pixels: Pixels | None = None
    """For rows with images: number of pixels to which a larger image is scaled down before the model's
    processor prepares it. Fewer pixels give fewer tokens with most models. Default: only the processor's limits."""

    min_pixels: Pixels | None = None
    """For rows with images: number of pixels to which a smaller image is scaled up before the model's
    processor prepares it. Default: only the processor's limits."""

    dataset_num_proc: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes that render and tokenise rows. More processes take less time; the resulting rows are the
    same."""

    streaming: bool = False
    """Only for `sft`: read, tokenise and cut rows during training instead of before. Set it for data too large for the
    disk. It needs `max_steps`, and prepared rows are not cached."""

    shuffle_buffer: Count = 10_000
    """Only for `sft` with `streaming: true`: number of rows in memory from which the next row is drawn at random. If
    rows are long, the buffer has fewer rows."""


class CacheKeys(Spec):
    """Recipe key of the cache of prepared rows on disk."""

    cache: bool = True
    """Store prepared rows and a trained tokenizer on disk, and reuse them in later runs with the same files, tokenizer
    and options."""


def _refuse_partial_weights(recipe: Any) -> Iterator[Refusal]:
    datasets, mix_by = recipe.datasets, recipe.mix_by
    without = [number for number, dataset in enumerate(datasets) if dataset.weight is None]
    if len(without) == len(datasets):
        if mix_by != "rows":
            yield Refusal(
                "mix_by",
                f"'mix_by: {mix_by}' is the unit of 'weight', and no dataset has a weight",
                "give each entry of datasets a weight, or delete the line",
            )
        return
    if without:
        yield Refusal(
            f"datasets.{without[0]}",
            f"{len(datasets) - len(without)} of {len(datasets)} datasets have a 'weight'; datasets[{without[0]}] has "
            "none",
            "give every entry a weight, or none",
        )
    if sum(dataset.weight or 0.0 for dataset in datasets) == 0:
        yield Refusal("datasets.0.weight", "the weights of the datasets sum to 0", "give one of them a weight above 0")
    for number, dataset in enumerate(datasets):
        if dataset.repeat != 1:
            what = "'weight' and 'repeat' both decide how often rows are visited"
            yield Refusal(f"datasets.{number}.repeat", what, KEEP_ONE)


def _refuse_wrong_eval_sets(recipe: Any) -> Iterator[Refusal]:
    for name, datasets in recipe.eval_datasets.items():
        if not SET_NAME.fullmatch(name):
            yield Refusal(
                "eval_datasets",
                f"'{name}' cannot be the name of an eval set: its loss is called eval_NAME_loss",
                "use letters, digits, _ and -, with a letter first",
            )
        if name in RESERVED:
            what = f"an eval set cannot be called '{name}': that is the name of {RESERVED[name]}"
            yield Refusal(f"eval_datasets.{name}", what, "give the set another name")
        for number, dataset in enumerate(datasets):
            for key in ("weight", "repeat"):
                if is_given(dataset, key):
                    what = f"'{key}' is only for training; every row of the eval set '{name}' is evaluated once"
                    yield Refusal(f"eval_datasets.{name}.{number}.{key}", what, "delete it")


def _refuse_shuffled_datasets(recipe: Any) -> Iterator[Refusal]:
    for number, dataset in enumerate(recipe.datasets):
        if dataset.shuffle:
            what = "'shuffle' of a dataset draws from all of its rows"
            yield Refusal(f"datasets.{number}.shuffle", what, "delete the line; max_rows takes the first rows")


def _refuse_overlength_error(recipe: Any) -> Iterator[Refusal]:
    if recipe.overlength == "error":
        key = "overlength" if "overlength" in recipe.model_fields_set else "streaming"
        what = "'overlength: error' checks all rows before training begins"
        yield Refusal(key, what, "write overlength: drop, truncate or split")


def _refuse_pixel_limits(recipe: Any) -> Iterator[Refusal]:
    least, most = recipe.min_pixels, recipe.max_pixels
    if least is not None and most is not None and least > most:
        yield Refusal("min_pixels", f"'min_pixels' {least} is above 'max_pixels' {most}", "write a smaller number")


DATASET_RULES: Rules = (
    Custom(_refuse_partial_weights),
    Custom(_refuse_wrong_eval_sets),
    Custom(_refuse_pixel_limits),
)

PREPARED = "delete this line, or streaming: true"

STREAMING_RULES: Rules = (
    OnlyFor("sft", "shuffle_buffer", what="'{key}' needs 'streaming: true', which is not for {objective}"),
    Clash(
        {"shuffle_buffer": GIVEN, "streaming": False},
        "'shuffle_buffer' needs 'streaming: true'; without it all rows are shuffled together",
        "add streaming: true, or delete the line",
    ),
    Clash(
        {"streaming": True, "objective": Not("sft")},
        "'streaming' is only for sft; {objective} needs all rows before its first step",
        "delete the line; without it prepared rows are on disk, not in memory",
    ),
    Clash(
        {"streaming": True, "max_steps": -1},
        "'streaming' needs 'max_steps': the number of rows is unknown until they are read",
        "add max_steps: 1000",
    ),
    Where(
        {"streaming": True},
        Custom(_refuse_overlength_error),
        Clash({"packing": True}, "'packing' packs all rows before training begins", PREPARED),
        Clash(
            {"batching": "buckets"},
            "'batching: buckets' cuts all rows before training begins",
            "write batching: tokens or rows",
        ),
        Clash(
            {"num_train_epochs": GIVEN},
            "'num_train_epochs' needs the number of rows",
            "delete the line; max_steps sets the length of the run",
        ),
        Clash(
            {"val_size": GIVEN},
            "'val_size' draws held-out rows from all rows",
            "write eval_datasets: {NAME: PATH}",
        ),
        Clash(
            {"mix_by": GIVEN},
            "'mix_by: {mix_by}' needs the lengths of all rows",
            "delete the line: with streaming, weights are probabilities of the next row",
        ),
        Clash(
            {"tokenizer.train": Not(None)},
            "'tokenizer.train' reads all texts before training begins",
            "write tokenizer: {path: NAME}",
        ),
        Custom(_refuse_shuffled_datasets),
        text="{}, and 'streaming' reads rows only during training",
    ),
    Clash(
        {"shuffle_buffer": GIVEN, "shuffle": False, "streaming": True},
        "'shuffle_buffer' shuffles rows, and 'shuffle: false' keeps their order",
        ONE_OF_TWO,
    ),
)
