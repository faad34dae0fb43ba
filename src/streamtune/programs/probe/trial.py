"""Run one measured trial: whole training steps in their own process, with limits on memory and time.

On a CPU, the process counts the bytes of all tensor storages and stops the step at the budget. On an accelerator, the
budget is the limit of PyTorch's allocator. The parent process kills a trial that exceeds the machine's free memory or
the time limit.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from streamtune.base import interrupts
from streamtune.base.child import Child
from streamtune.base.model_facts import model_device
from streamtune.base.text import show_size
from streamtune.engine import StreamHandle, decoder_layers
from streamtune.engine.memory.host import Tally, free_host_bytes, reserved_host_bytes, usable_host_bytes
from streamtune.errors import OutOfMemoryError, StorageError
from streamtune.ops.devices import synchronize
from streamtune.optim import state_tensors
from streamtune.plan.budget import Budget
from streamtune.plan.simulate.memory import (
    ACTIVATION,
    OPTIMIZER,
    LiveBytes,
    device_model_bytes,
    model_bytes,
    storage_bytes,
)
from streamtune.plan.simulate.simulate import TERMS
from streamtune.plan.simulate.workload import Mode
from streamtune.schedule import Schedule

Cause = Literal["", "device memory", "host memory", "disk memory", "time", "crash"]
"""Kind of failure of a trial; empty if the trial fits."""

POLL_SECONDS = 0.02
"""Seconds between two checks of a process. Memory fills at about 5 GB/s, so limits are exceeded by at most 0.1 GB."""


@dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    Attributes:
        fits: True if the trial's two training steps ran within the memory budget.
        cause: Kind of failure.
        reason: Description of the failure in one sentence.
        detail: Traceback of an exception that is not about memory.
        peak_bytes: Peak bytes on the device; for a stopped trial, up to the stop.
        host_bytes, disk_bytes: Peak bytes offloaded to host and disk, summed over the ranks of a node.
        rss_bytes: Peak resident memory of the process, in bytes.
        step_seconds: Seconds of the second step; on a CPU, this includes measuring the memory of all tensors.
        terms: Parts of the device peak in bytes: weights, activations and others.
        host_terms: Parts of the host memory in bytes.
        traffic: Data that a rank sends in a step; None with one rank.
        schedule: Streaming schedule of the step; None without streaming.
        env: Device, versions and the device budget.
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
    timeout_seconds: float,
    notify_phase: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """Run a trial in its own process.

    Args:
        prepare: Picklable function that builds the training step in the new process.
        timeout_seconds: Time limit, including loading libraries and building the model.
        notify_phase: Callback for the name of each phase.
    """
    child = Child(serve_trial, prepare, shape, budget)
    watch = _ProcessWatch(child.process, timeout_seconds)
    patience = 0
    try:
        outcome = _wait_for_outcome(child, watch, notify_phase)
        patience = 0 if watch.killed else 5  # after Ctrl-C it stays 0
        return outcome
    finally:
        child.close(seconds=patience)


def _wait_for_outcome(child: Child, watch: _ProcessWatch, notify_phase: Callable[[str], None]) -> Outcome:
    """Wait until the process sends an outcome or ends; pass its phases to ``notify_phase``."""
    while True:
        interrupts.raise_if_postponed()
        try:
            if child.connection.poll(POLL_SECONDS):
                message = child.connection.recv()
                if not isinstance(message, str):
                    return replace(Outcome(**message), rss_bytes=watch.rss)
                notify_phase(message)
        except (EOFError, OSError):
            child.process.join()
            failed = watch.killed or Outcome(False, "crash", _describe_exit(child.process.exitcode))
            return replace(failed, rss_bytes=watch.rss)
        watch.kill_if_over_limit()


class _ProcessWatch:
    """Kills a process that would exhaust the machine's memory, or that exceeds its time limit."""

    def __init__(self, process: SpawnProcess, seconds: float) -> None:
        self._process, self._seconds = process, seconds
        self._started = time.monotonic()
        self._reserve = reserved_host_bytes()
        self._most = usable_host_bytes()
        self.rss = 0
        """Peak resident memory of the process, in bytes."""
        self.killed: Outcome | None = None
        """Outcome of the process if it was killed."""

    def kill_if_over_limit(self) -> None:
        with suppress(psutil.Error):
            self.rss = max(self.rss, psutil.Process(self._process.pid).memory_info().rss)
        if self.killed:
            return
        if self.rss > self._most:
            reason = f"host memory: the process used {show_size(self.rss)}, only {show_size(self._most)} were free"
            self._kill("host memory", reason)
        elif free_host_bytes() < self._reserve // 2:
            self._kill("host memory", f"host memory: less than {show_size(self._reserve / 2)} of host memory is free")
        elif time.monotonic() - self._started > self._seconds:
            self._kill("time", f"not finished after {self._seconds:g} s (--trial-timeout)")

    def _kill(self, cause: Cause, reason: str) -> None:
        self.killed = Outcome(False, cause, reason)
        self._process.kill()


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (usually because the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


# --- in the process ---------------------------------------------------------------------------------------------------


STEPS = 2
"""Number of steps in a trial. The first creates the optimizer state, so that the second is like all later steps."""


@dataclass(frozen=True)
class Shape:
    """Training method, sequence length in tokens and batch size of a trial."""

    mode: Mode
    length: int
    batch_size: int


@dataclass(frozen=True)
class TrainingStep:
    """A model, its optimizer, and a function that runs a whole step: gradients, clipping, update.

    ``beside`` is a second model that runs without training, such as a reference model.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Callable[[], object]
    handle: StreamHandle | None = None
    beside: nn.Module | None = None

    @property
    def bytes_before_step(self) -> dict[str, int]:
        """Bytes of the weights of each model, which are allocated before the step begins."""
        # On a CPU, weights on the host are in the measured memory too.
        held = model_bytes if model_device(self.model).type == "cpu" else device_model_bytes
        terms = {"weights": held(self.model)}
        return terms if self.beside is None else {**terms, "reference": held(self.beside)}


PrepareStep = Callable[[Shape], TrainingStep]
"""Picklable function that builds the training step in the trial's process."""


class BudgetExceededError(MemoryError):
    """A step needs more memory than its budget allows on the device, on the host or on disk."""

    def __init__(self, tier: str, what: str) -> None:
        super().__init__(what)
        self.tier = tier


class _BudgetWatch(LiveBytes):
    """Counts the bytes of live tensors, and stops the step as soon as device, host or disk exceeds its budget."""

    def __init__(self, step: TrainingStep, budget: Budget) -> None:
        super().__init__(step.model, decoder_layers(step.model), other_model=step.beside)
        self.fixed = step.bytes_before_step
        self.weights = sum(self.fixed.values())
        self._step, self._budget = step, budget

    def __enter__(self) -> _BudgetWatch:
        self._check_budget("device", self.weights, self._budget.device_bytes)
        super().__enter__()
        return self

    def _count_results(self, out: Any) -> None:
        super()._count_results(out)
        self._check_budget("device", self.weights + self.total, self._budget.device_bytes)
        for name, tally, limit in _offload_tallies(self._step.handle, self._budget):
            self._check_budget(name, tally.live_bytes, limit)

    def _check_budget(self, name: str, live: int, limit: int | None) -> None:
        if limit is not None and live > limit:
            raise BudgetExceededError(name, f"{name} memory: the step needs more than {show_size(limit)}")

    def bytes_at_peak(self) -> dict[str, int]:
        """Return the parts of the device peak; optimizer state counted as activations is moved to ``optimizer``."""
        held = {**self.fixed, **self.at_peak}
        state = min(_optimizer_bytes(self._step.optimizer, torch.device("cpu")) - held[OPTIMIZER], held[ACTIVATION])
        held[OPTIMIZER], held[ACTIVATION] = held[OPTIMIZER] + state, held[ACTIVATION] - state
        return {TERMS[name]: size for name in TERMS if (size := held.get(name, 0))}


def serve_trial(connection: Connection, prepare: PrepareStep, shape: Shape, budget: Budget) -> None:
    """Run a trial in the trial's process; send each phase as text, and the outcome as a dictionary."""
    _raise_oom_score()
    _exit_when_parent_ends()
    result: dict[str, Any] = {}
    try:
        connection.send("building the model")
        step = prepare(shape)
        result["schedule"] = step.handle.schedule if step.handle is not None else None
        device = model_device(step.model)
        measure = _run_trial_on_accelerator if device.type == "cuda" else _run_trial_on_cpu
        measure(step, budget, connection.send, result)
        connection.send({"fits": True, **result})
    except BaseException as error:
        with suppress(ConnectionError):  # the parent is gone, as after Ctrl-C
            connection.send({"fits": False, **result, **_describe_error(error)})


def _run_trial_on_cpu(
    step: TrainingStep, budget: Budget, notify_phase: Callable[[str], None], result: dict[str, Any]
) -> None:
    """Run the steps and count the bytes of all tensor storages; ``result`` is filled even if a step fails."""
    result["env"] = _environment_facts("cpu", budget.device_bytes)
    watch = _BudgetWatch(step, budget)
    try:
        with watch:
            result["step_seconds"] = _run_steps(step, notify_phase, lambda: synchronize(model_device(step.model)))
    finally:
        result["peak_bytes"], result["terms"] = watch.weights + watch.peak, watch.bytes_at_peak()
        result.update(_offloaded_peaks(step, budget))


def _run_trial_on_accelerator(
    step: TrainingStep, budget: Budget, notify_phase: Callable[[str], None], result: dict[str, Any]
) -> None:
    """Run the steps with the budget as the allocator's limit; ``result`` is filled even if a step fails."""
    device = model_device(step.model)
    total = torch.cuda.get_device_properties(device).total_memory
    limit = int((1 - budget.margin) * total) if budget.device_bytes is None else budget.device_bytes
    result["env"] = _environment_facts(torch.cuda.get_device_name(device), limit)
    fixed = step.bytes_before_step
    weights = sum(fixed.values())
    result["terms"], result["peak_bytes"] = fixed, weights
    if weights > limit:
        raise BudgetExceededError("device", f"device memory: the weights alone need more than {show_size(limit)}")
    torch.cuda.empty_cache()  # blocks left by loading would count
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        result["step_seconds"] = _run_steps(step, notify_phase, lambda: torch.cuda.synchronize(device))
    finally:
        state = _optimizer_bytes(step.optimizer, device)
        peak = torch.cuda.max_memory_allocated(device)
        result["peak_bytes"] = peak
        result["terms"] = {**fixed, "optimizer": state, "gradients and activations": peak - weights - state}
        result.update(_offloaded_peaks(step, budget))
    for name, tally, most in _offload_tallies(step.handle, budget):
        if most is not None and tally.peak_bytes > most:
            raise BudgetExceededError(name, f"{name} memory: the step needs more than {show_size(most)}")


def _run_steps(step: TrainingStep, notify_phase: Callable[[str], None], synchronize: Callable[[], None]) -> float:
    """Run :data:`STEPS` steps; return the seconds of the last step."""
    started = 0.0
    for number in range(1, STEPS + 1):
        notify_phase(f"step {number} of {STEPS}")
        synchronize()
        started = time.perf_counter()
        step.run()
    synchronize()
    return time.perf_counter() - started


def _offload_tallies(handle: StreamHandle | None, budget: Budget) -> list[tuple[str, Tally, int | None]]:
    """Return (name, byte counter, budget in bytes) of host and disk; empty without streaming."""
    if handle is None:
        return []
    tiers = handle.tiers
    return [("host", tiers.host, budget.host_bytes), ("disk", tiers.disk, budget.disk_bytes)]


def _offloaded_peaks(step: TrainingStep, budget: Budget) -> dict[str, int]:
    return {f"{name}_bytes": tally.peak_bytes for name, tally, _ in _offload_tallies(step.handle, budget)}


def _describe_error(error: BaseException) -> dict[str, Any]:
    """Return ``cause`` and ``reason`` of the outcome; after a crash, also ``detail`` with the traceback."""
    chain: BaseException | None = error  # the training loop wraps a lack of memory
    while chain is not None:
        if isinstance(chain, BudgetExceededError):
            return {"cause": f"{chain.tier} memory", "reason": str(chain)}
        if isinstance(chain, torch.OutOfMemoryError):
            return {"cause": "device memory", "reason": "device memory: the allocator is out of memory"}
        if isinstance(chain, MemoryError) or "can't allocate memory" in str(chain):
            return {"cause": "host memory", "reason": "host memory: the system is out of memory"}
        chain = chain.__cause__ or chain.__context__
    if isinstance(error, OutOfMemoryError):  # the engine's: host memory
        return {"cause": "host memory", "reason": error.what}
    if isinstance(error, StorageError):
        return {"cause": "disk memory", "reason": error.what}
    first = (str(error).strip().splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}".removesuffix(": ")
    return {"cause": "crash", "reason": reason, "detail": "".join(traceback.format_exception(error))}


def _raise_oom_score() -> None:
    """Make this process the first that Linux kills if memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _exit_when_parent_ends() -> None:
    """Exit when the parent process ends, so that no step holds memory after the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _environment_facts(device: str, device_bytes: int | None) -> dict[str, Any]:
    return {
        "device": (platform.processor() or platform.machine()) if device == "cpu" else device,
        "device_bytes": device_bytes,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Return the bytes of optimizer state on devices of the same type as ``device``."""
    values = (value for state in optimizer.state.values() for _, value in state_tensors(state))
    return storage_bytes(value for value in values if value.device.type == device.type)
