"""Directories that appear whole or not at all.

    with commit_directory(Path("final")) as staged:      # ./.tmp-final
        write_files_into(staged)
    # here: every file fsynced, the directory renamed to ./final, the rename fsynced

Killed at any moment, the process leaves the directory as it was before, or as it is afterwards.

Names in a run directory may have been made by somebody else, so nothing is written through a symbolic link. Files are
created where nothing exists (``O_EXCL``), in a directory that is opened once, and appended to only if they are plain
and have no other name.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from streamtune.base.text import show_size
from streamtune.errors import ArgumentError, CheckpointError, RunError

STAGING_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"
HAS_FOLDER_DESCRIPTORS = os.open in os.supports_dir_fd and os.rename in os.supports_dir_fd
"""True where names can be looked up in an open directory; not on Windows."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Makes a pipe in the place of a file an error; without it, opening would wait."""


class OpenFolder:
    """A directory held open, so that names resolve in it even if its path leads elsewhere later.

    Its path may lead through a link; its entries may not be links.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        if HAS_FOLDER_DESCRIPTORS:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def open(self, name: str, flags: int) -> int:
        """Open a plain file and return its descriptor; OSError for anything else, also for a link."""
        try:
            found = os.open(self._place(name), flags | NO_LINK | NO_WAIT, 0o666, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", name) from error
            raise
        if not stat.S_ISREG(os.fstat(found).st_mode):
            os.close(found)
            raise OSError(errno.EINVAL, "it is no plain file", name)
        return found

    def create(self, name: str) -> IO[bytes]:
        """Create a file; an earlier file of that name, of a killed process or of somebody else, is removed."""
        with suppress(FileNotFoundError):
            os.unlink(self._place(name), dir_fd=self._descriptor)
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    def rename(self, old: str, new: str) -> None:
        """Rename a file of this directory; the new name is replaced, and a link is replaced, not followed."""
        os.replace(self._place(old), self._place(new), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def is_still_there(self) -> bool:
        """Return True if its path still leads to it, and not to something put in its place."""
        if self._descriptor is None:
            return True
        try:  # while it is open no other file gets its number
            return os.path.samestat(os.fstat(self._descriptor), self.path.lstat())
        except FileNotFoundError:
            return False

    def _place(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)


@contextmanager
def commit_directory(target: Path) -> Iterator[Path]:
    """Yield a staging directory beside ``target``; rename it to ``target`` when the block ends without an error.

    An earlier ``target`` is removed, after the new one is complete on disk.
    """
    make_directory(target.parent)
    discard_leftovers(target.parent)
    staged, replaced = target.with_name(STAGING_PREFIX + target.name), target.with_name(REPLACED_PREFIX + target.name)
    staged.mkdir()  # never what is there already, nor where a link leads
    try:
        with OpenFolder(staged) as made:
            yield staged
            if not made.is_still_there():
                raise OSError(errno.EEXIST, "somebody else put something in its place", str(staged))
        fsync_tree(staged)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(replaced)
        staged.rename(target)
        fsync_path(target.parent)
    except BaseException:
        with suppress(OSError):  # what went wrong is worth more than what could not be tidied up after it
            discard_leftovers(target.parent)
        raise
    remove_any(replaced)


def make_directory(path: Path) -> None:
    """Create ``path`` with its parents, each entry on disk: a crash must not remove what is committed in it."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_path(folder.absolute().parent)


def remove_directory(path: Path) -> None:
    """Rename ``path`` at once, then delete it: a process killed half-way leaves a leftover, not half a directory."""
    doomed = path.with_name(f"{STAGING_PREFIX}deleted-{path.name}")
    remove_any(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Replace a small file at once; it is on disk when this returns."""
    replace_file(path, text.encode("utf-8"))


def replace_file(path: Path, content: bytes, *, durably: bool = True) -> None:
    """Replace a file at once: readers see the old one or the new one. ``durably`` waits until it is on disk."""
    staged = STAGING_PREFIX + path.name
    if (path.parent / staged).is_dir():
        remove_any(path.parent / staged)
    with OpenFolder(path.parent) as folder:
        with folder.create(staged) as file:
            file.write(content)
            file.flush()
            if durably:
                os.fsync(file.fileno())
        folder.rename(staged, path.name)
        if durably:
            folder.sync()


def check_outputs(folder: Path, names: Iterable[str], *, where: str = "--output-dir") -> None:
    """Make a folder for results, and refuse names in it that cannot be written, before hours are spent on the results.

    Args:
        folder: The folder.
        names: Names of the files that :func:`write_output` will write there.
        where: Option that names the folder, for errors.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in names):
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                kind = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "not a plain file"
                raise ArgumentError(
                    f"{path} is {kind}, and the result is written to a file of that name",
                    where=where,
                    fix=f"move it away, or give another {where}",
                )
        replace_file(folder / ".probe", b"", durably=False)
        (folder / ".probe").unlink()
    except OSError as error:
        raise ArgumentError(
            f"nothing can be written to {folder}: {error.strerror or error}", where=where, fix=f"give another {where}"
        ) from error


