"""The lock on a run directory, held from before a process looks at its content until its run is over.

    output_dir/.lock    locked by the process that has the directory; names that process

Whether a run is new or resumed, and from which checkpoint, is decided under the lock, so that two starts cannot decide
the same. The system releases the lock when the process ends, however it ends. The file stays, because removing it would
let two processes lock two files of that name. It is a file and not the directory because NFS locks only files that are
open for writing.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamtune.base.result_cache import is_open_at, try_lock
from streamtune.errors import ArgumentError, CheckpointError
from streamtune.train.staging import OpenFolder, make_directory, write_error

LOCK = ".lock"
IDENTITY = "run.json"
"""The first file of a run. A directory without it holds no run yet."""
ATTEMPTS = 100
"""Attempts to lock: another start may remove a directory that it made for nothing, just when this one opens it."""
HOLDER_BYTES = 4096
HOLDER_SECONDS = 1.0
"""Time that a process which has just locked a directory needs to write its own id into the file."""

_open_locks: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked process, which would keep them after its parent was killed."""
    for descriptor in _open_locks:
        with suppress(OSError):
            os.close(descriptor)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@dataclass
class _Lock:
    path: Path
    descriptor: int
    made: list[Path]
    """Directories that were made for it, the deepest first."""
    process: int

    def let_go(self, *, tidy: bool = True) -> None:
        """Release the lock; with ``tidy``, remove the files and folders made for it if no run was begun."""
        if os.getpid() != self.process:
            return
        if tidy and not os.path.lexists(self.path / IDENTITY):
            with suppress(OSError):
                if is_open_at(self.descriptor, self.path / LOCK):
                    (self.path / LOCK).unlink()
                    for folder in self.made:
                        folder.rmdir()  # fails where there is something in it
        _open_locks.discard(self.descriptor)
        os.close(self.descriptor)


class DirectoryHold:
    """Keeps other processes from training in a directory, until :meth:`release` or the end of the process.

    Raises:
        ArgumentError: Another process has it.
        CheckpointError: It cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: _Lock | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.works = True
        """True if the file system has locks. Without locks nothing keeps other processes away."""
        self.take()

    def __enter__(self) -> DirectoryHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, *, new: bool = False) -> None:
        """Lock the directory, unless this object has locked it; ``new`` refuses one that exists."""
        if self._lock is not None:
            return
        if sys.platform == "win32":
            make_directory(self.path)
            return
        for _ in range(ATTEMPTS):
            missing = [folder for folder in (self.path, *self.path.absolute().parents) if not folder.exists()]
            if dangling := [folder for folder in missing if folder.is_symlink()]:
                raise ArgumentError(
                    f"{dangling[-1]} is a symbolic link to {dangling[-1].readlink()}, which is not there",
                    where="output_dir",
                    fix="make the folder that it leads to, or give another --output-dir",
                )
            try:
                if new:
                    self.path.mkdir()
                make_directory(self.path)
                with OpenFolder(self.path) as folder:
                    descriptor = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # removed by the start that made it
            except FileExistsError as error:
                if new:
                    raise self._in_use("") from error
                if self.path.is_dir() or not os.path.lexists(self.path):
                    continue  # removed after it was found to be there, or made again by now
                raise self._unwritable(error) from error
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                self.works = try_lock(descriptor)
                there = is_open_at(descriptor, self.path / LOCK)
            except BlockingIOError:
                holder = _read_holder(descriptor)
                os.close(descriptor)
                raise self._in_use(holder) from None
            if there:
                self._lock = _Lock(self.path, descriptor, missing, os.getpid())
                _open_locks.add(descriptor)
                self._finalizer = weakref.finalize(self, self._lock.let_go)
                _write_holder(descriptor)
                return
            os.close(descriptor)
        raise self._unwritable(OSError(errno.EBUSY, "it is made and removed again and again"))

    def release(self) -> None:
        """Let other processes lock it; remove it if it was made here and no run was begun in it."""
        self._let_go(tidy=True)

    def move_aside(self) -> Path:
        """Rename the directory to the first free ``NAME.old-N``, return that path, and release the lock."""
        number = 1
        while os.path.lexists(aside := self.path.with_name(f"{self.path.name}.old-{number}")):
            number += 1
        self.path.rename(aside)
        self._let_go(tidy=False)
        return aside

    def _let_go(self, *, tidy: bool) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            lock.let_go(tidy=tidy)

    def _in_use(self, holder: str) -> ArgumentError:
        return ArgumentError(
            f"another process is training in {self.path}{holder}",
            where="output_dir",
            fix="wait for it or stop it, or give another --output-dir",
        )

    def _unwritable(self, error: OSError) -> CheckpointError:
        return write_error(error, self.path / LOCK, needed=HOLDER_BYTES, safe="what was there before is intact")


def _write_holder(descriptor: int) -> None:
    """Write this process into the lock file, for the message to a refused process; nothing depends on it."""
    if os.fstat(descriptor).st_nlink != 1:
        return  # a hard link: the same bytes have a name elsewhere
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)  # so that other machines see it


def _read_holder(descriptor: int) -> str:
    """Return the process that has the lock, in words; empty if the file does not name it."""
    until = time.monotonic() + HOLDER_SECONDS
    while True:
        try:
            found = json.loads(os.pread(descriptor, HOLDER_BYTES, 0))
            host = "".join(letter for letter in str(found["host"])[:64] if letter.isprintable())
            return f": process {int(found['pid'])} on {host}, since {datetime.fromisoformat(found['since'])}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            if time.monotonic() > until:
                return ""
            time.sleep(0.05)
