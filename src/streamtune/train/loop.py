"""The training loop: takes optimizer steps, and evaluates, samples and saves between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle
from streamtune.train.backend import Backend
from streamtune.train.checkpoint import Checkpoint, checkpoint_step, explain_restore_errors, set_aside_later_checkpoints
from streamtune.train.evaluations import (
    RunProgress,
    note_missing_metric,
    note_unsaved_best,
    rank_by_current_metric,
    update_best_evaluations,
    update_early_stopping,
)
from streamtune.train.guard import FIRST_STEPS, ChangedWeights, NextSchedule, StepGuard, describe_unchanged_weights
from streamtune.train.objective import MicroBatch, Objective, StepScore, StepStream, counted_batches
from streamtune.train.process import RngState, StopRequest, capture_rng, restore_rng, seed_everything
from streamtune.train.progress import Listeners, LossPlot, Progress
from streamtune.train.records import (
    append_event,
    append_record,
    append_records,
    delete_events_after_step,
    delete_records_after_step,
    read_records_backwards,
)
from streamtune.train.rundir import RunDirectory
from streamtune.train.saver import CheckpointSaver, KeepPolicy, ModelWriter
from streamtune.train.slices import SliceReader
from streamtune.train.step import (
    GIB,
    HeldOut,
    StepContext,
    TrainSettings,
    accumulate_gradients,
    evaluate,
    explain_out_of_memory,
    non_finite_error,
    peak_memory_bytes,
)
from streamtune.train.world import WORLD, World


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Objects that the training loop works with."""

    backend: Backend
    """Training backend. In a resumed run its model already has the checkpoint's weights."""
    objective: Objective
    learning_rate_at: Callable[[int], float]
    """Function that returns the learning rate of a step, counted from 0."""
    steps: StepStream
    held_out: HeldOut
    """Name of an evaluation set -> function that returns its batches; empty without evaluation."""
    directory: RunDirectory
    identity: Mapping[str, Any]
    """Settings and hashes of the run, saved in each checkpoint and compared when the run is resumed."""
    writer: ModelWriter
    handle: StreamHandle | None = None
    """Handle returned by ``streamtune.stream``. Its router loss is in the gradient, but not in ``loss``."""
    world: World = WORLD
    """Ranks of the run. Each calls :func:`train` with its own rows; rank 0 writes the files."""
    resume_from: Checkpoint | None = None
    """Checkpoint to resume from. On the CPU, training then continues bit-identically."""
    fresh_optimizer: bool = False
    """True to start without optimizer states, because the checkpoint is from another optimizer."""
    next_schedule: NextSchedule = lambda install: None
    """Function that returns a schedule with less memory after memory ran out."""
    sample: Callable[[int, StopRequest], list[dict[str, Any]] | None] | None = None
    """Function that completes the sample prompts after a step; returns None if a stop was requested. All ranks call it.
    The model and the random state do not change."""


@dataclass(frozen=True)
class ResumePosition:
    """Random state and data position after a step, saved in a checkpoint."""

    rng: RngState
    stream: dict[str, Any]


def train(
    job: TrainJob, settings: TrainSettings, progress: Progress, stop: StopRequest, listeners: Listeners | None = None
) -> RunProgress:
    """Train until ``settings.total_steps`` or until ``stop`` is requested; return the progress.

    Args:
        job: Backend, objective, data and directory of the run.
        settings: Numbers and intervals of the run.
        progress: Output to the user.
        stop: Stop request, checked before each micro-batch. An interrupted step has no effect.
        listeners: Listeners, called on rank 0. An error in a listener stops the run.

    Raises:
        NonFiniteError: A loss or gradient is NaN or infinite, and ``settings`` stop the run.
        OutOfMemoryError: Memory ran out; the error names the batch and what to change.
        CheckpointError: A checkpoint cannot be written. Earlier checkpoints are intact.
    """
    return _Loop(job, settings, progress, stop, Listeners() if listeners is None else listeners).run()


