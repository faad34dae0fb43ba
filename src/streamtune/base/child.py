"""A process of its own for a measurement, so that only this process can run out of memory or be killed."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from streamtune.base.libraries import imports_are_quiet, quiet_imports
from streamtune.base.safe_path import SafeChildren


class Child:
    """A new process (spawned, not forked) that runs a function, connected to this one by a pipe.

    The child ignores Ctrl-C, which a terminal sends to all its processes: the parent decides when it ends, and ends it
    when it exits itself.

    Args:
        function: Called in the child with its end of the pipe and ``args``; all must be picklable.
        args: Further arguments.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_packed, args=(theirs, *packed_call(function, *args)), daemon=True)
        with SafeChildren(), _interrupts_ignored():  # by the child as well, from its first import on
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


def packed_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """Pack a call for :func:`run_packed` in another process, which logs as little on import as this one."""
    return pickle.dumps((function, args)), imports_are_quiet()


def run_packed(first: Any, packed: bytes, quiet: bool) -> None:
    """Make the call, with ``first`` before its arguments. The modules it needs are imported here, not before."""
    if quiet:
        quiet_imports()
    function, args = pickle.loads(packed)
    function(first, *args)
