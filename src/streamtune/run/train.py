"""Train a run that ``run.build`` has built, save its model, and complete the sample prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, models, train
from streamtune.base.privacy import redact, redact_values
from streamtune.base.streams import lost_output_error
from streamtune.distributed import RankEnvironment, Watchdog, move_log_to_run, read_environment
from streamtune.errors import ArgumentError, NonFiniteError
from streamtune.recipe.keys.engine import EngineKeys
from streamtune.recipe.keys.run import RunKeys
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import OptimizerSettings, TrainingSettings
from streamtune.recipe.yaml import dump_recipe
from streamtune.run.device import compute_dtype, known_peak_flops
from streamtune.run.engine import TrainableModel
from streamtune.run.listeners import StepFlops, StepTimes
from streamtune.run.samples import make_samples
from streamtune.schedule import Schedule
from streamtune.tasks.steps import StepPlan, divide_among_ranks
from streamtune.tasks.task import BuiltRun, Training

if TYPE_CHECKING:
    from rich.console import Console
from streamtune.run.start import Start

SLOW_ACTIVITIES = ("saving", "scoring", "sampling")
"""Activities of a step that may be slow, because of a disk, a reward function, or a rank that generates alone."""


@dataclass(kw_only=True)
class Run(BuiltRun):
    """A run that is ready to train: data, model, backend and training steps."""

    start: Start
    parameters: models.ParameterCount
    streamed: TrainableModel
    batch_facts: data.BatchStatistics | None
    """Statistics of the batches; None if the batches depend on the model."""
    added_stop_tokens: list[int] = field(default_factory=list)
    """End tokens of the training data that were added to the model's stop tokens."""
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(RankEnvironment()))
    """Watchdog of the ranks; the default is for one rank and does nothing."""

    @property
    def recipe(self) -> Recipe:
        return self.start.recipe

    @property
    def backend(self) -> train.Backend:
        return self.streamed.backend

    @property
    def checkpoint(self) -> train.Checkpoint | None:
        return self.start.checkpoint


@dataclass(frozen=True)
class RunOutcome:
    progress: train.RunProgress
    finished: bool
    exit_code: int
    """0: finished; 1: most steps were skipped; 130 or 143: stopped by a signal."""
    checkpoint: Path | None
    """Path of the checkpoint of the last step; None if there is none."""
    moved_aside: Path | None
    """New path of an earlier run that was in the run directory; None if there was none."""
    samples: Sequence[Mapping[str, Any]]
    """Lines of ``samples.jsonl`` written after training; empty without sample prompts."""
    records: Sequence[Mapping[str, Any]]
    """Lines of ``metrics.jsonl``, including steps before the run was resumed."""
    tokens: int
    """Number of tokens trained on since the process started."""
    seconds: float
    """Seconds of the training loop in this process."""
    failure: NonFiniteError | None = None
    """Error of a finished run most of whose steps were skipped; its model is saved."""

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def held_out(self) -> Mapping[str, Any]:
        """Metrics record of the last evaluation; empty if there was none."""
        evaluations = [r for r in self.records if any(name.startswith("eval_") for name in r)]
        return evaluations[-1] if evaluations else {}


def train_run(run: Run, console: Console, listeners: train.Listeners | None = None) -> RunOutcome:
    """Train a run, save its model, complete the sample prompts, and return the outcome.

    Args:
        run: Run from ``build_run``; it can be trained once.
        console: Console for progress.
        listeners: Trackers and callbacks, called on rank 0; None for no listeners.

    Raises:
        RunError: Training or a listener failed; checkpoints that were saved before are intact.
    """
    listeners = train.Listeners() if listeners is None or not run.world.is_main else listeners
    listeners.while_called = partial(run.watchdog.waiting_outside, "callbacks and trackers")
    outcome: dict[str, Any] = {"status": "failed", "step": run.first_step}
    try:
        return _train_run(run, console, listeners, outcome)
    except Exception as error:
        outcome |= {"status": "failed", "error": f"{type(error).__name__}: {redact(str(error))}"}
        if outcome.pop("told", False):
            raise
        with suppress(Exception):
            listeners.event("failure", {"error": type(error).__name__, "what": redact(str(error))})
            listeners.finished(outcome)
        raise


