"""Atomic and durable writing of files and directories.

    with commit_directory(Path("final")) as staged:      # ./.tmp-final
        write_files_into(staged)
    # here: every file fsynced, the directory renamed to ./final, the rename fsynced

If the process is killed, the directory is either the old one or the complete new one.

Another user may have created names in a run directory, so nothing is written through a symbolic or hard link.
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
"""True if the system can look up names relative to an open directory; False on Windows."""
NO_FOLLOW_FLAG = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK_FLAG = getattr(os, "O_NONBLOCK", 0)
"""Flag with which opening a named pipe does not block."""


class OpenFolder:
    """Context manager for an open directory; names are looked up in this directory even if it is renamed.

    The path may contain symbolic links, but entries of the directory must not be symbolic links.
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
        """Open a regular file and return its file descriptor.

        Raises:
            OSError: The entry is a symbolic link or not a regular file, or opening it fails.
        """
        try:
            descriptor = os.open(
                self._relative_name(name), flags | NO_FOLLOW_FLAG | NONBLOCK_FLAG, 0o666, dir_fd=self._descriptor
            )
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "symbolic links are not followed here", name) from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return descriptor

    def create(self, name: str) -> IO[bytes]:
        """Create a file and open it for writing; an existing file with this name is removed first."""
        with suppress(FileNotFoundError):
            os.unlink(self._relative_name(name), dir_fd=self._descriptor)
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")

    def rename(self, old: str, new: str) -> None:
        """Rename a file of this directory; an existing ``new`` is replaced, even if it is a symbolic link."""
        os.replace(
            self._relative_name(old), self._relative_name(new), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor
        )

    def fsync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def is_at_path(self) -> bool:
        """Return True if the path still leads to this directory."""
        if self._descriptor is None:
            return True
        try:  # while it is open, its inode number is not reused
            return os.path.samestat(os.fstat(self._descriptor), self.path.lstat())
        except FileNotFoundError:
            return False

    def _relative_name(self, name: str) -> str:
        return name if self._descriptor is not None else str(self.path / name)


@contextmanager
def commit_directory(target: Path) -> Iterator[Path]:
    """Context manager that yields a staging directory, and renames it to ``target`` if no error is raised.

    An existing ``target`` is removed after the new directory is complete on disk.

    Raises:
        OSError: The directory cannot be written, or another process has replaced it.
    """
    make_directory(target.parent)
    discard_leftovers(target.parent)
    staged, replaced = target.with_name(STAGING_PREFIX + target.name), target.with_name(REPLACED_PREFIX + target.name)
    staged.mkdir()  # fails if the name exists, also as a link
    try:
        with OpenFolder(staged) as open_folder:
            yield staged
            if not open_folder.is_at_path():
                raise OSError(errno.EEXIST, "another process replaced it", str(staged))
        fsync_tree(staged)
        if target.is_symlink():
            target.unlink()
        elif target.exists():
            target.rename(replaced)
        staged.rename(target)
        fsync_path(target.parent)
    except BaseException:
        with suppress(OSError):  # the first error is reported, not one of cleaning up
            discard_leftovers(target.parent)
        raise
    remove_path(replaced)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents, and wait until they are on disk."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_path(folder.absolute().parent)


def remove_directory(path: Path) -> None:
    """Rename ``path``, then delete it, so that a killed process never leaves half a directory under this name."""
    renamed = path.with_name(f"{STAGING_PREFIX}deleted-{path.name}")
    remove_path(renamed)
    path.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def write_text_durably(path: Path, text: str) -> None:
    """Write a text file atomically, and wait until it is on disk."""
    replace_file(path, text.encode("utf-8"))


def replace_file(path: Path, content: bytes, *, durably: bool = True) -> None:
    """Write a file atomically: readers see the old or the new content.

    Args:
        path: Path of the file.
        content: New content.
        durably: True to wait until it is on disk.
    """
    staged = STAGING_PREFIX + path.name
    if (path.parent / staged).is_dir():
        remove_path(path.parent / staged)
    with OpenFolder(path.parent) as folder:
        with folder.create(staged) as file:
            file.write(content)
            file.flush()
            if durably:
                os.fsync(file.fileno())
        folder.rename(staged, path.name)
        if durably:
            folder.fsync()


