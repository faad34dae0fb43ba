"""Streaming in other trainers: a callback for the Hugging Face ``Trainer`` and for TRL's trainers."""

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
    """Streams the model of a ``Trainer``, or of a TRL trainer, while it trains.

    A model that is already streamed stays streamed. When training begins, one line is printed with the schedule and the
    predicted memory peak. Every log of a training step gets ``peak_mem_gib``, ``stream_chunk_size`` and, if predicted,
    ``predicted_peak_gib``. On a CPU ``peak_mem_gib`` covers the whole process, while the prediction covers only
    tensors.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[StreamTuneCallback()])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    Attributes:
        handle: Handle of the streamed model during training; None before and after.
        plan: Plan of the step, with its simulation; None for a model that was already streamed.
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
            schedule: Schedule of the step; None lets the planner choose.
            chunk_size: Number of tokens of a chunk, short for ``schedule=Schedule(chunk_size=...)``.
            max_length: Number of tokens of the longest row, for the plan. None: ``max_length`` of TRL's configurations.
            rows: Number of rows of one forward, for the plan. None: ``per_device_train_batch_size``, doubled for TRL's
                DPO.
            device_memory: Memory to plan with, in bytes or as ``"80GiB"``. None: the free memory.
            head: Whether to stream the head too, as in :func:`streamtune.stream`.

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
        self._streamed_here = False
        self._device = torch.device("cpu")

    def attach(self, trainer: Trainer) -> StreamTuneCallback:
        """Add this callback to ``trainer`` before all other callbacks, so that experiment trackers get the memory
        figures too; return this callback.

        A callback that is passed as ``callbacks=[...]`` runs after the experiment trackers (``report_to``): only the
        trainer's log history and progress bar get the figures.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Plan the step, stream the model, and print one line with the schedule."""
        model: nn.Module = given["model"]
        self.remove()  # after a training that ended with an error
        self.plan = None
        self._device = model_device(model)
        streamed = _find_stream_handle(model)
        if streamed is None:
            _refuse_sharded(model, args)
            self.plan = self._plan_step(model, args)
            schedule = self.plan.schedule if self.plan is not None else self.schedule
            self.handle, self._streamed_here = stream(model, schedule=schedule, head=self.head), True
        else:
            self.handle, self._streamed_here = streamed, False
        reset_peak_memory(self._device)
        if state.is_world_process_zero:
            print(self._describe_schedule(), flush=True)
            if (note := _rounding_note(model, args)) is not None:
                print(note, flush=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Add the memory figures to the log of a training step, and to the trainer's history."""
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
        """Restore the model, if this callback streamed it."""
        self.remove()

    def remove(self) -> None:
        """Restore the model, if this callback streamed it. Call this method if training ended with an error."""
        if self.handle is not None and self._streamed_here:
            self.handle.remove()
        self.handle, self._streamed_here = None, False

    def _plan_step(self, model: nn.Module, args: TrainingArguments) -> Plan | None:
        """Return the plan of a step; None if a schedule is given and the length of the longest row is unknown."""
        length = self.max_length or _max_row_tokens(args)
        if length is None:
            if self.schedule is not None:
                return None
            raise ArgumentError(
                "the planner needs the length of the longest row, which the trainer's arguments lack",
                where="StreamTuneCallback",
                fix="pass max_length=..., or chunk_size=... for a schedule without the planner",
            )
        with _with_original_forwards(model):
            return plan_step(
                model,
                max_length=length,
                device_memory=self.device_memory,
                batch_size=self.rows or _rows_per_forward(args),
                accumulated=args.gradient_accumulation_steps > 1,
                autocast=bool(args.bf16),
                schedule=self.schedule,
            )

    def _describe_schedule(self) -> str:
        assert self.handle is not None
        words = f"StreamTune: {self.handle.schedule.describe(len(self.handle.layers))}"
        if self.plan is None:
            return words + ("" if self._streamed_here else "; streamed before training began")
        counted = " of tensors only, without Python and libraries" if self._device.type == "cpu" else ""
        return f"{words}; predicted peak {show_size(self.plan.simulation.peak_bytes)}{counted}"


def _rounding_note(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return a note if trained weights are bfloat16 or float16: the trainer's optimizer rounds each step to this
    dtype."""
    narrow = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if args.deepspeed is not None or not narrow:  # DeepSpeed keeps float32 weights
        return None
    dtype = str(narrow.pop()).removeprefix("torch.")
    return (
        f"StreamTune: trained weights are {dtype}, so each step is rounded to the nearest number. At a learning rate "
        f"of {args.learning_rate:g} most small steps are lost. Load the model with dtype=torch.float32, and compute in "
        "bfloat16 with TrainingArguments(bf16=True)"
    )


def _find_stream_handle(model: nn.Module) -> StreamHandle | None:
    try:
        return StreamHandle.of(model)
    except ArgumentError:
        return None


def _refuse_sharded(model: nn.Module, args: TrainingArguments) -> None:
    """Raise an error if DeepSpeed or FSDP has already sharded the model's weights."""
    by_deepspeed = args.deepspeed is not None or any(hasattr(weight, "ds_id") for weight in model.parameters())
    by_fsdp = bool(args.fsdp) or any(isinstance(weight, DTensor) for weight in model.parameters())
    if by_deepspeed or by_fsdp:
        raise UnsupportedModelError(
            f"{'DeepSpeed' if by_deepspeed else 'FSDP'} has already sharded the weights, and a model must be streamed "
            "before that",
            fix="call streamtune.stream(model, ...) before creating the trainer; the callback then adds its figures",
        )


def _max_row_tokens(args: TrainingArguments) -> int | None:
    """Return the maximum number of tokens of a row in TRL's arguments; None if the arguments have no such limit."""
    completion = getattr(args, "max_completion_length", None)
    prompt = getattr(args, "max_prompt_length", None)
    if completion is not None:
        return prompt + completion if prompt is not None else None
    return getattr(args, "max_length", None)


def _rows_per_forward(args: TrainingArguments) -> int:
    """Return how many rows one forward has: TRL's DPO passes chosen and rejected rows together."""
    paired = hasattr(args, "precompute_ref_log_probs")
    return args.per_device_train_batch_size * (2 if paired else 1)


@contextmanager
def _with_original_forwards(model: nn.Module) -> Iterator[None]:
    """Context manager: while active, modules have the ``forward`` of their class and not accelerate's replacement,
    which a copy of the model would share."""
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
