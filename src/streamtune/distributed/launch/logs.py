"""The log of a rank other than 0: a file of its own, in the run directory once there is one."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from streamtune.distributed.environment import RankEnvironment
from streamtune.distributed.launch.ranks import LOG_FILE_VARIABLE
from streamtune.distributed.watch.failure import ERROR_FILE_VARIABLE

__all__ = ["keep_log", "leave_terminal", "log_path"]


def log_path(directory: Path, rank: int) -> Path:
    """Return ``DIRECTORY/logs/rank-0003.log``."""
    return directory / "logs" / f"rank-{rank:04d}.log"


def leave_terminal(environment: RankEnvironment) -> int | None:
    """Redirect the output of a rank other than 0, if it shares a terminal with rank 0, to a temporary file.

    Under ``streamtune --nproc`` the launcher has redirected it already, and has the file.

    Returns:
        A descriptor of the previous standard error; None if nothing was changed.
    """
    if environment.is_main or os.environ.get(LOG_FILE_VARIABLE):
        return None
    handle, name = tempfile.mkstemp(prefix=f"streamtune-rank-{environment.rank:04d}-", suffix=".log")
    os.environ[LOG_FILE_VARIABLE] = name
    atexit.register(Path(name).unlink, missing_ok=True)
    before = os.dup(2)
    _write_to(handle)
    return before


def keep_log(directory: Path, environment: RankEnvironment) -> None:
    """Move the log of a rank other than 0 into the run directory, and continue it there.

    Nothing happens in rank 0. A log that cannot be moved stays in its file.
    """
    current = os.environ.get(LOG_FILE_VARIABLE)
    if environment.is_main or not current or Path(current).is_symlink():
        return
    target, source = log_path(directory, environment.rank), Path(current)
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent.is_symlink():
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(target, flags, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        with source.open("rb") as written, os.fdopen(os.dup(handle), "ab") as kept:
            shutil.copyfileobj(written, kept)
        _write_to(handle)
        source.unlink()
        if os.environ.get(ERROR_FILE_VARIABLE):  # its launcher looks there for the last words
            source.symlink_to(target.resolve())


def _write_to(handle: int) -> None:
    """Redirect standard output and error to ``handle``, and close it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