class _Loop:
    def __init__(
        self, job: TrainJob, settings: TrainSettings, progress: Progress, stop: StopRequest, listeners: Listeners
    ) -> None:
        self.job, self.settings, self.progress, self.stop, self.listeners = job, settings, progress, stop, listeners
        self.backend, self.directory, self.world = job.backend, job.directory, job.world
        self.context = StepContext(job.backend, job.objective, settings, job.handle, job.world, progress.show_activity)
        self.state = self._restore_or_seed()
        self.position = ResumePosition(capture_rng(), job.steps.state_dict())
        self.saved_checkpoint_key = self.state.checkpoint_key
        self.latest_record = self._read_latest_record()
        """Record of the last step, with the metrics of its evaluation; empty before the first step, and on other ranks
        than 0 also until the first step of this process."""
        self.has_updated = False
        """True if this process has updated the weights."""
        self.plot = LossPlot(self.directory)
        self.guard = StepGuard(
            settings, self.directory, model_device(self.backend.model), next_schedule=job.next_schedule, world=job.world
        )
        self.saver = CheckpointSaver(
            self.directory.checkpoints,
            job.writer,
            KeepPolicy(
                settings.save_total_limit, settings.save_best_limit, settings.greater_is_better, settings.ranked_by
            ),
            world=job.world.with_new_group() if settings.save_async else job.world,
            run=str(job.identity.get("run", "")),
            asynchronous=settings.save_async,
            before_write=self.directory.fsync_records,
        )

    def run(self) -> RunProgress:
        """Run the loop, and return the progress at the end."""
        with self.saver:  # on exit it waits for a save in flight
            while True:
                is_best = self._evaluate_if_due()
                self._sample_if_due()
                is_over = self._is_over()
                self._save_if_due(is_best, is_over)
                self._report_saved(is_over)
                if is_over:
                    return self.state
                self._take_step()

    def _restore_or_seed(self) -> RunProgress:
        job, settings, directory, state = self.job, self.settings, self.directory, RunProgress()
        seed_everything(settings.seed, self.world.rank)
        if job.resume_from is not None:
            state = restore_from_checkpoint(job, job.resume_from, settings.seed)
        state = rank_by_current_metric(state, settings, self.progress)
        patience = settings.early_stopping_patience
        if patience == 0 or state.not_better < patience:  # early stopping was disabled, or the patience raised
            state = replace(state, ended_early=False)
        # The resumed run may have no held-out rows or samples.
        state = replace(
            state,
            eval_due=state.eval_due and bool(job.held_out),
            sample_due=state.sample_due and job.sample is not None,
        )
        if self.world.is_main:  # after the checkpoint was loaded without error
            if job.resume_from is not None:
                set_aside_later_checkpoints(directory.checkpoints, state.step)
            delete_records_after_step(directory.metrics, state.step, keep_evaluation=not state.eval_due)
            delete_records_after_step(directory.samples, state.step - state.sample_due)
            delete_events_after_step(directory.events, state.step)
        return state

    def _read_latest_record(self) -> dict[str, Any]:
        """Return the record of the step from which the run is resumed, for the metrics of its next checkpoint."""
        latest: dict[str, Any] = {}
        if self.world.is_main and self.job.resume_from is not None and self.directory.metrics.is_file():
            for record in read_records_backwards(self.directory.metrics):
                if record.get("step") != self.state.step:
                    break
                latest = {**record, **latest}
        return latest

    def _evaluate_if_due(self) -> bool:
        """Evaluate if due; return True if a checkpoint must be saved because this evaluation is among the best."""
        if not (self.state.eval_due and self.job.held_out):
            return False
        self.progress.show_activity("evaluating")
        with self.backend.use_averaged_weights():
            metrics = evaluate(self.context, self.job.held_out, self.state.step, self.stop)
        if metrics is None:
            return False
        step, settings = self.state.step, self.settings
        state = replace(self.state, eval_loss=metrics.get("eval_loss"), eval_due=False)
        self.latest_record |= metrics
        self.progress.report_evaluation(step, metrics)
        note_missing_metric(settings, self.latest_record, step, self.progress)
        state = update_early_stopping(state, metrics, settings, self.progress)
        self.state, is_best = update_best_evaluations(state, metrics, settings)
        if self.world.is_main:
            append_record(self.directory.metrics, {"step": step, **metrics})
            self.listeners.evaluated({"step": step, **metrics})
            self.plot.draw()
        return is_best

    def _sample_if_due(self) -> None:
        if not self.state.sample_due or self.job.sample is None:
            return
        self.progress.show_activity("sampling")
        with self.backend.use_averaged_weights():
            samples = self.job.sample(self.state.step, self.stop)
        if samples is not None:
            self.state = replace(self.state, sample_due=False)
            if self.world.is_main:
                append_records(self.directory.samples, samples)
                self.listeners.sampled(samples)
            for each in samples:
                self.progress.report_sample(self.state.step, each["prompt"], each["completion"])
        self.progress.show_activity("")

    def _is_over(self) -> bool:
        """Return True on all ranks if the run has ended, or one rank was asked to stop.

        Raises:
            CheckpointError: A rank cannot save a checkpoint.
        """
        stops = [self.stop.requested or self.listeners.error is not None, self.saver.has_failed]
        stopped, failed = (count > 0 for count in self.world.sum_over_ranks(stops))
        if failed:
            self.saver.wait_for_save()  # if one rank cannot write, no rank can commit, so all of them raise
        return stopped or self.state.step >= self.settings.total_steps or self.state.ended_early

    def _save_if_due(self, is_best: bool, is_over: bool) -> None:
        state, position, settings = self.state, self.position, self.settings
        if state.checkpoint_key == self.saved_checkpoint_key or not (
            is_over or is_due(state.step, settings.save_steps) or is_best
        ):
            return
        self.progress.show_activity("saving")
        values = {
            "step": state.step,
            "progressed": asdict(state),
            "stream": position.stream,
            "identity": dict(self.job.identity),
        }
        with self.backend.use_averaged_weights():
            if backend_state := self.backend.state():
                values["backend"] = backend_state
            if self.backend.loss_scale is not None:
                values["loss_scale"] = self.backend.loss_scale.state()
            metric = self.latest_record.get(settings.metric_for_best_model or "")
            self.saver.save(self.backend, state=values, rng=position.rng, metric=metric)
        self.saved_checkpoint_key = state.checkpoint_key

    def _report_saved(self, is_over: bool) -> None:
        """Report the checkpoints completed since the last call; at the end of the run, wait for the last one."""
        committed = self.saver.wait_and_pop_committed() if is_over else self.saver.pop_committed()
        if not self.world.is_main:
            return
        for path in committed:
            step = checkpoint_step(path)
            append_event(self.directory.events, "checkpoint", step=step, folder=str(path))
            self.progress.report_checkpoint(step, path)
            self.listeners.saved(step, path)
        if is_over:
            self.plot.draw(last=True)
            note_unsaved_best(self.state, self.settings, self.directory, self.progress)

    def _take_step(self) -> None:
        """Take one optimizer step and record it; an interrupted step changes nothing."""
        started = time.perf_counter()
        job, settings, backend, guard, step = self.job, self.settings, self.backend, self.guard, self.state.step + 1
        micro_batches = job.steps.next_step()
        gradients = partial(compute_step_gradients, self.context, micro_batches, step, stop=self.stop)
        learning_rate = job.learning_rate_at(step - 1)
        backend.begin_step(learning_rate, make_replay(gradients))
        before = ChangedWeights(backend.updated_weights()) if step <= FIRST_STEPS else None
        score = guard.run_or_replan(gradients, backend.drop_gradients, step)
        if score is None:  # interrupted: `position` is still the start of this step
            backend.drop_gradients()
            return
        grad_norm = backend.clip_gradients(settings.max_grad_norm)
        scale = backend.loss_scale
        overflow = guard.has_overflowed(scale, score, grad_norm)
        not_finite = score.not_finite or non_finite_error("gradient norm", grad_norm, step, micro_batches)
        skip = overflow or guard.should_skip(not_finite, step, self.state.skipped)
        if skip:
            backend.drop_gradients()
        else:
            guard.record_spikes(step, score.loss, grad_norm, micro_batches)
            # The first step allocates the optimizer's state, so memory may run out here.
            with explain_out_of_memory(f"the optimizer at step {step}", micro_batches, settings.out_of_memory_fix):
                backend.step(learning_rate)
        changed = None if before is None or skip else round(before.changed_fraction(self.world), 6)
        if not skip and not self.has_updated:  # the optimizer now has its state: the size of a checkpoint is known
            self.saver.check_disk_space(backend)
        batches = counted_batches(micro_batches)
        scale_value = None if scale is None else scale.value
        if scale is not None and (overflow or not skip):
            scale.update(overflowed=overflow)
        self._record_step(
            _StepResult(started, batches, learning_rate, score, grad_norm, skip, changed, overflow, scale_value)
        )

    def _record_step(self, taken: _StepResult) -> None:
        state, settings, skip = self.state, self.settings, taken.is_skipped
        step, tokens = state.step + 1, self.world.sum_count_over_ranks(sum(batch.num_tokens for batch in taken.batches))
        loss = taken.score.loss
        self.state = replace(
            state,
            step=step,
            tokens=state.tokens + tokens,
            first_loss=loss if state.first_loss is None and not skip else state.first_loss,
            last_loss=state.last_loss if skip else loss,
            skipped=state.skipped + (skip and not taken.is_overflow),
            overflows=state.overflows + taken.is_overflow,
            eval_due=bool(self.job.held_out) and (step == settings.total_steps or is_due(step, settings.eval_steps)),
            # The caller writes the last step's samples, at the end of every run.
            sample_due=self.job.sample is not None
            and step < settings.total_steps
            and is_due(step, settings.sample_steps),
        )
        self.position = ResumePosition(capture_rng(), self.job.steps.state_dict())
        record = self._make_record(taken, tokens, time.perf_counter() - taken.started)
        if not skip and not self.has_updated:
            self.has_updated = True
            if not (settings.metric_for_best_model or "").startswith("eval_"):
                note_missing_metric(settings, record, step, self.progress)
        if taken.changed_fraction is not None and step == min(FIRST_STEPS, settings.total_steps):
            self._note_unchanged_weights(taken.changed_fraction, taken.learning_rate)
        self.latest_record = dict(record)
        if self.world.is_main:
            append_record(self.directory.metrics, record)
            self.listeners.step(record)
        self.progress.report_step(record)

    def _make_record(self, taken: _StepResult, tokens: int, seconds: float) -> dict[str, Any]:
        score, skip, clip_norm, world = taken.score, taken.is_skipped, self.backend.clip_norm, self.world
        measured: dict[str, Any] = {"loss": score.loss, **score.metrics}
        if score.aux_loss is not None:
            measured["aux_loss"] = world.sum_over_ranks([score.aux_loss])[0]
        return {
            "step": self.state.step,
            **({"skipped": True} if skip else measured),  # JSON has no NaN
            **({"overflow": True} if taken.is_overflow else {}),
            **({} if taken.loss_scale is None else {"loss_scale": taken.loss_scale}),
            "lr": taken.learning_rate,
            **({} if skip else {"grad_norm": taken.grad_norm}),
            **({} if skip or clip_norm is None else {"clip_norm": clip_norm}),
            **({} if taken.changed_fraction is None else {"moved": taken.changed_fraction}),
            "tokens": tokens,
            "supervised_tokens": world.sum_count_over_ranks(sum(batch.num_targets for batch in taken.batches)),
            "tokens_per_s": round(tokens / seconds, 1),
            **flops_entries(self.settings, taken.batches, seconds, world),
            "peak_mem_gib": round(peak_memory_bytes(model_device(self.backend.model)) / GIB, 3),
            **_epoch_entry(self.settings, self.state.step),
        }

    def _note_unchanged_weights(self, changed_fraction: float, learning_rate: float) -> None:
        if learning_rate > 0 and changed_fraction < self.settings.min_changed_fraction:
            dtypes = {x.dtype for x in self.backend.updated_weights()}
            text = describe_unchanged_weights(changed_fraction, dtypes, learning_rate)
            self.progress.report_note(self.state.step, text)


