"""The training loop: :func:`train` reads from top to bottom, and each thing it does is a function below it.

The gradient of an optimizer step is that of one number, whatever the number of micro-batches G it is summed over:

    loss = 1/N  sum_{g=1..G}  sum_{t in targets of micro-batch g}  -log p(target_t)        N = targets of all G together

Each micro-batch contributes its sum, divided once by N, and its gradient is added to the ones before. So a step split
differently, or shorter at the end of an epoch, still weighs every token the same. What a mixture's routers add to it is
in ``routers``; the loss that is shown and recorded is the one above, without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from streamtune.engine import StreamHandle
from streamtune.errors import NonFiniteError, OutOfMemoryError
from streamtune.train.batch import MicroBatch, StepStream
from streamtune.train.checkpoint import Checkpoint, ModelWriter, rotate, save_checkpoint
from streamtune.train.memory import GIB, is_out_of_memory, peak_memory_bytes, reset_peak_memory
from streamtune.train.optimizer_state import load_optimizer_tensors, optimizer_tensors
from streamtune.train.plot import draw_loss
from streamtune.train.progress import Progress
from streamtune.train.records import append_event, append_record, cut_after_step, read_records
from streamtune.train.rng import RngState, capture_rng, preserve_rng, restore_rng, seed_everything
from streamtune.train.routers import StepRouters
from streamtune.train.rundir import RunDirectory
from streamtune.train.signals import StopRequest

__all__ = ["Position", "Progressed", "TrainSettings", "train"]


@dataclass(frozen=True)
class TrainSettings:
    """What the loop needs to know beyond its objects."""

    total_steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    steps_per_epoch: int
    max_grad_norm: float
    """0 does not clip."""
    eval_steps: int
    """Evaluate every so many steps, and at the end; 0 only at the end."""
    save_steps: int
    """Save every so many steps, at the end and when stopped; 0 only at the end and when stopped."""
    save_total_limit: int
    bf16: bool
    """Run the forward under bfloat16 autocast."""
    seed: int
    out_of_memory_mend: str
    """What to change where memory runs out."""


@dataclass(frozen=True)
class Progressed:
    """How far a run has come. Saved in every checkpoint, returned at the end."""

    step: int = 0
    """Optimizer steps taken."""
    tokens: int = 0
    """Input tokens trained on, padding not counted."""
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    """The newest held-out loss."""
    eval_due: bool = False
    """An evaluation at this step is still to be done: it was interrupted."""


@dataclass(frozen=True)
class Position:
    """What the next step starts from: a step that is broken off is taken again from here."""

    rng: RngState
    stream: dict[str, Any]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    learning_rate_at: Callable[[int], float],
    steps: StepStream,
    validation: Callable[[], Iterable[MicroBatch]] | None,
    *,
    settings: TrainSettings,
    run: RunDirectory,
    identity: Mapping[str, Any],
    writer: ModelWriter,
    resume_from: Checkpoint | None,
    progress: Progress,
    stop: StopRequest,
    handle: StreamHandle | None = None,
) -> Progressed:
    """Train ``model`` until ``settings.total_steps``, or until ``stop`` is requested.

    Args:
        model: A causal language model whose call returns an object with ``loss``. Where ``resume_from`` is given it
            has been loaded from that checkpoint already.
        optimizer: Over parameters of ``model``.
        learning_rate_at: The learning rate of each step, counted from 0.
        steps: Gives each optimizer step its micro-batches.
        validation: Gives the held-out batches, anew at each call.
        settings: How long, how often, how.
        run: Where the files go.
        identity: What run this is; written into each checkpoint.
        writer: Writes the model into a checkpoint.
        resume_from: Go on from here. On the CPU every later loss is bit for bit that of a run never interrupted.
        progress: What the user sees.
        stop: Looked at after each micro-batch. A step broken off half-way is left out of the checkpoint.
        handle: What streams ``model``; its routers' losses, if it has any, are in the gradient and not in ``loss``.

    Returns:
        How far it came.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite. Raised before the weights are touched.
        OutOfMemoryError: With the batch it happened on and what to change.
        CheckpointError: A checkpoint cannot be written. The ones before are intact.
    """
    seed_everything(settings.seed)
    state = Progressed() if resume_from is None else resume(resume_from, model, optimizer, steps)
    cut_after_step(run.metrics, state.step, evaluated=not state.eval_due)
    position = Position(capture_rng(), steps.state_dict())
    saved_step = state.step

    while True:
        # 1. At a boundary between steps: evaluate and save where it is time to, leave where the run is over.
        if state.eval_due and validation is not None:
            progress.activity("evaluating")
            loss = evaluate(model, validation(), settings=settings, step=state.step, stop=stop, handle=handle)
            if loss is not None:
                state = replace(state, eval_loss=loss, eval_due=False)
                append_record(run.metrics, {"step": state.step, "eval_loss": loss})
                progress.evaluated(state.step, loss)
                draw_loss(read_records(run.metrics), run.loss_plot, title=run.path.name)
        over = stop.requested or state.step >= settings.total_steps
        if state.step != saved_step and (over or is_due(state.step, settings.save_steps)):
            progress.activity("saving")
            checkpoint = save(run, model, optimizer, state, position, identity, writer)
            saved_step = state.step
            rotate(run.checkpoints, settings.save_total_limit)
            progress.saved(state.step, checkpoint.path)
        if over:
            return state

        # 2. One optimizer step.
        started = time.perf_counter()
        micro_batches = steps.next_step()
        routers = StepRouters(handle, micro_batches)
        loss = accumulate_gradients(
            model, micro_batches, routers, settings=settings, state=state, progress=progress, stop=stop
        )
        if loss is None:  # Stopped half-way: `position` still is where this step began.
            optimizer.zero_grad(set_to_none=True)
            continue
        grad_norm = clip_gradients(model, settings.max_grad_norm)
        refuse_non_finite("gradient norm", grad_norm, state.step + 1, micro_batches)
        learning_rate = learning_rate_at(state.step)
        update_weights(optimizer, learning_rate, settings=settings, state=state, micro_batches=micro_batches)

        # 3. What the step was.
        tokens = sum(batch.num_tokens for batch in micro_batches)
        state = replace(
            state,
            step=state.step + 1,
            tokens=state.tokens + tokens,
            first_loss=loss if state.first_loss is None else state.first_loss,
            last_loss=loss,
            eval_due=validation is not None
            and (state.step + 1 == settings.total_steps or is_due(state.step + 1, settings.eval_steps)),
        )
        position = Position(capture_rng(), steps.state_dict())
        seconds = time.perf_counter() - started
        record = {
            "step": state.step,
            "loss": loss,
            **({} if routers.aux_loss is None else {"aux_loss": routers.aux_loss}),
            "lr": learning_rate,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "supervised_tokens": sum(batch.num_targets for batch in micro_batches),
            "tokens_per_s": round(tokens / seconds, 1),
            "peak_mem_gib": round(peak_memory_bytes(device_of(model)) / GIB, 3),
            "epoch": round(state.step / settings.steps_per_epoch, 4),
        }
        append_record(run.metrics, record)
        progress.step(record)


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[MicroBatch],
    routers: StepRouters,
    *,
    settings: TrainSettings,
    state: Progressed,
    progress: Progress,
    stop: StopRequest,
) -> float | None:
    """Add the gradients of all micro-batches to ``parameter.grad`` and return the step's loss, without the routers'.

    Returns None where ``stop`` was requested before the last micro-batch: the gradients are then incomplete.
    """
    device = device_of(model)
    reset_peak_memory(device)
    num_targets = sum(batch.num_targets for batch in micro_batches)
    total = 0.0
    model.train()
    if routers.need_counting:
        progress.activity("counting routes")
        where = f"step {state.step + 1}"
        with explain_out_of_memory(where, micro_batches, settings.out_of_memory_mend), autocast(device, settings.bf16):
            routers.count(device)
    for index, batch in enumerate(micro_batches):
        if stop.requested:
            return None
        if len(micro_batches) > 1:
            progress.activity(f"batch {index + 1}/{len(micro_batches)}")
        with explain_out_of_memory(f"step {state.step + 1}", [batch], settings.out_of_memory_mend):
            batch = batch.to(device)
            with routers.micro_batch(batch):
                loss = loss_of(model, batch, num_targets=num_targets, bf16=settings.bf16)
                value = loss.item()
                refuse_non_finite("loss", value, state.step + 1, [batch])
                loss.backward()
        total += routers.without(value)
    return total


def loss_of(model: nn.Module, batch: MicroBatch, *, num_targets: int, bf16: bool) -> torch.Tensor:
    """The sum of ``-log p`` over the targets of ``batch``, divided by ``num_targets``, and what routers add to it."""
    loss: torch.Tensor = output_of(model, batch, num_targets=num_targets, bf16=bf16).loss
    return loss


def output_of(model: nn.Module, batch: MicroBatch, *, num_targets: int, bf16: bool, **more: Any) -> Any:
    """What the model's call returns; ``more`` are arguments of it that replace or add to the usual ones."""
    with autocast(batch.input_ids.device, bf16):
        return model(
            # Transformers asks for labels to compute a loss at all, and takes the shifted ones where they are given.
            labels=batch.shift_labels,
            shift_labels=batch.shift_labels,
            num_items_in_batch=num_targets,
            **{**batch.arguments, **more},
        )


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    """Compute in bfloat16 within, if ``bf16``. The cache of cast weights would hold all of them at once."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients down to ``max_norm`` (0: leave them) and return the norm they had."""
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    value = norm.item()
    if max_norm > 0 and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return value


