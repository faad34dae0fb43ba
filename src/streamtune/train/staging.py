"""Directories that appear whole or not at all.

    with commit_directory(Path("final")) as staged:      # ./.tmp-final
        write_files_into(staged)
    # here: every file fsynced, the directory renamed to ./final, the rename fsynced

Killed at any moment, the process leaves the directory as it was before, or as it is afterwards.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamtune.errors import CheckpointError
from streamtune.sizes import show_size

__all__ = [
    "commit_directory",
    "discard_leftovers",
    "free_bytes",
    "fsync_path",
    "fsync_tree",
    "make_directory",
    "remove_any",
    "remove_directory",
    "write_durably",
    "write_error",
]

STAGING_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"


@contextmanager
def commit_directory(target: Path) -> Iterator[Path]:
    """Yield a staging directory beside ``target``; rename it to ``target`` when the block ends without an error.

    What was at ``target`` before is removed, after the new one is complete on disk.
    """
    make_directory(target.parent)
    discard_leftovers(target.parent)
    staged, replaced = target.with_name(STAGING_PREFIX + target.name), target.with_name(REPLACED_PREFIX + target.name)
    staged.mkdir()
    try:
        yield staged
        fsync_tree(staged)
        if target.exists():
            target.rename(replaced)
        staged.rename(target)
        fsync_path(target.parent)
    except BaseException:
        with suppress(OSError):  # what went wrong is worth more than what could not be tidied up after it
            discard_leftovers(target.parent)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def make_directory(path: Path) -> None:
    """Create ``path`` and what is missing above it, each entry on disk: what is committed in it must not go with it."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        fsync_path(folder.absolute().parent)


def remove_directory(path: Path) -> None:
    """Take ``path`` out of sight at once, then delete it: a process killed half-way leaves a leftover, not a ruin."""
    doomed = path.with_name(f"{STAGING_PREFIX}deleted-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Replace a small file at once; it is on disk when this returns."""
    staged = path.with_name(STAGING_PREFIX + path.name)
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    fsync_path(path.parent)


def discard_leftovers(folder: Path) -> None:
    """Remove what a killed process left staged in ``folder``; put back what it had moved away and not yet replaced."""
    for leftover in folder.glob(f"{REPLACED_PREFIX}*"):
        original = leftover.with_name(leftover.name.removeprefix(REPLACED_PREFIX))
        if original.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(original)
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        remove_any(leftover)


def remove_any(path: Path) -> None:
    """Delete a file, a link or a directory, or nothing."""
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
    """Say why ``target`` could not be written.

    Args:
        error: What the operating system, or safetensors on its behalf, raised.
        target: What was being written.
        needed: Bytes it takes.
        safe: What is still there: "the checkpoint of step 100 is intact".
    """
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
        text in str(error) for text in ("No space left", "quota exceeded", "File too large")
    )
    takes = f"it takes {show_size(needed)} and {show_size(free_bytes(target))} are free"
    if not full:
        what = f"cannot write {target}: {error}; {takes}"
        return CheckpointError(what, mend=f"mend the cause and start again; {safe}")
    return CheckpointError(
        f"no room for {target}: {takes}", mend=f"make room, or lower save_total_limit, and start again; {safe}"
    )


def free_bytes(path: Path) -> int:
    """Bytes free where ``path`` is, or will be."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free