def write_output(path: Path, content: bytes) -> None:
    """Write a result to a file in a folder that :func:`check_outputs` has checked, replacing an earlier one."""
    try:
        replace_file(path, content, durably=False)
    except OSError as error:
        with suppress(OSError):
            (path.parent / f"{STAGING_PREFIX}{path.name}").unlink()
        what = f"{path} cannot be written: {error.strerror or error}"
        raise RunError(what, fix="fix the cause and start again") from error


def append_to(path: Path, content: bytes) -> None:
    """Add whole lines to a plain file, made if it does not exist. A last line torn by a crash is cut off before."""
    _leave_other_names(path)
    with OpenFolder(path.parent) as folder:
        descriptor = folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _last_line_end(file, end)
        if whole < end:
            file.truncate(whole)
        file.write(content)


def _leave_other_names(path: Path) -> None:
    """Replace a file that has other names, as hard links, by a copy: the other names keep their content."""
    with OpenFolder(path.parent) as folder, suppress(FileNotFoundError):
        with os.fdopen(folder.open(path.name, os.O_RDONLY), "rb") as file:
            if os.fstat(file.fileno()).st_nlink < 2:
                return
            content = file.read()
        replace_file(path, content)


def _last_line_end(file: IO[bytes], end: int) -> int:
    """Return how many bytes of a file its whole lines take, read from the end."""
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def cut_file(path: Path, size: int) -> None:
    """Cut a plain file to ``size`` bytes; it is on disk when this returns."""
    _leave_other_names(path)
    with OpenFolder(path.parent) as folder:
        descriptor = folder.open(path.name, os.O_RDWR)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_file(path: Path, name: str) -> None:
    with OpenFolder(path.parent) as folder:
        folder.rename(path.name, name)


def refuse_link(folder: Path) -> None:
    """Raise an OSError for a symbolic link."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(folder))


def discard_leftovers(folder: Path) -> None:
    """Remove what a killed process left staged in ``folder``; put back what it had moved away and not yet replaced."""
    for leftover in folder.glob(f"{REPLACED_PREFIX}*"):
        original = leftover.with_name(leftover.name.removeprefix(REPLACED_PREFIX))
        if leftover.is_symlink() or original.exists():  # this module moves no link away
            remove_any(leftover)
        else:
            leftover.rename(original)
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        remove_any(leftover)


def remove_any(path: Path) -> None:
    """Delete a file, a link, a directory, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync_tree(folder: Path) -> None:
    """Wait until every file below ``folder``, and every directory entry, is on disk."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))


def fsync_path(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no such thing.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            # Nobody reads it soon but who verifies it, and that one is to read the disk and not its shadow in memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_error(error: Exception, target: Path, *, needed: int, safe: str) -> CheckpointError:
    """Return the error for a ``target`` of ``needed`` bytes that could not be written.

    ``error`` is the operating system's, or safetensors' on its behalf; ``safe`` says what still exists.
    """
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        text in str(error) for text in ("No space left", "quota exceeded", "File too large")
    )
    takes = f"it takes {show_size(needed)} and {show_size(free_bytes(target))} are free"
    if getattr(error, "errno", None) == errno.EFBIG or "File too large" in str(error):
        return CheckpointError(
            f"{target} is larger than a file may be here: it takes {show_size(needed)}",
            fix=f"raise the limit (ulimit -f), or write to another file system, and start again; {safe}",
        )
    if not full:
        what = f"cannot write {target}: {error}; {takes}"
        return CheckpointError(what, fix=f"fix the cause and start again; {safe}")
    return CheckpointError(
        f"no room for {target}: {takes}", fix=f"make room, or lower save_total_limit, and start again; {safe}"
    )


def free_bytes(path: Path) -> int:
    """Return how many bytes are free where ``path`` is, or will be."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
