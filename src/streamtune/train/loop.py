"""The training loop: :func:`train` reads from top to bottom, and each thing it does is a function below it.

What is minimised comes in as an ``Objective``; one optimizer step of it, and the evaluation, are in ``step``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from streamtune.engine import StreamHandle
from streamtune.errors import did_you_mean
from streamtune.train.backend import Backend
from streamtune.train.batch import MicroBatch, StepStream, counted
from streamtune.train.checkpoint import Checkpoint, checkpoint_path, restoring, supersede
from streamtune.train.guard import NextSchedule, StepGuard
from streamtune.train.listeners import Listeners
from streamtune.train.memory import GIB, peak_memory_bytes
from streamtune.train.moved import FIRST_STEPS, MovedWeights, describe_moved
from streamtune.train.objective import Objective, StepScore
from streamtune.train.progress import LossPlot, Progress
from streamtune.train.records import append_event, append_record, append_records, cut_after_step, cut_events
from streamtune.train.rng import RngState, capture_rng, restore_rng, seed_everything
from streamtune.train.rundir import RunDirectory
from streamtune.train.saver import CheckpointSaver, Keep, ModelWriter
from streamtune.train.signals import StopRequest
from streamtune.train.slices import SliceReader
from streamtune.train.step import (
    HeldOut,
    StepRouters,
    TrainSettings,
    accumulate_gradients,
    device_of,
    evaluate,
    explain_out_of_memory,
    find_non_finite,
)
from streamtune.train.world import World


@dataclass(frozen=True)
class Progressed:
    """The progress of a run. Saved in every checkpoint, returned at the end."""

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
    sample_due: bool = False
    """The sample prompts are still to be completed at this step: that was interrupted."""
    skipped: int = 0
    """Steps without an update, because something was not finite."""
    best: float | None = None
    """The best value so far of the metric that ends a run early."""
    not_better: int = 0
    """Evaluations in a row whose metric was not better than that."""
    ended_early: bool = False
    """The run is over before its last step."""
    best_evaluations: Sequence[Sequence[float]] = ()
    """The best values of ``metric_for_best_model`` (``eval_loss`` without one) and their steps, the best first."""


@dataclass(frozen=True)
class Position:
    """The state that the next step starts from: a step that is broken off is taken again from here."""

    rng: RngState
    stream: dict[str, Any]


def train(
    backend: Backend,
    objective: Objective,
    learning_rate_at: Callable[[int], float],
    steps: StepStream,
    held_out: HeldOut,
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
    next_schedule: NextSchedule = lambda install: None,
    sample: Callable[[int, StopRequest], list[dict[str, Any]] | None] | None = None,
    listeners: Listeners | None = None,
    fresh_optimizer: bool = False,
) -> Progressed:
    """Train the model of ``backend`` until ``settings.total_steps``, or until ``stop`` is requested.

    Args:
        backend: A causal language model with its gradients and optimizer. Where ``resume_from`` is given its weights
            are those of that checkpoint already.
        objective: What is minimised.
        learning_rate_at: The learning rate of each step, counted from 0.
        steps: Gives each optimizer step its micro-batches.
        held_out: Gives the held-out batches of each set, anew at each call; empty where nothing is held out.
        settings: How long, how often, how.
        run: Where the files go.
        identity: What run this is; written into each checkpoint.
        writer: Writes the model into a checkpoint.
        resume_from: Go on from here. On the CPU every later loss is bit for bit that of a run never interrupted.
        progress: What the user sees.
        stop: Looked at after each micro-batch. A step broken off half-way is left out of the checkpoint.
        handle: What streams the model; its routers' losses, if it has any, are in the gradient and not in ``loss``.
        world: The ranks that train together: each calls this with its share of the rows, rank 0 writes the files.
        next_schedule: Finds another schedule for the model where memory runs out.
        sample: Completes the sample prompts after ``settings.sample_steps`` steps each, called by all ranks; it leaves
            model and random state as they were, and returns None where it was stopped.
        listeners: Called by rank 0 with what happens. One that raises stops the run, as ``stop`` does.
        fresh_optimizer: The states of the optimizer begin anew where ``resume_from`` has those of another one.

    Returns:
        How far it came.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite, and the run is to stop. Raised before the weights are
            touched.
        OutOfMemoryError: With the batch it happened on and what to change.
        CheckpointError: A checkpoint cannot be written. The ones before are intact.
    """
    model = backend.model
    listeners = Listeners() if listeners is None else listeners
    seed_everything(settings.seed, world.rank)
    state = Progressed()
    if resume_from is not None:
        state = resume(resume_from, backend, steps, settings.seed, world, fresh_optimizer=fresh_optimizer)
    if state.not_better < settings.early_stopping_patience:  # it was raised since
        state = replace(state, ended_early=False)
    if world.is_main:  # only now: the checkpoint is loaded whole
        if resume_from is not None:
            supersede(run.checkpoints, state.step)
        cut_after_step(run.metrics, state.step, evaluated=not state.eval_due)
        cut_after_step(run.samples, state.step - state.sample_due)
        cut_events(run.events, state.step)
    position = Position(capture_rng(), steps.state_dict())
    saved = state.step, state.eval_due, state.sample_due
    latest: dict[str, Any] = {}
    plot = LossPlot(run)
    guard = StepGuard(settings, run, device_of(model), next_schedule=next_schedule, world=world)
    saver = CheckpointSaver(
        run.checkpoints,
        writer,
        Keep(settings.save_total_limit, settings.save_best_limit, settings.greater_is_better),
        world=world.apart() if settings.save_async else world,
        run=str(identity.get("run", "")),
        asynchronous=settings.save_async,
        before=run.sync,
    )

    with saver:  # which waits for a save in flight, however this ends
        while True:
            is_best = False
            # 1. At a boundary between steps: evaluate and save where it is time to, leave where the run is over.
            if state.eval_due and held_out:
                progress.activity("evaluating")
                with backend.averaged():
                    found = evaluate(
                        model,
                        objective,
                        held_out,
                        settings=settings,
                        step=state.step,
                        stop=stop,
                        handle=handle,
                        world=world,
                    )
                if found is not None:
                    state = replace(state, eval_loss=found.get("eval_loss"), eval_due=False)
                    latest |= found
                    progress.evaluated(state.step, found)
                    tell_missing_metric(settings, latest, state.step, progress)
                    state = after_evaluation(state, found, settings, progress)
                    state, is_best = among_the_best(state, found, settings)
                    if world.is_main:
                        append_record(run.metrics, {"step": state.step, **found})
                        listeners.evaluated({"step": state.step, **found})
                        plot.draw()
            if state.sample_due and sample is not None:
                progress.activity("sampling")
                with backend.averaged():
                    samples = sample(state.step, stop)
                if samples is not None:
                    state = replace(state, sample_due=False)
                    if world.is_main:
                        append_records(run.samples, samples)
                        listeners.sampled(samples)
                    for each in samples:
                        progress.sampled(state.step, each["prompt"], each["completion"])
                progress.activity("")
            stops = world.sums([stop.requested or listeners.error is not None, saver.failed])
            stopped, failed = (count > 0 for count in stops)
            if failed:
                saver.wait_for_last()  # where one rank cannot write no rank can commit: all of them raise
            over = stopped or state.step >= settings.total_steps or state.ended_early
            # Also where a run that was stopped in an evaluation has now made up for it: its checkpoint says it is due.
            if (state.step, state.eval_due, state.sample_due) != saved and (
                over or is_due(state.step, settings.save_steps) or is_best
            ):
                progress.activity("saving")
                metric = latest.get(settings.metric_for_best_model or "")
                with backend.averaged():
                    save(saver, backend, state, position, identity, metric)
                saved = state.step, state.eval_due, state.sample_due
            committed = saver.wait() if over else saver.finished()
            if world.is_main:
                for path in committed:
                    step = int(path.name.removeprefix("step-"))
                    append_event(run.events, "checkpoint", step=step, folder=str(path))
                    progress.saved(step, path)
                    listeners.saved(step, path)
                if over:
                    plot.draw(last=True)
                    tell_lost_best(state, settings, run, progress)
            if over:
                return state

            # 2. One optimizer step.
            started = time.perf_counter()
            micro_batches = steps.next_step()
            gradients = partial(
                take_gradients,
                backend,
                objective,
                micro_batches,
                handle,
                settings=settings,
                step=state.step + 1,
                progress=progress,
                stop=stop,
                world=world,
            )
            learning_rate = learning_rate_at(state.step)
            backend.begin_step(learning_rate, replayed(gradients))
            before = MovedWeights(backend.stepped()) if state.step < FIRST_STEPS else None
            score = guard.attempt(gradients, backend.drop_gradients, state.step + 1)
            if score is None:  # Stopped half-way: `position` still is where this step began.
                backend.drop_gradients()
                continue
            grad_norm = backend.clip_gradients(settings.max_grad_norm)
            wrong = score.not_finite or find_non_finite("gradient norm", grad_norm, state.step + 1, micro_batches)
            skip = guard.skips(wrong, state.step + 1, state.skipped)
            if skip:
                backend.drop_gradients()
            else:
                guard.watch(state.step + 1, score.loss, grad_norm, micro_batches)
                # The first step allocates the optimizer's state, which is when a model that just fits no longer does.
                doing = f"the optimizer at step {state.step + 1}"
                with explain_out_of_memory(doing, micro_batches, settings.out_of_memory_mend):
                    backend.step(learning_rate)
            moved = {} if before is None or skip else {"moved": round(before.share(world), 6)}
            if not latest:  # now the optimizer has its state: what a checkpoint takes is known
                saver.check_room(backend)

            # 3. What the step was.
            mine = counted(micro_batches)
            tokens = world.count(sum(batch.num_tokens for batch in mine))
            state = replace(
                state,
                step=state.step + 1,
                tokens=state.tokens + tokens,
                first_loss=score.loss if state.first_loss is None and not skip else state.first_loss,
                last_loss=state.last_loss if skip else score.loss,
                skipped=state.skipped + skip,
                eval_due=bool(held_out)
                and (state.step + 1 == settings.total_steps or is_due(state.step + 1, settings.eval_steps)),
                # The last step's are written by the caller, at the end of every run.
                sample_due=sample is not None
                and state.step + 1 < settings.total_steps
                and is_due(state.step + 1, settings.sample_steps),
            )
            position = Position(capture_rng(), steps.state_dict())
            seconds = time.perf_counter() - started
            measured = {
                "loss": score.loss,
                **score.metrics,
                **({} if score.aux_loss is None else {"aux_loss": world.sums([score.aux_loss])[0]}),
            }
            record = {
                "step": state.step,
                **({"skipped": True} if skip else measured),  # JSON has no NaN
                "lr": learning_rate,
                **({} if skip else {"grad_norm": grad_norm}),
                **({} if skip or backend.clipped_by is None else {"clip_norm": backend.clipped_by}),
                **moved,
                "tokens": tokens,
                "supervised_tokens": world.count(sum(batch.num_targets for batch in mine)),
                "tokens_per_s": round(tokens / seconds, 1),
                **used_flops(settings, mine, seconds, world),
                "peak_mem_gib": round(peak_memory_bytes(device_of(model)) / GIB, 3),
                **_epoch(settings, state.step),
            }
            if not latest and not (settings.metric_for_best_model or "").startswith("eval_"):
                tell_missing_metric(settings, record, state.step, progress)
            if moved and state.step == min(FIRST_STEPS, settings.total_steps):
                tell_unmoved(settings, backend, moved["moved"], learning_rate, state.step, progress)
            latest = dict(record)
            if world.is_main:
                append_record(run.metrics, record)
                listeners.step(record)
            progress.step(record)


def _epoch(settings: TrainSettings, step: int) -> dict[str, float]:
    """Return the epoch after a step, as its record has it."""
    if settings.steps_per_epoch is None:
        return {}
    return {"epoch": round(max(0, step - settings.supervised_steps) / settings.steps_per_epoch, 4)}


def used_flops(settings: TrainSettings, batches: Sequence[MicroBatch], seconds: float, world: World) -> dict[str, Any]:
    """Return the operations of a step, of all ranks, and the part of the devices' rate that it used, where known."""
    if settings.step_flops is None:
        return {}
    # Ranks that share a sequence have the same rows: those of one of them count.
    flops = world.count(settings.step_flops(batches))
    if settings.peak_flops is None:
        return {"flops": flops}
    return {"flops": flops, "mfu": round(flops / seconds / settings.peak_flops / world.size, 4)}


