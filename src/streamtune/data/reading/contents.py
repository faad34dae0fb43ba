"""Fingerprint the contents of sources, so that cached rows prepared from the same contents are found.

A local file is identified by the hash of its bytes. Hashing a terabyte takes an hour, so hashes are cached together
with the file's size, mtime, ctime and inode, as git does. A hash is not cached if the file changed within :data:`RACY`
seconds before its hashing: its timestamps may be too coarse to show a second change. Programs can set mtime (``cp -p``,
``rsync -t``), so ctime, which they cannot set, is compared too.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamtune.base.result_cache import CacheFile, Notify, log
from streamtune.data.reading.builtin import STDLIB_PATH
from streamtune.data.reading.data_paths import find_local_files, find_remote_files, is_url, load_hub_dataset
from streamtune.data.reading.files import DataFile, open_bytes
from streamtune.data.reading.sources import BUILT_IN, Source
from streamtune.errors import DataError

RACY = 2.0
"""Minimum number of seconds between a file's last change and its hashing; otherwise the hash is not cached."""
_BLOCK = 1 << 20


@dataclass
class FileHashes:
    """Hashes of files, cached in a JSON file by path, size, mtime, ctime and inode.

    Args:
        path: JSON file of the cache; a missing or damaged file is replaced.
    """

    path: Path
    notify: Notify = log.warning
    _known: dict[str, Any] = field(default_factory=dict)
    _new: dict[str, Any] = field(default_factory=dict)
    _read: dict[Path, list[int]] = field(default_factory=dict)
    _digests: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._cache_file().read_json(self.notify)

    def hash_file(self, path: Path) -> str:
        """Return the hash of a regular file's bytes, in hexadecimal.

        Raises:
            OSError: The file cannot be read.
        """
        status = path.stat()
        facts = _file_stats(status)
        self._read.setdefault(path, facts)
        name = str(path.resolve())
        cached = self._known.get(name)
        if isinstance(cached, list) and cached[:-1] == facts:
            return self._digests.setdefault(path, str(cached[-1]))
        began = time.time()
        digest = _hash_bytes(path)
        self._digests.setdefault(path, digest)
        if began - max(status.st_mtime, status.st_ctime) > RACY and _file_stats(path.stat()) == facts:
            self._known[name] = self._new[name] = [*facts, digest]
        return digest

    def changed_files(self) -> list[Path]:
        """Return the files whose size, mtime, ctime or inode changed since this object first hashed them."""
        return [path for path, facts in self._read.items() if _file_stats_at(path) != facts]

    def has_same_bytes(self, path: Path) -> bool:
        """Return True if a file still has the bytes that this object hashed first.

        The file is read only if its size, mtime, ctime or inode changed.

        Raises:
            OSError: The file cannot be read.
        """
        facts = _file_stats(path.stat())
        if self._read.get(path) != facts:
            if path not in self._digests or _hash_bytes(path) != self._digests[path]:
                return False
            self._read[path] = facts
        return True

    def save(self) -> None:
        """Write new hashes to the cache. A write error is ignored, because the hashes can be computed again."""
        if self._new:
            with suppress(OSError):
                self._cache_file().update_json(lambda known: {**known, **self._new})
            self._new = {}

    def _cache_file(self) -> CacheFile:
        return CacheFile(self.path, "files")


_Entry = tuple[str, str, str | None, str]
"""Path, split, configuration and place in the recipe of an entry of ``datasets``."""


