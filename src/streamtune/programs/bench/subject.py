"""Worker process of ``streamtune bench``: it builds the model and measures steps, and alone can run out of memory.

A prompt with several completions, as in a preference pair or a GRPO group, is measured in three layouts:

    shared   the prompt once, followed by all completions (``engine.Branches``)
    batch    each completion after its own copy of the prompt, as rows of one batch
    turns    the same rows one after another, each with its own forward and backward

The loss is the same in all layouts: the mean over all tokens of the completions.
"""

from __future__ import annotations

import gc
import os
import platform
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn

from streamtune.base.child import Child
from streamtune.base.model_facts import IGNORE_INDEX, model_device
from streamtune.engine import Branches, decoder_layers
from streamtune.errors import RunError, StreamTuneError, UnsupportedModelError
from streamtune.ops.devices import device_name, synchronize
from streamtune.plan.simulate.memory import LiveBytes, model_bytes
from streamtune.plan.simulate.scored import Completions
from streamtune.plan.simulate.workload import Mode
from streamtune.programs.bench.modes import MODE_SETUPS, Batch, Ready, last_hidden_state
from streamtune.schedule import Schedule
from streamtune.train.objective import autocast

Layout = Literal["row", "packed", "separate", "shared", "batch", "turns"]
"""Layout of a step's tokens: one row, several packed rows, the same rows one by one, or a layout of :data:`SHARING`."""

MakeModel = Callable[[], nn.Module]
"""Picklable function that builds the model, with the same weights in every process."""

PLURALS = {
    "activation": "activations",
    "layer input": "layer inputs",
    "gradient": "gradients",
    "attention output": "attention outputs",
}
"""{kind of memory in :class:`LiveBytes`: name in tables}, for kinds whose names differ."""


@dataclass(frozen=True)
class Job:
    """Model, batch size and precision that all measurements of a process share."""

    make_model: MakeModel
    batch_size: int = 1
    autocast: str | None = None
    """Dtype of autocast, ``bfloat16`` or ``float16``; None: no autocast."""
    completions: Completions | None = None
    """Picklable function that returns the completions to score; None to train on next tokens."""

    def tokens(self, length: int) -> int:
        """Return the number of tokens in a batch; a shared prompt counts once for each completion."""
        if self.completions is None:
            return self.batch_size * length
        apart = self.completions(length, self.batch_size).as_separate_rows()
        return apart.num_rows * apart.length


@dataclass(frozen=True)
class Case:
    """One measurement: training method, sequence length and layout, with the schedule of streaming."""

    mode: Mode
    length: int
    schedule: Schedule = field(default_factory=Schedule)
    layout: Layout = "row"
    packed_rows: int = 0


