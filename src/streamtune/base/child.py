"""A child process in which a measurement runs, so that running out of memory kills only the child."""

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
    """A new process (spawned, not forked) that runs a function, with a pipe between both processes.

    The child ignores Ctrl-C, which a terminal sends to parent and child. The child is a daemon process: it ends when
    its parent exits.

    Args:
        function: Function called in the child with its end of the pipe and ``args``; all must be picklable.
        args: Further arguments of ``function``.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_end = context.Pipe()
        self.process = context.Process(
            target=run_pickled_call, args=(child_end, *pickle_call(function, *args)), daemon=True
        )
        with SafeChildren(), _ignore_interrupts():  # inherited by the child, from its first import on
            self.process.start()
        child_end.close()

    def close(self, *, seconds: float) -> None:
        """Close the pipe, wait up to ``seconds`` for the process to end, and kill it if it still runs."""
        self.connection.close()
        self.process.join(timeout=seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python accepts handlers only in the main thread
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def pickle_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """Return the arguments ``pickled_call`` and ``with_quiet_imports`` of :func:`run_pickled_call`."""
    return pickle.dumps((function, args)), imports_are_quiet()


def run_pickled_call(first_argument: Any, pickled_call: bytes, with_quiet_imports: bool) -> None:
    """Unpickle a function with its arguments, and call it with ``first_argument`` in front of them.

    The modules of the function are imported only here.
    """
    if with_quiet_imports:
        quiet_imports()
    function, args = pickle.loads(pickled_call)
    function(first_argument, *args)
