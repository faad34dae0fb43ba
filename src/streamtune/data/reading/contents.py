"""Fingerprint the contents of sources, so that rows prepared from the same contents are found again.

A file of this machine is known by the hash of its bytes. Hashing a terabyte takes an hour, so the hash is remembered
with the file's size, its times of change and its inode, as git does it. A file that was changed within :data:`RACY`
seconds before it was hashed is hashed again: its clock may not tell two changes apart. Programs can set the time of
change (``cp -p``, ``rsync -t``), so the system's own time, which none can set, is compared as well.
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
from streamtune.data.reading.data_paths import is_address, load_hub, local_files, remote_files
from streamtune.data.reading.files import DataFile, open_bytes
from streamtune.data.reading.sources import BUILT_IN, Source
from streamtune.errors import DataError

RACY = 2.0
"""Fewest seconds between a file's last change and its hashing for the hash to be remembered."""
_BLOCK = 1 << 20


@dataclass
class FileHashes:
    """Hashes of files, remembered in a JSON file by path, size, times of change and inode.

    Args:
        path: The JSON file; it is made if it is missing, and anew if it is damaged.
    """

    path: Path
    notify: Notify = log.warning
    _known: dict[str, Any] = field(default_factory=dict)
    _new: dict[str, Any] = field(default_factory=dict)
    _read: dict[Path, list[int]] = field(default_factory=dict)
    _digests: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._file().read_json(self.notify)

    def of(self, path: Path) -> str:
        """Return the hash of a regular file's bytes in hexadecimal, or raise ``OSError``."""
        status = path.stat()
        facts = _facts(status)
        self._read.setdefault(path, facts)
        name = str(path.resolve())
        found = self._known.get(name)
        if isinstance(found, list) and found[:-1] == facts:
            return self._digests.setdefault(path, str(found[-1]))
        began = time.time()
        digest = _hash_bytes(path)
        self._digests.setdefault(path, digest)
        if began - max(status.st_mtime, status.st_ctime) > RACY and _facts(path.stat()) == facts:
            self._known[name] = self._new[name] = [*facts, digest]
        return digest

    def touched(self) -> list[Path]:
        """Return the files whose size, times or inode changed since they were first hashed."""
        return [path for path, facts in self._read.items() if _facts_at(path) != facts]

    def is_same(self, path: Path) -> bool:
        """Return True if a file has the bytes that were first hashed; only a touched file is read again.

        Raises:
            OSError: It cannot be read.
        """
        facts = _facts(path.stat())
        if self._read.get(path) != facts:
            if path not in self._digests or _hash_bytes(path) != self._digests[path]:
                return False
            self._read[path] = facts
        return True

    def save(self) -> None:
        """Write the new hashes; if that fails they are computed again another time."""
        if self._new:
            with suppress(OSError):
                self._file().update(lambda known: {**known, **self._new})
            self._new = {}

    def _file(self) -> CacheFile:
        return CacheFile(self.path, "files")


_Entry = tuple[str, str, str | None, str]
"""Path, split, configuration and place in the recipe of an entry of ``datasets``."""


@dataclass
class StreamedFiles:
    """Files of streamed rows: raises if one differs from the file that the run began with.

    A file is compared before it is opened, and after the rows of every step while it is read. So no row of a changed
    file is trained on.
    """

    hashes: FileHashes
    """hashes of the local files as the run began"""
    _versions: dict[_Entry, list[tuple[str, str | None]]] = field(default_factory=dict)
    _reading: dict[_Entry, tuple[Source, Path]] = field(default_factory=dict)

    def listed(self, source: Source, files: Sequence[DataFile]) -> None:
        """Compare the names of the files, and the versions of remote ones, with the first list of them."""
        found = [(file.shown, file.version) for file in files]
        before = self._versions.setdefault(_entry(source), found)
        if found != before:
            names = sorted({name for name, _ in {*found} ^ {*before}})
            raise _replaced(", ".join(names[:MOST_NAMED]), "was added, removed or replaced", source)

    def opens(self, source: Source, file: DataFile) -> None:
        """Compare the file that is read next."""
        self._reading.pop(_entry(source), None)
        if file.path is not None:
            self._reading[_entry(source)] = (source, file.path)
            self._check(source, file.path)

    def check(self) -> None:
        """Compare the files that are being read."""
        for source, path in list(self._reading.values()):
            self._check(source, path)

    def _check(self, source: Source, path: Path) -> None:
        try:
            same = self.hashes.is_same(path)
        except OSError:
            same = False
        if not same:
            raise _replaced(str(path), "was changed, replaced or removed", source)


