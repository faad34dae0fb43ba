"""Turn errors caused by limits of the machine into StreamTune errors, and configure torch's memory allocator.

The allocator uses expandable segments, because growing sequence lengths otherwise fragment the memory. torch reads
the setting once, when it first uses the device.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from streamtune.base import interrupts
from streamtune.base.paths import NO_HOME, has_home, raise_if_too_many_open_files
from streamtune.errors import ArgumentError, OutOfMemoryError, RunError, StreamTuneError

MEMORY_TEXTS = ("cannot allocate memory", "can't allocate memory", "out of memory", "bad_alloc",
          "failed to map segment")  # fmt: skip
TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")


def check_current_directory() -> None:
    """Raise an ArgumentError if the current directory was deleted, because torch would abort the process."""
    if _is_directory_deleted():
        raise _deleted_directory_error()


@contextmanager
def using_temporary_home() -> Iterator[None]:
    """Context manager: set HOME to a temporary directory if the user has no home, as in some containers.

    Libraries write settings and caches there. The directory is removed at the end.
    """
    if has_home():
        yield
        return
    with interrupts.temporary_directory(prefix="streamtune-home-", ignore_cleanup_errors=True) as folder:
        os.environ["HOME"], os.environ[NO_HOME] = folder, "1"
        os.environ.setdefault("USER", str(os.getuid()))  # else libraries look the user up in the password database
        try:
            yield
        finally:
            for name in ("HOME", NO_HOME):
                os.environ.pop(name, None)


def _deleted_directory_error() -> ArgumentError:
    return ArgumentError("the current directory was deleted", fix="cd to an existing directory")


def machine_limit_error(error: BaseException) -> StreamTuneError | None:
    """Return a StreamTune error for an exception caused by a limit of the machine; None for other exceptions."""
    for each in _chained_errors(error):
        if isinstance(each, MemoryError) or any(text in str(each).lower() for text in MEMORY_TEXTS):
            return OutOfMemoryError(_out_of_memory_message(each), fix="close other programs, or raise the limit")
        if isinstance(each, FileNotFoundError) and "No usable temporary directory" in str(each):
            named = [f"{name}={os.environ[name]}" for name in TEMPORARY_VARIABLES if os.environ.get(name)]
            return RunError(
                "no directory for temporary files is writable",
                where=", ".join(named) or "/tmp",
                fix="set TMPDIR to a writable directory, or free space in it",
            )
        if isinstance(each, FileNotFoundError) and _is_directory_deleted():
            return _deleted_directory_error()
        if isinstance(each, BlockingIOError) or "can't start new thread" in str(each):
            return RunError(
                "the limit of processes or threads is reached",
                fix="close other programs, or raise the limit (ulimit -u, or the container's limit)",
            )
        if isinstance(each, OSError):
            try:
                raise_if_too_many_open_files(each)
            except RunError as known:
                return known
        if isinstance(each, OSError) and each.errno in DISK_ERRORS:
            return RunError(
                f"{each.strerror or DISK_ERRORS[each.errno]}" + (f": {each.filename}" if each.filename else ""),
                where=str(each.filename or ""),
                fix=f"free space, or raise the limit (ulimit); temporary files are in {_temporary_directory()}",
            )
        if isinstance(each, OSError) and each.errno in PATH_ERRORS and each.filename is not None:
            shown = str(each.filename)
            return ArgumentError(
                f"{PATH_ERRORS[each.errno]}: {shown if len(shown) <= 100 else shown[:97] + '...'}",
                fix="use another path",
            )
    return None


def add_locale_to_fix(error: StreamTuneError) -> None:
    """Name the locale's encoding in the fix of an error with non-ASCII text, unless the locale is UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not f"{error.what}{error.where}".isascii():
        fix = f"this locale reads file names and arguments as {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
        error.fix = f"{error.fix}; {fix}" if error.fix else fix


DISK_ERRORS = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
}
PATH_ERRORS = {
    errno.ENAMETOOLONG: "this file name is too long",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
}


def _chained_errors(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then its causes (or contexts) in turn; at most 10 exceptions."""
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _out_of_memory_message(error: BaseException) -> str:
    try:
        import resource  # not on Windows

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limited = (
            f"; the limit of this process is {limit >> 20:,} MiB (ulimit -v)" if limit != resource.RLIM_INFINITY else ""
        )
    except ImportError:
        limited = ""
    library = f" while loading {error.name or 'a library'}" if isinstance(error, ImportError) else ""
    return f"memory ran out{library}{limited}"


def _is_directory_deleted() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 - what fails is the call
    except FileNotFoundError:
        return True
    return False


def _temporary_directory() -> str:
    return next((os.environ[name] for name in TEMPORARY_VARIABLES if os.environ.get(name)), "/tmp")


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the allocator, the newer name first; some versions of torch read only one of them."""
ALLOCATOR_SETTING = "expandable_segments:True"


def use_expandable_segments(variables: MutableMapping[str, str] = os.environ) -> None:
    """Enable torch's expandable segments on Linux, unless the environment already configures the allocator."""
    if sys.platform == "linux" and not any(name in variables for name in ALLOCATOR_VARIABLES):
        variables.update(dict.fromkeys(ALLOCATOR_VARIABLES, ALLOCATOR_SETTING))


def allocator_setting(variables: MutableMapping[str, str] = os.environ) -> str:
    """Return the setting of torch's memory allocator in the environment; an empty string if there is none."""
    return next((variables[name] for name in ALLOCATOR_VARIABLES if variables.get(name)), "")