@dataclass
class StreamedFiles:
    """Checks that files of streamed rows have not changed since the run began.

    A file is checked before it is opened, and again after the rows of every step while it is read. So no row of a
    changed file is trained on.
    """

    hashes: FileHashes
    """hashes of the local files at the start of the run"""
    _versions: dict[_Entry, list[tuple[str, str | None]]] = field(default_factory=dict)
    _reading: dict[_Entry, tuple[Source, Path]] = field(default_factory=dict)

    def check_listing(self, source: Source, files: Sequence[DataFile]) -> None:
        """Check that the list of files and the versions of remote files are the same as at the first call for this
        source.

        Raises:
            DataError: A file was added, removed or replaced.
        """
        found = [(file.shown, file.version) for file in files]
        before = self._versions.setdefault(_source_key(source), found)
        if found != before:
            names = sorted({name for name, _ in {*found} ^ {*before}})
            raise _file_changed_error(", ".join(names[:MOST_NAMED]), "was added, removed or replaced", source)

    def check_file(self, source: Source, file: DataFile) -> None:
        """Check before a file is opened that it has not changed since the run began.

        Raises:
            DataError: The file was changed, replaced or removed.
        """
        self._reading.pop(_source_key(source), None)
        if file.path is not None:
            self._reading[_source_key(source)] = (source, file.path)
            self._check_unchanged(source, file.path)

    def check_open_files(self) -> None:
        """Check that the files being read have not changed since the run began.

        Raises:
            DataError: A file was changed, replaced or removed.
        """
        for source, path in list(self._reading.values()):
            self._check_unchanged(source, path)

    def _check_unchanged(self, source: Source, path: Path) -> None:
        try:
            same = self.hashes.has_same_bytes(path)
        except OSError:
            same = False
        if not same:
            raise _file_changed_error(str(path), "was changed, replaced or removed", source)


def _source_key(source: Source) -> _Entry:
    return source.path, source.split, source.name, source.where


MOST_NAMED = 3
"""Maximum number of files that a message names."""


def _file_changed_error(subject: str, change: str, source: Source) -> DataError:
    return DataError(
        f"{subject} {change} since the run began, so the streamed rows would differ",
        where=source.place,
        fix="restore the files and start again: the run resumes from its checkpoint; or start with --allow-change data "
        "to read the changed data from its beginning",
    )


def _hash_bytes(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _file_stats(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _file_stats_at(path: Path) -> list[int] | None:
    try:
        return _file_stats(path.stat())
    except OSError:
        return None


_NOT_IN_FINGERPRINT = ("where", "watch", "seed", "repeat", "weight", "mix_by", "evaluates", "streamed")
"""Fields of a source that do not affect its rows. ``seed`` affects them only if ``shuffle`` is True."""


def fingerprint_source(source: Source, hashes: FileHashes) -> Mapping[str, Any] | None:
    """Return the values that identify the rows of a source, as JSON values: its options and the hashes of its files.

    Return None if the contents of a file are unknown, for example because the file cannot be read.
    """
    try:
        contents = _source_contents(source, hashes)
    except (OSError, DataError):
        return None
    if contents is None:
        return None
    options = {name: value for name, value in vars(source).items() if name not in _NOT_IN_FINGERPRINT}
    options["columns"] = None if source.columns is None else dict(source.columns)
    return {**options, "seed": source.seed if source.shuffle else None, "contents": contents}


def fingerprint_streamed_source(source: Source, hashes: FileHashes) -> Mapping[str, Any] | None:
    """Return the values that identify the rows of a streamed source, as JSON values.

    The same files at another path give the same values. Return None if the contents of a file are unknown, as for
    datasets on the Hugging Face Hub, which are not downloaded.
    """
    found = fingerprint_source(source, hashes)
    if found is None:
        return None
    contents = found["contents"]
    if source.path not in BUILT_IN:
        contents = [version for _, version in contents[0]]
        found = {**found, "path": None}
    return {**found, "contents": contents, "repeat": source.repeat, "weight": source.weight}


def _source_contents(source: Source, hashes: FileHashes) -> Any:
    if source.path in BUILT_IN:
        return [sys.version, _hash_library_files()] if source.path == STDLIB_PATH else []
    find = find_remote_files if is_url(source.path) else find_local_files
    found = find(source.path, split=source.split, config=source.name, where=source.place)
    if found is None:
        if source.streamed:  # loading it would download all of it
            return None
        return load_hub_dataset(source.path, source.name, source.split, source.place)._fingerprint
    files = [(file.shown, _file_version(file, hashes)) for file in found[0]]
    left_out = [] if found[1] is None else list(found[1].left_out)
    return None if any(version is None for _, version in files) else [files, left_out]


def _file_version(file: DataFile, hashes: FileHashes) -> str | None:
    """Return the hash of a local file, or the version that the storage reports for a remote file; None if unknown."""
    if file.path is None:
        return file.version
    with open_bytes(file, text=False):  # opened as a reader does: a pipe or a device is rejected
        pass
    return hashes.hash_file(file.path)


def _hash_library_files() -> str:
    digest = hashlib.blake2b(digest_size=20)
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "site-packages", "dist-packages"))
        for name in sorted(names):
            file = Path(folder, name)
            status = file.lstat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