def _train_run(run: Run, console: Console, listeners: train.Listeners, outcome: dict[str, Any]) -> RunOutcome:
    """Train, and return the outcome; ``outcome`` is updated so that listeners get it even after an error."""
    training = run.start.task.make_training(run)
    directory = run.directory
    tokens_before = run.checkpoint.state["progressed"].get("tokens", 0) if run.checkpoint else 0
    world = run.world
    with _claim_directory(run) as moved_aside:
        move_log_to_run(directory.path, read_environment())
        run.watchdog.event = lambda name, details: train.append_event(directory.events, name, **details)
        writer = _make_model_writer(run)
        started = time.perf_counter()
        failures = train.record_failure(directory.events) if world.is_main else nullcontext()
        with train.StopRequest() as stop, failures:
            progressed = _run_training_loop(run, training, writer, stop, console, listeners)
            outcome["step"] = progressed.step
            run.world.run_on_rank_0(listeners.raise_first_error)
        seconds = time.perf_counter() - started
        is_last = progressed.step >= run.plan.total_steps or progressed.ended_early
        finished = is_last and not progressed.eval_due  # a stop may interrupt the last evaluation
        samples = _write_final_model_and_samples(run, progressed.step, writer, listeners) if finished else []
        failure = _most_skipped_error(run, progressed) if finished else None
        if world.is_main:
            details: dict[str, Any] = {} if finished else {"reason": stop.reason}
            if progressed.ended_early:
                details["early"] = True
            if (lost := lost_output_error()) is not None:
                details["output"] = f"lost: {lost.strerror}"
            train.append_event(directory.events, "finish" if finished else "stop", step=progressed.step, **details)
            listeners.event("finish" if finished else "stop", {"step": progressed.step, **details})
            outcome["status"] = "finished" if finished and failure is None else "failed" if finished else "stopped"
            outcome |= {"error": str(failure)} if failure is not None else {}
            listeners.finished(outcome)
            outcome["told"] = True
        run.world.run_on_rank_0(listeners.raise_first_error)
        run.backend.close()
        run.closing.close()
    newest = train.checkpoint_path(directory.checkpoints, progressed.step)
    return RunOutcome(
        progress=progressed,
        finished=finished,
        exit_code=failure.exit_code if failure is not None else 0 if finished else stop.exit_code,
        checkpoint=newest if newest.exists() else None,
        moved_aside=moved_aside,
        samples=samples,
        records=train.read_records(directory.metrics),
        tokens=progressed.tokens - tokens_before,
        seconds=seconds,
        failure=failure,
    )


@contextmanager
def _claim_directory(run: Run) -> Iterator[Path | None]:
    """Context manager that locks the run directory; yields the path to which an earlier run was renamed, or None."""
    start, world = run.start, run.world
    with ExitStack() as exit_stack:
        exit_stack.callback(start.release)
        moved_aside = world.run_on_rank_0(start.move_aside)
        text = dump_recipe(run.recipe, comment=f"resolved from {run.start.loaded.path}")
        world.run_on_rank_0(
            lambda: exit_stack.enter_context(
                run.directory.claim(start.identity, text, run.backend.config, start.lock, _run_documents(run))
            )
        )
        if world.size > 1:
            train.check_shared_folder(run.directory.path, world)
        yield moved_aside


def _run_documents(run: Run) -> dict[Path, Mapping[str, Any]]:
    batches = {} if run.batch_facts is None else {"batches": asdict(run.batch_facts)}
    documents: dict[Path, Mapping[str, Any]] = {run.directory.data: {**run.prepared.report.to_json(), **batches}}
    if run.prepared.bad_rows:
        documents[run.directory.bad_rows] = {"bad_rows": list(run.prepared.bad_rows)}
    if run.streamed.memory is not None:
        documents[run.directory.plan] = run.streamed.memory.to_json()
    return documents