def update_weights(
    optimizer: torch.optim.Optimizer,
    learning_rate: float,
    *,
    settings: TrainSettings,
    state: Progressed,
    micro_batches: Sequence[MicroBatch],
) -> None:
    """Take the optimizer step and let go of the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # The first step allocates the optimizer's state, which is when a model that just fits no longer does.
    where = f"the optimizer at step {state.step + 1}"
    with explain_out_of_memory(where, micro_batches, settings.out_of_memory_mend):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def evaluate(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    settings: TrainSettings,
    step: int,
    stop: StopRequest,
    handle: StreamHandle | None = None,
) -> float | None:
    """The mean loss over every target of ``batches``, computed without gradients; None where ``stop`` was requested.

    Nothing is added for routers, so recipes that balance them differently can be compared.

    Training goes on afterwards as if this had not been: the random state is put back.
    """
    device = device_of(model)
    total, num_targets = 0.0, 0
    model.eval()
    silenced = nullcontext() if handle is None else handle.routers.silenced()
    with torch.no_grad(), preserve_rng(), silenced:
        for batch in batches:
            if stop.requested:
                return None
            with explain_out_of_memory(f"the evaluation at step {step}", [batch], settings.out_of_memory_mend):
                total += loss_of(model, batch.to(device), num_targets=1, bf16=settings.bf16).item()
            num_targets += batch.num_targets
    loss = total / max(num_targets, 1)
    if not math.isfinite(loss):
        raise NonFiniteError(f"the held-out loss at step {step} is {loss}", mend="lower learning_rate")
    return loss


def save(
    run: RunDirectory,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Progressed,
    position: Position,
    identity: Mapping[str, Any],
    writer: ModelWriter,
) -> Checkpoint:
    """Commit a checkpoint of ``state``, from which the next step starts at ``position``."""
    checkpoint = save_checkpoint(
        run.checkpoints,
        state={"step": state.step, "progressed": asdict(state), "stream": position.stream, "identity": dict(identity)},
        rng=position.rng,
        optimizer_tensors=optimizer_tensors(optimizer, model),
        writer=writer,
    )
    append_event(run.events, "checkpoint", step=state.step, folder=str(checkpoint.path))
    draw_loss(read_records(run.metrics), run.loss_plot, title=run.path.name)
    return checkpoint


def resume(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, steps: StepStream) -> Progressed:
    """Put optimizer, data and random state to where ``checkpoint`` left them, and return how far it had come."""
    load_optimizer_tensors(optimizer, model, checkpoint.optimizer_tensors())
    steps.load_state_dict(checkpoint.state["stream"])
    restore_rng(checkpoint.rng())
    return Progressed(**checkpoint.state["progressed"])


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after ``step``; 0 is never."""
    return every > 0 and step % every == 0


