"""Tables of tokenised rows: written to an Arrow file, memory-mapped, and decoded row by row on access.

Example    a sequence to train on
Tree       a prompt with its completions
Prompt     a prompt for which the model writes the completions
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Protocol, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]

from streamtune.base import interrupts
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.base.result_cache import WatchedFile, new_checksum
from streamtune.base.text import show_size
from streamtune.errors import StorageError

IntArray = npt.NDArray[np.int32]

ROWS = "rows.arrow"

AGAIN = "start again: damaged rows are prepared again, and the run resumes from its checkpoint"
"""Fix in errors about a damaged table."""

_FLUSH_TOKENS = 1 << 18
"""Number of tokens buffered before a write: 2 MiB with their labels, several times as much while they are written."""

_RESIDENT = 64 << 20
"""Number of bytes of a mapped table that may be read before the system is told to drop its pages."""
_READ_AHEAD = 2 << 16
"""Number of bytes that the system reads ahead for each row, of ids and labels together."""


class Record(Protocol):
    """A record that is stored as one row of an Arrow table."""

    schema: ClassVar[pa.Schema]
    """columns of the table"""

    @property
    def num_tokens(self) -> int:
        """Number of tokens; a common prefix of completions counts once."""
        ...

    def to_row(self) -> Mapping[str, Any]:
        """Return the record as column -> value, to write it to a table."""
        ...

    @classmethod
    def from_row(cls, table: pa.Table, row: int) -> Self:
        """Return the record that is stored at index ``row`` of a table."""
        ...

    @staticmethod
    def token_counts(table: pa.Table) -> npt.NDArray[np.int64]:
        """Return [rows]: number of tokens of each record of a table. The records are not decoded."""
        ...


RecordT = TypeVar("RecordT", bound=Record)


class MappedTable:
    """A memory-mapped Arrow table; after every 64 MiB read, the system is told to drop the pages of the table.

    Otherwise the pages would count as memory of this process.

    Args:
        file: Arrow stream, opened for reading; it may be closed and deleted afterwards.
        checksum: Checksum of the file, as :class:`streamtune.base.result_cache.WatchedFile` computes it.
    """

    def __init__(self, file: BinaryIO, path: Path, checksum: str) -> None:
        self.checksum, self._watched = checksum, WatchedFile(path, file, checksum, AGAIN)
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with pa.ipc.open_stream(pa.py_buffer(self._map)) as reader:
            self._table: pa.Table = reader.read_all()
        self._read = 0

    @property
    def table(self) -> pa.Table:
        """The Arrow table.

        Raises:
            StorageError: The file was truncated or changed.
        """
        self._watched.check()
        return self._table

    def set_path(self, path: Path) -> None:
        self._watched.path = path

    def count_read_tokens(self, tokens: int) -> None:
        """Count tokens as read from the file; after every 64 MiB, tell the system to drop the pages that were read.

        Raises:
            StorageError: The file was truncated or changed.
        """
        self._watched.check()
        self._read += 8 * tokens + _READ_AHEAD
        if self._read > _RESIDENT and hasattr(mmap, "MADV_DONTNEED"):
            self._read = 0
            self._map.madvise(mmap.MADV_DONTNEED)  # safe for a file mapping: pages are read again when needed


class Stored(Sequence[RecordT], Generic[RecordT]):
    """A sequence of records in an Arrow table, in a given order; a record is decoded on access.

    Args:
        rows: [records] index of each record in the table.
    """

    def __init__(self, record: type[RecordT], table: pa.Table | MappedTable, rows: npt.NDArray[np.int64]) -> None:
        self._record, self._rows = record, rows
        self._from = table

    @property
    def _table(self) -> pa.Table:
        return self._from.table if isinstance(self._from, MappedTable) else self._from

    def __len__(self) -> int:
        return len(self._rows)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return [records]: number of tokens; a common prefix of completions counts once. No record is decoded."""
        return self._record.token_counts(self._table)[self._rows]

    def table_indices(self) -> npt.NDArray[np.int64]:
        """Return [records]: index of each record in the Arrow table, whose records are in the order of reading."""
        return self._rows

    @property
    def column_names(self) -> list[str]:
        """Names of the columns of the Arrow table."""
        names: list[str] = self._table.schema.names
        return names

    def column_cells(self, column: str) -> pa.ChunkedArray:
        """Return a column of the whole Arrow table, including records that are not in this sequence."""
        return self._table[column]

    def all_records(self) -> Stored[RecordT]:
        """Return all records of the Arrow table, including records not in this sequence, in the order of reading."""
        return Stored(self._record, self._from, np.arange(self._table.num_rows, dtype=np.int64))

    def take(self, positions: npt.NDArray[np.int64]) -> Stored[RecordT]:
        return Stored(self._record, self._from, self._rows[positions])

    def positions_of(self, origin: str) -> list[int]:
        """Return the positions in this sequence of the records with this origin. The records are not decoded."""
        found = pyarrow.compute.equal(self._table["origin"], origin).to_numpy()[self._rows]
        return [int(place) for place in np.flatnonzero(found)]

    @overload
    def __getitem__(self, index: int) -> RecordT: ...
    @overload
    def __getitem__(self, index: slice) -> Stored[RecordT]: ...
    def __getitem__(self, index: int | slice) -> RecordT | Stored[RecordT]:
        if isinstance(index, slice):
            return Stored(self._record, self._from, self._rows[index])
        found = self._record.from_row(self._table, int(self._rows[index]))
        if isinstance(self._from, MappedTable):
            self._from.count_read_tokens(found.num_tokens)
        return found


