"""Run a command in several ranks (processes with one device each): launch, output and error reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from streamtune.distributed import (
    Failure,
    RankEnvironment,
    Watchdog,
    launch,
    read_environment,
    redirect_rank_output,
    write_failure,
)
from streamtune.errors import StreamTuneError

from .console import err, print_error

Doing = Callable[[str], AbstractContextManager[Any]]

ECHO_SECONDS = 3.0
"""Seconds that a rank other than 0 waits before it prints its error on the terminal.

Rank 0 usually fails with the same error, and the launcher then ends this process before it prints.
"""

_arguments: list[str] = []
_terminal: list[int] = []
"""File descriptor of the terminal, in a rank whose output goes elsewhere; else empty."""


def save_arguments(arguments: Sequence[str]) -> None:
    """Save the command's arguments for :func:`launch_ranks` and :func:`command_arguments`."""
    _arguments[:] = arguments


def command_arguments() -> list[str]:
    return list(_arguments)


def launch_ranks(nproc: int | None, hostfile: Path | None, device: str) -> int:
    """Run the current command in several ranks, and return their exit code."""
    return launch(_arguments, nproc=nproc, hostfile=hostfile, device=device)


def set_up_rank() -> RankEnvironment:
    """Read this process's rank, set the variables that libraries read, and redirect the output of ranks above 0."""
    environment = read_environment()
    environment.export_variables()
    previous_stderr = redirect_rank_output(environment)
    if previous_stderr is not None:
        _terminal[:] = [previous_stderr]
    return environment


def make_watchdog(environment: RankEnvironment) -> Watchdog:
    """Return a context manager that ends all ranks when one rank fails."""
    return Watchdog(environment, show=print_error)


def report_activity(show_activity: Doing, watchdog: Watchdog) -> Doing:
    """Return a wrapper of ``show_activity`` that also sends each text to the watchdog, for other ranks to show."""

    def record_and_show(text: str) -> AbstractContextManager[Any]:
        watchdog.record_phase(0, text, waits_outside=True)
        return show_activity(text)

    return record_and_show


def pass_error_to_launcher(error: StreamTuneError) -> bool:
    """Write an error to the file that this rank's launcher reads; return True if a launcher will show it."""
    try:
        environment = read_environment()
    except StreamTuneError:
        environment = RankEnvironment()
    return write_failure(Failure.from_error(error, environment.rank, environment.host))


def report_failure(error: StreamTuneError) -> None:
    """Show an error, unless the launcher of this rank shows it.

    If the output of this rank goes to a file, the error is printed to the file and, :data:`ECHO_SECONDS` later, to the
    terminal.
    """
    if pass_error_to_launcher(error):
        return
    print_error(error)
    if _terminal:
        time.sleep(ECHO_SECONDS)
        with os.fdopen(_terminal[0], "w") as terminal:
            failure = Failure.from_error(error, read_environment().rank, read_environment().host)
            print_error(failure.to_error(), Console(file=terminal, highlight=False, width=err.width))
