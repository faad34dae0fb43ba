"""Errors of the machine that can occur anywhere (memory, limits, temporary files, file names), and its allocator.

The device allocator is set to expandable segments, so that ever longer sequences do not fragment memory. Without them,
memory a longer sequence cannot use again stays reserved, and a run ends out of memory with gigabytes free. torch reads
the setting once, when it first touches the device.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from streamtune.base import interrupts
from streamtune.base.paths import NO_HOME, check_descriptors, has_home
from streamtune.errors import ArgumentError, OutOfMemoryError, RunError, StreamTuneError

MEMORY = ("cannot allocate memory", "can't allocate memory", "out of memory", "bad_alloc",
          "failed to map segment")  # fmt: skip
TEMPORARY = ("TMPDIR", "TEMP", "TMP")


def check_directory() -> None:
    """Raise if the current directory was deleted: libraries that torch loads abort the process there.

    Raises:
        ArgumentError: It was deleted.
    """
    if _has_no_directory():
        raise _no_directory()


@contextmanager
def some_home() -> Iterator[None]:
    """Give libraries a directory for their settings and caches where the user has none, as in some containers.

    It is removed at the end. Nothing is kept there by StreamTune.
    """
    if has_home():
        yield
        return
    with interrupts.temporary_directory(prefix="streamtune-home-", ignore_cleanup_errors=True) as folder:
        os.environ["HOME"], os.environ[NO_HOME] = folder, "1"
        os.environ.setdefault("USER", str(os.getuid()))  # libraries ask the table of users otherwise
        try:
            yield
        finally:
            for name in ("HOME", NO_HOME):
                os.environ.pop(name, None)


def _no_directory() -> ArgumentError:
    return ArgumentError("the directory that the command was started in is gone", fix="cd to one that exists")


def error_of_machine(error: BaseException) -> StreamTuneError | None:
    """Return the error to show for a limit of the machine that no other code caught; None for other errors.

    Args:
        error: The exception that reached the command line.
    """
    for each in _causes(error):
        if isinstance(each, MemoryError) or any(text in str(each).lower() for text in MEMORY):
            return OutOfMemoryError(_memory(each), fix="close other programs, or raise the limit")
        if isinstance(each, FileNotFoundError) and "No usable temporary directory" in str(each):
            named = [f"{name}={os.environ[name]}" for name in TEMPORARY if os.environ.get(name)]
            return RunError(
                "there is no directory for temporary files that can be written to",
                where=", ".join(named) or "/tmp",
                fix="set TMPDIR to a directory with room, or make room there",
            )
        if isinstance(each, FileNotFoundError) and _has_no_directory():
            return _no_directory()
        if isinstance(each, BlockingIOError) or "can't start new thread" in str(each):
            return RunError(
                "the system allows no further process or thread",
                fix="close other programs, or raise the limit (ulimit -u, or that of the container)",
            )
        if isinstance(each, OSError):
            try:
                check_descriptors(each)
            except RunError as known:
                return known
        if isinstance(each, OSError) and each.errno in FULL:
            return RunError(
                f"{each.strerror or FULL[each.errno]}" + (f": {each.filename}" if each.filename else ""),
                where=str(each.filename or ""),
                fix=f"make room, or raise the limit (ulimit); temporary files go to {_temporary()}",
            )
        if isinstance(each, OSError) and each.errno in NAMES and each.filename is not None:
            shown = str(each.filename)
            return ArgumentError(
                f"{NAMES[each.errno]}: {shown if len(shown) <= 100 else shown[:97] + '...'}",
                fix="use another path",
            )
    return None


def name_locale(error: StreamTuneError) -> None:
    """Add the locale to an error about names beyond ASCII, where it is not UTF-8: names and texts then differ."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not f"{error.what}{error.where}".isascii():
        fix = f"file names and arguments are read as {encoding} in this locale: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
        error.fix = f"{error.fix}; {fix}" if error.fix else fix


FULL = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
}
NAMES = {
    errno.ENAMETOOLONG: "this file name is too long",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, its cause or context, the cause of that, and so on; 10 at most."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _memory(error: BaseException) -> str:
    """Return the message that memory ran out, with the limit on this process if there is one."""
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limited = f"; this process may have {limit >> 20:,} MiB (ulimit -v)" if limit != resource.RLIM_INFINITY else ""
    except ImportError:
        limited = ""
    library = f" while {error.name or 'a library'} was loaded" if isinstance(error, ImportError) else ""
    return f"memory ran out{library}{limited}"


def _has_no_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - what fails is the call
    except FileNotFoundError:
        return True
    return False


def _temporary() -> str:
    return next((os.environ[name] for name in TEMPORARY if os.environ.get(name)), "/tmp")


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name and its older one; some versions of torch follow only one of them."""
SETTING = "expandable_segments:True"


def grow_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set expandable segments for this process and its children unless the user set the allocator; Linux only."""
    if sys.platform == "linux" and not any(name in environment for name in VARIABLES):
        environment.update(dict.fromkeys(VARIABLES, SETTING))


def allocator_setting(environment: MutableMapping[str, str] = os.environ) -> str:
    """Return the allocator's setting from the environment; an empty string if there is none."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")
