"""Prepared rows on disk, under a hash of everything they are made of: a second start renders nothing.

An entry is a folder that is written under another name and renamed when it is complete. So two processes may prepare
the same rows at once, and a killed one leaves no half entry.

    ROOT/files.json         hashes of files, see :class:`FileHashes`
    ROOT/<key>.txt          a tokenizer that was trained on the rows
    ROOT/<key>/rows.arrow   the records
    ROOT/<key>/fit.*        the counts, see :mod:`streamtune.data.fit.length_fit`
    ROOT/<key>/entry.json   the messages for the user, the number of records, sizes and checksums of the other files

Each file is checked when it is read, and made again if it is damaged (:mod:`streamtune.base.result_cache`). Nothing is
kept of files that changed while they were read.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
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

from streamtune import __version__
from streamtune.base import interrupts
from streamtune.base.paths import open_at_once
from streamtune.base.result_cache import CacheFile, Notify, checksum_of, locked
from streamtune.base.text import show_size
from streamtune.data.fit import LengthFit
from streamtune.data.fit.length_fit import load_fit, save_fit
from streamtune.data.reading.contents import FileHashes, StreamedFiles, fingerprint_rows, fingerprint_source
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import ROWS, MappedTable, Record, TableWriter, spill
from streamtune.data.templates import fixed_date
from streamtune.errors import StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FitT = TypeVar("FitT", bound=LengthFit[Any, Any])
_ENTRY = "entry.json"
_UNFINISHED = ".unfinished-"
MOST_NAMED = 3
"""Most files that a message names."""
STALE = 7 * 24 * 3600.0
"""Seconds after which an unfinished folder is deleted: the process that wrote it is gone."""


@dataclass(frozen=True)
class RowCache:
    """A folder of prepared rows."""

    root: Path

    def size(self) -> int:
        total = 0
        for file in self.root.rglob("*"):
            with suppress(OSError):  # another process may delete it meanwhile
                total += file.stat().st_size if file.is_file() else 0
        return total

    def clear(self) -> tuple[int, int]:
        """Delete all entries; return their number and their bytes. Processes that read them are not disturbed."""
        size, entries = self.size(), 0
        for path in self.root.glob("*"):
            entries += path.is_dir() and not path.is_symlink() and not path.name.startswith(_UNFINISHED)
            _remove(path)
        return entries, size

    def text_of(
        self, sources: Sequence[Source], settings: Mapping[str, Any], make: Callable[[], str], notify: Notify
    ) -> tuple[str, bool]:
        """Return a text that is made of all rows, and True if it was kept from an earlier start.

        Args:
            settings: All else that decides the text.
            make: Makes the text; called again another time if it cannot be kept.
        """
        contents = SourceContents.of(sources, self.root, notify)
        if contents is None:
            return make(), False
        name = _name([contents.name, settings, metadata.version("tokenizers")])
        kept = CacheFile(self.root / f"{name}.txt", f"tokenizer/{name}")
        if (found := kept.read(notify)) is not None:
            return found.decode("utf-8"), True
        text = make()
        if not contents.moved(notify):
            with suppress(OSError):
                kept.write(text.encode("utf-8"))
        return text, False

    def key(self, made_of: MadeOf, notify: Notify) -> tuple[str, SourceContents] | None:
        """Return the name of an entry, and the contents of its sources; None if they cannot be known."""
        facts = _tokenizer_facts(made_of.tokenizer)
        contents = SourceContents.of(made_of.sources, self.root, notify) if facts is not None else None
        if contents is None:
            return None
        versions = [__version__, _own_code(), *map(metadata.version, ("tokenizers", "transformers", "jinja2"))]
        # As Python writes it: JSON takes 1 and "1" for the same name, and has no dates.
        everything = [made_of.record.__name__, contents.name, facts, repr(made_of.settings), versions]
        return _name(everything), contents


@dataclass(frozen=True)
class MadeOf:
    """All that decides prepared rows."""

    record: type[Record]
    sources: Sequence[Source]
    tokenizer: PreTrainedTokenizerBase
    """tokenizer with its chat template"""
    settings: Mapping[str, Any]
    """all else, as plain values: what ``repr`` tells apart"""


def fit_rows(
    made_of: MadeOf,
    make: Callable[[TableWriter], FitT],
    fill: Callable[[FitT, Notify], None],
    cache: RowCache | None,
    notify: Notify,
) -> tuple[FitT, MappedTable]:
    """Load rows that were prepared before from the same contents, or prepare and keep them.

    Args:
        make: Makes an empty fit, given the writer of its records.
        fill: Reads, renders and fits every row; its second argument takes messages for the user.
        cache: Cache of prepared rows; None keeps nothing.
        notify: Called with messages for the user; loaded rows repeat the messages of their preparation.

    Returns:
        The fit, and the table of the records.
    """
    notes: list[str] = []

    def note(message: str) -> None:
        notes.append(message)
        notify(message)

    def prepare(path: Path | None) -> tuple[FitT, MappedTable]:
        with spill(made_of.record, path) as (writer, tables):
            fit = make(writer)
            fill(fit, note)
        return fit, tables[0]

    known = None if cache is None else cache.key(made_of, notify)
    if cache is None or known is None:
        return prepare(None)
    key, contents = known
    entry = cache.root / key
    if (found := _read(entry, make(TableWriter(None, made_of.record.schema)), made_of.sources, notify)) is not None:
        return found
    if (unfinished := _new_folder(cache.root)) is None:
        notify(f"prepared rows are not kept: {cache.root} cannot be written to")
        return prepare(None)
    try:
        fit, mapped = prepare(unfinished / ROWS)
        if not _holds_pickles(mapped.table) and not contents.moved(notify):
            _keep(fit, notes, mapped, unfinished, entry, notify)
        return fit, mapped
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # the mapping keeps the bytes of the table


def _holds_pickles(table: pa.Table) -> bool:
    return "pickled" in table.schema.names and table["pickled"].null_count < table.num_rows


def _read(entry: Path, fit: FitT, sources: Sequence[Source], notify: Notify) -> tuple[FitT, MappedTable] | None:
    """Return what an entry holds; None without it, or if it is damaged: then it is deleted with a message."""
    try:
        inode = entry.lstat().st_ino
    except OSError:
        return None
    try:
        facts = json.loads(_entry_file(entry, entry.name).load())
        for name, (size, checksum) in facts["files"].items():
            with open(entry / name, "rb", opener=open_at_once) as file:
                if os.fstat(file.fileno()).st_size != size or checksum_of(file) != checksum:
                    raise ValueError(f"{name} has changed")
                if name == ROWS:
                    table = MappedTable(file, entry / name, checksum)
        if table.table.schema != fit.record.schema or table.table.num_rows != facts["records"]:
            raise ValueError("the table is another one")
        if _holds_pickles(table.table):
            raise ValueError("the table holds what was pickled")
        load_fit(fit, entry, sources)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StorageError, *_UNREADABLE) as error:
        if _delete(entry, inode):
            notify(f"the prepared rows in {entry} are damaged and are prepared again ({error})")
        return None
    for message in facts["notes"]:
        notify(message)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["time"]))
    notify(f"rows prepared on {made} are used again ({show_size(sum(size for size, _ in facts['files'].values()))})")
    with suppress(OSError):
        os.utime(entry)
    return fit, table


def _entry_file(folder: Path, key: str) -> CacheFile:
    return CacheFile(folder / _ENTRY, f"rows/{key}")


def _delete(entry: Path, inode: int) -> bool:
    """Delete a damaged entry; return False if it is gone, or another process has prepared the rows again."""
    with suppress(OSError), locked(entry.parent / "rows"):
        if entry.lstat().st_ino != inode:
            return False
        doomed = entry.with_name(f"{_UNFINISHED}{entry.name}-{secrets.token_hex(6)}")
        entry.rename(doomed)
        _remove(doomed)
        return True
    return os.path.lexists(entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_UNREADABLE = (EOFError, zipfile.BadZipFile, pa.ArrowException)


def _new_folder(root: Path) -> Path | None:
    """Return a new folder for an entry that is being written; None if nothing can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):  # another start removed it, or it is another user's: it is in nobody's way
                if time.time() - old.lstat().st_mtime > STALE:
                    _remove(old)
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=root)
        interrupts.remove_too(unfinished)
        return Path(unfinished)
    except OSError:
        return None


