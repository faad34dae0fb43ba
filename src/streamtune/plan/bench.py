"""Plain autograd, gradient checkpointing and streaming side by side: the same weights, the same batch, a process each.

Time and memory are measured in different steps: following every storage slows a step down. Timed steps of the modes
take turns, so a ratio compares neighbours in time; the median of the ratios is what is reported.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.engine import Schedule, decoder_layers, stream
from streamtune.errors import RunError
from streamtune.plan.memory import LiveBytes, held_tensors

__all__ = ["MODES", "BenchReport", "BenchRow", "Mode", "run_bench"]

Mode = Literal["plain", "checkpoint", "stream"]
MODES: tuple[Mode, ...] = ("plain", "checkpoint", "stream")
BASELINE: Mode = "checkpoint"

MakeModel = Callable[[], nn.Module]
"""Builds the model in a fresh process; must be picklable (``functools.partial`` of a module's function)."""


@dataclass(frozen=True)
class BenchRow:
    """What one mode took at one length: bytes, seconds, tokens per second; medians over the repeats.

    Attributes:
        peak_bytes: Peak of a step: the device allocator's on an accelerator; on the CPU weights and live storages.
        activation_bytes: Peak beyond weights, gradients and stored layer inputs, head included.
        layer_activation_bytes: The same for the decoder layers alone, without the head.
        rss_bytes: Peak resident memory of the process.
        ratio: Forward and backward time over that of gradient checkpointing, median of paired steps.
        error: Why there are no figures, where there are none.
    """

    mode: Mode
    length: int
    peak_bytes: int | None = None
    activation_bytes: int | None = None
    layer_activation_bytes: int | None = None
    rss_bytes: int | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    tokens_per_s: float | None = None
    ratio: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class BenchReport:
    """All rows of a benchmark and the machine they were measured on."""

    env: dict[str, Any]
    schedule: Schedule
    rows: list[BenchRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The document of ``streamtune bench --json``."""
        return {"env": self.env, "schedule": asdict(self.schedule), "rows": [asdict(row) for row in self.rows]}

    def row(self, mode: Mode, length: int) -> BenchRow:
        """The row of a mode at a length."""
        return next(row for row in self.rows if row.mode == mode and row.length == length)


def run_bench(
    make_model: MakeModel,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode] = MODES,
    schedule: Schedule,
    batch_size: int = 1,
    repeats: int = 3,
    autocast: bool = False,
    notify: Callable[[str], None] = lambda message: None,
) -> BenchReport:
    """Measure every mode at every length.

    Args:
        make_model: Builds the model; called in every process, so it must give the same weights each time.
        lengths: Tokens of a row.
        modes: Which of ``plain``, ``checkpoint`` and ``stream``.
        schedule: How streaming cuts the sequence.
        batch_size: Rows of the batch.
        repeats: Timed steps of each mode, taken in turns.
        autocast: Compute in bf16.
        notify: Told what is being measured.
    """
    rows: list[BenchRow] = []
    env: dict[str, Any] = {}
    for length in lengths:
        task = _Task(make_model, length, batch_size, schedule, autocast)
        measured = _measure_length(task, modes, repeats, notify, env)
        rows += [measured[mode] for mode in modes]
    return BenchReport(env, schedule, rows)


@dataclass(frozen=True)
class _Task:
    make_model: MakeModel
    length: int
    batch_size: int
    schedule: Schedule
    autocast: bool


def _measure_length(
    task: _Task, modes: Sequence[Mode], repeats: int, notify: Callable[[str], None], env: dict[str, Any]
) -> dict[Mode, BenchRow]:
    """All modes at one length: first the memory of each, then timed steps in turns by processes that stay alive."""
    rows = {mode: BenchRow(mode, task.length) for mode in modes}
    workers: dict[Mode, _Worker] = {}
    try:
        for mode in modes:
            notify(f"{task.length:,} tokens, {mode}: memory")
            workers[mode] = _Worker(task, mode)
            rows[mode] = replace(rows[mode], **workers[mode].ask("memory"))
            env.update(workers[mode].ask("env"))
            if workers[mode].failed:
                rows[mode] = replace(rows[mode], error=workers[mode].failed)
        times: dict[Mode, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for turn in range(repeats + 1):  # the first turn warms up
            for mode in modes:
                notify(f"{task.length:,} tokens, {mode}: step {turn} of {repeats}")
                answer = workers[mode].ask("time")
                if turn and answer:
                    times[mode].append((answer["forward_s"], answer["backward_s"]))
                    rows[mode] = replace(rows[mode], rss_bytes=answer["rss_bytes"])
        for mode in modes:
            if workers[mode].failed:
                rows[mode] = replace(rows[mode], error=workers[mode].failed)
            elif times[mode]:
                rows[mode] = _with_times(rows[mode], times[mode], times.get(BASELINE, []), task)
    finally:
        for worker in workers.values():
            worker.close()
    return rows


def _with_times(
    row: BenchRow, times: list[tuple[float, float]], baseline: list[tuple[float, float]], task: _Task
) -> BenchRow:
    total = statistics.median(map(sum, times))
    ratios = [sum(ours) / sum(theirs) for ours, theirs in zip(times, baseline, strict=False)]
    return replace(
        row,
        forward_s=statistics.median(forward for forward, _ in times),
        backward_s=statistics.median(backward for _, backward in times),
        tokens_per_s=task.batch_size * task.length / total,
        ratio=statistics.median(ratios) if ratios else None,
    )


class _Worker:
    """A process that holds one model in one mode and answers one request at a time."""

    def __init__(self, task: _Task, mode: Mode) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, task, mode), daemon=True)
        self.process.start()
        theirs.close()
        self.failed: str | None = None

    def ask(self, request: str) -> dict[str, Any]:
        """The answer to a request; empty once the process has failed, with the reason in ``failed``."""
        if self.failed:
            return {}
        try:
            self.connection.send(request)
            answer: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):  # the process is gone: on the CPU that is what running out of memory looks like
            self.process.join()
            self.failed = f"the process ended with exit code {self.process.exitcode} (out of memory?)"
            return {}
        if "fault" in answer:  # not a limit of the machine but a defect: it must not pass for one
            raise RunError("the benchmark failed", mend=answer["fault"])
        if "error" in answer:
            self.failed = answer["error"]
            return {}
        return answer

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: Connection, task: _Task, mode: Mode) -> None:
    """Body of the process: build once, then measure on request until the other end closes."""
    try:
        subject = _Subject(task, mode)
        while True:
            request = connection.recv()
            connection.send(getattr(subject, request)())
    except EOFError:
        pass
    except (torch.OutOfMemoryError, MemoryError):
        connection.send({"error": "out of memory"})
    except Exception as error:
        text = str(error)
        if isinstance(error, RuntimeError) and "can't allocate memory" in text:
            connection.send({"error": "out of memory"})
        else:
            connection.send({"fault": traceback.format_exc()})


class _Subject:
    """One model in one mode and the batch it is measured on."""

    def __init__(self, task: _Task, mode: Mode) -> None:
        self.task = task
        self.model = cast(Any, task.make_model()).train()
        self.device = next(self.model.parameters()).device
        torch.manual_seed(0)
        vocab = self.model.get_input_embeddings().weight.shape[0]
        self.ids = torch.randint(0, vocab, (task.batch_size, task.length), device=self.device)
        if mode == "checkpoint":
            self.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_checkpoint)
        elif mode == "stream":
            stream(self.model, schedule=task.schedule)

    def env(self) -> dict[str, Any]:
        """The machine and the versions."""
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": "bfloat16 autocast" if self.task.autocast else str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(_logical_size(p) for p in self.model.parameters()),
            "batch_size": self.task.batch_size,
        }

    def memory(self) -> dict[str, Any]:
        """Peaks of one step with the head and of one without it."""
        self.model.zero_grad(set_to_none=True)
        held = _distinct(held_tensors(self.model))
        weights = sum(tensor.untyped_storage().nbytes() for tensor in held)
        layers = decoder_layers(self.model)
        with LiveBytes(self.model, layers) as whole:
            self._step()
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, layers) as decoder:
            self._hidden_backward()
        self.model.zero_grad(set_to_none=True)
        peak = weights + whole.peak
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._step()
            peak = torch.cuda.max_memory_allocated(self.device)
        return {
            "peak_bytes": peak,
            "activation_bytes": whole.activation_peak,
            "layer_activation_bytes": decoder.activation_peak,
        }

    def time(self) -> dict[str, Any]:
        """Seconds of one forward and one backward."""
        self.model.zero_grad(set_to_none=True)
        start = self._now()
        loss: Any = self._loss()
        middle = self._now()
        loss.backward()
        return {"forward_s": middle - start, "backward_s": self._now() - middle, "rss_bytes": _peak_rss()}

    def _step(self) -> None:
        loss: Any = self._loss()
        loss.backward()

    def _loss(self) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.autocast):
            return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def _hidden_backward(self) -> None:
        inner = getattr(self.model, "get_base_model", lambda: self.model)()  # out of peft's wrapper
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.autocast):
            hidden = inner.base_model(input_ids=self.ids, use_cache=False).last_hidden_state
        hidden.backward(torch.ones((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({t.untyped_storage()._cdata: t for t in tensors}.values())


def _logical_size(parameter: Tensor) -> int:
    """Weights a parameter stands for: bitsandbytes packs two in a byte and reports the bytes."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _peak_rss() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
