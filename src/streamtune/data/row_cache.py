"""Cache prepared rows on disk, under a hash of everything that determines them, so that a second start renders nothing.

An entry is a folder. It is written under a temporary name and renamed when it is complete. So two processes may prepare
the same rows at the same time, and a killed process leaves no incomplete entry.

    ROOT/files.json         hashes of files, see :class:`FileHashes`
    ROOT/<key>.txt          a tokenizer that was trained on the rows
    ROOT/images/            images that rows have as bytes, each under its digest
    ROOT/<key>/rows.arrow   the records
    ROOT/<key>/fit.*        the counts, see :mod:`streamtune.data.fit.length_fit`
    ROOT/<key>/entry.json   messages for the user, number of records, sizes and checksums of the other files

Each file is verified when it is read, and made again if it is damaged (:mod:`streamtune.base.result_cache`). Rows of
files that changed while they were read are not cached.
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
from streamtune.base.paths import open_nonblocking
from streamtune.base.result_cache import CacheFile, Notify, checksum_of, file_lock
from streamtune.base.text import show_size
from streamtune.data.fit import LengthFitter
from streamtune.data.fit.length_fit import load_counts, save_counts
from streamtune.data.image_files import first_changed_image
from streamtune.data.images import IMAGES
from streamtune.data.reading.contents import FileHashes, StreamedFiles, fingerprint_source, fingerprint_streamed_source
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import ROWS, MappedTable, Record, TableWriter, open_record_table
from streamtune.data.templates import fixed_template_date
from streamtune.errors import StorageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FitterT = TypeVar("FitterT", bound=LengthFitter[Any, Any])
_ENTRY = "entry.json"
_UNFINISHED = ".unfinished-"
MOST_NAMED = 3
"""Maximum number of files that a message names."""
STALE = 7 * 24 * 3600.0
"""Age in seconds at which an unfinished folder is deleted, because the process that wrote it has certainly ended."""


@dataclass(frozen=True)
class RowCache:
    """A folder that caches prepared rows; each entry is a folder with a table and counts."""

    root: Path

    def size_bytes(self) -> int:
        total = 0
        for file in self.root.rglob("*"):
            with suppress(OSError):  # another process may have deleted the file
                total += file.stat().st_size if file.is_file() else 0
        return total

    def clear(self) -> tuple[int, int]:
        """Delete all entries; return their number and their size in bytes.

        Processes that are reading an entry are not affected, but for images that its rows have as bytes.
        """
        size, entries = self.size_bytes(), 0
        for path in self.root.glob("*"):
            named = path.name != IMAGES and not path.name.startswith(_UNFINISHED)
            entries += path.is_dir() and not path.is_symlink() and named
            _remove_path(path)
        return entries, size

    def cached_text(
        self, sources: Sequence[Source], settings: Mapping[str, Any], make_text: Callable[[], str], notify: Notify
    ) -> tuple[str, bool]:
        """Return a text computed from all rows, such as a trained tokenizer, and True if the text came from the cache.

        Args:
            settings: All other values that determine the text.
        """
        contents = SourceContents.from_sources(sources, self.root, notify)
        if contents is None:
            return make_text(), False
        name = _hash_values([contents.name, settings, metadata.version("tokenizers")])
        cached = CacheFile(self.root / f"{name}.txt", f"tokenizer/{name}")
        if (found := cached.read(notify)) is not None:
            return found.decode("utf-8"), True
        text = make_text()
        if not contents.has_changed(notify):
            with suppress(OSError):
                cached.write(text.encode("utf-8"))
        return text, False

    def identify_entry(self, inputs: RowInputs, notify: Notify) -> tuple[str, SourceContents] | None:
        """Return the name of the cache entry for rows, and the hashed contents of sources; None if contents are
        unknown.
        """
        facts = _identify_tokenizer(inputs.tokenizer)
        contents = SourceContents.from_sources(inputs.sources, self.root, notify) if facts is not None else None
        if contents is None:
            return None
        versions = [__version__, _code_hash(), *map(metadata.version, ("tokenizers", "transformers", "jinja2"))]
        # repr, not JSON: as keys, JSON writes 1 and "1" alike, and it has no dates.
        everything = [inputs.record.__name__, contents.name, facts, repr(inputs.settings), versions]
        return _hash_values(everything), contents


@dataclass(frozen=True)
class RowInputs:
    """All values that determine prepared rows; together they identify a cache entry."""

    record: type[Record]
    sources: Sequence[Source]
    """sources of the rows, in order"""
    tokenizer: PreTrainedTokenizerBase
    """tokenizer with its chat template"""
    settings: Mapping[str, Any]
    """all other options, as values that ``repr`` distinguishes"""


def load_or_prepare_rows(
    inputs: RowInputs,
    make_fitter: Callable[[TableWriter], FitterT],
    fill_fitter: Callable[[FitterT, Notify], None],
    cache: RowCache | None,
    notify: Notify,
) -> tuple[FitterT, MappedTable]:
    """Return prepared rows from the cache; otherwise prepare them and add them to the cache.

    Args:
        make_fitter: Function of a :class:`TableWriter` that returns the object which truncates, writes and counts rows.
        fill_fitter: Function that reads and renders every row and adds it to this object; its second argument shows the
            user a message.
        cache: Cache of prepared rows; None disables it.
        notify: Function that shows the user a message. Cached rows show the messages of their preparation again.

    Returns:
        The object from ``make_fitter`` after all rows, and the table of records.

    Raises:
        StorageError: The prepared rows cannot be written.
    """
    notes: list[str] = []

    def record_note(message: str) -> None:
        notes.append(message)
        notify(message)

    def prepare_into(path: Path | None) -> tuple[FitterT, MappedTable]:
        with open_record_table(inputs.record, path) as (writer, tables):
            fitter = make_fitter(writer)
            fill_fitter(fitter, record_note)
        return fitter, tables[0]

    entry_key_and_contents = None if cache is None else cache.identify_entry(inputs, notify)
    if cache is None or entry_key_and_contents is None:
        return prepare_into(None)
    key, contents = entry_key_and_contents
    entry = cache.root / key
    if (
        cached_rows := _read_entry(
            entry, make_fitter(TableWriter(None, inputs.record.schema)), inputs.sources, contents, notify
        )
    ) is not None:
        return cached_rows
    if (unfinished := _new_unfinished_folder(cache.root)) is None:
        notify(f"prepared rows are not cached: {cache.root} is not writable")
        return prepare_into(None)
    try:
        fitter, mapped = prepare_into(unfinished / ROWS)
        if not _has_pickled_values(mapped.table) and not contents.has_changed(notify):
            _write_entry(fitter, notes, mapped, unfinished, entry, notify)
        return fitter, mapped
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # the mapping keeps the bytes of the table


def _has_pickled_values(table: pa.Table) -> bool:
    """Return True if a table has pickled values, which are never loaded from a cache because they may run code."""
    return "pickled" in table.schema.names and table["pickled"].null_count < table.num_rows


def _read_entry(
    entry: Path, fitter: FitterT, sources: Sequence[Source], contents: SourceContents, notify: Notify
) -> tuple[FitterT, MappedTable] | None:
    """Return a cache entry as ``fitter`` with its counts and the table; delete a damaged entry and return None."""
    try:
        inode = entry.lstat().st_ino
    except OSError:
        return None
    try:
        facts = json.loads(_entry_file(entry, entry.name).read_or_raise())
        for name, (size, checksum) in facts["files"].items():
            with open(entry / name, "rb", opener=open_nonblocking) as file:
                if os.fstat(file.fileno()).st_size != size or checksum_of(file) != checksum:
                    raise ValueError(f"{name} has changed")
                if name == ROWS:
                    table = MappedTable(file, entry / name, checksum)
        if table.table.schema != fitter.record.schema or table.table.num_rows != facts["records"]:
            raise ValueError("the table has other columns or another number of records")
        if _has_pickled_values(table.table):
            raise ValueError("the table has pickled values")
        load_counts(fitter, entry, sources)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StorageError, *_UNREADABLE) as error:
        if _delete_entry(entry, inode):
            notify(f"the cached rows in {entry} are damaged ({error}); they are prepared again")
        return None
    if (changed := contents.first_changed_image(table.table)) is not None:
        if _delete_entry(entry, inode):
            notify(f"{changed} has changed since its row was cached: the rows are prepared again")
        return None
    for message in facts["notes"]:
        notify(message)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["time"]))
    notify(f"using cached rows of {made} ({show_size(sum(size for size, _ in facts['files'].values()))})")
    with suppress(OSError):
        os.utime(entry)
    return fitter, table


def _entry_file(folder: Path, key: str) -> CacheFile:
    return CacheFile(folder / _ENTRY, f"rows/{key}")


def _delete_entry(entry: Path, inode: int) -> bool:
    """Delete a damaged cache entry; return False if it is gone, or if another process has already replaced it."""
    with suppress(OSError), file_lock(entry.parent / "rows"):
        if entry.lstat().st_ino != inode:
            return False
        doomed = entry.with_name(f"{_UNFINISHED}{entry.name}-{secrets.token_hex(6)}")
        entry.rename(doomed)
        _remove_path(doomed)
        return True
    return os.path.lexists(entry)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_UNREADABLE = (EOFError, zipfile.BadZipFile, pa.ArrowException)


def _new_unfinished_folder(root: Path) -> Path | None:
    """Create a temporary folder for a new cache entry and return it; None if the cache is not writable."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):  # already deleted, or owned by another user
                if time.time() - old.lstat().st_mtime > STALE:
                    _remove_path(old)
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=root)
        interrupts.remove_on_signal(unfinished)
        return Path(unfinished)
    except OSError:
        return None