def _keep(
    fit: LengthFit[Any, Any], notes: Sequence[str], mapped: MappedTable, unfinished: Path, entry: Path, notify: Notify
) -> None:
    """Finish an entry. If that fails, as on a full disk, the rows are prepared again another time."""
    with suppress(OSError):
        save_fit(fit, unfinished)
        checksums = {ROWS: mapped.checksum}
        files = {file.name: _describe(file, checksums.get(file.name)) for file in unfinished.iterdir()}
        facts = {"notes": notes, "records": mapped.table.num_rows, "files": files, "time": time.time()}
        _entry_file(unfinished, entry.name).write(json.dumps(facts).encode())
        for file in unfinished.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        unfinished.rename(entry)  # fails if another process was first: its entry holds the same
        mapped.renamed(entry / ROWS)
        size = show_size(sum(size for size, _ in files.values()))
        notify(f"prepared rows are kept for the next start: {size} in {entry.parent}")


def _describe(path: Path, checksum: str | None) -> tuple[int, str]:
    """Return the size and the checksum of a file; a known checksum is of what was to be written."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, checksum or checksum_of(file)


@dataclass(frozen=True)
class SourceContents:
    """Contents of some sources, as they were when their files were hashed."""

    name: str
    """hash of all that decides their rows"""
    _sources: Sequence[Source]
    _hashes: FileHashes

    @classmethod
    def of(cls, sources: Sequence[Source], root: Path, notify: Notify) -> SourceContents | None:
        """Hash the sources; return None if what decides their rows cannot be known.

        ``root`` has the remembered hashes of files; ``notify`` is called if they are damaged.
        """
        hashes = FileHashes(root / "files.json", notify)
        name = cls._hash(sources, hashes)
        hashes.save()
        return None if name is None else cls(name, sources, hashes)

    def moved(self, notify: Notify) -> bool:
        """Return True and notify the user if a file changed since, also if it was changed back.

        Its rows may have been read in between, and then differ from the rows of :attr:`name`.
        """
        touched = self._hashes.touched()
        if not touched and self._hash(self._sources, self._hashes) == self.name:
            return False
        which = ", ".join(map(str, touched[:MOST_NAMED])) or "a source of rows"
        notify(f"{which} changed while it was read: what was made of its rows is used now, and not kept for later")
        return True

    @staticmethod
    def _hash(sources: Sequence[Source], hashes: FileHashes) -> str | None:
        contents = [fingerprint_source(source, hashes) for source in sources]
        return None if any(content is None for content in contents) else _name([contents, _own_code()])


def fingerprint_stream(
    sources: Sequence[Source], root: Path, *, keep: bool, notify: Notify
) -> tuple[str, list[str], StreamedFiles]:
    """Return a hash of the known contents of streamed sources, the paths of unknown ones, and a watch on their files.

    Args:
        root: Folder of the remembered hashes of files.
    """
    hashes = FileHashes(root / "files.json", notify)
    contents = [fingerprint_rows(source, hashes) for source in sources]
    if keep:
        hashes.save()
    unknown = [source.path for source, content in zip(sources, contents, strict=True) if content is None]
    name = _name([content or source.path for source, content in zip(sources, contents, strict=True)])
    return name, unknown, StreamedFiles(hashes)


_PLACES = ("name_or_path", "is_local", "local_files_only", "model_max_length", "_commit_hash")
"""Options of a tokenizer that say where it was loaded from, or that no row is cut by: a checkpoint's has others."""


def _tokenizer_facts(tokenizer: PreTrainedTokenizerBase) -> list[Any] | None:
    """Return all that decides the tokens of a text and the text of a chat; None for a tokenizer with its own code."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return None
    text = backend.to_str()
    template = tokenizer.chat_template
    prints_date = "strftime_now" in json.dumps(template)
    today = fixed_date() or time.strftime("%Y-%m-%d")
    options = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | bool | int | None) and not (name in _PLACES or name.endswith(("_file", "_token")))
    }
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [
        type(tokenizer).__name__, hashlib.sha256(text.encode()).hexdigest(), template, special, options,
        today if prints_date else None,
    ]  # fmt: skip


@cache
def _own_code() -> str:
    """Return a hash of the code that prepares rows, so that no version of it takes rows of another version."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _name(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_no_value).encode()).hexdigest()[:40]


def _no_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no plain value")
