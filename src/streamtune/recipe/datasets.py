"""The keys of an entry of ``datasets``: one source of rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from streamtune.recipe.spec import Count, Spec, Text, mistake

__all__ = ["DatasetSpec"]


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

    max_rows: Count | None = None
    """Use this many rows at most: the first ones, or with `shuffle` some of all."""

    shuffle: bool = False
    """Draw the `max_rows` rows among all of this entry, by the recipe's `seed`."""

    repeat: Count = 1
    """Visit each training row of this entry so many times in an epoch; held-out rows are evaluated once."""

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
        theirs = list((self.columns or {}).values())
        if twice := next((name for name in theirs if theirs.count(name) > 1), None):
            raise mistake(f"'columns' reads the column '{twice}' twice", key="datasets", mend="keep one of the two")
        return self
