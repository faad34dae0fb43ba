"""The cache folder, an opener for user files, and a check of file names that come from files."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path, PurePosixPath

from streamtune.errors import RunError

NO_HOME = "STREAMTUNE_NO_HOME"
"""Variable that is set if ``HOME`` is a directory that is removed at the end of the command."""

_DRIVE = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://")


def cache_folder() -> Path:
    """Return the folder of all caches, as the XDG base directory specification defines it. It may not exist yet.

    Without a home directory it is a folder that cannot be created: results are then not cached, which only costs time.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home.startswith("/"):
        return Path(home) / "streamtune"
    return Path(os.devnull if os.environ.get(NO_HOME) or not has_home() else Path.home() / ".cache") / "streamtune"


def has_home() -> bool:
    """Return True if the user has a home directory: from ``HOME``, or in the user database."""
    try:
        return Path.home().is_absolute()
    except (RuntimeError, KeyError, OSError):
        return False


def raise_if_too_many_open_files(error: OSError) -> None:
    """Raise ``RunError`` if the process, or the system, has reached its limit of open files."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise RunError(
            f"{os.strerror(error.errno).lower()}: the limit of open files is reached",
            where=str(error.filename or ""),
            fix="raise the limit (ulimit -n 4096), or name fewer datasets",
        ) from error


def unsafe_name_reason(name: object) -> str | None:
    """Return why a name from a file may not name a file below a folder; None if it may.

    Refused on every system: absolute names, ``..``, backslashes, drives, addresses, ``~``, control characters, empty
    parts and long names. A dot or blank at the end is refused because some systems drop it.
    """
    if not isinstance(name, str) or not name:
        return "is not a name"
    if any(ord(character) < 32 or ord(character) == 127 or "\ud800" <= character <= "\udfff" for character in name):
        return "contains a control character"
    if "\\" in name or _DRIVE.match(name) or name.startswith(("/", "~")):
        return "is not relative"
    parts = name.split("/")
    if ".." in PurePosixPath(name).parts or any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder"
    if any(part != part.rstrip(" .") for part in parts):
        return "ends with a dot or a blank"
    return "is too long" if len(name) > 1024 else None


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting, as an opener for ``open``: a pipe without a writer would block forever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