def _entry(source: Source) -> _Entry:
    return source.path, source.split, source.name, source.where


MOST_NAMED = 3
"""Most files that a message names."""


def _replaced(what: str, how: str, source: Source) -> DataError:
    return DataError(
        f"{what} {how} while the rows are streamed: others would be trained on than the run began with",
        where=source.place,
        fix="put it back and start again: the run goes on from its checkpoint; or start with --allow-change data, "
        "which goes through the data as it is now from its beginning",
    )


def _hash_bytes(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _facts(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _facts_at(path: Path) -> list[int] | None:
    try:
        return _facts(path.stat())
    except OSError:
        return None


_AFTERWARDS = ("where", "watch", "seed", "repeat", "weight", "mix_by", "evaluates", "streamed")
"""Fields of a source that do not decide its rows; the seed does if rows are drawn."""


def fingerprint_source(source: Source, hashes: FileHashes) -> Mapping[str, Any] | None:
    """Return all that decides the rows of a source, as plain values; None if its contents cannot be known.

    A read error makes the contents unknown: the reader names it better.
    """
    try:
        contents = _contents(source, hashes)
    except (OSError, DataError):
        return None
    if contents is None:
        return None
    options = {name: value for name, value in vars(source).items() if name not in _AFTERWARDS}
    options["columns"] = None if source.columns is None else dict(source.columns)
    return {**options, "seed": source.seed if source.shuffle else None, "contents": contents}


def fingerprint_rows(source: Source, hashes: FileHashes) -> Mapping[str, Any] | None:
    """Return what decides the rows of a streamed source, wherever its files are; None if that cannot be known.

    A dataset on the hub is not loaded for it.
    """
    found = fingerprint_source(source, hashes)
    if found is None:
        return None
    contents = found["contents"]
    if source.path not in BUILT_IN:
        contents = [version for _, version in contents[0]]
        found = {**found, "path": None}
    return {**found, "contents": contents, "repeat": source.repeat, "weight": source.weight}


def _contents(source: Source, hashes: FileHashes) -> Any:
    if source.path in BUILT_IN:
        return [sys.version, _library_files()] if source.path == STDLIB_PATH else []
    find = remote_files if is_address(source.path) else local_files
    found = find(source.path, split=source.split, config=source.name, where=source.place)
    if found is None:
        if source.streamed:  # loading it would make a copy of all of it
            return None
        return load_hub(source.path, source.name, source.split, source.place)._fingerprint
    files = [(file.shown, _version(file, hashes)) for file in found[0]]
    left_out = [] if found[1] is None else list(found[1].left_out)
    return None if any(version is None for _, version in files) else [files, left_out]


def _version(file: DataFile, hashes: FileHashes) -> str | None:
    """Return the hash of a local file, or the version that a remote file's storage gives."""
    if file.path is None:
        return file.version
    with open_bytes(file, text=False):  # as a reader opens it: no pipe is read, no device
        pass
    return hashes.of(file.path)


def _library_files() -> str:
    """Return a hash of the names, sizes and times of the standard library's files."""
    digest = hashlib.blake2b(digest_size=20)
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "site-packages", "dist-packages"))
        for name in sorted(names):
            file = Path(folder, name)
            status = file.lstat()
            digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
