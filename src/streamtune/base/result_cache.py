"""A cache of results on disk, with checksums, locks and atomic writes.

    CacheFile      a small file: measured speeds, simulations, plans, file hashes, tokenizers, reference log-probs
    checksum_of    checksum of a large file, such as tokenized rows
    WatchedFile    a file that is read during training; an error is raised if it shrinks or changes
    file_lock      a lock between processes, which is released when its process ends

The first line of a cache file has its key, and the checksum of key and content::

    streamtune-cache 1 simulations/5f2c... 9e107d9d372bb6826bd81d3542a419d6
    {"peak_bytes": ...

If the first line does not match, because the file is truncated, changed or copied from another entry, the result is
computed again, and a message says so. Checksums detect damage, not tampering.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import IO, Any

import xxhash

from streamtune.base.paths import cache_folder, open_nonblocking
from streamtune.base.text import show_size
from streamtune.errors import StorageError

Notify = Callable[[str], None]
log = logging.getLogger(__name__)

MAGIC = "streamtune-cache 1"
"""Name and version of the file format."""
_PACKAGES = (
    *("torch", "transformers", "peft", "triton", "flash-attn", "causal-conv1d", "flash-linear-attention", "mamba-ssm"),
    *("bitsandbytes", "torchao", "pytorch-optimizer", "apollo-torch", "schedulefree", "deepspeed"),
)
"""Packages that compute a step: operators, quantised weights, optimizers."""
_OPTIONAL_MODULES = (
    "triton",
    "liger_kernel",
    "flash_attn",
    "flash_attn_interface",
    "causal_conv1d",
    "fla",
    "mamba_ssm",
)
"""Modules whose presence may decide the operators of a step, whatever package provides them."""
_BLOCK = 1 << 20
LOCK_SECONDS = 10.0
"""Limit of seconds to wait for a lock. Others hold it for milliseconds, so a stopped process is not waited for."""

new_checksum = xxhash.xxh3_128
"""Function that makes a checksum with ``update`` and ``hexdigest``."""


def checksum_of(file: IO[bytes]) -> str:
    """Return the checksum of a whole open file; the file position does not change."""
    return _checksum(file.fileno(), os.fstat(file.fileno()).st_size)


def _checksum(descriptor: int, size: int) -> str:
    digest, offset = new_checksum(), 0
    while block := _read_at(descriptor, min(_BLOCK, size - offset), offset):
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()


def _read_at(descriptor: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    before = os.lseek(descriptor, 0, os.SEEK_CUR)  # Windows, where a mapped file cannot be truncated
    os.lseek(descriptor, offset, os.SEEK_SET)
    try:
        return os.read(descriptor, size)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


@dataclass(frozen=True)
class CacheFile:
    """A small file in the cache, read as a whole and replaced atomically.

    Attributes:
        path: Path of the file.
        key: Key of the content, such as ``simulations/5f2c...``. A file with another key counts as damaged.
    """

    path: Path
    key: str

    def read(self, notify: Notify = log.warning) -> bytes | None:
        """Return the content; None if the file is missing or damaged. ``notify`` gets a message about damage."""
        try:
            return self.read_or_raise()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            notify(f"{self.path} is damaged and will be created again ({getattr(error, 'strerror', None) or error})")
            return None

    def read_or_raise(self) -> bytes:
        """Return the content.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is damaged.
        """
        with open(self.path, "rb", opener=open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("not a regular file")
            line, content = file.readline(4096), file.read()
        if line != self._first_line(content):
            begins = line.startswith(f"{MAGIC} ".encode())
            raise ValueError("its checksum does not match" if begins else "unknown file format")
        return content

    def write(self, content: bytes, *, durably: bool = False) -> None:
        """Replace the file atomically; with ``durably``, wait until it is on disk.

        Raises:
            OSError: The file cannot be written; the old file is unchanged.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}.tmp")
        try:
            with staged.open("xb") as file:
                file.write(self._first_line(content) + content)
                if durably:
                    file.flush()
                    os.fsync(file.fileno())
            if self.path.is_dir() and not self.path.is_symlink():
                shutil.rmtree(self.path)
            staged.replace(self.path)
        finally:
            staged.unlink(missing_ok=True)

    def read_json(self, notify: Notify = log.warning) -> dict[str, Any]:
        """Return the content as a JSON object; empty if the file does not exist or is damaged."""
        content = self.read(notify)
        value = None if content is None else json.loads(content)
        return value if isinstance(value, dict) else {}

    def update_json(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change the JSON object in the file under a lock, so that changes of concurrent processes are not lost.

        Args:
            change: Function from the old object (empty if the file is missing or damaged) to the new object.
        """
        with file_lock(self.path):
            self.write(json.dumps(change(self.read_json(lambda message: None)), indent=1).encode() + b"\n")

    def _first_line(self, content: bytes) -> bytes:
        digest = new_checksum(f"{MAGIC} {self.key}\n".encode())
        digest.update(content)
        return f"{MAGIC} {self.key} {digest.hexdigest()}\n".encode()


def cached_result(
    kind: str, key: str, compute: Callable[[], dict[str, Any]], notify: Notify = log.warning
) -> dict[str, Any]:
    """Return the result that is cached on disk, a dict of JSON values; if there is none, compute and cache it.

    Args:
        kind: Name of the cache folder, such as ``simulations``.
        key: Hash of everything that the result depends on.
        compute: Function that computes the result.
        notify: Function called with a message if the cached file is damaged.
    """
    result = read_cached(kind, key, notify)
    if result is None:
        result = compute()
        write_cached(kind, key, result)
    return result


def read_cached(kind: str, key: str, notify: Notify = log.warning) -> dict[str, Any] | None:
    """Return the result that is cached on disk, a dict of JSON values; None if it is missing, empty or damaged."""
    return _cache_file(kind, key).read_json(notify) or None


def write_cached(kind: str, key: str, result: dict[str, Any]) -> None:
    """Cache a result, a dict of JSON values, on disk; errors in writing are ignored."""
    with suppress(OSError):
        _cache_file(kind, key).write(json.dumps(result).encode())


def json_hash(value: Any) -> str:
    """Return a hash of JSON values, for use as a cache key."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


@cache
def code_versions() -> list[str]:
    """Return package versions and a hash of StreamTune's source code, for cache keys."""
    names = []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            names.append(f"{name} {metadata.version(name)}")
    names += [name for name in _OPTIONAL_MODULES if util.find_spec(name) is not None]
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(file.read_bytes())
    return [*names, code.hexdigest()]


def _cache_file(kind: str, key: str) -> CacheFile:
    return CacheFile(cache_folder() / kind / f"{key}.json", f"{kind}/{key}")


# --- files that are read while training ------------------------------------------------------------------------------


class WatchedFile:
    """A file that is read or memory-mapped during training and must not change.

    If a memory-mapped file is truncated, reading beyond its end kills the process (SIGBUS). So call :meth:`check`
    before and after each read. It compares size and times of the file, in about a microsecond, and the checksum if a
    time differs.

    Args:
        path: Path of the file, for errors.
        file: The open file. It may be closed afterwards.
        checksum: Checksum of the content, from :func:`checksum_of`.
        fix: Advice in the error.
    """

    def __init__(self, path: Path, file: IO[bytes], checksum: str, fix: str) -> None:
        self.path, self.fix, self._checksum = path, fix, checksum
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._state = self._file_state()
        self.size = self._state[0]

    def check(self) -> None:
        """Check that the file has not changed since this object was created.

        Raises:
            StorageError: The file is shorter, or its content has changed.
        """
        now = self._file_state()
        if now == self._state:
            return
        if now[0] < self.size:
            what = f"{self.path} was truncated from {show_size(self.size)} to {show_size(now[0])} during the run"
            raise StorageError(what, where=str(self.path), fix=self.fix)
        if _checksum(self._descriptor, self.size) != self._checksum:
            what = f"{self.path} was changed during the run"
            raise StorageError(what, where=str(self.path), fix=self.fix)
        self._state = now

    def _file_state(self) -> tuple[int, int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns


# --- locks -----------------------------------------------------------------------------------------------------------


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Context manager that holds the lock of a cache file, stored in a hidden file next to it.

    If the file system has no locks, or the lock is not free within ten seconds, the block runs without the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        until = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < until:
            with suppress(BlockingIOError):
                try_lock(descriptor)
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file; return False if the file system has no locks.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    if sys.platform == "win32":
        return False
    import fcntl  # Not on Windows.

    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(errno.EAGAIN, "locked") from error
    return False


def is_open_at(descriptor: int, path: Path) -> bool:
    """Return True if ``path`` is the file open as ``descriptor``, and has not been replaced since."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
