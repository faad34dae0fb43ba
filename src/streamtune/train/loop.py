"""The training loop: :func:`train` reads from top to bottom, and each thing it does is a function below it.

What is minimised comes in as an ``Objective``; one optimizer step of it, and the evaluation, are in ``step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamtune.engine import StreamHandle
from streamtune.train.backend import Backend, LocalBackend
from streamtune.train.batch import MicroBatch, StepStream, counted
from streamtune.train.checkpoint import Checkpoint, ModelWriter, rotate, save_checkpoint
from streamtune.train.memory import GIB, peak_memory_bytes
from streamtune.train.objective import Objective
from streamtune.train.plot import draw_loss
from streamtune.train.progress import Progress
from streamtune.train.records import append_event, append_record, cut_after_step, read_records
from streamtune.train.rng import RngState, capture_rng, restore_rng, seed_everything
from streamtune.train.routers import StepRouters
from streamtune.train.rundir import RunDirectory
from streamtune.train.sharded_checkpoint import ranks_of, rng_of_rank, save_sharded
from streamtune.train.signals import StopRequest
from streamtune.train.slices import SliceReader
from streamtune.train.step import (
    TrainSettings,
    accumulate_gradients,
    device_of,
    evaluate,
    explain_out_of_memory,
    refuse_non_finite,
)
from streamtune.train.world import World

__all__ = ["Position", "Progressed", "train"]


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
    backend: Backend,
    objective: Objective,
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
    world: World = World(),  # noqa: B008 (frozen)
) -> Progressed:
    """Train the model of ``backend`` until ``settings.total_steps``, or until ``stop`` is requested.

    Args:
        backend: A causal language model with its gradients and optimizer. Where ``resume_from`` is given its weights
            are those of that checkpoint already.
        objective: What is minimised.
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
        handle: What streams the model; its routers' losses, if it has any, are in the gradient and not in ``loss``.
        world: The ranks that train together: each calls this with its share of the rows, rank 0 writes the files.

    Returns:
        How far it came.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite. Raised before the weights are touched.
        OutOfMemoryError: With the batch it happened on and what to change.
        CheckpointError: A checkpoint cannot be written. The ones before are intact.
    """
    model = backend.model
    seed_everything(settings.seed, world.rank)
    state = Progressed() if resume_from is None else resume(resume_from, backend, steps, settings.seed, world)
    if world.is_main:
        cut_after_step(run.metrics, state.step, evaluated=not state.eval_due)
    position = Position(capture_rng(), steps.state_dict())
    saved_step = state.step

    while True:
        # 1. At a boundary between steps: evaluate and save where it is time to, leave where the run is over.
        if state.eval_due and validation is not None:
            progress.activity("evaluating")
            found = evaluate(
                model,
                objective,
                validation(),
                settings=settings,
                step=state.step,
                stop=stop,
                handle=handle,
                world=world,
            )
            if found is not None:
                state = replace(state, eval_loss=found.get("eval_loss"), eval_due=False)
                progress.evaluated(state.step, found)
                if world.is_main:
                    append_record(run.metrics, {"step": state.step, **found})
                    draw_loss(read_records(run.metrics), run.loss_plot, title=run.path.name)
        over = world.any(stop.requested) or state.step >= settings.total_steps
        if state.step != saved_step and (over or is_due(state.step, settings.save_steps)):
            progress.activity("saving")
            checkpoint = save(run, backend, state, position, identity, writer, world)
            saved_step = state.step
            if world.is_main:
                rotate(run.checkpoints, settings.save_total_limit)
            progress.saved(state.step, checkpoint.path)
        if over:
            return state

        # 2. One optimizer step.
        started = time.perf_counter()
        micro_batches = steps.next_step()
        routers = StepRouters(handle, micro_batches, world)
        score = accumulate_gradients(
            backend,
            objective,
            micro_batches,
            routers,
            settings=settings,
            step=state.step + 1,
            progress=progress.activity,
            stop=stop,
            world=world,
        )
        if score is None:  # Stopped half-way: `position` still is where this step began.
            backend.drop_gradients()
            continue
        grad_norm = backend.clip_gradients(settings.max_grad_norm)
        refuse_non_finite("gradient norm", grad_norm, state.step + 1, micro_batches, world)
        learning_rate = learning_rate_at(state.step)
        # The first step allocates the optimizer's state, which is when a model that just fits no longer does.
        doing = f"the optimizer at step {state.step + 1}"
        with explain_out_of_memory(doing, micro_batches, settings.out_of_memory_mend):
            backend.step(learning_rate)

        # 3. What the step was.
        mine = counted(micro_batches)
        tokens = world.count(sum(batch.num_tokens for batch in mine))
        state = replace(
            state,
            step=state.step + 1,
            tokens=state.tokens + tokens,
            first_loss=score.loss if state.first_loss is None else state.first_loss,
            last_loss=score.loss,
            eval_due=validation is not None
            and (state.step + 1 == settings.total_steps or is_due(state.step + 1, settings.eval_steps)),
        )
        position = Position(capture_rng(), steps.state_dict())
        seconds = time.perf_counter() - started
        record = {
            "step": state.step,
            "loss": score.loss,
            **score.metrics,
            **({} if routers.aux_loss is None else {"aux_loss": world.sums([routers.aux_loss])[0]}),
            "lr": learning_rate,
            "grad_norm": grad_norm,
            "tokens": tokens,
            "supervised_tokens": world.count(sum(batch.num_targets for batch in mine)),
            "tokens_per_s": round(tokens / seconds, 1),
            "peak_mem_gib": round(peak_memory_bytes(device_of(model)) / GIB, 3),
            "epoch": round(state.step / settings.steps_per_epoch, 4),
        }
        if world.is_main:
            append_record(run.metrics, record)
        progress.step(record)


def save(
    run: RunDirectory,
    backend: Backend,
    state: Progressed,
    position: Position,
    identity: Mapping[str, Any],
    writer: ModelWriter,
    world: World,
) -> Checkpoint:
    """Commit a checkpoint of ``state``, from which the next step starts at ``position``. Called by all ranks."""
    values = {
        "step": state.step,
        "progressed": asdict(state),
        "stream": position.stream,
        "identity": dict(identity),
    }
    if isinstance(backend, LocalBackend):
        tensors = backend.optimizer_tensors()
        checkpoint = save_checkpoint(
            run.checkpoints, state=values, rng=position.rng, optimizer_tensors=tensors, writer=writer
        )
    else:
        checkpoint = save_sharded(
            run.checkpoints, world=world, backend=backend, state=values, rng=position.rng, writer=writer
        )
    if world.is_main:
        append_event(run.events, "checkpoint", step=state.step, folder=str(checkpoint.path))
        draw_loss(read_records(run.metrics), run.loss_plot, title=run.path.name)
    return checkpoint


def resume(checkpoint: Checkpoint, backend: Backend, steps: StepStream, seed: int, world: World) -> Progressed:
    """Put optimizer, data and random state to where ``checkpoint`` left them, and return how far it had come.

    Every rank goes on with its own random state. Where other ranks wrote the checkpoint there is none for each, and
    all are seeded anew, by the step and the rank.
    """
    world.together(lambda: backend.load_slices(SliceReader(checkpoint.path)))
    steps.load_state_dict(checkpoint.state["stream"])
    if ranks_of(checkpoint) == world.size:
        restore_rng(rng_of_rank(checkpoint, world.rank))
    else:
        seed_everything(seed, world.rank, checkpoint.step)
    return Progressed(**checkpoint.state["progressed"])


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps is done after ``step``; 0 is never."""
    return every > 0 and step % every == 0
