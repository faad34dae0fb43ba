"""The training loop: :func:`train` takes optimizer steps, and evaluates, samples and saves between them.

Gradients of one step and evaluation are in ``step``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from streamtune.engine import StreamHandle
from streamtune.train.backend import Backend
from streamtune.train.checkpoint import Checkpoint, restoring, step_of, supersede
from streamtune.train.evaluations import (
    Progressed,
    note_lost_best,
    note_missing_metric,
    rank_evaluation,
    update_early_stopping,
)
from streamtune.train.guard import FIRST_STEPS, MovedWeights, NextSchedule, StepGuard, describe_moved
from streamtune.train.objective import MicroBatch, Objective, StepScore, StepStream, counted
from streamtune.train.process import RngState, StopRequest, capture_rng, restore_rng, seed_everything
from streamtune.train.progress import Listeners, LossPlot, Progress
from streamtune.train.records import append_event, append_record, append_records, cut_after_step, cut_events
from streamtune.train.rundir import RunDirectory
from streamtune.train.saver import CheckpointSaver, Keep, ModelWriter
from streamtune.train.slices import SliceReader
from streamtune.train.step import (
    GIB,
    HeldOut,
    StepContext,
    TrainSettings,
    accumulate_gradients,
    device_of,
    evaluate,
    explain_out_of_memory,
    find_non_finite,
    peak_memory_bytes,
)
from streamtune.train.world import WORLD, World


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """The objects that a run passes to the training loop."""

    backend: Backend
    """Model, gradients and optimizer. In a resumed run the model already has the checkpoint's weights."""
    objective: Objective
    learning_rate_at: Callable[[int], float]
    """Function that returns the learning rate of a step, counted from 0."""
    steps: StepStream
    held_out: HeldOut
    """Functions that make the held-out batches, by name of the set; empty without held-out rows."""
    directory: RunDirectory
    identity: Mapping[str, Any]
    """Identity of the run, saved in each checkpoint."""
    writer: ModelWriter
    handle: StreamHandle | None = None
    """Handle of the streamed model. Its router loss is in the gradient, but not in ``loss``."""
    world: World = WORLD
    """Ranks that train together. Each calls :func:`train` with its share of the rows; rank 0 writes the files."""
    resume_from: Checkpoint | None = None
    """Checkpoint to resume from. On the CPU all later losses equal the uninterrupted run's bit for bit."""
    fresh_optimizer: bool = False
    """True if the optimizer starts without states, because the checkpoint is from another optimizer."""
    next_schedule: NextSchedule = lambda install: None
    """Function that finds another schedule when memory runs out."""
    sample: Callable[[int, StopRequest], list[dict[str, Any]] | None] | None = None
    """Function that completes the sample prompts at a step; returns None if it was stopped. All ranks call it. It does
    not change the model or the random state.
    """


@dataclass(frozen=True)
class Position:
    """Random state and data position before the next step, from which an interrupted step is repeated."""

    rng: RngState
    stream: dict[str, Any]


def train(
    job: TrainJob, settings: TrainSettings, progress: Progress, stop: StopRequest, listeners: Listeners | None = None
) -> Progressed:
    """Train until ``settings.total_steps`` or until ``stop`` is requested; return the progress.

    Args:
        job: Objects of the run: backend, objective, data, directory.
        settings: Numbers and intervals of the run.
        progress: Output to the user.
        stop: Stop request, checked after each micro-batch. An interrupted step is not in the checkpoint.
        listeners: Listeners, called by rank 0. An error in a listener stops the run, as ``stop`` does.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite, and the settings stop the run. The weights have not been
            changed by this step.
        OutOfMemoryError: Memory ran out; the error names the batch and what to change.
        CheckpointError: A checkpoint cannot be written. Earlier checkpoints are intact.
    """
    return _Loop(job, settings, progress, stop, Listeners() if listeners is None else listeners).run()