def check_output_files(folder: Path, names: Iterable[str], *, option: str = "--output-dir") -> None:
    """Create a folder, and check that result files can be written to it before they are computed.

    Args:
        folder: The folder.
        names: Names of the files that :func:`write_output` will write.
        option: Name of the option that sets the folder, for errors.

    Raises:
        ArgumentError: The folder cannot be written to, or a name in it is not a regular file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in names):
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                kind = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "not a regular file"
                raise ArgumentError(
                    f"{path} is {kind}, but a result file is written to this path",
                    where=option,
                    fix=f"move it away, or use another {option}",
                )
        replace_file(folder / ".probe", b"", durably=False)
        (folder / ".probe").unlink()
    except OSError as error:
        raise ArgumentError(
            f"cannot write to {folder}: {error.strerror or error}", where=option, fix=f"use another {option}"
        ) from error


def write_output(path: Path, content: bytes) -> None:
    """Write a result file atomically, in a folder that :func:`check_output_files` has checked.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        replace_file(path, content, durably=False)
    except OSError as error:
        with suppress(OSError):
            (path.parent / f"{STAGING_PREFIX}{path.name}").unlink()
        what = f"cannot write {path}: {error.strerror or error}"
        raise RunError(what, fix="fix the cause and start again") from error


def append_to_file(path: Path, content: bytes) -> None:
    """Append whole lines to a regular file, created if needed; a last line truncated by a crash is removed first."""
    _break_hard_links(path)
    with OpenFolder(path.parent) as folder:
        descriptor = folder.open(path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        complete_bytes = _last_line_end(file, end)
        if complete_bytes < end:
            file.truncate(complete_bytes)
        file.write(content)


def _break_hard_links(path: Path) -> None:
    """Replace a file that has other hard links by a copy, so that the other names keep their content."""
    with OpenFolder(path.parent) as folder, suppress(FileNotFoundError):
        with os.fdopen(folder.open(path.name, os.O_RDONLY), "rb") as file:
            if os.fstat(file.fileno()).st_nlink < 2:
                return
            content = file.read()
        replace_file(path, content)


def _last_line_end(file: IO[bytes], end: int) -> int:
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def truncate_file(path: Path, size: int) -> None:
    """Truncate a regular file to ``size`` bytes, and wait until the change is on disk."""
    _break_hard_links(path)
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


def refuse_symlink(folder: Path) -> None:
    """Raise an OSError if ``folder`` is a symbolic link."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "symbolic links are not followed here", str(folder))


def discard_leftovers(folder: Path) -> None:
    """Remove temporary entries that a killed process left in ``folder``; restore directories that it was replacing."""
    for leftover in folder.glob(f"{REPLACED_PREFIX}*"):
        original = leftover.with_name(leftover.name.removeprefix(REPLACED_PREFIX))
        if leftover.is_symlink() or original.exists():  # this module never renames links
            remove_path(leftover)
        else:
            leftover.rename(original)
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        remove_path(leftover)


def remove_path(path: Path) -> None:
    """Delete a file, link or directory if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def fsync_tree(folder: Path) -> None:
    """Wait until all files and directories below ``folder`` are on disk."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))


def fsync_path(path: Path) -> None:
    """Wait until the content of a file, or the entries of a directory, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot flush directories
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise") and not path.is_dir():
            # Drop the file from the page cache, so that the verification reads the disk.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def failed_write_error(error: Exception, target: Path, *, needed_bytes: int, intact: str) -> CheckpointError:
    """Return an error for a failed write, which explains a full disk or a limit on file size.

    Args:
        error: Error of the operating system or of safetensors.
        target: Path that was written.
        needed_bytes: Size of ``target`` in bytes.
        intact: Clause about files that are intact, for the fix.
    """
    is_disk_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        text in str(error) for text in ("No space left", "quota exceeded", "File too large")
    )
    sizes = f"{show_size(needed_bytes)} are needed, {show_size(free_bytes(target))} are free"
    if getattr(error, "errno", None) == errno.EFBIG or "File too large" in str(error):
        return CheckpointError(
            f"{target} exceeds the limit on file size: {show_size(needed_bytes)} are needed",
            fix=f"raise the limit (ulimit -f), or write to another file system, and start again; {intact}",
        )
    if not is_disk_full:
        what = f"cannot write {target}: {error}; {sizes}"
        return CheckpointError(what, fix=f"fix the cause and start again; {intact}")
    return CheckpointError(
        f"the disk is full: cannot write {target}: {sizes}",
        fix=f"free disk space or lower save_total_limit, and start again; {intact}",
    )


def free_bytes(path: Path) -> int:
    """Return the number of free bytes on the file system of ``path``, which need not exist."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