def _run_training_loop(
    run: Run,
    training: Training,
    writer: train.ModelWriter,
    stop: train.StopRequest,
    console: Console,
    listeners: train.Listeners,
) -> train.RunProgress:
    recipe, plan, directory = run.recipe, run.plan, run.directory
    first_step = run.first_step
    world = run.world
    if world.is_main:
        changes = {"changes": run.start.changes} if run.start.changes else {}
        train.append_event(directory.events, "resume" if run.checkpoint else "start", step=first_step, **changes)
        listeners.started(_run_facts(run))
        if run.checkpoint:
            listeners.event("resume", {"step": first_step})
    on_activity = _activity_reporter(run.watchdog)
    with train.Progress(console, plan.total_steps, first_step, recipe.logging_steps, on_activity) as progress:
        training.before_first_step(run.backend, progress, stop)
        if (times := _make_step_times(run, progress)) is not None:
            listeners.listeners = [*listeners.listeners, times]
        job = train.TrainJob(
            backend=run.backend,
            objective=training.objective,
            learning_rate_at=training.learning_rate_at,
            steps=training.steps,
            held_out={name: partial(_batches_of_rank, make, world) for name, make in training.held_out.items()},
            directory=directory,
            identity=run.start.identity,
            writer=writer,
            handle=run.handle,
            world=world,
            resume_from=run.checkpoint,
            fresh_optimizer=run.start.resets_optimizer,
            next_schedule=partial(_schedule_with_less_memory, run),
            sample=partial(make_samples, run, recipe) if recipe.sample_steps else None,
        )
        settings = replace(
            train_settings(recipe, plan, run.handle.schedule),
            # Training one block at a time, each block has its own backward.
            step_flops=None
            if recipe.step_kind.gradients == "block"
            else StepFlops(run.model, recipe.step_kind).count_flops,
            peak_flops=known_peak_flops(recipe, run.device),
        )
        return train.train(job, settings, progress, stop, listeners)


def _make_step_times(run: Run, progress: train.Progress) -> StepTimes | None:
    plan, recipe = run.streamed.memory, run.recipe
    has_extra_work = (
        recipe.objective == "grpo" or recipe.select_rows is not None
    )  # a rollout or the choice of rows needs additional time
    if plan is None or run.world.size > 1 or has_extra_work:
        return None

    def report(step: int, text: str, figures: dict[str, float]) -> None:
        progress.report_note(step, text)
        train.append_event(run.directory.events, "step_time", step=step, **figures)

    return StepTimes(plan, run.device, compute_dtype(recipe, run.model), report)


def _batches_of_rank(make: Callable[[], Iterable[train.MicroBatch]], world: train.World) -> Iterator[train.MicroBatch]:
    return divide_among_ranks(make(), world)


def _run_facts(run: Run) -> train.RunFacts:
    memory, directory = run.streamed.memory, run.directory
    plan: dict[str, Any] = {"schedule": asdict(run.handle.schedule)}
    if memory is not None:
        simulation = memory.simulation
        plan |= {"peak_bytes": simulation.peak_bytes, "host_bytes": simulation.host_bytes}
        plan |= {"step_seconds": memory.step_seconds, "terms": dict(simulation.terms)}
    return train.RunFacts(
        run=str(run.start.identity["run"]),
        name=directory.path.resolve().name,
        directory=directory.path.resolve(),
        step=run.first_step,
        total_steps=run.plan.total_steps,
        recipe=redact_values(run.recipe.model_dump(mode="json", exclude_none=True)),
        versions=dict(run.start.identity["versions"]),
        plan=redact_values(plan),
    )


def _schedule_with_less_memory(run: Run, install: bool) -> Schedule | None:
    """Return a schedule that needs less memory than the current schedule; None if none fits.

    Args:
        run: Run whose current schedule ran out of memory.
        install: True to use the new schedule from now on.
    """
    failed_schedule = run.handle.schedule
    run.handle.remove()  # the planner needs the model without streaming
    try:
        smaller = run.streamed.plan_smaller(failed_schedule).schedule
    except ArgumentError:
        smaller = None
    if install and smaller is not None:
        run.handle.reschedule(smaller)
        run.start.identity["schedule"] = asdict(smaller)
    return smaller


def _most_skipped_error(run: Run, progressed: train.RunProgress) -> NonFiniteError | None:
    dtype = next(run.model.parameters()).dtype
    return train.mostly_skipped_error(progressed.step, progressed.skipped, progressed.overflows, run.directory, dtype)


def _activity_reporter(watchdog: Watchdog) -> Callable[[int, str], None]:
    return lambda step, doing: watchdog.record_phase(step, doing, waits_outside=doing.startswith(SLOW_ACTIVITIES))


def _write_final_model_and_samples(
    run: Run, step: int, writer: train.ModelWriter, listeners: train.Listeners
) -> list[dict[str, Any]]:
    world, backend = run.world, run.backend
    with run.watchdog.waiting_outside("saving"), backend.use_averaged_weights():
        train.write_final_model(run.directory.final, writer, world)
    if run.recipe.sample is None:
        return []
    if run.handle.offloaded is None:  # else only a streamed model copies its weights to the device
        run.handle.remove()
    with backend.use_averaged_weights(), backend.allow_direct_calls() if run.weights_are_sharded else nullcontext():
        samples = make_samples(run, run.recipe, step)
    assert samples is not None, "unreachable: only a stop request leaves samples incomplete"
    if world.is_main:
        # A finished run that is started again rewrites the samples of its last step.
        train.delete_records_after_step(run.directory.samples, step - 1)
        train.append_records(run.directory.samples, samples)
        listeners.sampled(samples)
    return samples


