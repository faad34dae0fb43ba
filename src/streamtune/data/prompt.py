"""One prompt to write completions for, with the other columns of its row: in memory, and in Arrow on disk."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

__all__ = ["PROMPT_SCHEMA", "Prompt", "PromptSequence", "gather_columns"]

# A row's other columns may hold whatever its file format knows (dates, bytes): pickled, they come back as they were.
# The file is written and read by one process, and nobody else can open it.
PROMPT_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("said", pa.binary()), ("origin", pa.string())])


@dataclass(frozen=True)
class Prompt:
    """A prompt, as token ids and as its row has it, with the row's other columns."""

    input_ids: list[int]
    """[P] token ids, the generation prompt of the chat template included; P at least 1"""
    prompt: str | list[dict[str, Any]]
    """the prompt as the row has it: text, or messages"""
    columns: dict[str, Any] = field(default_factory=dict)
    """the row's other columns"""
    origin: str = ""
    """the row it comes from, ``file:line`` or ``file:row N``"""

    def stored(self) -> dict[str, Any]:
        """Return the prompt as a row of :data:`PROMPT_SCHEMA`."""
        said = pickle.dumps((self.prompt, self.columns), protocol=pickle.HIGHEST_PROTOCOL)
        return {"input_ids": self.input_ids, "said": said, "origin": self.origin}


def gather_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return the columns of several prompts as lists by name, for reward functions; None where a row has none."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


class PromptSequence(Sequence[Prompt]):
    """Some rows of an Arrow table of prompts, in a given order; each is decoded on access."""

    def __init__(self, table: pa.Table, rows: npt.NDArray[np.int64]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each prompt, [prompts], without decoding any."""
        sizes = pa.compute.list_value_length(self._table["input_ids"]).to_numpy()
        return np.asarray(sizes, dtype=np.int64)[self._rows]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptSequence: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptSequence:
        if isinstance(index, slice):
            return PromptSequence(self._table, self._rows[index])
        row = int(self._rows[index])
        prompt, columns = pickle.loads(self._table["said"][row].as_py())
        ids = self._table["input_ids"][row].values.to_numpy().tolist()
        return Prompt(ids, prompt, columns, self._table["origin"][row].as_py())
