"""What one process of the benchmark measures: a model in one mode, its tokens in one layout."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.engine import Schedule, decoder_layers, stream
from streamtune.plan.memory import LiveBytes, held_tensors

__all__ = ["Layout", "MakeModel", "Mode", "Subject", "Task", "Variant"]

Mode = Literal["plain", "checkpoint", "stream"]

Layout = Literal["row", "packed", "separate"]
"""The tokens as one row, as several rows in one sequence, or as the same rows one after another."""

MakeModel = Callable[[], nn.Module]
"""Builds the model in a fresh process; must be picklable (``functools.partial`` of a module's function)."""

Variant = tuple[Mode, Layout]
"""What a process is for."""


@dataclass(frozen=True)
class Task:
    """What all variants at one length have in common: tokens of a row, rows of the batch, rows of a packed sequence."""

    make_model: MakeModel
    length: int
    batch_size: int
    packed_rows: int
    schedule: Schedule
    autocast: bool


class Subject:
    """One model in one mode and the batches it is measured on."""

    def __init__(self, task: Task, variant: Variant) -> None:
        mode, layout = variant
        self.task = task
        self.model = cast(Any, task.make_model()).train()
        self.device = next(self.model.parameters()).device
        torch.manual_seed(0)
        vocab = self.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(0, vocab, (task.batch_size, task.length), device=self.device)
        self.batches = _laid_out(ids, layout, task.packed_rows)
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
        """Seconds of a step: its forwards and its backwards."""
        self.model.zero_grad(set_to_none=True)
        forward = backward = 0.0
        for batch in self.batches:
            start = self._now()
            loss: Any = self._loss(batch)
            middle = self._now()
            loss.backward()
            forward, backward = forward + middle - start, backward + self._now() - middle
        return {"forward_s": forward, "backward_s": backward, "rss_bytes": _peak_rss()}

    def _step(self) -> None:
        for batch in self.batches:
            loss: Any = self._loss(batch)
            loss.backward()

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.autocast):
            return self.model(**batch, labels=batch["input_ids"], use_cache=False).loss

    def _hidden_backward(self) -> None:
        inner = getattr(self.model, "get_base_model", lambda: self.model)()  # out of peft's wrapper
        for batch in self.batches:
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.autocast):
                hidden = inner.base_model(**batch, use_cache=False).last_hidden_state
            hidden.backward(torch.ones((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _laid_out(ids: Tensor, layout: Layout, rows: int) -> list[dict[str, Tensor]]:
    """The batches of a step: one, or one for each row where they come one after another."""
    if layout == "row":
        return [{"input_ids": ids}]
    parts = torch.tensor_split(ids, rows, dim=1)
    if layout == "separate":
        return [{"input_ids": part} for part in parts]
    positions = torch.cat([torch.arange(part.shape[1], device=ids.device) for part in parts])
    return [{"input_ids": ids, "position_ids": positions.expand(ids.shape[0], -1)}]


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
