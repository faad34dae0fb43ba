"""A process of its own for what measures, so that only this process can run out of memory or be killed."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from streamtune.base.quiet import packed_call, run_packed
from streamtune.base.safe_path import SafeChildren


class Child:
    """A new process (spawned, not forked) that runs a function, connected to this one by a pipe.

    The process ignores Ctrl-C, which a terminal sends to all its processes: this one decides when it ends, and
    ends it when it exits itself.

    Args:
        function: Called in the process with its end of the pipe and ``args``; all must be picklable.
        args: Further arguments.

    Attributes:
        connection: This process's end of the pipe, for both directions.
        process: The process.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_packed, args=(theirs, *packed_call(function, *args)), daemon=True)
        with SafeChildren(), _interrupts_ignored():  # by the process as well, from its first import on
            self.process.start()
        theirs.close()

    def close(self, *, seconds: float) -> None:
        """Close the pipe and wait ``seconds`` for the process to end; then kill it."""
        self.connection.close()
        self.process.join(timeout=seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python takes no handlers there
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
