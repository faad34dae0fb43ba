"""Random states of the training process, and the signals that stop a run."""

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
from streamtune.ops.devices import accelerators, random_state, set_random_state


@dataclass(frozen=True)
class RngState:
    """States of all random generators: of torch as tensors, of ``random`` and numpy as JSON values."""

    tensors: dict[str, Tensor]
    """``cpu``, ``cuda:0``, ... -> random state as uint8 tensor"""
    json_states: dict[str, Any]
    """``python`` and ``numpy`` -> nested lists of numbers and strings"""


def seed_everything(seed: int, rank: int = 0, step: int = 0) -> None:
    """Seed ``random``, numpy and torch on every device, with a different seed on each rank.

    Args:
        seed: Seed below 2**32, numpy's limit.
        rank: Rank of this process.
        step: Step from which the run resumes without a saved random state.
    """
    if rank > 0 or step > 0:
        seed = int(np.random.SeedSequence((seed, rank, step) if step else (seed, rank)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Make torch raise an error in nondeterministic kernels. Call this before a device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_rng() -> RngState:
    """Return the state of every random generator; nothing is drawn."""
    tensors = {"cpu": torch.get_rng_state()}
    for device in accelerators():
        if (state := random_state(device)) is not None:
            tensors[str(device)] = state
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    return RngState(tensors, plain)


def restore_rng(state: RngState) -> None:
    """Restore the state of every random generator; saved devices that do not exist are ignored."""
    torch.set_rng_state(state.tensors["cpu"])
    for device in accelerators():
        if str(device) in state.tensors:
            set_random_state(state.tensors[str(device)], device)
    version, internal, gauss = state.json_states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state.json_states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Context manager that restores the random state on exit."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)


class StopRequest:
    """Context manager that records SIGINT, SIGTERM and SIGHUP in :attr:`signum`, so that the training loop stops
    cleanly.

    A second SIGINT or SIGTERM ends the process at once. No checkpoint is lost, because a checkpoint is valid only after
    it is renamed into place. SIGHUP does not count as the second signal, because a closing terminal sends it several
    times.

    A stop is also requested if the reader of standard output has closed the pipe (``| head``).

    Outside the main thread Python accepts no handlers, so signals have their usual effect.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._owner_pid = 0
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._entered = ExitStack()

    @property
    def requested(self) -> bool:
        return self.signum is not None or (bool(self._owner_pid) and reader_is_gone())

    @property
    def reason(self) -> str:
        """Name of the signal, or a text about the closed output; empty without a stop."""
        if self.signum is not None:
            return signal.Signals(self.signum).name
        return "the reader of the output has gone" if reader_is_gone() else ""

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0 without a stop, 130 for Ctrl-C, 143 in all other cases."""
        if self.signum is None and not reader_is_gone():
            return 0
        return 128 + (signal.SIGINT if self.signum == signal.SIGINT else signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        self._owner_pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._entered.enter_context(interrupts.use_other_handlers())
            for signum in interrupts.SIGNALS:
                if not interrupts.is_ignored(signum):
                    self._previous[signum] = signal.signal(signum, self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
        self._entered.close()

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        interrupts.record_handled_signal()
        if os.getpid() != self._owner_pid:  # in a forked worker: its parent decides
            return
        self.signum = signum
        for handled_signum in self._previous:
            next_handler = signal.SIG_DFL if handled_signum in (signal.SIGINT, signal.SIGTERM) else signal.SIG_IGN
            signal.signal(handled_signum, next_handler)
        # Written to the file descriptor, because the handler may interrupt a print and must not touch its buffer.
        # The live line hides the cursor; show it now, because the process may be killed next.
        with suppress(OSError):  # the terminal may be closed
            cursor = interrupts.SHOW_CURSOR + b"\n" if os.isatty(2) else b""
            os.write(2, cursor + b"Stopping after this micro-batch, then saving. Repeat to quit at once.\n")