def replayed(take: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls ``take`` with the random numbers of now, to its end whatever is requested."""
    began = capture_rng()

    def again() -> object:
        restore_rng(began)
        return take(stop=StopRequest())

    return again


def take_gradients(
    backend: Backend,
    objective: Objective,
    micro_batches: Sequence[MicroBatch],
    handle: StreamHandle | None,
    *,
    settings: TrainSettings,
    step: int,
    progress: Progress,
    stop: StopRequest,
    world: World,
) -> StepScore | None:
    """Compute the gradients of a step once; return its loss, None where it was broken off."""
    return backend.compute(
        lambda: accumulate_gradients(
            backend,
            objective,
            micro_batches,
            StepRouters(handle, micro_batches, world),
            settings=settings,
            step=step,
            progress=progress.activity,
            stop=stop,
            world=world,
        )
    )


def save(
    saver: CheckpointSaver,
    backend: Backend,
    state: Progressed,
    position: Position,
    identity: Mapping[str, Any],
    metric: float | None,
) -> None:
    """Begin a checkpoint of ``state``, from which the next step starts at ``position``. Called by all ranks."""
    values = {
        "step": state.step,
        "progressed": asdict(state),
        "stream": position.stream,
        "identity": dict(identity),
        **({"backend": own} if (own := backend.state()) else {}),
    }
    saver.save(backend, state=values, rng=position.rng, metric=metric)


def resume(
    checkpoint: Checkpoint,
    backend: Backend,
    steps: StepStream,
    seed: int,
    world: World,
    *,
    fresh_optimizer: bool = False,
) -> Progressed:
    """Restore optimizer, data and random state from ``checkpoint``, and return the progress of its run.

    Every rank goes on with its own random state. Where another number of ranks wrote the checkpoint there is none for
    each, and all are seeded anew, by the step and the rank.
    """
    path = checkpoint.path
    with restoring(path, "optimizer"):
        saved = SliceReader(path, masters=fresh_optimizer)
        if not fresh_optimizer:
            backend.load_state(checkpoint.state.get("backend", {}))  # which weights have a state may depend on it
    if not fresh_optimizer or saved.parameters():

        def load() -> None:
            with restoring(path, "optimizer"):
                backend.load_slices(saved)

        world.together(load)
    if checkpoint.state["stream"] is not None:  # None: the data may be another, and is begun anew
        with restoring(path, "position in the data"):
            steps.load_state_dict(checkpoint.state["stream"])
    with restoring(path, "random state"):
        if checkpoint.ranks == world.size:
            restore_rng(checkpoint.rng(world.rank))
        else:
            seed_everything(seed, world.rank, checkpoint.step)
    with restoring(path, "progress"):
        progressed = dict(checkpoint.state["progressed"])
        progressed["best_evaluations"] = tuple(map(tuple, progressed.get("best_evaluations", ())))  # JSON has no tuples
        return Progressed(**progressed)


def after_evaluation(
    state: Progressed, found: Mapping[str, Any], settings: TrainSettings, progress: Progress
) -> Progressed:
    """Return the state after an evaluation that found some metrics: with the best value, and if the run ends early."""
    value = found.get(settings.metric_for_best_model or "")
    if settings.early_stopping_patience == 0 or value is None:
        return state
    gain = math.inf if state.best is None else value - state.best if settings.greater_is_better else state.best - value
    if gain > settings.early_stopping_threshold:
        return replace(state, best=value, not_better=0, ended_early=False)
    not_better = state.not_better + 1
    ended = not_better >= settings.early_stopping_patience and state.step < settings.total_steps
    if ended:
        progress.note(
            state.step,
            f"stopped early: {not_better} evaluations without a better {settings.metric_for_best_model} than "
            f"{state.best:.4g}",
        )
    return replace(state, not_better=not_better, ended_early=ended)


def among_the_best(state: Progressed, found: Mapping[str, Any], settings: TrainSettings) -> tuple[Progressed, bool]:
    """Return the state with an evaluation among its best ones, and True if the weights of it are to be saved.

    A checkpoint of an evaluation that is among the best so far is saved whatever ``save_steps`` says: later there is
    none of these weights.
    """
    value = found.get(settings.metric_for_best_model or "eval_loss")
    if value is None:
        return state, False
    limit = settings.save_best_limit or 1
    before = [tuple(each) for each in state.best_evaluations]
    ranked = sorted(
        [*before, (value, state.step)], key=lambda each: -each[0] if settings.greater_is_better else each[0]
    )
    best = ranked[:limit]
    is_best = (value, state.step) in best and settings.metric_for_best_model is not None
    return replace(state, best_evaluations=tuple(best)), is_best


def tell_lost_best(state: Progressed, settings: TrainSettings, run: RunDirectory, progress: Progress) -> None:
    """Show a note if an earlier evaluation was better than the last, and its weights are in no checkpoint."""
    if settings.metric_for_best_model is not None or not state.best_evaluations or state.eval_loss is None:
        return
    value, step = state.best_evaluations[0]
    if value < state.eval_loss and not checkpoint_path(run.checkpoints, int(step)).exists():
        progress.note(
            state.step,
            f"eval_loss was {value:.4g} at step {int(step)} and is {state.eval_loss:.4g}: the weights of that step are "
            "not kept; metric_for_best_model: eval_loss keeps the best ones of the next run",
        )


def tell_missing_metric(settings: TrainSettings, latest: Mapping[str, Any], step: int, progress: Progress) -> None:
    """Show a note if checkpoints are to be kept for a metric that is not measured."""
    name = settings.metric_for_best_model
    if name is not None and name not in latest:
        what = "keep checkpoints for" if settings.early_stopping_patience == 0 else "stop early by"
        known = did_you_mean(name, latest) or f"there are {', '.join(latest)}"
        progress.note(step, f"there is no metric '{name}' to {what}; {known}")


def tell_unmoved(
    settings: TrainSettings, backend: Backend, share: float, learning_rate: float, step: int, progress: Progress
) -> None:
    """Show a note if a step that should change the weights changes next to none of them."""
    if learning_rate > 0 and share < settings.least_moved:
        progress.note(step, describe_moved(share, {x.dtype for x in backend.stepped()}, learning_rate))


def is_due(step: int, every: int) -> bool:
    """Return True if something done every so many steps is done after ``step``; 0 is never."""
    return every > 0 and step % every == 0