class _Loop:
    """The state of a running training loop."""

    def __init__(
        self, job: TrainJob, settings: TrainSettings, progress: Progress, stop: StopRequest, listeners: Listeners
    ) -> None:
        self.job, self.settings, self.progress, self.stop, self.listeners = job, settings, progress, stop, listeners
        self.backend, self.directory, self.world = job.backend, job.directory, job.world
        self.context = StepContext(job.backend, job.objective, settings, job.handle, job.world, progress.activity)
        self.state = self._start()
        self.position = Position(capture_rng(), job.steps.state_dict())
        self.saved = self.state.boundary
        self.latest: dict[str, Any] = {}
        """Record of the last step, with the metrics of the last evaluation; empty before the first step."""
        self.plot = LossPlot(self.directory)
        self.guard = StepGuard(
            settings,
            self.directory,
            device_of(self.backend.model),
            next_schedule=job.next_schedule,
            world=job.world,
        )
        self.saver = CheckpointSaver(
            self.directory.checkpoints,
            job.writer,
            Keep(settings.save_total_limit, settings.save_best_limit, settings.greater_is_better),
            world=job.world.apart() if settings.save_async else job.world,
            run=str(job.identity.get("run", "")),
            asynchronous=settings.save_async,
            before=self.directory.sync,
        )

    def run(self) -> Progressed:
        """Run the loop: before each step evaluate, sample and save if due; return the progress at the end."""
        with self.saver:  # on exit it waits for a save in flight
            while True:
                is_best = self._evaluate()
                self._sample()
                is_over = self._is_over()
                self._save(is_best, is_over)
                self._report_saved(is_over)
                if is_over:
                    return self.state
                self._take_step()

    def _start(self) -> Progressed:
        """Return the initial progress: seed, or restore a checkpoint and delete records of later steps."""
        job, settings, directory, state = self.job, self.settings, self.directory, Progressed()
        seed_everything(settings.seed, self.world.rank)
        if job.resume_from is not None:
            state = resume(job, job.resume_from, settings.seed)
        if state.not_better < settings.early_stopping_patience:  # the patience was raised
            state = replace(state, ended_early=False)
        if self.world.is_main:  # after the checkpoint was loaded without error
            if job.resume_from is not None:
                supersede(directory.checkpoints, state.step)
            cut_after_step(directory.metrics, state.step, evaluated=not state.eval_due)
            cut_after_step(directory.samples, state.step - state.sample_due)
            cut_events(directory.events, state.step)
        return state

    def _evaluate(self) -> bool:
        """Evaluate if due; return True if a checkpoint must be saved because the metric is among the best."""
        if not (self.state.eval_due and self.job.held_out):
            return False
        self.progress.activity("evaluating")
        with self.backend.averaged():
            metrics = evaluate(self.context, self.job.held_out, self.state.step, self.stop)
        if metrics is None:
            return False
        step, settings = self.state.step, self.settings
        state = replace(self.state, eval_loss=metrics.get("eval_loss"), eval_due=False)
        self.latest |= metrics
        self.progress.evaluated(step, metrics)
        note_missing_metric(settings, self.latest, step, self.progress)
        state = update_early_stopping(state, metrics, settings, self.progress)
        self.state, is_best = rank_evaluation(state, metrics, settings)
        if self.world.is_main:
            append_record(self.directory.metrics, {"step": step, **metrics})
            self.listeners.evaluated({"step": step, **metrics})
            self.plot.draw()
        return is_best

    def _sample(self) -> None:
        """Complete the sample prompts if due, and write the completions."""
        if not self.state.sample_due or self.job.sample is None:
            return
        self.progress.activity("sampling")
        with self.backend.averaged():
            samples = self.job.sample(self.state.step, self.stop)
        if samples is not None:
            self.state = replace(self.state, sample_due=False)
            if self.world.is_main:
                append_records(self.directory.samples, samples)
                self.listeners.sampled(samples)
            for each in samples:
                self.progress.sampled(self.state.step, each["prompt"], each["completion"])
        self.progress.activity("")

    def _is_over(self) -> bool:
        """Return True on all ranks if the run has ended or a rank was stopped.

        Raises:
            CheckpointError: A rank cannot save a checkpoint.
        """
        stops = [self.stop.requested or self.listeners.error is not None, self.saver.failed]
        stopped, failed = (count > 0 for count in self.world.sums(stops))
        if failed:
            self.saver.wait_for_last()  # if one rank cannot write, no rank can commit, so all of them raise
        return stopped or self.state.step >= self.settings.total_steps or self.state.ended_early

    def _save(self, is_best: bool, is_over: bool) -> None:
        """Start to save a checkpoint if due, and also after a resumed run has finished an interrupted evaluation."""
        state, position, settings = self.state, self.position, self.settings
        if state.boundary == self.saved or not (is_over or is_due(state.step, settings.save_steps) or is_best):
            return
        self.progress.activity("saving")
        values = {
            "step": state.step,
            "progressed": asdict(state),
            "stream": position.stream,
            "identity": dict(self.job.identity),
        }
        with self.backend.averaged():
            if backend_state := self.backend.state():
                values["backend"] = backend_state
            metric = self.latest.get(settings.metric_for_best_model or "")
            self.saver.save(self.backend, state=values, rng=position.rng, metric=metric)
        self.saved = state.boundary

    def _report_saved(self, is_over: bool) -> None:
        """Report the checkpoints committed since the last call; at the end of the run wait for the last one."""
        committed = self.saver.wait() if is_over else self.saver.finished()
        if not self.world.is_main:
            return
        for path in committed:
            step = step_of(path)
            append_event(self.directory.events, "checkpoint", step=step, folder=str(path))
            self.progress.saved(step, path)
            self.listeners.saved(step, path)
        if is_over:
            self.plot.draw(last=True)
            note_lost_best(self.state, self.settings, self.directory, self.progress)

    def _take_step(self) -> None:
        """Take one optimizer step and record it; an interrupted step changes nothing."""
        started = time.perf_counter()
        job, settings, backend, guard, step = self.job, self.settings, self.backend, self.guard, self.state.step + 1
        micro_batches = job.steps.next_step()
        gradients = partial(take_gradients, self.context, micro_batches, step, stop=self.stop)
        learning_rate = job.learning_rate_at(step - 1)
        backend.begin_step(learning_rate, replayed(gradients))
        before = MovedWeights(backend.stepped()) if step <= FIRST_STEPS else None
        score = guard.attempt(gradients, backend.drop_gradients, step)
        if score is None:  # interrupted: `position` is still the start of this step
            backend.drop_gradients()
            return
        grad_norm = backend.clip_gradients(settings.max_grad_norm)
        wrong = score.not_finite or find_non_finite("gradient norm", grad_norm, step, micro_batches)
        skip = guard.skips(wrong, step, self.state.skipped)
        if skip:
            backend.drop_gradients()
        else:
            guard.watch(step, score.loss, grad_norm, micro_batches)
            # The first step allocates the optimizer's state, so memory may run out here.
            with explain_out_of_memory(f"the optimizer at step {step}", micro_batches, settings.out_of_memory_fix):
                backend.step(learning_rate)
        moved = None if before is None or skip else round(before.share(self.world), 6)
        if not self.latest:  # after the first step the optimizer has its state, so the size of a checkpoint is known
            self.saver.check_disk_space(backend)
        self._record(_StepResult(started, counted(micro_batches), learning_rate, score, grad_norm, skip, moved))

    def _record(self, taken: _StepResult) -> None:
        """Update the progress after a step, write its record and show it."""
        state, settings, skip = self.state, self.settings, taken.skip
        step, tokens = state.step + 1, self.world.count(sum(batch.num_tokens for batch in taken.batches))
        loss = taken.score.loss
        self.state = replace(
            state,
            step=step,
            tokens=state.tokens + tokens,
            first_loss=loss if state.first_loss is None and not skip else state.first_loss,
            last_loss=state.last_loss if skip else loss,
            skipped=state.skipped + skip,
            eval_due=bool(self.job.held_out) and (step == settings.total_steps or is_due(step, settings.eval_steps)),
            # The caller writes the last step's samples, at the end of every run.
            sample_due=self.job.sample is not None
            and step < settings.total_steps
            and is_due(step, settings.sample_steps),
        )
        self.position = Position(capture_rng(), self.job.steps.state_dict())
        record = self._make_record(taken, tokens, time.perf_counter() - taken.started)
        if not self.latest and not (settings.metric_for_best_model or "").startswith("eval_"):
            note_missing_metric(settings, record, step, self.progress)
        if taken.moved is not None and step == min(FIRST_STEPS, settings.total_steps):
            self._note_unmoved(taken.moved, taken.learning_rate)
        self.latest = dict(record)
        if self.world.is_main:
            append_record(self.directory.metrics, record)
            self.listeners.step(record)
        self.progress.step(record)

    def _make_record(self, taken: _StepResult, tokens: int, seconds: float) -> dict[str, Any]:
        """Return the record of the current step for ``metrics.jsonl``."""
        score, skip, clipped_by, world = taken.score, taken.skip, self.backend.clipped_by, self.world
        measured: dict[str, Any] = {"loss": score.loss, **score.metrics}
        if score.aux_loss is not None:
            measured["aux_loss"] = world.sums([score.aux_loss])[0]
        return {
            "step": self.state.step,
            **({"skipped": True} if skip else measured),  # JSON has no NaN
            "lr": taken.learning_rate,
            **({} if skip else {"grad_norm": taken.grad_norm}),
            **({} if skip or clipped_by is None else {"clip_norm": clipped_by}),
            **({} if taken.moved is None else {"moved": taken.moved}),
            "tokens": tokens,
            "supervised_tokens": world.count(sum(batch.num_targets for batch in taken.batches)),
            "tokens_per_s": round(tokens / seconds, 1),
            **used_flops(self.settings, taken.batches, seconds, world),
            "peak_mem_gib": round(peak_memory_bytes(device_of(self.backend.model)) / GIB, 3),
            **_epoch_entry(self.settings, self.state.step),
        }

    def _note_unmoved(self, share: float, learning_rate: float) -> None:
        """Show a note if a step with a positive learning rate changed hardly any weights."""
        if learning_rate > 0 and share < self.settings.least_moved:
            dtypes = {x.dtype for x in self.backend.stepped()}
            self.progress.note(self.state.step, describe_moved(share, dtypes, learning_rate))


