"""The cache folder, opening of files without blocking, and a check of untrusted file names."""

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
    """Return the folder of all caches: ``$XDG_CACHE_HOME/streamtune``, else ``~/.cache/streamtune``. It may not exist.

    Without a home directory, return a folder that cannot be created, so that nothing is cached.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if home.startswith("/"):
        return Path(home) / "streamtune"
    return Path(os.devnull if os.environ.get(NO_HOME) or not has_home() else Path.home() / ".cache") / "streamtune"


def has_home() -> bool:
    """Return True if ``HOME`` or the user database has a home directory of the user."""
    try:
        return Path.home().is_absolute()
    except (RuntimeError, KeyError, OSError):
        return False


def raise_if_too_many_open_files(error: OSError) -> None:
    """Raise ``RunError`` if ``error`` is ``EMFILE`` or ``ENFILE``: too many open files."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise RunError(
            f"{os.strerror(error.errno).lower()}: the limit of open files is reached",
            where=str(error.filename or ""),
            fix="raise the limit (ulimit -n 4096), or name fewer datasets",
        ) from error


def unsafe_name_reason(name: object) -> str | None:
    """Return the reason why an untrusted relative file name must not be used; None if it is safe.

    Refused are absolute names, ``..``, backslashes, drives, URLs, ``~``, control characters, empty parts, and names of
    more than 1024 characters. Parts that end with a dot or space are refused because Windows drops these characters.
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
        return "ends with a dot or a space"
    return "is too long" if len(name) > 1024 else None


def open_nonblocking(path: str, flags: int) -> int:
    """Open a file with ``O_NONBLOCK``, as ``opener`` of ``open()``, so that a named pipe without a writer does not
    block."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
