"""Prepared rows on disk, under a hash of everything they are made of: a second start renders nothing.

An entry is a folder that is written under another name and renamed when it is whole. So two processes may prepare the
same rows at once, and one that is killed leaves nothing that could be taken for an entry.

    ROOT/files.json         hashes of files, see :class:`FileHashes`
    ROOT/<key>.txt          a tokenizer that was trained on the rows
    ROOT/<key>/rows.arrow   the records
    ROOT/<key>/fit.*        the counts, see :mod:`streamtune.data.fit.state`
    ROOT/<key>/entry.json   the messages for the user, the number of records, the sizes of the other files
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]

from streamtune import __version__, interrupts
from streamtune.data.fit import LengthFit
from streamtune.data.fit.state import load_fit, save_fit
from streamtune.data.reading.contents import FileHashes, fingerprint_rows, fingerprint_source
from streamtune.data.reading.sources import Source
from streamtune.data.records import ROWS, MappedTable, Record, TableWriter, spill
from streamtune.sizes import show_size
from streamtune.templates import fixed_date

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowCache", "fingerprint_sources", "fingerprint_stream", "fit_rows"]

FitT = TypeVar("FitT", bound=LengthFit[Any, Any])
Notify = Callable[[str], None]

_ENTRY = "entry.json"
_UNFINISHED = ".unfinished-"
STALE = 7 * 24 * 3600.0
"""Seconds after which a folder that was never finished is deleted: the process that wrote it is gone."""


@dataclass(frozen=True)
class RowCache:
    """A folder of prepared rows."""

    root: Path

    def size(self) -> int:
        """Return the bytes of all entries."""
        total = 0
        for file in self.root.rglob("*"):
            with suppress(OSError):  # another process may delete it meanwhile
                total += file.stat().st_size if file.is_file() else 0
        return total

    def clear(self) -> tuple[int, int]:
        """Delete all entries; return their number and their bytes. Processes that read them go on."""
        size, entries = self.size(), 0
        for path in self.root.glob("*"):
            if path.is_dir():
                entries += not path.name.startswith(_UNFINISHED)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return entries, size

    def made_of(self, sources: Sequence[Source], settings: Mapping[str, Any]) -> str | None:
        """Return the name of what is made of the texts of all rows; None where their contents cannot be known."""
        contents = fingerprint_sources(sources, self.root)
        everything = [contents, settings, metadata.version("tokenizers")]
        return None if contents is None else _name(everything)

    def read_text(self, name: str) -> str | None:
        """Return a text that was kept, None without one."""
        try:
            return (self.root / f"{name}.txt").read_text("utf-8")
        except (OSError, ValueError):
            return None

    def keep_text(self, name: str, text: str) -> None:
        """Keep a text. Where that fails, it is made again another time."""
        temporary = self.root / f"{_UNFINISHED}{name}.{os.getpid()}"
        with suppress(OSError):
            self.root.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, "utf-8")
            temporary.replace(self.root / f"{name}.txt")

    def key(
        self,
        record: type[Record],
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        settings: Mapping[str, Any],
    ) -> str | None:
        """Return the name of an entry; None where what the rows are made of cannot be known."""
        facts = _tokenizer_facts(tokenizer)
        contents = fingerprint_sources(sources, self.root) if facts is not None else None
        if contents is None:
            return None
        versions = [__version__, _own_code(), *map(metadata.version, ("tokenizers", "transformers", "jinja2"))]
        # As Python writes it: JSON takes 1 and "1" for the same name, and has no dates.
        everything = [record.__name__, contents, facts, repr(settings), versions]
        return _name(everything)


def fit_rows(
    record: type[Record],
    make: Callable[[TableWriter], FitT],
    fill: Callable[[FitT, Notify], None],
    *,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    settings: Mapping[str, Any],
    cache: RowCache | None,
    notify: Notify,
) -> tuple[FitT, MappedTable]:
    """Return the rows that were prepared before from the same contents, or prepare them and keep them.

    Args:
        record: The kind of records.
        make: Makes an empty fit, given the writer of its records.
        fill: Reads, renders and fits every row; is given what to call with messages for the user.
        sources: Where the rows come from.
        tokenizer: The model's tokenizer, with its chat template.
        settings: All else that decides the rows, as plain values: what ``repr`` tells apart.
        cache: Where prepared rows are kept; None keeps nothing.
        notify: Called with messages for the user: those of the time when rows were prepared are repeated.

    Returns:
        The fit, and the table of the records.
    """
    notes: list[str] = []

    def note(message: str) -> None:
        notes.append(message)
        notify(message)

    def prepare(path: Path | None) -> tuple[FitT, MappedTable]:
        with spill(record, path) as (writer, tables):
            fit = make(writer)
            fill(fit, note)
        return fit, tables[0]

    key = None if cache is None else cache.key(record, sources, tokenizer, settings)
    if cache is None or key is None:
        return prepare(None)
    entry = cache.root / key
    if (found := _read(entry, make(TableWriter(None, record.schema)), sources, notify)) is not None:
        return found
    if (unfinished := _new_folder(cache.root)) is None:
        notify(f"prepared rows are not kept: {cache.root} cannot be written to")
        return prepare(None)
    try:
        fit, mapped = prepare(unfinished / ROWS)
        if not _holds_pickles(mapped.table):
            _keep(fit, notes, mapped.table.num_rows, unfinished, entry, notify)
        return fit, mapped
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # the mapping keeps the bytes of the table


def _holds_pickles(table: pa.Table) -> bool:
    return "pickled" in table.schema.names and table["pickled"].null_count < table.num_rows


def _read(entry: Path, fit: FitT, sources: Sequence[Source], notify: Notify) -> tuple[FitT, MappedTable] | None:
    """Return what an entry holds; None if there is none, or one that was damaged, which is deleted."""
    if not entry.is_dir():
        return None
    try:
        facts = json.loads((entry / _ENTRY).read_text("utf-8"))
        if any((entry / name).stat().st_size != size for name, size in facts["sizes"].items()):
            raise ValueError("a file has another size")
        with (entry / ROWS).open("rb") as file:
            table = MappedTable(file)
        if table.table.schema != fit.record.schema or table.table.num_rows != facts["records"]:
            raise ValueError("the table is another one")
        if _holds_pickles(table.table):
            raise ValueError("the table holds what was pickled")
        load_fit(fit, entry, sources)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, *_UNREADABLE):
        shutil.rmtree(entry, ignore_errors=True)
        return None
    for message in facts["notes"]:
        notify(message)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["time"]))
    notify(f"rows prepared on {made} are used again ({show_size(sum(facts['sizes'].values()))})")
    with suppress(OSError):
        os.utime(entry)
    return fit, table


_UNREADABLE = (EOFError, zipfile.BadZipFile, pa.ArrowException)


def _new_folder(root: Path) -> Path | None:
    """Return a new folder for an entry that is being written; None where nothing can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(f"{_UNFINISHED}*"):
            if time.time() - old.stat().st_mtime > STALE:
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=root)
        interrupts.remove_too(unfinished)
        return Path(unfinished)
    except OSError:
        return None