class MeasuredModel:
    """Model that is prepared for one training method at a time and measured on random tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = cast(Any, job.make_model()).train()
        self.device = model_device(self.model)
        self._vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self._prepared_for: tuple[Mode, Schedule] | None = None
        self._ready: Ready
        self._exit = ExitStack()

    def environment(self) -> dict[str, Any]:
        return describe_environment(self.model, self.job, self.device)

    def measure_memory(self, case: Case) -> dict[str, Any]:
        """Return the peak bytes of a step, their parts, and the activation peaks with and without the LM head."""
        batches = self._prepare(case)
        weights = model_bytes(self.model)
        layers = decoder_layers(self.model)
        with LiveBytes(self.model, layers) as whole:
            self._run_step(batches)
        self.model.zero_grad(set_to_none=True)
        without_head = None
        if "targets" not in batches[0]:
            with LiveBytes(self.model, layers) as decoder:
                self._run_without_head(batches)
            without_head = decoder.activation_peak
        self.model.zero_grad(set_to_none=True)
        peak = weights + whole.peak
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._run_step(batches)
            peak = torch.cuda.max_memory_allocated(self.device)
        tiers = self._ready.tiers
        return {
            "peak_bytes": peak,
            "activation_bytes": whole.activation_peak,
            "layer_activation_bytes": without_head,
            "host_bytes": tiers.host.peak_bytes if tiers else 0,
            "disk_bytes": tiers.disk.peak_bytes if tiers else 0,
            "terms": {"weights": weights, **{PLURALS.get(kind, kind): size for kind, size in whole.at_peak.items()}},
        }

    def measure_time(self, case: Case) -> dict[str, Any]:
        """Return a step's forward and backward seconds, loss, gradient norm, and the process's peak resident bytes."""
        forward = backward = loss_sum = 0.0
        entered = self._prepared_for
        batches = self._prepare(case)
        if self.device.type == "cuda" and self._prepared_for != entered:  # a first step fills the allocator's cache
            self._run_step(batches)
            self.model.zero_grad(set_to_none=True)
        for batch in batches:
            start = self._synchronised_time()
            loss: Any = self._loss(batch)
            middle = self._synchronised_time()
            loss.backward()
            forward, backward = forward + middle - start, backward + self._synchronised_time() - middle
            loss_sum += float(loss.detach())
        norms = [p.grad.norm(dtype=torch.float64) for p in self.model.parameters() if p.grad is not None]
        return {
            "forward_s": forward,
            "backward_s": backward,
            "rss_bytes": _peak_resident_bytes(),
            "loss": loss_sum,
            "grad_norm": float(torch.stack(norms).norm()),
        }

    def undo_preparation(self) -> None:
        """Restore the model as it was before its preparation for a training method, and clear its gradients."""
        self._exit.close()
        self._prepared_for = None
        self.model.zero_grad(set_to_none=True)

    def _prepare(self, case: Case) -> list[Batch]:
        wanted = (case.mode, case.schedule)
        if self._prepared_for != wanted:
            self.undo_preparation()
            way = MODE_SETUPS[case.mode]
            if reason := way.why_unavailable(self.device.type):
                raise UnsupportedModelError(reason)
            self._ready = self._exit.enter_context(way.prepare(self.model, case.schedule))
            self._prepared_for = wanted
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        if self.job.completions is not None:
            scored = self.job.completions(case.length, self.job.batch_size)
            streams = case.mode in ("stream", "stream-keep-attention")
            return [(scored if streams else scored.as_separate_rows()).random_batch(self._vocabulary, self.device)]
        if case.layout in SHARING:
            ids = torch.randint(0, self._vocabulary, (prompt_and_completion_tokens(case.length),), device=self.device)
            return prefix_sharing_batches(ids, case.length, case.layout)
        ids = torch.randint(0, self._vocabulary, (self.job.batch_size, case.length), device=self.device)
        return _layout_batches(ids, case.layout, case.packed_rows)

    def _run_step(self, batches: list[Batch]) -> None:
        for batch in batches:
            loss: Any = self._loss(batch)
            loss.backward()

    def _loss(self, batch: Batch) -> Tensor:
        with self._autocast():
            return self._ready.loss(batch)

    def _autocast(self) -> torch.autocast:
        """Return autocast as in training: without the cache, which would hold a 16-bit copy of all weights."""
        return autocast(self.device, self.job.autocast)

    def _run_without_head(self, batches: list[Batch]) -> None:
        for batch in batches:
            with self._autocast():
                hidden = last_hidden_state(self.model, batch)
            hidden.backward(torch.ones((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden))

    def _synchronised_time(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


def describe_environment(model: Any, job: Job, device: torch.device) -> dict[str, Any]:
    """Return the machine, library versions and size of the model as JSON values."""
    names = {"cpu": platform.processor() or platform.machine(), "meta": "simulated"}
    return {
        "device": names[device.type] if device.type in names else device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": f"{job.autocast} autocast" if job.autocast else str(model.dtype).removeprefix("torch."),
        "layers": len(decoder_layers(model)),
        "parameters": sum(_logical_size(p) for p in model.parameters()),
        "batch_size": job.batch_size,
        **({"dropout": True} if _has_dropout(model) else {}),
    }


def _has_dropout(model: nn.Module) -> bool:
    """Return True if a module drops activations or attention weights in training."""
    rates = [getattr(module, "attention_dropout", 0.0) for module in model.modules()]  # a module in some families
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _layout_batches(ids: Tensor, layout: Layout, rows: int) -> list[Batch]:
    """Return the batches of a step: one batch per row for the layout ``separate``, otherwise a single batch."""
    if layout == "row":
        return [{"input_ids": ids}]
    parts = torch.tensor_split(ids, rows, dim=1)
    if layout == "separate":
        return [{"input_ids": part} for part in parts]
    positions = torch.cat([torch.arange(part.shape[1], device=ids.device) for part in parts])
    return [{"input_ids": ids, "position_ids": positions.expand(ids.shape[0], -1)}]


def _logical_size(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; bitsandbytes stores two 4-bit weights in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def _peak_resident_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


COMPLETIONS = 8
"""Number of completions of each prompt in the table ``prefix-sharing``."""

SHARING = {
    "batch": f"{COMPLETIONS} rows, one batch",
    "turns": f"{COMPLETIONS} rows in turn",
    "shared": "prompt shared",
}
"""Label of each layout of a prompt with several completions."""


def completion_length(prompt_length: int) -> int:
    """Return the completion length in tokens: a fourth of the prompt length, at least 2."""
    return max(2, prompt_length // 4)


def prompt_and_completion_tokens(prompt_length: int) -> int:
    """Return the number of tokens in a prompt and its :data:`COMPLETIONS` completions."""
    return prompt_length + COMPLETIONS * completion_length(prompt_length)


def prefix_sharing_batches(ids_T: Tensor, prompt_length: int, layout: str) -> list[dict[str, Any]]:
    """Return the batches of a step on a prompt with several completions.

    Args:
        ids_T: Token ids of the prompt, then of all completions: ``[prompt_and_completion_tokens(prompt_length)]``.
        layout: Layout: ``shared``, ``batch`` or ``turns``.
    """
    shared, last = ids_T[: prompt_length - 1], ids_T[prompt_length - 1 : prompt_length]
    branches = [torch.cat([last, part]) for part in ids_T[prompt_length:].split(completion_length(prompt_length))]
    count = sum(len(branch) - 1 for branch in branches)
    nothing = ids_T.new_full((1,), IGNORE_INDEX)
    if layout == "shared":
        targets = [shared.new_full(shared.shape, IGNORE_INDEX)]
        targets += [torch.cat([branch[1:], nothing]) for branch in branches]
        tree = Branches.of([(prompt_length - 1, [len(branch) for branch in branches])])
        ids = torch.cat([shared, *branches])
        return [{"input_ids": ids[None], "targets": torch.cat(targets)[None], "count": count, "branches": tree}]
    rows = torch.stack([torch.cat([shared, branch]) for branch in branches])
    targets_BT = torch.cat([rows[:, 1:], nothing.expand(len(rows), 1)], 1)
    targets_BT[:, : prompt_length - 1] = IGNORE_INDEX
    if layout == "batch":
        return [{"input_ids": rows, "targets": targets_BT, "count": count}]
    return [
        {"input_ids": row[None], "targets": target[None], "count": count}
        for row, target in zip(rows, targets_BT, strict=True)
    ]


# --- the process ------------------------------------------------------------------------------------------------------


class Worker:
    """Child process that holds a :class:`MeasuredModel` and calls its methods on request."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.failed = ""
        """Reason why the last request failed; empty if it succeeded."""
        self._start()

    def _start(self) -> None:
        self._child = Child(_serve_requests, self.job)
        self._busy = False

    def ask(self, request: str, *args: Any) -> dict[str, Any]:
        """Call the :class:`MeasuredModel` method ``request`` in the child process and return its result.

        If the call fails, {} is returned and the attribute ``failed`` has the reason. A child process that has ended is
        started again.

        Raises:
            RunError: The call failed because of a bug in StreamTune.
        """
        if not self._child.process.is_alive():
            self.close()
            self._start()
        process, connection = self._child.process, self._child.connection
        self.failed, self._busy = "", True
        try:
            connection.send((request, args))
            answer: dict[str, Any] = connection.recv()
            self._busy = False
        except (EOFError, OSError):  # the process is gone: running out of memory, on a CPU
            process.join()
            self.failed = f"the process ended with exit code {process.exitcode} (out of memory?)"
            return {}
        if "fault" in answer:
            raise RunError("the benchmark failed", fix=answer["fault"])
        self.failed = answer.get("error", "")
        return {} if self.failed else answer

    def close(self) -> None:
        """End the process without waiting for a running step."""
        self._child.close(seconds=0 if self._busy else 10)


