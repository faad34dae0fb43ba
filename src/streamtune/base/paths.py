"""The folder of caches, an opener for files of users, and a check of file names that come from files."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path, PurePosixPath

from streamtune.errors import RunError

NO_HOME = "STREAMTUNE_NO_HOME"
"""Set where ``HOME`` is a directory that is removed at the end of the command."""

_DRIVE = re.compile(r"[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*://")


def cache_folder() -> Path:
    """Return the folder of all caches, which may not exist yet, by the convention of the XDG base directories.

    Without a home directory it is a folder that nobody can make: results that are not kept cost only time.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home.startswith("/"):
        return Path(home) / "streamtune"
    return Path(os.devnull if os.environ.get(NO_HOME) or not has_home() else Path.home() / ".cache") / "streamtune"


def has_home() -> bool:
    """Return True if the user has a home directory: ``HOME``, or an entry in the table of users."""
    try:
        return Path.home().is_absolute()
    except (RuntimeError, KeyError, OSError):
        return False


def check_descriptors(error: OSError) -> None:
    """Raise ``RunError`` if the system's error is that the process, or the system, may have no more files open."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise RunError(
            f"{os.strerror(error.errno).lower()}: the process may not open another one",
            where=str(error.filename or ""),
            fix="raise the limit (ulimit -n 4096), or name fewer datasets",
        ) from error


def escape_of(name: object) -> str | None:
    """Return the reason why a name from a file does not name a file below its folder; None if it does.

    Refused on every system: absolute names and ``..``, by slash or backslash, drives and addresses, ``~``, control
    characters, empty parts, names that a system would take for another (a dot or blank at the end), and long names.
    """
    if not isinstance(name, str) or not name:
        return "is no name"
    if any(ord(character) < 32 or ord(character) == 127 or "\ud800" <= character <= "\udfff" for character in name):
        return "holds a control character"
    if "\\" in name or _DRIVE.match(name) or name.startswith(("/", "~")):
        return "is not relative"
    parts = name.split("/")
    if ".." in PurePosixPath(name).parts or any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder"
    if any(part != part.rstrip(" .") for part in parts):
        return "ends with a dot or a blank"
    return "is too long" if len(name) > 1024 else None


def open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting, for ``open``: a pipe that no process writes to would block for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