@dataclass(frozen=True)
class _StepResult:
    """The result of an optimizer step."""

    started: float
    """``time.perf_counter()`` at its start."""
    batches: Sequence[MicroBatch]
    """Micro-batches of this rank, without the fillers that keep ranks in step."""
    learning_rate: float
    score: StepScore
    grad_norm: float
    skip: bool
    """True if the weights were not updated, because a loss or gradient was not finite."""
    moved: float | None
    """Share of the weights that the step changed; None if not measured."""


def _epoch_entry(settings: TrainSettings, step: int) -> dict[str, float]:
    if settings.steps_per_epoch is None:
        return {}
    return {"epoch": round(max(0, step - settings.supervised_steps) / settings.steps_per_epoch, 4)}


def used_flops(settings: TrainSettings, batches: Sequence[MicroBatch], seconds: float, world: World) -> dict[str, Any]:
    """Return ``flops``, the model FLOPs of a step on all ranks, and ``mfu``, model FLOPs utilisation, if known."""
    if settings.step_flops is None:
        return {}
    # Ranks that share a sequence have the same rows, so one of them counts.
    flops = world.count(settings.step_flops(batches))
    if settings.peak_flops is None:
        return {"flops": flops}
    return {"flops": flops, "mfu": round(flops / seconds / settings.peak_flops / world.size, 4)}