@dataclass(frozen=True)
class _StepResult:
    started: float
    """``time.perf_counter()`` at the start of the step."""
    batches: Sequence[MicroBatch]
    """Micro-batches of this rank, without dummy micro-batches (``MicroBatch.filler``)."""
    learning_rate: float
    score: StepScore
    grad_norm: float
    is_skipped: bool
    """True if the weights were not updated, because a loss or gradient was not finite or overflowed float16."""
    changed_fraction: float | None
    """Fraction of the trained weights that the step changed; None if not measured."""
    is_overflow: bool
    """True if the gradient overflowed float16; a smaller loss scale will follow."""
    loss_scale: float | None
    """Loss scale of the step; None if the loss is not scaled."""


def _epoch_entry(settings: TrainSettings, step: int) -> dict[str, float]:
    if settings.steps_per_epoch is None:
        return {}
    return {"epoch": round(max(0, step - settings.supervised_steps) / settings.steps_per_epoch, 4)}


def flops_entries(
    settings: TrainSettings, batches: Sequence[MicroBatch], seconds: float, world: World
) -> dict[str, Any]:
    """Return ``flops``, the model FLOPs of a step on all ranks, and ``mfu``, model FLOPs utilisation, if they are
    known."""
    if settings.step_flops is None:
        return {}
    # Ranks that share a sequence have the same rows, so only one of these ranks counts.
    flops = world.sum_count_over_ranks(settings.step_flops(batches))
    if settings.peak_flops is None:
        return {"flops": flops}
    return {"flops": flops, "mfu": round(flops / seconds / settings.peak_flops / world.size, 4)}