def _keep(
    fit: LengthFit[Any, Any], notes: Sequence[str], records: int, unfinished: Path, entry: Path, notify: Notify
) -> None:
    """Finish an entry. Where that fails, as on a full disk, the rows are prepared again another time."""
    with suppress(OSError):
        save_fit(fit, unfinished)
        sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
        facts = {"notes": notes, "records": records, "sizes": sizes, "time": time.time()}
        (unfinished / _ENTRY).write_text(json.dumps(facts), "utf-8")
        for file in unfinished.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        unfinished.rename(entry)  # fails if another process was first: its entry holds the same
        notify(f"prepared rows are kept for the next start: {show_size(sum(sizes.values()))} in {entry.parent}")


def fingerprint_sources(sources: Sequence[Source], root: Path) -> str | None:
    """Return a hash of all that decides the rows of the sources; None where it cannot be known.

    Args:
        sources: The sources.
        root: Where the hashes of their files are remembered.
    """
    hashes = FileHashes(root / "files.json")
    contents = [fingerprint_source(source, hashes) for source in sources]
    hashes.save()
    if any(content is None for content in contents):
        return None
    return _name([contents, _own_code()])


def fingerprint_stream(sources: Sequence[Source], root: Path, *, keep: bool) -> tuple[str, list[str]]:
    """Return a hash of what is known of the contents of streamed sources, and the paths of those of unknown contents.

    Args:
        sources: The sources.
        root: Where the hashes of files are remembered.
        keep: Remember those that are computed.
    """
    hashes = FileHashes(root / "files.json")
    contents = [fingerprint_rows(source, hashes) for source in sources]
    if keep:
        hashes.save()
    unknown = [source.path for source, content in zip(sources, contents, strict=True) if content is None]
    return _name([content or source.path for source, content in zip(sources, contents, strict=True)]), unknown


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any] | None:
    """Return all that decides the tokens of a text and the text of a chat; None of a tokenizer with code of its own."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return None
    text = backend.to_str()
    template = tokenizer.chat_template
    prints_date = "strftime_now" in json.dumps(template)
    today = fixed_date() or time.strftime("%Y-%m-%d")
    options = {
        name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, str | bool | int | None)
    }
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [
        type(tokenizer).__name__, hashlib.sha256(text.encode()).hexdigest(), template, special, options,
        today if prints_date else None,
    ]  # fmt: skip


@cache
def _own_code() -> str:
    """Return a hash of the code that prepares rows, so that no version of it takes rows of another one."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*package.rglob("*.py"), *(package.parent / "templates").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _name(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_no_value).encode()).hexdigest()[:40]


def _no_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain value")