def _write_entry(
    fitter: LengthFitter[Any, Any], notes: Sequence[str], table: MappedTable, folder: Path, entry: Path, notify: Notify
) -> None:
    """Finish a cache entry. A write error (such as a full disk) is ignored: the next start prepares the rows again."""
    with suppress(OSError):
        save_counts(fitter, folder)
        checksums = {ROWS: table.checksum}
        files = {file.name: _size_and_checksum(file, checksums.get(file.name)) for file in folder.iterdir()}
        facts = {"notes": notes, "records": table.table.num_rows, "files": files, "time": time.time()}
        _entry_file(folder, entry.name).write(json.dumps(facts).encode())
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        folder.rename(entry)  # fails if another process was faster: its entry has the same content
        table.set_path(entry / ROWS)
        size = show_size(sum(size for size, _ in files.values()))
        notify(f"prepared rows cached for the next start: {size} in {entry.parent}")


def _size_and_checksum(path: Path, checksum: str | None) -> tuple[int, str]:
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size, checksum or checksum_of(file)


@dataclass(frozen=True)
class SourceContents:
    """Hash of the contents of some sources, and a check that their files have not changed since."""

    name: str
    """hash of the contents and of the source code that prepares rows"""
    _sources: Sequence[Source]
    _hashes: FileHashes

    @classmethod
    def from_sources(cls, sources: Sequence[Source], root: Path, notify: Notify) -> SourceContents | None:
        """Hash the contents of sources; return None if the contents of any source are unknown.

        Args:
            root: Folder with the cached hashes of files.
            notify: Function that tells the user if the cached hashes are damaged.
        """
        hashes = FileHashes(root / "files.json", notify)
        name = cls._hash(sources, hashes)
        hashes.save()
        return None if name is None else cls(name, sources, hashes)

    def has_changed(self, notify: Notify) -> bool:
        """Return True and notify the user if a file was changed since it was hashed, even if it was changed back.

        Rows may have been read in between, so they may differ from the rows that :attr:`name` identifies.
        """
        changed = self._hashes.changed_files()
        if not changed and self._hash(self._sources, self._hashes) == self.name:
            return False
        changed_names = ", ".join(map(str, changed[:MOST_NAMED])) or "a source of rows"
        notify(f"{changed_names} changed while it was read: its rows are used for this run, but not cached")
        return True

    def first_changed_image(self, table: pa.Table) -> str | None:
        """Return the path of an image of cached rows that is missing or has changed; None if there is none."""
        changed = first_changed_image(table, self._hashes) if "images" in table.schema.names else None
        self._hashes.save()
        return changed

    @staticmethod
    def _hash(sources: Sequence[Source], hashes: FileHashes) -> str | None:
        contents = [fingerprint_source(source, hashes) for source in sources]
        return None if any(content is None for content in contents) else _hash_values([contents, _code_hash()])


