"""The command as one of several ranks: what it prints and where, and how it says that it failed."""

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

__all__ = ["enter_rank", "launch_ranks", "note_failure", "remember_arguments", "shown", "tell_failure", "watch"]

Doing = Callable[[str], AbstractContextManager[Any]]

ECHO_SECONDS = 3.0
"""A rank other than 0 waits so long before it prints its error: rank 0 most often has the same, and its launcher then
ends this process."""

_given: list[str] = []
_terminal: list[int] = []
"""A descriptor of the terminal, in a rank that has left it to rank 0."""


def remember_arguments(given: Sequence[str]) -> None:
    """Keep what the command was called with, for the ranks that :func:`launch_ranks` starts."""
    _given[:] = given


def launch_ranks(nproc: int | None, hostfile: Path | None, device: str) -> int:
    """Run the command that is running in several ranks instead, and return their exit code."""
    return launch(_given, nproc=nproc, hostfile=hostfile, device=device)


def enter_rank() -> RankEnvironment:
    """Find out which rank this process is, tell the libraries, and leave the terminal to rank 0."""
    environment = read_environment()
    environment.export()
    before = leave_terminal(environment)
    if before is not None:
        _terminal[:] = [before]
    return environment


def watch(environment: RankEnvironment) -> Watchdog:
    """What watches the other ranks from here, to be entered."""
    return Watchdog(environment, show=print_error)


def shown(doing: Doing, watchdog: Watchdog) -> Doing:
    """``doing`` as before, which the other ranks are to know as well."""

    def told(text: str) -> AbstractContextManager[Any]:
        watchdog.at(0, text, patient=True)
        return doing(text)

    return told


def note_failure(error: StreamTuneError) -> bool:
    """Write an error down for the launcher of this rank; whether there is one, which then shows it."""
    try:
        environment = read_environment()
    except StreamTuneError:
        environment = RankEnvironment()
    return write_failure(Failure.of(error, environment.rank, environment.host))


def tell_failure(error: StreamTuneError) -> None:
    """Say how the command failed, in one place whatever the number of ranks."""
    if note_failure(error):
        return
    print_error(error)
    if _terminal:
        time.sleep(ECHO_SECONDS)
        with os.fdopen(_terminal[0], "w") as terminal:
            failure = Failure.of(error, read_environment().rank, read_environment().host)
            print_error(failure.error(), Console(file=terminal, highlight=False, width=err.width))
