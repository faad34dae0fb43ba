"""The keys of an entry of ``datasets``, one source of rows, and the rules about several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamtune.recipe.spec import Count, Spec, Text, at_most, mistake

SET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Name of an eval set: it is part of the name of a metric."""

RESERVED = {"held_out": "the rows that val_size holds out", "nll": "a loss of preferences, eval_nll_loss"}
"""Names that an eval set cannot have, and what has them."""


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

    @model_validator(mode="after")
    def _shuffle_draws(self) -> DatasetSpec:
        if self.shuffle and self.max_rows is None:
            raise mistake(
                "'shuffle' of a dataset draws its 'max_rows', and there is none",
                key="datasets",
                mend="add max_rows, or delete the line: the recipe's own shuffle orders the rows",
            )
        default = DatasetSpec.model_fields["input_separator"].default
        if self.input_separator != default and self.type not in ("auto", "alpaca"):
            raise mistake(
                f"'input_separator' is read with 'type: alpaca', and the type is {self.type}",
                key="datasets",
                mend="delete the line",
            )
        theirs = list((self.columns or {}).values())
        if twice := next((name for name in theirs if theirs.count(name) > 1), None):
            raise mistake(f"'columns' reads the column '{twice}' twice", key="datasets", mend="keep one of the two")
        return self


def check_weights(datasets: Sequence[DatasetSpec], mix_by: str) -> None:
    """Raise unless all datasets have a weight, or none has.

    Raises:
        PydanticCustomError: Some have none, they sum to 0, or one has a ``repeat`` as well.
    """
    without = [number for number, dataset in enumerate(datasets) if dataset.weight is None]
    if len(without) == len(datasets):
        if mix_by != "rows":
            raise mistake(
                f"'mix_by: {mix_by}' is the unit of weights, and no dataset has one",
                key="mix_by",
                mend="give each entry of datasets a weight, or delete the line",
            )
        return
    if without:
        raise mistake(
            f"{len(datasets) - len(without)} of {len(datasets)} datasets have a 'weight', and datasets[{without[0]}] "
            "has none",
            key=f"datasets.{without[0]}",
            mend="give each entry one, or none",
        )
    if sum(dataset.weight or 0.0 for dataset in datasets) == 0:
        raise mistake(
            "the weights of the datasets sum to 0", key="datasets.0.weight", mend="give one of them a weight above 0"
        )
    for number, dataset in enumerate(datasets):
        if dataset.repeat != 1:
            raise mistake(
                "'weight' says how often rows are visited, and so does 'repeat'",
                key=f"datasets.{number}.repeat",
                mend="keep one of them",
            )


def check_eval_sets(sets: Mapping[str, Sequence[DatasetSpec]]) -> None:
    """Raise if an eval set has a reserved name, or a source of it a key that is about training.

    Raises:
        PydanticCustomError: With the key.
    """
    for name, datasets in sets.items():
        if not SET_NAME.fullmatch(name):
            raise mistake(
                f"'{name}' is no name of an eval set, which is a part of the name of its loss",
                key="eval_datasets",
                mend="use letters, digits, _ and -, with a letter first",
            )
        if name in RESERVED:
            raise mistake(
                f"'{name}' is the name of {RESERVED[name]}",
                key=f"eval_datasets.{name}",
                mend="give the set another name",
            )
        for number, dataset in enumerate(datasets):
            for key in ("weight", "repeat"):
                if getattr(dataset, key) != DatasetSpec.model_fields[key].default:
                    raise mistake(
                        f"'{key}' is about training, and the eval set '{name}' is evaluated once each time",
                        key=f"eval_datasets.{name}.{number}.{key}",
                        mend="delete it",
                    )