def make_replay(compute: Callable[..., object]) -> Callable[[], object]:
    """Return a function that calls ``compute`` with the present random state and without stop requests."""
    rng = capture_rng()

    def replay() -> object:
        restore_rng(rng)
        return compute(stop=StopRequest())

    return replay


def compute_step_gradients(
    context: StepContext, micro_batches: Sequence[MicroBatch], step: int, stop: StopRequest
) -> StepScore | None:
    """Compute the gradients of a step; return its score, or None if the step was interrupted."""
    return context.backend.compute_gradients(partial(accumulate_gradients, context, micro_batches, step, stop))


def restore_from_checkpoint(job: TrainJob, checkpoint: Checkpoint, seed: int) -> RunProgress:
    """Restore optimizer, data position and random state from ``checkpoint``; return the saved progress.

    If another number of ranks wrote the checkpoint, each rank is seeded anew from seed, step and rank.

    Raises:
        CheckpointError: A part of the checkpoint cannot be restored.
    """
    path = checkpoint.path
    with explain_restore_errors(path, "optimizer"):
        saved = SliceReader(path, only_masters=job.fresh_optimizer)
        if not job.fresh_optimizer:
            job.backend.load_state(checkpoint.state.get("backend", {}))  # before the tensors: it may decide which exist
    if not job.fresh_optimizer or saved.parameter_names():

        def load() -> None:
            with explain_restore_errors(path, "optimizer"):
                job.backend.load_optimizer_slices(saved)

        job.world.run_on_all_ranks(load)
    if job.backend.loss_scale is not None and "loss_scale" in checkpoint.state:
        with explain_restore_errors(path, "loss scale"):
            job.backend.loss_scale.load_state(checkpoint.state["loss_scale"])
    if checkpoint.state["stream"] is not None:  # None: the data may have changed and starts from the beginning
        with explain_restore_errors(path, "position in the data"):
            job.steps.load_state_dict(checkpoint.state["stream"])
    with explain_restore_errors(path, "random state"):
        if checkpoint.num_ranks == job.world.size:
            restore_rng(checkpoint.random_state(job.world.rank))
        else:
            seed_everything(seed, job.world.rank, checkpoint.step)
    with explain_restore_errors(path, "progress"):
        progressed = dict(checkpoint.state["progressed"])
        progressed["best_evaluations"] = tuple(map(tuple, progressed.get("best_evaluations", ())))  # JSON has no tuples
        return RunProgress(**progressed)


def is_due(step: int, interval: int) -> bool:
    """Return True if an action repeated every ``interval`` steps is due after ``step``; 0 means never."""
    return interval > 0 and step % interval == 0
