"""Handlers that end the command at once after Ctrl-C, SIGTERM or SIGHUP, and clean up.

The handler raises no exception: inside a callback of a C++ library, an exception would abort the process or be lost.
Instead the handler kills the command's children, removes its temporary folders, restores the terminal, and calls
``os._exit``.

Python runs a handler only between two instructions of the main thread. If the main thread stays inside a library call,
a second thread, which the signal also wakes, does the same after :data:`PATIENCE_SECONDS`.

During training, ``train.StopRequest`` installs its own handlers, which save a checkpoint first.

This module imports almost nothing, because the command line installs the handlers before its other imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SHOW_CURSOR = b"\x1b[?25h"
PATIENCE_SECONDS = 1.5
"""Seconds that the main thread has to run the handler, before the second thread does so."""
POSTPONED_SECONDS = 2.0
"""Seconds that a command has, after a postponed signal, to reach a point where it can end with its results."""


class _State:
    def __init__(self) -> None:
        self.owner = 0
        """Process that installed the handlers; a fork inherits them."""
        self.text = "Stopped."
        self.folders: list[str] = []
        self.postponed = False
        self.asked = False
        """True if a signal came while signals were postponed."""
        self.stopping = False
        """True while other handlers are installed, which do not exit at once."""
        self.received = 0
        """Number of signals received."""
        self.handled = 0
        """Number of signals for which a handler ran."""


_state = _State()


def exit_on_signals(*, for_good: bool = False) -> Callable[[], None]:
    """Make Ctrl-C, SIGTERM and SIGHUP end this process at once; return a function that restores the earlier handlers.

    An ignored SIGHUP, as under ``nohup``, stays ignored. Nothing happens if the handlers are already installed, or
    outside the main thread, where Python accepts no handlers.

    Args:
        for_good: True to never restore the earlier handlers, and to ignore Ctrl-C while the interpreter shuts down.
    """
    if threading.current_thread() is not threading.main_thread() or _state.owner == os.getpid():
        return lambda: None
    _state.__init__()  # type: ignore[misc]  # a fork starts with a fresh state, not the parent's
    _state.owner = os.getpid()
    previous = {signum: signal.signal(signum, _exit_on_signal) for signum in SIGNALS if not is_ignored(signum)}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_exit_if_late, args=(read_end,), name="signals", daemon=True)
    watcher.start()
    if hasattr(signal, "pthread_sigmask"):  # a rank's launcher has blocked them
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if for_good:
        import atexit

        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def restore_handlers() -> None:
        if for_good or _state.owner != os.getpid():
            return
        _state.owner = 0
        signal.set_wakeup_fd(-1)
        os.close(write_end)  # this ends the thread
        watcher.join()
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    return restore_handlers


def is_ignored(signum: int) -> bool:
    """Return True if the process ignores this signal, and it is neither SIGINT nor SIGTERM: SIGHUP under ``nohup``."""
    return signum not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(signum) == signal.SIG_IGN


@contextmanager
def print_on_signal(text: str) -> Iterator[None]:
    """Context manager that sets the text printed if a signal ends the process; the default is ``Stopped.``"""
    before, _state.text = _state.text, text
    try:
        yield
    finally:
        _state.text = before


def remove_on_signal(folder: str) -> None:
    """Register a folder that is deleted if a signal ends the process; the folder may be missing by then."""
    _state.folders.append(folder)


@contextmanager
def temporary_directory(**options: Any) -> Iterator[str]:
    """Context manager like ``tempfile.TemporaryDirectory``, but the directory is also removed on a signal."""
    import tempfile

    with tempfile.TemporaryDirectory(**options) as folder:
        remove_on_signal(folder)
        try:
            yield folder
        finally:
            _state.folders.remove(folder)


@contextmanager
def postpone_ctrl_c() -> Iterator[None]:
    """Context manager that postpones the first Ctrl-C until :func:`raise_if_postponed` is called.

    Two seconds after Ctrl-C, the process ends.
    """
    _state.postponed, _state.asked = True, False
    try:
        yield
    finally:
        _state.postponed = False


def raise_if_postponed() -> None:
    """Raise ``KeyboardInterrupt`` if Ctrl-C was postponed. Do not call it inside a callback of a C++ library."""
    if _state.asked:
        _state.asked = _state.postponed = False
        raise KeyboardInterrupt


@contextmanager
def use_other_handlers() -> Iterator[None]:
    """Context manager for code that installs its own signal handlers; each handler calls :func:`record_handled_signal`.

    The process ends if two signals arrive and no handler records either of them.
    """
    _state.stopping = True
    try:
        yield
    finally:
        _state.stopping = False


def record_handled_signal() -> None:
    """Record that the main thread has run a signal handler, so that the second thread does not end the process."""
    _state.handled += 1


@contextmanager
def block_signals() -> Iterator[None]:
    """Context manager that blocks signals with ``pthread_sigmask``; they are delivered on exit.

    A process started inside the context inherits the blocked signals.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    if _state.owner != os.getpid():  # a fork made by a library: its parent decides, and the fork ends silently
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    record_handled_signal()
    if _state.postponed and signum == signal.SIGINT and not _state.asked:
        _state.asked = True
        return
    for caught in SIGNALS:  # a second signal ends the process during clean-up
        if not is_ignored(caught):
            signal.signal(caught, signal.SIG_DFL)
    _clean_up()
    if signum == signal.SIGINT:
        os._exit(128 + signum)
    os.kill(os.getpid(), signum)  # so that the parent process sees the signal