class TableWriter:
    """Appends records to an Arrow stream; buffered records are written when they have 2**18 tokens."""

    def __init__(self, stream: Any, schema: pa.Schema) -> None:
        self._stream, self._schema = stream, schema
        self._pending: list[Mapping[str, Any]] = []
        self._pending_tokens = 0

    def append(self, record: Record) -> None:
        self._pending.append(record.to_row())
        self._pending_tokens += record.num_tokens
        if self._pending_tokens >= _FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        columns = {name: [row[name] for row in self._pending] for name in self._schema.names}
        self._stream.write_table(pa.table(columns, schema=self._schema))
        self._pending, self._pending_tokens = [], 0


@contextmanager
def open_record_table(
    record: type[Record], path: Path | None = None
) -> Iterator[tuple[TableWriter, list[MappedTable]]]:
    """Open a table for writing as a context manager that yields ``(writer, tables)``.

    After the block, ``tables[0]`` is the memory-mapped table.

    Args:
        path: File to write. None writes a temporary file and deletes it at once: the mapping keeps its bytes while the
            table is referenced, and a killed run leaves no file behind.

    Raises:
        StorageError: The file cannot be written, or no temporary folder exists.
    """
    tables: list[MappedTable] = []
    with ExitStack() as held:
        if path is None:
            try:
                directory = interrupts.temporary_directory(prefix="streamtune-data-", ignore_cleanup_errors=True)
                path = Path(held.enter_context(directory)) / ROWS
            except OSError as error:
                what = f"cannot create a temporary folder: {error.strerror or error}"
                raise StorageError(what, where="TMPDIR", fix="set TMPDIR to a writable folder with space") from error
            sink = _SpillFile(path, path.parent.parent, "TMPDIR", "set TMPDIR to a folder with enough space")
        else:
            clear = "clear the cache with streamtune data --clear-cache, or disable it with cache: false"
            sink = _SpillFile(path, path.parent, str(path.parent.parent), clear)
        with sink:
            reading = held.enter_context(path.open("rb"))  # opened now, because clearing the cache deletes the file
            with pa.ipc.new_stream(pa.PythonFile(sink, "w"), record.schema) as stream:
                writer = TableWriter(stream, record.schema)
                yield writer, tables
                writer.flush()
        tables.append(MappedTable(reading, path, sink.digest.hexdigest()))


