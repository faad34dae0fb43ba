"""A command that runs as one of several ranks: its output, and the report of its failure."""

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
    leave_terminal,
    read_environment,
    write_failure,
)
from streamtune.errors import StreamTuneError

from .console import err, print_error

Doing = Callable[[str], AbstractContextManager[Any]]

ECHO_SECONDS = 3.0
"""A rank other than 0 waits so long before it prints its error: rank 0 most often has the same, and its launcher then
ends this process."""

_given: list[str] = []
_terminal: list[int] = []
"""A descriptor of the terminal, in a rank that has left it to rank 0."""


def remember_arguments(given: Sequence[str]) -> None:
    """Keep the command's arguments for the ranks that :func:`launch_ranks` starts."""
    _given[:] = given


def launch_ranks(nproc: int | None, hostfile: Path | None, device: str) -> int:
    """Run the current command in several ranks instead, and return their exit code."""
    return launch(_given, nproc=nproc, hostfile=hostfile, device=device)


def enter_rank() -> RankEnvironment:
    """Read which rank this process is, export it for the libraries, and leave the terminal to rank 0."""
    environment = read_environment()
    environment.export()
    before = leave_terminal(environment)
    if before is not None:
        _terminal[:] = [before]
    return environment


def watch(environment: RankEnvironment) -> Watchdog:
    """Return the watchdog of the other ranks, a context manager."""
    return Watchdog(environment, show=print_error)


def shown(doing: Doing, watchdog: Watchdog) -> Doing:
    """Return ``doing`` so that each call also reports its text to the watchdog, and so to the other ranks."""

    def reported(text: str) -> AbstractContextManager[Any]:
        watchdog.at(0, text, patient=True)
        return doing(text)

    return reported


def note_failure(error: StreamTuneError) -> bool:
    """Write an error to the file for this rank's launcher; return True if a launcher will show it."""
    try:
        environment = read_environment()
    except StreamTuneError:
        environment = RankEnvironment()
    return write_failure(Failure.of(error, environment.rank, environment.host))


def report_failure(error: StreamTuneError) -> None:
    """Show the error unless a launcher does; a rank that left the terminal also prints it there, after a delay."""
    if note_failure(error):
        return
    print_error(error)
    if _terminal:
        time.sleep(ECHO_SECONDS)
        with os.fdopen(_terminal[0], "w") as terminal:
            failure = Failure.of(error, read_environment().rank, read_environment().host)
            print_error(failure.error(), Console(file=terminal, highlight=False, width=err.width))
