"""Tokenised rows in Arrow: written to disk as they come, memory-mapped back, decoded one by one on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

from streamtune import interrupts

__all__ = ["EXAMPLE_SCHEMA", "Example", "ExampleSequence", "ExampleWriter", "IntArray", "TableWriter", "spill"]

IntArray = npt.NDArray[np.int32]

EXAMPLE_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("origin", pa.string())],
)

_FLUSH_TOKENS = 1 << 20
"""Tokens held in memory before they are written: 8 MiB with their labels."""


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence to train on."""

    input_ids: IntArray | Sequence[int]
    """[T] token ids"""
    labels: IntArray | Sequence[int]
    """[T] the token id where it is trained on, -100 elsewhere; not shifted"""
    origin: str
    """the row it comes from, ``file:line`` or ``file:row N``"""


class TableWriter:
    """Appends rows to an Arrow stream, which it writes whenever 2**20 tokens are pending."""

    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._stream = stream
        self._schema = schema
        self._pending: list[Mapping[str, Any]] = []
        self._pending_tokens = 0

    def append(self, columns: Mapping[str, Any], tokens: int) -> None:
        """Add one row, which has ``tokens`` tokens."""
        self._pending.append(columns)
        self._pending_tokens += tokens
        if self._pending_tokens >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the pending rows."""
        if not self._pending:
            return
        columns = {name: [row[name] for row in self._pending] for name in self._schema.names}
        self._stream.write_table(pa.table(columns, schema=self._schema))
        self._pending, self._pending_tokens = [], 0


class ExampleWriter:
    """Appends examples to a table."""

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer

    def append(self, example: Example) -> None:
        """Add one example."""
        self._writer.append(vars(example), len(example.input_ids))


@contextmanager
def spill(schema: pa.Schema = EXAMPLE_SCHEMA) -> Iterator[tuple[TableWriter, list[pa.Table]]]:
    """Yield a writer, and a list that holds the written table, memory-mapped, once the block has ended without error.

    The file is deleted at once: the mapping keeps its bytes for as long as the table is referenced, and a killed run
    leaves nothing behind.
    """
    tables: list[pa.Table] = []
    with interrupts.temporary_directory(prefix="streamtune-data-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "rows.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            writer = TableWriter(stream, schema)
            yield writer, tables
            writer.flush()
        with pa.ipc.open_stream(pa.memory_map(str(path))) as reader:
            tables.append(reader.read_all())


class ExampleSequence(Sequence[Example]):
    """Some rows of an Arrow table of examples, in a given order; each is decoded on access."""

    def __init__(self, table: pa.Table, rows: npt.NDArray[np.int64]) -> None:
        self._table = table
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each row, [rows], without decoding any."""
        sizes = pa.compute.list_value_length(self._table["input_ids"]).to_numpy()
        return np.asarray(sizes, dtype=np.int64)[self._rows]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> ExampleSequence: ...
    def __getitem__(self, index: int | slice) -> Example | ExampleSequence:
        if isinstance(index, slice):
            return ExampleSequence(self._table, self._rows[index])
        row = int(self._rows[index])
        return Example(
            input_ids=self._table["input_ids"][row].values.to_numpy(),
            labels=self._table["labels"][row].values.to_numpy(),
            origin=self._table["origin"][row].as_py(),
        )
