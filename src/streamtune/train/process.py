"""State of the training process: every random generator that a step may draw from, and the signals that stop a run."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamtune.base import interrupts
from streamtune.base.streams import reader_is_gone


@dataclass(frozen=True)
class RngState:
    """Torch's generators as tensors; ``random``'s and numpy's as plain JSON values."""

    tensors: dict[str, Tensor]
    """``cpu`` and ``cuda:0`` ... -> uint8"""
    plain: dict[str, Any]
    """``python`` and ``numpy`` -> nested lists of numbers and strings"""


def seed_everything(seed: int, rank: int = 0, step: int = 0) -> None:
    """Seed ``random``, numpy and torch on every device. ``seed`` is below 2**32, numpy's limit.

    Ranks draw differently: two ranks that drop the same units would be less random together than one alone. ``step`` is
    for ranks that start there without a random state to restore.
    """
    if rank > 0 or step > 0:
        seed = int(np.random.SeedSequence((seed, rank, step) if step else (seed, rank)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Have torch refuse kernels whose results vary from run to run. Call it before a device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_rng() -> RngState:
    """Read the state of every generator; draws nothing."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    return RngState(tensors, plain)


def restore_rng(state: RngState) -> None:
    """Restore every generator. Devices that do not exist any more are left out."""
    torch.set_rng_state(state.tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in state.tensors:
            torch.cuda.set_rng_state(state.tensors[f"cuda:{index}"], index)
    version, internal, gauss = state.plain["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state.plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random state at the end, whatever the block draws."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


class StopRequest:
    """Records the first signal in :attr:`signum` while entered; the loop checks it and stops cleanly.

    A second SIGINT or SIGTERM has the system's default effect: it ends the process at once, even inside a kernel or
    while a checkpoint is written. That loses nothing: a checkpoint counts only once it is renamed into place. SIGHUP is
    sent several times when a terminal is closed, or after SIGTERM, and so never counts as the second; under ``nohup``,
    where it is ignored, it stays ignored.

    If the reader of standard output has gone (``| head``, a closed viewer), a stop is requested too: nobody may see how
    the run goes on, and what was trained is saved.

    Outside the main thread, where Python accepts no handlers, signals change nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._owner = 0
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._entered = ExitStack()

    @property
    def requested(self) -> bool:
        return self.signum is not None or (bool(self._owner) and reader_is_gone())

    @property
    def reason(self) -> str:
        """Name of the signal, or that nobody reads the output; empty without a stop."""
        if self.signum is not None:
            return signal.Signals(self.signum).name
        return "the reader of the output has gone" if reader_is_gone() else ""

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 130 for Ctrl-C, 143 for SIGTERM and all others, 0 without a stop."""
        if self.signum is None and not reader_is_gone():
            return 0
        return 128 + (signal.SIGINT if self.signum == signal.SIGINT else signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._entered.enter_context(interrupts.handled_elsewhere())
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
        interrupts.record_handled()
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