def hash_streamed_sources(
    sources: Sequence[Source], root: Path, *, save_hashes: bool, notify: Notify
) -> tuple[str, list[str], StreamedFiles]:
    """Hash the contents of the sources of streamed rows.

    Args:
        root: Folder with the cached hashes of files.
        save_hashes: Whether to write new hashes to this folder.

    Returns:
        The hash, the paths of sources whose contents are unknown, and an object that checks files for changes.
    """
    hashes = FileHashes(root / "files.json", notify)
    contents = [fingerprint_streamed_source(source, hashes) for source in sources]
    if save_hashes:
        hashes.save()
    unknown = [source.path for source, content in zip(sources, contents, strict=True) if content is None]
    name = _hash_values([content or source.path for source, content in zip(sources, contents, strict=True)])
    return name, unknown, StreamedFiles(hashes)


_IGNORED_OPTIONS = ("name_or_path", "is_local", "local_files_only", "model_max_length", "_commit_hash")
"""Tokenizer options that do not affect prepared rows; they differ after the tokenizer was saved in a checkpoint."""


def _identify_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[Any] | None:
    """Return the values that identify how a tokenizer tokenises and renders; None if it runs its own code."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not type(tokenizer).__module__.startswith("transformers."):
        return None
    text = backend.to_str()
    template = tokenizer.chat_template
    prints_date = "strftime_now" in json.dumps(template)
    today = fixed_template_date() or time.strftime("%Y-%m-%d")
    options = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | bool | int | None)
        and not (name in _IGNORED_OPTIONS or name.endswith(("_file", "_token")))
    }
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [
        type(tokenizer).__name__, hashlib.sha256(text.encode()).hexdigest(), template, special, options,
        today if prints_date else None,
    ]  # fmt: skip


@cache
def _code_hash() -> str:
    """Return a hash of the source code that prepares rows; rows cached by other code are not used."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _hash_values(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_to_dict).encode()).hexdigest()[:40]


def _to_dict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")
