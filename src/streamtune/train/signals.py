"""Ctrl-C, SIGTERM, SIGHUP and a reader that has gone: the run stops cleanly; a second signal leaves at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import Any

from streamtune.base import interrupts
from streamtune.base.streams import reader_is_gone


class StopRequest:
    """While entered, records the first signal in :attr:`signum`, which the loop checks.

    The second SIGINT or SIGTERM meets the system's default, which ends the process within the instant, even inside a
    kernel or in the middle of writing a checkpoint. That loses nothing: a checkpoint counts only once it is renamed
    into place. SIGHUP is sent several times where a terminal is closed, or after SIGTERM, and so never counts as the
    second; under ``nohup``, where it is ignored, it stays ignored.

    A reader of standard output that has gone (``| head``, a viewer that was closed) requests a stop too: nobody may see
    how the run goes on, and what was trained is saved.

    Outside the main thread, where Python accepts no handlers, a signal changes nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._owner = 0
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._entered = ExitStack()

    @property
    def requested(self) -> bool:
        """True if the run is to stop."""
        return self.signum is not None or (bool(self._owner) and reader_is_gone())

    @property
    def reason(self) -> str:
        """The reason to stop: the name of a signal, or that nobody reads the output; empty where there is none."""
        if self.signum is not None:
            return signal.Signals(self.signum).name
        return "the reader of the output has gone" if reader_is_gone() else ""

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 for Ctrl-C, 143 for SIGTERM and all others, 0 where it was not stopped."""
        if self.signum is None and not reader_is_gone():
            return 0
        return 128 + (signal.SIGINT if self.signum == signal.SIGINT else signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._entered.enter_context(interrupts.stopping())
            for signum in interrupts.SIGNALS:
                if not interrupts.is_ignored(signum):
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        self._entered.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        interrupts.handled()
        if os.getpid() != self._owner:  # a fork of a library's: its parent decides
            return
        self.signum = signum
        for caught in self._previous:
            again = signal.SIG_DFL if caught in (signal.SIGINT, signal.SIGTERM) else signal.SIG_IGN
            signal.signal(caught, again)
        # Straight to the file descriptor: a handler may run in the middle of a print, whose buffer it must not touch.
        # The live line hides the cursor, and a process that is killed next would not bring it back.
        with suppress(OSError):  # the terminal may be what has gone
            cursor = interrupts.SHOW_CURSOR + b"\n" if os.isatty(2) else b""
            os.write(2, cursor + b"Stopping after this micro-batch, then saving. Once more leaves at once.\n")
