"""Trainers of others: streaming as a callback of the Hugging Face ``Trainer`` and of TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from streamtune.base.model_facts import model_device
from streamtune.base.text import show_size
from streamtune.engine import StreamHandle, stream
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.plan import Plan, plan_step
from streamtune.schedule import Schedule
from streamtune.train.step import GIB, peak_memory_bytes, reset_peak_memory

__all__ = ["StreamTuneCallback"]


class StreamTuneCallback(TrainerCallback):
    """Streams the model of a ``Trainer``, or of one of TRL's trainers, while it trains.

    A model that is streamed already stays streamed. At the beginning of training one line has the schedule and the
    predicted peak of memory; every log of a training step gets ``peak_mem_gib``, ``stream_chunk_size`` and, if it was
    predicted, ``predicted_peak_gib``. On a CPU ``peak_mem_gib`` is of the whole process, while the prediction counts
    tensors.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[StreamTuneCallback()])
        >>> trainer.train()

    Attributes:
        handle: The streamed model while it trains; None before and after.
        plan: The plan of the step with its simulation; None for a model that was streamed already.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        chunk_size: int | None = None,
        max_length: int | None = None,
        rows: int | None = None,
        device_memory: int | str | None = None,
        head: bool = True,
    ) -> None:
        """Choose how the model is streamed.

        Args:
            schedule: The schedule; None lets the planner choose.
            chunk_size: Tokens of a chunk, shorthand for ``schedule=Schedule(chunk_size=...)``.
            max_length: Tokens of the longest row, for the plan; None is ``max_length`` of TRL's configurations.
            rows: Rows of one forward, for the plan; None is ``per_device_train_batch_size``, twice that for TRL's DPO.
            device_memory: Memory to plan with, bytes or ``"80GiB"``; None is the free memory.
            head: Stream the head as well, as in :func:`streamtune.stream`.

        Raises:
            ArgumentError: Both ``schedule`` and ``chunk_size`` are given.
        """
        if schedule is not None and chunk_size is not None:
            raise ArgumentError("schedule and chunk_size exclude each other", fix="give one of them")
        self.schedule = Schedule(chunk_size=chunk_size) if chunk_size is not None else schedule
        self.max_length, self.rows = max_length, rows
        self.device_memory, self.head = device_memory, head
        self.handle: StreamHandle | None = None
        self.plan: Plan | None = None
        self._ours = False
        self._device = torch.device("cpu")

    def attach(self, trainer: Trainer) -> StreamTuneCallback:
        """Add the callback in front of all others, so that experiment trackers get its figures too; return it.

        With ``callbacks=[...]`` it comes behind them: the trainer's log history and its progress bar have the figures,
        and trackers (``report_to``) do not.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Plan, stream the model, print one line."""
        model: nn.Module = given["model"]
        self.remove()  # from a training that ended with an error
        self.plan = None
        self._device = model_device(model)
        streamed = _handle_of(model)
        if streamed is None:
            _refuse_sharded(model, args)
            self.plan = self._plan(model, args)
            schedule = self.plan.schedule if self.plan is not None else self.schedule
            self.handle, self._ours = stream(model, schedule=schedule, head=self.head), True
        else:
            self.handle, self._ours = streamed, False
        reset_peak_memory(self._device)
        if state.is_world_process_zero:
            print(self._line(), flush=True)
            if (note := _lost_steps(model, args)) is not None:
                print(note, flush=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Add the figures to the log of a training step, and to the trainer's history."""
        if self.handle is None or not logs or "loss" not in logs:
            return
        figures: dict[str, float] = {"peak_mem_gib": peak_memory_bytes(self._device) / GIB}
        figures["stream_chunk_size"] = self.handle.schedule.chunk_size
        if self.plan is not None:
            figures["predicted_peak_gib"] = self.plan.simulation.peak_bytes / GIB
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Restore the model, if it was streamed here."""
        self.remove()

    def remove(self) -> None:
        """Restore the model, if it was streamed here; for a training that ended with an error."""
        if self.handle is not None and self._ours:
            self.handle.remove()
        self.handle, self._ours = None, False

    def _plan(self, model: nn.Module, args: TrainingArguments) -> Plan | None:
        """Return the plan of a step; None if a schedule is given and the longest row is unknown."""
        length = self.max_length or _longest(args)
        if length is None:
            if self.schedule is not None:
                return None
            raise ArgumentError(
                "the planner has to know how long the longest row is, and the trainer's arguments do not say it",
                where="StreamTuneCallback",
                fix="StreamTuneCallback(max_length=...), or chunk_size=... for a schedule without planner",
            )
        with _own_forwards(model):
            return plan_step(
                model,
                max_length=length,
                device_memory=self.device_memory,
                batch_size=self.rows or _rows(args),
                accumulated=args.gradient_accumulation_steps > 1,
                autocast=bool(args.bf16),
                schedule=self.schedule,
            )

    def _line(self) -> str:
        assert self.handle is not None
        words = f"StreamTune: {self.handle.schedule.describe(len(self.handle.layers))}"
        if self.plan is None:
            return words + ("" if self._ours else "; streamed before the trainer began")
        counted = " of tensors, without Python and libraries" if self._device.type == "cpu" else ""
        return f"{words}; predicted peak {show_size(self.plan.simulation.peak_bytes)}{counted}"


def _lost_steps(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return a note if trained weights are bfloat16 or float16: the trainer's optimizer rounds each step to them."""
    narrow = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if args.deepspeed is not None or not narrow:  # DeepSpeed keeps float32 weights
        return None
    dtype = str(narrow.pop()).removeprefix("torch.")
    return (
        f"StreamTune: {dtype} weights are trained and each step is rounded to the nearest number: at a learning rate "
        f"of {args.learning_rate:g} most small steps are lost. Load the model with dtype=torch.float32, and compute in "
        "bfloat16 by TrainingArguments(bf16=True)"
    )


def _handle_of(model: nn.Module) -> StreamHandle | None:
    try:
        return StreamHandle.of(model)
    except ArgumentError:
        return None


def _refuse_sharded(model: nn.Module, args: TrainingArguments) -> None:
    """Refuse a model whose weights DeepSpeed or FSDP has distributed already."""
    by_deepspeed = args.deepspeed is not None or any(hasattr(weight, "ds_id") for weight in model.parameters())
    by_fsdp = bool(args.fsdp) or any(isinstance(weight, DTensor) for weight in model.parameters())
    if by_deepspeed or by_fsdp:
        raise UnsupportedModelError(
            f"when training begins {'DeepSpeed' if by_deepspeed else 'FSDP'} has distributed the weights, and a model "
            "is streamed before that",
            fix="call streamtune.stream(model, ...) before the trainer is made; this callback then adds its figures",
        )


def _longest(args: TrainingArguments) -> int | None:
    """Return the tokens of the longest row by TRL's configurations; None without them."""
    completion = getattr(args, "max_completion_length", None)
    prompt = getattr(args, "max_prompt_length", None)
    if completion is not None:
        return prompt + completion if prompt is not None else None
    return getattr(args, "max_length", None)


def _rows(args: TrainingArguments) -> int:
    """Return the number of rows of one forward: TRL's DPO calls the model with chosen and rejected rows together."""
    paired = hasattr(args, "precompute_ref_log_probs")
    return args.per_device_train_batch_size * (2 if paired else 1)


@contextmanager
def _own_forwards(model: nn.Module) -> Iterator[None]:
    """Remove functions that replace ``forward`` (accelerate's autocast), while inside: a copy would share them."""
    replaced: list[tuple[nn.Module, dict[str, Any]]] = []
    for module in model.modules():
        names = [name for name in ("forward", "_original_forward") if name in module.__dict__]
        if names:
            replaced.append((module, {name: module.__dict__.pop(name) for name in names}))
    try:
        yield
    finally:
        for module, functions in replaced:
            module.__dict__.update(functions)
