"""Trainer callback that streams the model in the Hugging Face ``Trainer`` and in TRL's trainers."""

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
    """Trainer callback that streams the model during training: its layers run chunk by chunk, with the exact gradient.

    A model that is already streamed stays streamed. When training begins, one line is printed with the schedule and the
    predicted memory peak. Every log of a training step gets ``peak_mem_gib``, ``stream_chunk_size`` and, if predicted,
    ``predicted_peak_gib``. On a CPU ``peak_mem_gib`` covers the whole process, while the prediction covers only
    tensors.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[StreamTuneCallback()])  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    Attributes:
        handle: Handle of the streamed model during training; None before and after.
        plan: Planned schedule and simulated memory of a training step. None if the model was already streamed, or if a
            schedule was given and the longest row is unknown.
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
        """Set how the model is streamed and how its memory is planned.

        Args:
            schedule: Chunk sizes, and where activations are stored; None lets the planner choose.
            chunk_size: Number of tokens per chunk, short for ``schedule=Schedule(chunk_size=...)``.
            max_length: Number of tokens of the longest row, for the planner. None: read from the arguments of TRL's
                trainers.
            rows: Number of rows per forward pass, for the planner. None: ``per_device_train_batch_size``, doubled for
                TRL's DPO.
            device_memory: Device memory that training may use, in bytes or as ``"80GiB"``. None: the free memory plus
                the memory of the model.
            head: Whether the language-model head runs in chunks too, as in :func:`streamtune.stream`.

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
        """Insert this callback before all other callbacks of ``trainer``, and return this callback.

        Experiment trackers (``report_to``) then get the memory figures too. A callback that is passed as
        ``callbacks=[...]`` runs after the trackers, so only the trainer's log history and progress bar get the figures.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Choose a schedule, stream the model, and print the schedule in one line."""
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
        """Add peak memory and chunk size to the log of a training step and to the trainer's log history."""
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
        """Restore the model's original forward, if this callback replaced it."""
        self.remove()

    def remove(self) -> None:
        """Restore the model's original forward, if this callback replaced it. Call this if training raised an error."""
        if self.handle is not None and self._streamed_here:
            self.handle.remove()
        self.handle, self._streamed_here = None, False

    def _plan_step(self, model: nn.Module, args: TrainingArguments) -> Plan | None:
        """Return the plan of a training step; None if a schedule is given and the longest row's length is unknown."""
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
                autocast=bool(args.bf16 or args.fp16),
                schedule=self.schedule,
            )

    def _describe_schedule(self) -> str:
        assert self.handle is not None
        words = f"StreamTune: {self.handle.schedule.describe(len(self.handle.layers))}"
        if self.plan is None:
            return words + ("" if self._streamed_here else "; streamed before training began")
        counted = " (tensors only, without Python and libraries)" if self._device.type == "cpu" else ""
        return f"{words}; predicted peak memory {show_size(self.plan.simulation.peak_bytes)}{counted}"


def _rounding_note(model: nn.Module, args: TrainingArguments) -> str | None:
    """Return a warning if trained weights are bfloat16 or float16, which rounds small updates away; else None."""
    narrow = {p.dtype for p in model.parameters() if p.requires_grad} & {torch.bfloat16, torch.float16}
    if args.deepspeed is not None or not narrow:  # DeepSpeed keeps float32 weights
        return None
    dtype = str(narrow.pop()).removeprefix("torch.")
    return (
        f"StreamTune: trained weights are {dtype}, so each updated weight is rounded to the nearest {dtype} number. At "
        f"a learning rate of {args.learning_rate:g} most small updates are lost. Load the model with "
        "dtype=torch.float32, and compute in bfloat16 with TrainingArguments(bf16=True)"
    )


def _find_stream_handle(model: nn.Module) -> StreamHandle | None:
    try:
        return StreamHandle.of(model)
    except ArgumentError:
        return None


def _refuse_sharded(model: nn.Module, args: TrainingArguments) -> None:
    by_deepspeed = args.deepspeed is not None or any(hasattr(weight, "ds_id") for weight in model.parameters())
    by_fsdp = bool(args.fsdp) or any(isinstance(weight, DTensor) for weight in model.parameters())
    if by_deepspeed or by_fsdp:
        raise UnsupportedModelError(
            f"{'DeepSpeed' if by_deepspeed else 'FSDP'} has already sharded the weights, and a model must be streamed "
            "before its weights are sharded",
            fix="call streamtune.stream(model, ...) before creating the trainer; the callback then logs its figures",
        )


def _max_row_tokens(args: TrainingArguments) -> int | None:
    """Return the maximum number of tokens of a row in TRL's arguments; None if they set no limit."""
    completion = getattr(args, "max_completion_length", None)
    prompt = getattr(args, "max_prompt_length", None)
    if completion is not None:
        return prompt + completion if prompt is not None else None
    return getattr(args, "max_length", None)


def _rows_per_forward(args: TrainingArguments) -> int:
    """Return the number of rows of one forward pass: TRL's DPO passes chosen and rejected rows together."""
    paired = hasattr(args, "precompute_ref_log_probs")
    return args.per_device_train_batch_size * (2 if paired else 1)


@contextmanager
def _with_original_forwards(model: nn.Module) -> Iterator[None]:
    """Remove accelerate's replacements of ``forward`` from all modules inside the ``with`` block."""
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