def _serve_requests(connection: Connection, job: Job) -> None:
    """Build the model, then answer requests until the connection closes; runs in the worker process."""
    subject: MeasuredModel | None = None
    answer: dict[str, Any]
    while True:
        try:
            request, args = connection.recv()
        except EOFError:
            return
        try:
            subject = subject or MeasuredModel(job)
            answer = getattr(subject, request)(*args)
        except Exception as error:
            answer = _failure_answer(
                error, any(isinstance(arg, Case) and MODE_SETUPS[arg.mode].package for arg in args)
            )
        if subject is not None and "error" in answer:  # not in the handler, whose frames reference tensors
            subject.undo_preparation()
            gc.collect()
        try:
            connection.send(answer)
        except ConnectionError:  # the parent is gone, as after Ctrl-C
            return


def _failure_answer(error: Exception, is_other_library: bool) -> dict[str, Any]:
    """Return ``{"error": reason}``; for a bug in StreamTune, ``{"fault": traceback}``."""
    text = str(error)
    if isinstance(error, StreamTuneError):  # the mode refuses this model, or a disk is full
        return {"error": error.what}
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return {"error": "out of memory"}
    if is_other_library:
        return {"error": f"failed: {type(error).__name__}: {text.strip().partition(chr(10))[0][:120]}"}
    return {"fault": traceback.format_exc()}