class _SpillFile(io.FileIO):
    """File to which prepared rows are written; a write error names the folder and the space that is needed."""

    def __init__(self, path: Path, folder: Path, where: str, fix: str) -> None:
        super().__init__(path, "wb")
        self._folder, self._where, self._fix, self._written = folder, where, fix, 0
        self.digest = new_checksum()

    def write(self, data: Any) -> int:
        waiting = memoryview(data).cast("B")
        size = len(waiting)
        self.digest.update(waiting)
        try:
            while len(waiting):
                count = super().write(waiting) or 0
                self._written += count
                waiting = waiting[count:]
        except OSError as error:
            needed = show_size(self._written + len(waiting))
            raise StorageError(
                f"cannot write the prepared rows to {self._folder}: {error.strerror or error}",
                where=self._where,
                fix=f"prepared rows need more than {needed}: free space in that folder, or {self._fix}",
            ) from error
        return size


def _list_lengths(cells: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    found = [_integer_array(chunk, np.int32) for chunk in pa.compute.list_value_length(cells).chunks]
    return np.concatenate(found, dtype=np.int64) if found else np.zeros(0, dtype=np.int64)


def _integer_array(cells: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """Return an Arrow array of integers without nulls as a NumPy array. pyarrow's own function would import pandas."""
    assert not cells.null_count, "the column has no nulls"
    buffer = cells.buffers()[1]
    found: npt.NDArray[Any] = np.zeros(0, dtype) if buffer is None else np.frombuffer(buffer, dtype)
    return found[cells.offset : cells.offset + len(cells)]


def _list_cell_values(cell: pa.ListScalar) -> list[Any]:
    """Return a list cell as a list of Python values, through NumPy, which is several times faster than item by item."""
    items: list[Any] = cell.values.to_numpy(zero_copy_only=False).tolist()
    return items


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids and labels of one sequence to train on."""

    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("labels", pa.list_(pa.int32())),
            ("origin", pa.string()),
            ("weight", pa.float64()),
            ("images", pa.list_(pa.string())),
        ],
    )

    input_ids: IntArray | Sequence[int]
    """[T] token ids"""
    labels: IntArray | Sequence[int]
    """[T] token id, or -100 for a token that does not count in the loss; not shifted"""
    origin: str
    """file and line of the row, ``file:line`` or ``file:row N``"""
    weight: float = 1.0
    """factor of the loss of the example's tokens"""
    images: Sequence[str] = ()
    """files of the images, in the order of their tokens (:class:`streamtune.data.image_files.ImageFile`)"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def to_row(self) -> Mapping[str, Any]:
        return vars(self)

    @classmethod
    def from_row(cls, table: pa.Table, row: int) -> Self:
        return cls(
            # Copies: a view would read the file later, without a check that the file is unchanged.
            input_ids=_integer_array(table["input_ids"][row].values, np.int32).copy(),
            labels=_integer_array(table["labels"][row].values, np.int32).copy(),
            origin=table["origin"][row].as_py(),
            weight=table["weight"][row].as_py(),
            images=table["images"][row].as_py(),
        )

    @staticmethod
    def token_counts(table: pa.Table) -> npt.NDArray[np.int64]:
        return _list_lengths(table["input_ids"])


@dataclass(frozen=True)
class Tree:
    """A prompt with G completions as token ids, such as a preference pair.

    The prompt's last token predicts the first token of every completion. All completions share the trunk,
    ``prompt[:-1]``, and the common prefix of the branches ``[prompt[-1], *completion]``.
    """

    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("prompt", pa.list_(pa.int32())),
            ("completions", pa.list_(pa.list_(pa.int32()))),
            ("masks", pa.list_(pa.list_(pa.bool_()))),
            ("origin", pa.string()),
            ("labels", pa.list_(pa.bool_())),
            ("margin", pa.float64()),
            ("tokens", pa.int64()),
            ("images", pa.list_(pa.string())),
        ]
    )

    prompt: list[int]
    """[P] token ids, P at least 1"""
    completions: list[list[int]]
    """G non-empty lists of token ids"""
    masks: list[list[bool]] | None = None
    """mask of each completion, True for tokens that count in the loss; None if all tokens count"""
    origin: str = ""
    """file and line of the row, ``file:line`` or ``file:row N``"""
    labels: list[bool] | None = None
    """True for each desirable completion; None for pairs"""
    margin: float | None = None
    """score of the first completion minus score of the second, or column ``margin``; None if the row has neither"""
    images: Sequence[str] = ()
    """files of the prompt's images, in order (:class:`streamtune.data.image_files.ImageFile`)"""

    def __post_init__(self) -> None:
        assert self.prompt, "a prompt has at least one token, which predicts the first token of a completion"
        assert self.completions, "a tree has at least one completion"
        assert all(self.completions), "a completion has at least one token"
        if self.masks is not None:
            sizes, marked = ([len(item) for item in items] for items in (self.completions, self.masks))
            assert sizes == marked, "a mask has one value per token of its completion"

    @property
    def num_tokens(self) -> int:
        """Number of tokens if the prompt and the common prefix of all completions are stored once.

        Some of more than two completions may share a longer prefix.
        """
        branches = sum(len(completion) + 1 for completion in self.completions)
        return len(self.prompt) - 1 + branches - (len(self.completions) - 1) * self.num_common_tokens

    @cached_property
    def num_common_tokens(self) -> int:
        """Number of tokens after ``prompt[:-1]`` that all completions share; 0 for a single completion.

        The prompt's last token counts if all completions begin with the same token, because they then share its target.
        """
        if len(self.completions) == 1:
            return 0
        ids, targets = self.branch_tokens(0)
        for index in range(1, len(self.completions)):
            others, theirs = self.branch_tokens(index)
            size = shared_beginning_length(ids, targets, others, theirs, same_target=True)
            ids, targets = ids[:size], np.maximum(targets[:size], theirs[:size])  # a target that counts in either
        return len(ids)

    def branch_tokens(self, index: int) -> tuple[IntArray, IntArray]:
        """Return ``[prompt[-1], *completions[index]]``, and the token id that each of them should predict, or -100."""
        ids = np.array([self.prompt[-1], *self.completions[index]], np.int32)
        targets = np.append(ids[1:], np.int32(IGNORE_INDEX))
        if self.masks is not None:
            targets[:-1][~np.array(self.masks[index], np.bool_)] = IGNORE_INDEX
        return ids, targets

    @property
    def num_tokens_separate(self) -> int:
        """Number of tokens if each completion has its own copy of the prompt."""
        return sum(len(self.prompt) + len(completion) for completion in self.completions)

    @property
    def longest_row_tokens(self) -> int:
        """Number of tokens of the prompt and the longest completion together."""
        return len(self.prompt) + max(map(len, self.completions))

    @property
    def num_targets(self) -> int:
        """Number of completion tokens that count in the loss."""
        masks = self.masks or [[True] * len(completion) for completion in self.completions]
        return sum(sum(mask) for mask in masks)

    def to_row(self) -> Mapping[str, Any]:
        return {**vars(self), "tokens": self.num_tokens}

    @classmethod
    def from_row(cls, table: pa.Table, row: int) -> Self:
        masks = table["masks"][row]
        return cls(
            prompt=_list_cell_values(table["prompt"][row]),
            completions=[_list_cell_values(item) for item in table["completions"][row]],
            masks=[_list_cell_values(item) for item in masks] if masks.is_valid else None,
            origin=table["origin"][row].as_py(),
            labels=table["labels"][row].as_py(),
            margin=table["margin"][row].as_py(),
            images=table["images"][row].as_py(),
        )

    @staticmethod
    def token_counts(table: pa.Table) -> npt.NDArray[np.int64]:
        return np.asarray(table["tokens"].to_numpy(), dtype=np.int64)


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids, and as text or messages, with the other columns of its row for reward functions."""

    # Other columns may hold any type of the file format. Values that JSON restores unchanged are written as JSON, other
    # values (dates, bytes) are pickled. A table with pickled values is read only by the process that wrote it.
    schema: ClassVar[pa.Schema] = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("json", pa.string()),
            ("pickled", pa.binary()),
            ("origin", pa.string()),
            ("images", pa.list_(pa.string())),
        ]
    )

    input_ids: list[int]
    """[P] token ids, including the generation prompt of the chat template; P at least 1"""
    prompt: str | list[dict[str, Any]]
    """prompt as text or messages, with :data:`streamtune.data.reading.image_cells.MARK` in place of images"""
    columns: dict[str, Any] = field(default_factory=dict)
    """name -> value of the row's other columns, without the column of images"""
    origin: str = ""
    """file and line of the row, ``file:line`` or ``file:row N``"""
    images: Sequence[str] = ()
    """files of the images, in the order of their tokens (:class:`streamtune.data.image_files.ImageFile`)"""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    def to_row(self) -> Mapping[str, Any]:
        content = [self.prompt, self.columns]
        text = _to_exact_json(content)
        pickled = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL) if text is None else None
        stored = {"input_ids": self.input_ids, "origin": self.origin, "images": self.images}
        return {**stored, "json": text, "pickled": pickled}

    @classmethod
    def from_row(cls, table: pa.Table, row: int) -> Self:
        text = table["json"][row].as_py()
        prompt, columns = pickle.loads(table["pickled"][row].as_py()) if text is None else json.loads(text)
        origin, images = (table[name][row].as_py() for name in ("origin", "images"))
        return cls(_list_cell_values(table["input_ids"][row]), prompt, columns, origin, images)

    @staticmethod
    def token_counts(table: pa.Table) -> npt.NDArray[np.int64]:
        return _list_lengths(table["input_ids"])


def _to_exact_json(content: Any) -> str | None:
    """Return a value as JSON text; None if decoding the JSON would not give an equal value."""
    try:
        text = json.dumps(content, ensure_ascii=False)
        text.encode()  # raises for a lone surrogate
        return text if json.loads(text) == content else None
    except (TypeError, ValueError, RecursionError):
        return None


def shared_beginning_length(
    ids: IntArray, targets: IntArray, other_ids: IntArray, other_targets: IntArray, *, same_target: bool
) -> int:
    """Return the length of the common prefix of two sequences that can be stored once.

    A stored token has at most one target.

    Args:
        ids: [T] token ids of a row.
        targets: [T] token id that each token should predict, or -100.
        other_ids: [S] token ids of the other row.
        other_targets: [S] token id that each token of the other row should predict, or -100.
        same_target: Whether a token may be stored once if it has the same target in both rows. With False the prefix
            ends there.
    """
    size = min(len(ids), len(other_ids))
    mine, others = targets[:size], other_targets[:size]
    apart = (mine != IGNORE_INDEX) & (others != IGNORE_INDEX)
    if same_target:
        apart &= mine != others
    apart |= ids[:size] != other_ids[:size]
    return int(apart.argmax()) if apart.any() else size


def measure_trees(trees: Stored[Tree], *, share: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return [trees]: number of tokens, and [trees]: sum of squared row lengths (attention cost), without decoding the
    trees.

    Args:
        share: Whether the prompt and the common prefix of the completions are computed once.
    """
    completions, prompts = trees.column_cells("completions"), _list_lengths(trees.column_cells("prompt"))
    counts = _list_lengths(completions)
    rows = np.repeat(prompts, counts) + _list_lengths(pa.compute.list_flatten(completions))
    starts = np.cumsum(counts) - counts
    again = (counts - 1) * share
    apart = np.add.reduceat(rows, starts)
    tokens = np.asarray(trees.column_cells("tokens").to_numpy(), np.int64) if share else apart
    common = (apart - tokens) // np.maximum(again, 1)  # the trunk, and the tokens after it that completions share
    squares = np.add.reduceat(rows**2, starts) - again * common**2
    return tokens[trees.table_indices()], squares[trees.table_indices()]


def find_labels(trees: Stored[Tree]) -> set[bool]:
    """Return the distinct labels of the completions of all trees, without decoding the trees."""
    labels = trees.column_cells("labels").take(pa.array(trees.table_indices()))
    return set(pyarrow.compute.unique(pyarrow.compute.list_flatten(labels)).to_pylist())


def gather_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Return column -> list of the prompts' values, for reward functions; None where a prompt lacks the column."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