def replayed(take: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls ``take`` with the current random state, and ignores stop requests."""
    began = capture_rng()

    def again() -> object:
        restore_rng(began)
        return take(stop=StopRequest())

    return again


def take_gradients(
    context: StepContext, micro_batches: Sequence[MicroBatch], step: int, stop: StopRequest
) -> StepScore | None:
    """Compute the gradients of a step; return its score, or None if it was interrupted."""
    return context.backend.compute(partial(accumulate_gradients, context, micro_batches, step, stop))


def resume(job: TrainJob, checkpoint: Checkpoint, seed: int) -> Progressed:
    """Restore optimizer, data position and random state from ``checkpoint``; return the saved progress.

    Each rank restores its own random state. If another number of ranks wrote the checkpoint, each rank is seeded anew
    from seed, step and rank.

    Raises:
        CheckpointError: A part of the checkpoint cannot be restored.
    """
    path = checkpoint.path
    with restoring(path, "optimizer"):
        saved = SliceReader(path, masters=job.fresh_optimizer)
        if not job.fresh_optimizer:
            job.backend.load_state(checkpoint.state.get("backend", {}))  # before the tensors: it may decide which exist
    if not job.fresh_optimizer or saved.parameters():

        def load() -> None:
            with restoring(path, "optimizer"):
                job.backend.load_slices(saved)

        job.world.together(load)
    if checkpoint.state["stream"] is not None:  # None: the data may have changed and starts from the beginning
        with restoring(path, "position in the data"):
            job.steps.load_state_dict(checkpoint.state["stream"])
    with restoring(path, "random state"):
        if checkpoint.ranks == job.world.size:
            restore_rng(checkpoint.rng(job.world.rank))
        else:
            seed_everything(seed, job.world.rank, checkpoint.step)
    with restoring(path, "progress"):
        progressed = dict(checkpoint.state["progressed"])
        progressed["best_evaluations"] = tuple(map(tuple, progressed.get("best_evaluations", ())))  # JSON has no tuples
        return Progressed(**progressed)


def is_due(step: int, every: int) -> bool:
    """Return True if an action with interval ``every`` is due after ``step``; 0 means never."""
    return every > 0 and step % every == 0