def _make_model_writer(run: Run) -> train.ModelWriter:
    trained = [p for p in run.model.parameters() if p.requires_grad]
    if isinstance(run.backend, train.BlockBackend):  # a block that is frozen now may be trained while a copy is written
        trained = run.backend.optimizer.all_parameters
    saved = list(run.model.parameters()) if run.recipe.finetuning_type == "full" else trained
    num_bytes = sum(models.full_parameter_size(parameter) * parameter.element_size() for parameter in saved)
    tokenizer = models.SavedTokenizer(run.tokenizer, run.model)
    if run.weights_are_sharded:
        is_main = run.world.is_main

        def write_gathered(folder: Path) -> None:
            models.save_gathered_weights(run.model, tokenizer, folder, run.backend.full_weights, is_main=is_main)

        def snapshot_gathered() -> Callable[[Path], None]:
            tokenizer.read_files()
            copies = models.copy_gathered_weights(run.model, run.backend.full_weights, is_main=is_main)
            return lambda folder: models.save_copied_weights(run.model, tokenizer, folder, copies)

        return train.ModelWriter(write_gathered, num_bytes, snapshot_gathered, needs_all_ranks=True)

    def write(folder: Path) -> None:
        models.save_pretrained(run.model, tokenizer, folder)

    def snapshot() -> Callable[[Path], None]:
        tokenizer.read_files()  # read once in this thread: tokenizers are not thread-safe
        return partial(models.save_pretrained, run.model, tokenizer, weights=models.copy_weights(run.model, trained))

    return train.ModelWriter(write, num_bytes, snapshot)


def train_settings(recipe: TrainingSettings, plan: StepPlan, schedule: Schedule) -> train.TrainSettings:
    """Return the settings of the training loop, with advice for out-of-memory errors."""
    fix = _schedule_advice(recipe, schedule)
    if recipe.per_device_train_batch_size > 1:
        fix += "; then lower per_device_train_batch_size, with more gradient_accumulation_steps"
    fix += f"; then lower max_length (now {recipe.max_length:,})"
    if recipe.finetuning_type == "full":
        fix += "; or train adapters with finetuning_type: lora"
    elif recipe.finetuning_type == "lora":
        fix += "; or quantise the frozen weights with finetuning_type: qlora"
    return train.TrainSettings(
        total_steps=plan.total_steps,
        steps_per_epoch=plan.steps_per_epoch,
        supervised_steps=plan.supervised_steps,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=recipe.eval_steps,
        save_steps=recipe.save_steps,
        save_total_limit=recipe.save_total_limit,
        autocast_dtype=recipe.autocast_dtype,
        seed=recipe.seed,
        out_of_memory_fix=fix,
        on_nan=recipe.on_nan,
        max_skips=recipe.max_skips,
        on_oom=recipe.on_oom,
        save_async=recipe.save_async,
        metric_for_best_model=recipe.metric_for_best_model,
        early_stopping_patience=recipe.early_stopping_patience,
        early_stopping_threshold=recipe.early_stopping_threshold,
        greater_is_better=_greater_is_better(recipe),
        save_best_limit=recipe.save_best_limit if recipe.metric_for_best_model is not None else 0,
        sample_steps=recipe.sample_steps,
        min_changed_fraction=_min_changed_fraction(recipe),
    )


def _min_changed_fraction(recipe: OptimizerSettings) -> float:
    if recipe.weight_rounding == "stochastic" or recipe.optim == "badam_ratio":  # few weights change, as intended
        return 0.0
    return 0.1


def _greater_is_better(recipe: RunKeys) -> bool:
    if recipe.greater_is_better is not None:
        return recipe.greater_is_better
    return not (recipe.metric_for_best_model or "loss").endswith("loss")


def _schedule_advice(recipe: EngineKeys, schedule: Schedule) -> str:
    if recipe.engine.schedule == "auto":
        return (
            "the planner predicted that this step fits in memory: lower engine.device_memory or raise engine.margin "
            f"(now {recipe.engine.margin:g}); results do not change"
        )
    return (
        f"write engine.schedule: auto, and the planner finds a schedule that fits; or lower engine.chunk_size (now "
        f"{schedule.chunk_size:,}) or engine.head_chunk_size (now {schedule.head_chunk_size:,}); results do not change"
    )