def remove_folder(folder: str) -> None:
    """Delete a folder. Hidden files come last, because one of them names the folder's owner."""
    import shutil

    with suppress(OSError):
        for name in sorted(os.listdir(folder), key=lambda name: name.startswith(".")):  # noqa: PTH208
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)  # leaves files
            with suppress(OSError):
                os.unlink(f"{folder}/{name}")  # noqa: PTH108
        os.rmdir(folder)  # noqa: PTH106


def _exit_if_late(read_end: int) -> None:
    """End the process after a signal if the main thread runs no handler in time."""
    while signal_byte := os.read(read_end, 1):
        signum = signal_byte[0]
        if signum not in SIGNALS:
            continue
        _state.received += 1
        signal_number = _state.received
        waited = 0.0
        while waited < PATIENCE_SECONDS and _state.handled < signal_number:
            time.sleep(0.05)
            waited += 0.05
        while _state.asked and waited < POSTPONED_SECONDS:
            time.sleep(0.05)
            waited += 0.05
        is_late = _state.handled < signal_number and (not _state.stopping or signal_number - _state.handled > 1)
        if is_late or _state.asked:
            _clean_up()
            os._exit(128 + signum)
    os.close(read_end)


def _clean_up() -> None:
    _kill_children()
    for folder in _state.folders:
        remove_folder(folder)
    # Straight to the file descriptors: the handler may run in the middle of a print.
    with suppress(OSError):
        if os.isatty(1) and not os.isatty(2):
            os.write(1, b"\r\x1b[2K" + SHOW_CURSOR)
    with suppress(OSError):
        os.write(2, (b"\r\x1b[2K" + SHOW_CURSOR if os.isatty(2) else b"") + f"{_state.text}\n".encode())


def _kill_children() -> None:
    stopped: set[int] = set()
    while new := _descendants() - stopped:  # stopped first: the children of a killed process could not be found
        for process in new:
            with suppress(OSError):
                os.kill(process, signal.SIGSTOP)
        stopped |= new
    for process in stopped:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208 (no further imports in a handler)
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # pid (name) state parent ...: the name may hold blanks and parentheses
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                    if state not in b"ZX":
                        parents[int(name)] = int(parent)
    descendants: set[int] = set()
    while (
        new := {child for child, parent in parents.items() if parent in descendants or parent == os.getpid()}
        - descendants
    ):
        descendants |= new
    return descendants - {_resource_tracker_pid()}


def _resource_tracker_pid() -> int | None:
    """Return the process id of multiprocessing's resource tracker, which must end after this process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), "_pid", None)
