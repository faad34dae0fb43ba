"""Command line of StreamTune. Importing this package does not import torch or transformers; commands do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from streamtune.base import interrupts
from streamtune.base.libraries import pip_install_command, quiet_imports, untested_versions_note
from streamtune.base.patterns import tokenizer_panic_error
from streamtune.base.privacy import disable_telemetry, go_offline, is_offline
from streamtune.base.streams import lost_output_error, reader_is_gone, replace_standard_streams
from streamtune.cli.console import command_needs_stdout, print_note, set_command_needs_stdout
from streamtune.cli.machine import (
    add_locale_to_fix,
    check_current_directory,
    machine_limit_error,
    use_expandable_segments,
    using_temporary_home,
)
from streamtune.cli.rank_process import pass_error_to_launcher, report_failure, save_arguments
from streamtune.distributed.local_ranks import die_with_launcher
from streamtune.errors import RunError, StreamTuneError

__all__ = ["main"]

NO_VERSION_NOTE = ("--version", "doctor", "env", "optim", "recipes", "report", "schema", "validate")
"""Commands that print no note on untested library versions: they compute nothing, or (`doctor`) report versions."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its exit code.

    Exit codes: 0 done; 1 failed while it ran; 2 wrong input; 130 stopped by Ctrl-C.

    Args:
        argv: Arguments without the program's name. None takes them from ``sys.argv``.
    """
    with ExitStack() as cleanup:
        cleanup.callback(replace_standard_streams())
        cleanup.callback(interrupts.exit_on_signals())
        cleanup.enter_context(using_temporary_home())
        _run_command(list(sys.argv[1:] if argv is None else argv))


def _run_command(arguments_with_globals: list[str]) -> None:
    die_with_launcher()
    use_expandable_segments()
    disable_telemetry()
    debug = "--debug" in arguments_with_globals
    if not debug:
        quiet_imports()
    save_arguments(arguments_with_globals)
    set_command_needs_stdout(True)
    if "--offline" in arguments_with_globals or is_offline():
        go_offline()
    arguments = [argument for argument in arguments_with_globals if argument not in ("--debug", "--offline")]
    # `deepspeed` adds the local rank, which is in its environment variables too.
    arguments = [argument for argument in arguments if not argument.startswith(("--local_rank=", "--local-rank="))]
    try:
        check_current_directory()
        _print_version_note(arguments)
        try:
            from streamtune.cli.app import app  # imported late: the commands import this package

            app(arguments, prog_name="streamtune")
        except SystemExit as ended:
            if not ended.code:
                _check_output_written()
            raise
    except BaseException as error:
        if not isinstance(error, Exception) and tokenizer_panic_error(error) is None:
            raise
        known = (
            error if isinstance(error, StreamTuneError) else tokenizer_panic_error(error) or _unexpected_error(error)
        )
        add_locale_to_fix(known)
        if debug:
            pass_error_to_launcher(known)
            raise
        try:
            report_failure(known)
        except MemoryError:  # the panel of an error needs memory too
            os.write(2, f"error: {known.what}\nfix: {known.fix}\n".encode(errors="replace"))
        sys.exit(known.exit_code)


def _print_version_note(arguments: list[str]) -> None:
    """Print a note if torch or transformers is newer than tested, unless the command is in :data:`NO_VERSION_NOTE`."""
    computes = bool(arguments) and arguments[0] not in NO_VERSION_NOTE and "--help" not in arguments
    if computes and os.environ.get("RANK", "0") == "0" and (text := untested_versions_note()):
        print_note(text)


def _check_output_written() -> None:
    """Raise a RunError if output to stdout was lost, unless the reader closed the pipe."""
    sys.stdout.flush()
    error = lost_output_error()
    if error is not None and not reader_is_gone() and command_needs_stdout():
        raise RunError(
            f"the output cannot be written: {error.strerror}",
            where="standard output",
            fix="free some space, or redirect the output",
        )


def _unexpected_error(error: BaseException) -> StreamTuneError:
    """Return a StreamTuneError for any other exception: a limit of the machine, or a bug."""
    known = machine_limit_error(error)
    if known is not None:
        return known
    what = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    if text := untested_versions_note():
        return StreamTuneError(
            f"{what}; {text}, which is the likely cause", fix=f"{pip_install_command()}; --debug shows more"
        )
    return StreamTuneError(
        what, fix="this is a bug: run the command again with --debug for the traceback, and report it"
    )
