"""The command line. Importing it loads neither torch nor transformers; a command does when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from streamtune.errors import StreamTuneError
from streamtune.network import go_offline, is_offline, keep_private
from streamtune.quiet import hush_imports

from .allocator import grow_segments
from .app import app
from .console import print_error

__all__ = ["app", "main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code.

    0 done; 1 ran and failed; 2 the input is wrong; 130 stopped by Ctrl-C.

    Args:
        argv: Arguments without the program's name; ``sys.argv`` by default.
    """
    grow_segments()
    keep_private()
    if "--debug" not in (sys.argv if argv is None else argv):
        hush_imports()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if "--offline" in arguments or is_offline():
        go_offline()
    arguments = [argument for argument in arguments if argument not in ("--debug", "--offline")]
    try:
        try:
            app(arguments, prog_name="streamtune")
        finally:
            _flush()
    except Exception as error:
        if debug:
            raise
        known = error if isinstance(error, StreamTuneError) else _unexpected(error)
        print_error(known)
        sys.exit(known.exit_code)


def _flush() -> None:
    """Write what is buffered now: a reader that left early (``| head``) is no error, and Python would call it one."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unexpected(error: Exception) -> StreamTuneError:
    """A defect of ours, or a library's error nobody foresaw: short, with the way to see all of it."""
    what = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return StreamTuneError(what, mend="run it again with --debug for the traceback, and report it: this is a defect")
