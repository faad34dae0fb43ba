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
from contextlib import contextmanager
from pathlib import Path

from streamtune.errors import CheckpointError

__all__ = ["commit_directory", "discard_leftovers", "fsync_path", "fsync_tree", "write_error"]

STAGING_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"


@contextmanager
def commit_directory(target: Path) -> Iterator[Path]:
    """Yield a staging directory beside ``target``; rename it to ``target`` when the block ends without an error.

    What was at ``target`` before is removed, after the new one is complete on disk.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
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
        discard_leftovers(target.parent)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def discard_leftovers(folder: Path) -> None:
    """Remove what a killed process left staged in ``folder``; put back what it had moved away and not yet replaced."""
    for leftover in folder.glob(f"{REPLACED_PREFIX}*"):
        original = leftover.with_name(leftover.name.removeprefix(REPLACED_PREFIX))
        if original.exists():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.rename(original)
    for leftover in folder.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Wait until every file below ``folder``, and every directory entry, is on disk."""
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            fsync_path(Path(directory, name))
        fsync_path(Path(directory))


def fsync_path(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no such thing.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
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
    if not full:
        return CheckpointError(f"cannot write {target}: {error}", mend=f"mend the cause and start again; {safe}")
    return CheckpointError(
        f"no room for {target}: it takes {format_bytes(needed)} and {format_bytes(free_bytes(target))} are free",
        mend=f"make room, or lower save_total_limit, and start again; {safe}",
    )


def free_bytes(path: Path) -> int:
    """Bytes free where ``path`` is, or will be."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def format_bytes(count: int) -> str:
    """``1.5 GiB``, ``320.0 MiB``"""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