def device_of(model: nn.Module) -> torch.device:
    """The device of the parameters."""
    return next(model.parameters()).device


def refuse_non_finite(name: str, value: float, step: int, micro_batches: Sequence[MicroBatch]) -> None:
    """Raise where ``value`` is NaN or infinite: one such step would leave no weight usable."""
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the {name} of step {step} is {value}; the weights were not changed by it",
            where=name_rows(micro_batches),
            mend="look at these rows; lower learning_rate or warm up longer; checkpoints saved before are intact",
        )


@contextmanager
def explain_out_of_memory(doing: str, micro_batches: Sequence[MicroBatch], mend: str) -> Iterator[None]:
    """Turn running out of memory into a message that names the batch and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, length = max((tuple(batch.input_ids.shape) for batch in micro_batches), key=math.prod)
        what = f"out of memory in {doing}, on a batch of {rows} x {length:,} tokens"
        raise OutOfMemoryError(what, where=name_rows(micro_batches), mend=mend) from error


def name_rows(micro_batches: Sequence[MicroBatch], most: int = 4) -> str:
    """Where the rows come from; the first few of many."""
    origins = [origin for batch in micro_batches for origin in batch.origins]
    rest = f" and {len(origins) - most} more" if len(origins) > most else ""
    return ", ".join(origins[:most]) + rest
