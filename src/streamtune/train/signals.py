"""Ctrl-C and SIGTERM: the first asks the run to stop cleanly, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """While entered, turns the first SIGINT or SIGTERM into :attr:`signum`, which the loop looks at.

    The second signal meets the system's default, which ends the process within the instant, even inside a kernel or in
    the middle of writing a checkpoint. That loses nothing: a checkpoint counts only once it is renamed into place.

    Outside the main thread, where Python accepts no handlers, entering changes nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process stopped by this signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum if self.signum is not None else 0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for caught in self._previous:
            signal.signal(caught, signal.SIG_DFL)
        # Straight to the file descriptor: a handler may run in the middle of a print, whose buffer it must not touch.
        # The live line hides the cursor, and a process that is killed next would not bring it back.
        cursor = SHOW_CURSOR + b"\n" if sys.stderr.isatty() else b""
        os.write(2, cursor + b"Stopping after this micro-batch, then saving. Once more leaves at once.\n")
