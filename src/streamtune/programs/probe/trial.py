"""Run one trial of the probe: whole training steps in a process of their own, whose memory and time are limited.

Inside the process, every storage is counted on the CPU, and the step is stopped where it exceeds the budget; an
accelerator's allocator is given the budget as its limit. From outside, a process that takes more of the machine's
memory than is free, or more time than it is given, is killed. The prober goes on however a trial ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

import psutil

from streamtune.base import interrupts
from streamtune.base.child import Child
from streamtune.base.sizes import show_size
from streamtune.engine.memory.host import reserved_host_bytes, usable_host_bytes
from streamtune.plan.budget import Budget
from streamtune.programs.probe.steps import PrepareStep, Shape, serve
from streamtune.schedule import Schedule

Cause = Literal["", "device memory", "host memory", "disk memory", "time", "crash"]
"""The kind of failure of a trial; empty if it did not fail."""

POLL_SECONDS = 0.02
"""Interval at which the process is looked at: memory is filled at some 5 GB/s, so within 0.1 GB."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        fits: True if both steps were done within the budget.
        cause: The kind of failure.
        reason: The failure in a sentence.
        detail: The traceback of an exception that is no lack of memory.
        peak_bytes: Largest number of bytes on the device; of a trial that was stopped, the largest until then.
        host_bytes, disk_bytes: The same for what the engine keeps there, all ranks of a node together.
        rss_bytes: Largest resident memory of the process that was seen.
        step_seconds: Of the second step. On the CPU it includes the time for counting every storage.
        terms: Device bytes at the peak by what they are.
        host_terms: Bytes on the host by what they are.
        traffic: What a rank sends in a step, where there are several.
        schedule: The schedule of the step, if it was streamed.
        env: Device, versions, and the budget the device was given.
    """

    fits: bool
    cause: Cause = ""
    reason: str = ""
    detail: str = ""
    peak_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    rss_bytes: int | None = None
    step_seconds: float | None = None
    terms: dict[str, int] = field(default_factory=dict)
    host_terms: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, Any] | None = None
    schedule: Schedule | None = None
    env: dict[str, Any] = field(default_factory=dict)


def run_trial(
    prepare: PrepareStep,
    shape: Shape,
    budget: Budget,
    *,
    seconds: float,
    tell: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """Run a trial in a process of its own.

    Args:
        prepare: Builds what is stepped, in that process: must be picklable.
        shape: Mode, tokens and rows.
        budget: Bytes it may take.
        seconds: Time it may take, loading libraries and building the model included.
        tell: Called with what it is doing.
    """
    child = Child(serve, prepare, shape, budget)
    watch = _Watch(child.process, seconds)
    patience = 0
    try:
        outcome = _listen(child, watch, tell)
        patience = 0 if watch.killed else 5  # none where Ctrl-C broke it off
        return outcome
    finally:
        child.close(seconds=patience)


def _listen(child: Child, watch: _Watch, tell: Callable[[str], None]) -> Outcome:
    """Wait until the process sends its outcome or ends, and pass its messages to ``tell``."""
    while True:
        interrupts.check()
        try:
            if child.connection.poll(POLL_SECONDS):
                message = child.connection.recv()
                if not isinstance(message, str):
                    return replace(Outcome(**message), rss_bytes=watch.rss)
                tell(message)
        except (EOFError, OSError):
            child.process.join()
            failed = watch.killed or Outcome(False, "crash", _died(child.process.exitcode))
            return replace(failed, rss_bytes=watch.rss)
        watch.look()


class _Watch:
    """Kills a process that would exhaust the machine's memory, or that takes more time than it is given."""

    def __init__(self, process: SpawnProcess, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._started = time.monotonic()
        self._reserve = reserved_host_bytes()
        self._most = usable_host_bytes()
        self.rss = 0
        """Largest resident memory seen."""
        self.killed: Outcome | None = None
        """The outcome of a process that was killed."""

    def look(self) -> None:
        """Measure the process once, and kill it if it takes too much memory or time."""
        with suppress(psutil.Error):
            self.rss = max(self.rss, psutil.Process(self._process.pid).memory_info().rss)
        if self.killed:
            return
        if self.rss > self._most:
            reason = f"host memory: the process took {show_size(self.rss)} of the {show_size(self._most)} there are"
            self._kill("host memory", reason)
        elif psutil.virtual_memory().available < self._reserve // 2:
            self._kill("host memory", f"host memory: less than {show_size(self._reserve / 2)} of the machine is left")
        elif time.monotonic() - self._started > self._seconds:
            self._kill("time", f"not done after {self._seconds:g} s")

    def _kill(self, cause: Cause, reason: str) -> None:
        self.killed = Outcome(False, cause, reason)
        self._process.kill()


def _died(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (the system does that where memory runs out)" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{hint}"
