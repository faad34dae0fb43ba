"""A lock on a run directory, taken before a process reads the directory and released at the end of its run.

    output_dir/.lock    locked by the process that trains in the directory; has its process id and host

Two processes can therefore not start the same run. The operating system releases the lock when the process ends, even
if it is killed. The lock file is not deleted, because two processes could then lock two different files of that name.
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
from streamtune.train.staging import OpenFolder, failed_write_error, make_directory

LOCK = ".lock"
IDENTITY = "run.json"
"""First file of a run; a directory without it has no run yet."""
ATTEMPTS = 100
"""Largest number of attempts to lock. Another process may remove a directory without a run while this one opens it."""
HOLDER_BYTES = 4096
HOLDER_SECONDS = 1.0
"""Seconds to wait until the process that has just taken the lock has written its id into the file."""

_open_locks: set[int] = set()


def _close_locks_in_child() -> None:
    """Close the lock files in a forked child, which would otherwise hold the locks after its parent has ended."""
    for descriptor in _open_locks:
        with suppress(OSError):
            os.close(descriptor)
    _open_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_in_child)


@dataclass
class _Lock:
    path: Path
    descriptor: int
    created_folders: list[Path]
    """Directories that were created for the lock, the deepest first."""
    pid: int

    def release(self, *, remove_unused: bool = True) -> None:
        """Release the lock; with ``remove_unused``, also remove its file and created folders if no run has started."""
        if os.getpid() != self.pid:
            return
        if remove_unused and not os.path.lexists(self.path / IDENTITY):
            with suppress(OSError):
                if is_open_at(self.descriptor, self.path / LOCK):
                    (self.path / LOCK).unlink()
                    for folder in self.created_folders:
                        folder.rmdir()  # fails if it is not empty
        _open_locks.discard(self.descriptor)
        os.close(self.descriptor)


class DirectoryLock:
    """Lock of a run directory against other processes, until :meth:`release` or the end of the process.

    Args:
        path: Run directory; created if it does not exist.

    Raises:
        ArgumentError: Another process has locked the directory, or a symbolic link in its path has no target.
        CheckpointError: The directory cannot be created or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: _Lock | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.is_effective = True
        """True if the file system supports locks; otherwise other processes are not kept out."""
        self.acquire()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, *, must_create: bool = False) -> None:
        """Lock the directory, unless this object has locked it already.

        Args:
            must_create: True to raise an error if the directory exists.
        """
        if self._lock is not None:
            return
        if sys.platform == "win32":
            make_directory(self.path)
            return
        for _ in range(ATTEMPTS):
            missing = [folder for folder in (self.path, *self.path.absolute().parents) if not folder.exists()]
            if dangling := [folder for folder in missing if folder.is_symlink()]:
                raise ArgumentError(
                    f"{dangling[-1]} is a symbolic link to {dangling[-1].readlink()}, which does not exist",
                    where="output_dir",
                    fix="create the folder that it points to, or use another --output-dir",
                )
            try:
                if must_create:
                    self.path.mkdir()
                make_directory(self.path)
                with OpenFolder(self.path) as folder:
                    descriptor = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # removed by the process that created it
            except FileExistsError as error:
                if must_create:
                    raise self._in_use_error("") from error
                if self.path.is_dir() or not os.path.lexists(self.path):
                    continue  # removed or created again in between
                raise self._unwritable_error(error) from error
            except OSError as error:
                raise self._unwritable_error(error) from error
            try:
                self.is_effective = try_lock(descriptor)
                is_current = is_open_at(descriptor, self.path / LOCK)
            except BlockingIOError:
                holder = _read_holder(descriptor)
                os.close(descriptor)
                raise self._in_use_error(holder) from None
            if is_current:
                self._lock = _Lock(self.path, descriptor, missing, os.getpid())
                _open_locks.add(descriptor)
                self._finalizer = weakref.finalize(self, self._lock.release)
                _write_holder(descriptor)
                return
            os.close(descriptor)
        raise self._unwritable_error(OSError(errno.EBUSY, "another process keeps creating and removing it"))

    def release(self) -> None:
        """Release the lock; remove the directory if it was created for the lock and no run has started in it."""
        self._release(remove_unused=True)

    def move_aside(self) -> Path:
        """Rename the directory to the first free ``NAME.old-N``, release the lock, and return the new path."""
        number = 1
        while os.path.lexists(aside := self.path.with_name(f"{self.path.name}.old-{number}")):
            number += 1
        self.path.rename(aside)
        self._release(remove_unused=False)
        return aside

    def _release(self, *, remove_unused: bool) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            lock.release(remove_unused=remove_unused)

    def _in_use_error(self, holder: str) -> ArgumentError:
        return ArgumentError(
            f"another process is training in {self.path}{holder}",
            where="output_dir",
            fix="wait until it ends, stop it, or use another --output-dir",
        )

    def _unwritable_error(self, error: OSError) -> CheckpointError:
        return failed_write_error(
            error, self.path / LOCK, needed_bytes=HOLDER_BYTES, intact="existing files are unchanged"
        )


def _write_holder(descriptor: int) -> None:
    if os.fstat(descriptor).st_nlink != 1:
        return  # a hard link: writing would change another file
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
        os.fsync(descriptor)  # so that other machines see it


def _read_holder(descriptor: int) -> str:
    deadline = time.monotonic() + HOLDER_SECONDS
    while True:
        try:
            holder = json.loads(os.pread(descriptor, HOLDER_BYTES, 0))
            host = "".join(character for character in str(holder["host"])[:64] if character.isprintable())
            return f": process {int(holder['pid'])} on {host}, since {datetime.fromisoformat(holder['since'])}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.05)
