"""What runs of every objective share: where they start from, the model in its engine, training, and the end.

start_run     recipe -> directory, checkpoint, device; refuses to go on with another run
stream_model  in ``build``; plan_and_stream joins it with the planner and with what is checked on that very model
train_run     trains, saves the model, tries it

An objective adds its data, its loss and its batches (``build_sft``, ``build_dpo``).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from streamtune import __version__, models, optim, train
from streamtune.distributed import RankEnvironment, Watchdog, agree, keep_log, read_environment
from streamtune.engine import Schedule, StreamHandle
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.plan import Plan
from streamtune.plan.scored import Completions
from streamtune.recipe.build import choose_device, quiet_libraries, stream_model
from streamtune.recipe.build_batches import share_out
from streamtune.recipe.build_cluster import cluster_here
from streamtune.recipe.build_model import choose_quantization, make_trial_model
from streamtune.recipe.build_plan import plan_model
from streamtune.recipe.build_settings import StepPlan, train_settings
from streamtune.recipe.build_world import (
    accumulation,
    device_of_rank,
    make_backend,
    make_world,
    sequence_ranks,
    share_reference,
    shares_weights,
)
from streamtune.recipe.dump import dump_recipe
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = ["Doing", "Notify", "Outcome", "Run", "Start", "plan_and_stream", "start_run", "tell_of_model", "train_run"]

Notify = Callable[[str], None]
"""Told what is worth knowing on the way, a sentence at a time."""
Doing = Callable[[str], AbstractContextManager[Any]]
"""Shows what takes a while, for as long as it does."""
Begin = Callable[[train.Backend, train.Progress, train.StopRequest], None]
"""Given, before the first step, what a loop is run with and a stream of steps may want to know."""

FREE_KEYS = frozenset(
    {
        # Where things go and what is shown,
        "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "sample",
        "num_completions_to_print", "save_async", "metric_for_best_model", "greater_is_better", "save_best_limit",
        # what is done about what goes wrong,
        "on_nan", "max_skips", "on_oom",
        # how the same gradient is computed,
        "engine", "device", "per_device_eval_batch_size", "trust_remote_code", "allow_pickle", "share_prefix",
        "dataloader_num_workers", "deterministic",
        "deepspeed", "fsdp", "sequence_parallel", "sequence_parallel_size",
        # what `rows_per_step` says,
        "gradient_accumulation_steps", "train_batch_size",
        # and what the fingerprint of the data covers, wherever the files are now.
        "datasets",
    }
)  # fmt: skip
"""Keys that may change between the start of a run and its resumption."""

PATIENT = ("saving", "scoring")
"""What a step does that may wait for something outside: a disk, a judge of completions."""

SAMPLE_TEMPERATURE = 0.3
"""Of the sample at the end. The likeliest token each time would go in circles where little is learnt yet."""


@dataclass(frozen=True)
class Start:
    """Where a run starts, and what it must have in common with what it goes on with."""

    device: torch.device
    world: train.World
    """The ranks that train together."""
    quantization: str | None
    """``nf4`` or ``int8``: of the frozen linear layers."""
    directory: train.RunDirectory
    checkpoint: train.Checkpoint | None
    """Where the run goes on from; None starts at the beginning."""
    identity: dict[str, Any]
    replaces: bool
    """Whether ``directory`` holds another run, which is moved aside first."""
    shares_weights: bool
    """Whether each rank holds a part of the weights."""
    continued: Mapping[Path, dict[str, Any]]
    """What is gone on with, and what it was started as."""
    allow: frozenset[str]
    """What may differ from that all the same: keys of the recipe, and ``data``."""
    notify: Notify
    planned_for: dict[str, Any] = field(default_factory=dict)
    """What the planner was asked, to ask it again where memory runs out."""
    engines: list[Any] = field(default_factory=list)
    """What gathers the weights of references that ranks share."""

    @property
    def sharing(self) -> train.World | None:
        """The ranks that share the weights; None where each has all of them."""
        return self.world if self.shares_weights else None

    def share(self, recipe: Recipe) -> Callable[[Any, Any], None]:
        """Gives a reference its weights, of which each rank holds a part; does nothing to one that has them."""

        def share(model: Any, layers: Any) -> None:
            engine = share_reference(recipe, model, layers, self.world, self.device)
            if engine is not None:
                self.engines.append(engine)

        return share

    def close(self) -> None:
        """Let go of what shares a reference."""
        for engine in self.engines:
            engine.destroy()
        self.engines.clear()

    def with_data(self, fingerprint: str) -> None:
        """Take note of the data. Run settings were compared before it was read, with which it takes minutes.

        Raises:
            DistributedError: It is not the data of the other ranks.
            RecipeError: It is not the data of the run that is gone on with.
        """
        told = self._check()
        agree({"data": fingerprint})
        self.identity["data"] = fingerprint
        changed = [text for text in self._check() if text not in told]
        self._tell(changed)
        if changed and self.checkpoint is not None and "epoch" in self.checkpoint.state["stream"]:
            self.checkpoint.state["stream"] = None
            self.notify("the data is another, as --allow-change data says: it is gone through from its beginning")

    def _check(self) -> list[str]:
        """The allowed differences; each once, though the directory and its checkpoint both tell them."""
        found = (
            train.check_same_run(started_as, self.identity, where=where, allow=self.allow)
            for where, started_as in self.continued.items()
        )
        return list(dict.fromkeys(text for texts in found for text in texts))

    def _tell(self, changes: Iterable[str]) -> None:
        for text in changes:
            self.notify(f"going on with a change: {text}")


@dataclass(kw_only=True)
class Run:
    """Everything a run needs whatever its objective, built and checked."""

    loaded: LoadedRecipe
    start: Start
    tokenizer: PreTrainedTokenizerBase
    data_summary: str
    """The data in one line."""
    model: Any
    parameters: models.ParameterCount
    handle: StreamHandle
    backend: train.Backend
    """Steps the model."""
    plan: StepPlan
    unit: str
    """What a step has so many of: ``row``, ``packed sequence``, ``pair`` ..."""
    memory: Plan | None
    """The planner's schedule, and what a step of the longest rows holds and takes by it; None where none was asked."""
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(RankEnvironment()))
    """Watches the ranks while they train; by itself that of a run of one, which does nothing."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe

    @property
    def directory(self) -> train.RunDirectory:
        """Where the run's files go."""
        return self.start.directory

    @property
    def rows_per_step(self) -> int:
        """Rows, or what ``unit`` says, of an optimizer step on all ranks together."""
        world = self.start.world
        return self.recipe.per_device_train_batch_size * accumulation(self.recipe, world) * world.data_size

    @property
    def checkpoint(self) -> train.Checkpoint | None:
        """Where it goes on from."""
        return self.start.checkpoint


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    progressed: train.Progressed
    finished: bool
    exit_code: int
    """0; 130 or 143 where a signal stopped it."""
    checkpoint: Path | None
    """The newest checkpoint."""
    moved_aside: Path | None
    """Where the run went that was in the directory before."""
    sample: str | None
    records: Sequence[Mapping[str, Any]]
    """The lines of ``metrics.jsonl``, those before a resume included."""
    tokens: int
    """Tokens trained on since it was started or resumed."""
    seconds: float
    """Time the loop took since it was started or resumed."""

    @property
    def losses(self) -> list[float]:
        """The training loss of every step."""
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def held_out(self) -> Mapping[str, Any]:
        """What the last evaluation found; empty without one."""
        found = [r for r in self.records if any(name.startswith("eval_") for name in r)]
        return found[-1] if found else {}


def start_run(recipe: Recipe, resume: str, notify: Notify, allow_change: Collection[str] = ()) -> Start:
    """Find out where a run starts, and say what differs from the start of what it goes on with. Nothing is written.

    Args:
        recipe: The recipe.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        notify: See :data:`Notify`.
        allow_change: What may differ: keys of the recipe, and ``data``.

    Raises:
        ArgumentError: A device that is not there, a quantisation that is not installed, or ``allow_change`` names
            nothing that could be refused.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        DistributedError: The ranks have other versions or another recipe, or do not reach each other.
        RecipeError: What would be gone on with was started under other settings.
    """
    known = (*type(recipe).model_fields, "data")
    for name in allow_change:
        if name not in known:
            mend = did_you_mean(name, known) or "name a key of the recipe, or data"
            raise ArgumentError(f"there is no '{name}' to change", where="--allow-change", mend=mend)
    device = device_of_rank(choose_device(recipe.device))
    if recipe.deterministic:
        train.use_deterministic_kernels()
    quantization = choose_quantization(recipe, device)
    quiet_libraries(device)
    agree(_facts(recipe))
    world = make_world(recipe, device)
    directory = train.RunDirectory(Path(recipe.output_dir))
    before, checkpoint = world.main(
        lambda: (directory.read_identity(), train.find_checkpoint(directory, resume, notify))
    )
    continued = {directory.path: before} if before is not None and resume != "never" else {}
    if checkpoint is not None:
        continued[checkpoint.path] = checkpoint.state["identity"]
    start = Start(
        device=device,
        world=world,
        quantization=quantization,
        directory=directory,
        checkpoint=checkpoint,
        identity=_identify(recipe, quantization, world, before if resume != "never" else None),
        replaces=before is not None and resume == "never",
        shares_weights=shares_weights(recipe),
        continued=continued,
        allow=frozenset(allow_change),
        notify=notify,
    )
    start._tell(start._check())
    last = list(continued.values())[-1] if continued else start.identity
    start._tell(train.tell_changes(last, start.identity))
    if checkpoint is not None and train.ranks_of(checkpoint) != world.size:
        ranks = train.ranks_of(checkpoint)
        notify(
            f"the checkpoint is of {ranks} rank{'' if ranks == 1 else 's'} and goes on with {world.size}: dropout "
            "and other draws of the ranks are seeded anew, by the step and the rank"
        )
    return start


def _facts(recipe: Recipe) -> dict[str, str]:
    """What of a recipe must be the same on all ranks: everything but where the files are."""
    settings = recipe.model_dump(mode="json", exclude={"output_dir", "datasets"})
    return {f"recipe {name}": json.dumps(value) for name, value in settings.items()}


def _identify(
    recipe: Recipe, quantization: str | None, world: train.World, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What run this is: what a resumption must have in common with its start, and what is told where it differs.

    The rows of a step are those of all ranks together: on how many they are computed changes nothing but roundings.
    """
    compared = recipe.model_dump(mode="json", exclude={*FREE_KEYS, "quantization"})
    compared["gradient_accumulation_steps"] = accumulation(recipe, world) * world.data_size
    if recipe.objective == "sft":  # runs were started before there was another
        del compared["objective"]
    if quantization is not None:  # what `auto` became: on another device it is another model
        compared["quantization"] = quantization
    return {
        "run": (before or {}).get("run") or secrets.token_hex(8),
        "recipe": compared,
        "world_size": world.size,
        "free": recipe.model_dump(mode="json", include=set(FREE_KEYS) - {"output_dir", "datasets"}),
        "versions": {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def tell_of_model(model: Any, longest: int, start: Start, notify: Notify) -> None:
    """Say what is worth knowing of a loaded model before rows of ``longest`` tokens go through it.

    Raises:
        ArgumentError: They cannot: its table of positions is shorter.
    """
    notes = [models.check_positions(model, longest)]
    if start.checkpoint is None:
        notes.append(models.left_out(model))
    for note in notes:
        if note is not None:
            notify(note)


def plan_and_stream(
    recipe: Recipe,
    model: Any,
    start: Start,
    *,
    rows: int,
    length: int,
    completions: Completions | None = None,
    check: Callable[[StreamHandle], None] = lambda handle: None,
    reference_bytes: int = 0,
    dry_run: bool,
    notify: Notify,
    doing: Doing,
) -> tuple[StreamHandle, train.Backend, Plan | None]:
    """Put the engine into the model, by the planner's schedule where the recipe asks for one.

    Args:
        recipe: The recipe.
        model: On its device, with its adapters; changed in place.
        start: Where the run starts.
        rows: Sequences of a micro-batch, or what ``completions`` takes for one.
        length: Tokens of the longest sequence, or of the longest completion with its prompt.
        completions: What a micro-batch scores, where the objective scores completions.
        check: What else is to be checked on that very model, besides that it streams exactly.
        reference_bytes: Of a model that is held beside it and is not trained.
        dry_run: Plan a fixed schedule too: what it would hold is what a dry run is for.
        notify: See :data:`Notify`.
        doing: See :data:`Doing`.

    Raises:
        ArgumentError: Nothing fits.
        UnsupportedModelError: The model does not stream exactly.
    """
    recipe = _one_level(recipe)
    like = recipe.model_copy(update={"per_device_train_batch_size": rows})
    shape: dict[str, Any] = {"completions": completions, "reference_bytes": reference_bytes}
    start.planned_for.update(recipe=like, length=length, device=start.device, **shape)
    memory: Plan | None = None

    def plan() -> tuple[Schedule, int]:
        nonlocal memory
        memory = plan_model(
            like,
            model,
            length,
            start.device,
            **shape,
            cluster=cluster_here(recipe, model, start.world, start.device),
            keep=_schedule_of(start.checkpoint),
            notify=notify,
        )
        return memory.schedule, memory.simulation.host_bytes

    schedule, host_bytes = None, 0
    if recipe.engine.schedule == "auto" or dry_run:
        with doing("planning the steps"):  # one rank measures and chooses for all: they have to walk in step
            schedule, host_bytes = start.world.main(plan)
    handle = stream_model(recipe, model, schedule, sequence_ranks(recipe, start.world))
    with doing("checking that this model streams exactly"):
        _check_streams(recipe, model, handle, check, start, notify)
    with doing("setting up the optimizer"):  # after the checks: ranks that share the weights have them no longer whole
        backend = make_backend(recipe, model, handle.layers, start.world, start.device)
    if schedule is not None and not dry_run and schedule.uses_host:
        handle.tiers.reserve(host_bytes, start.device)
    start.identity["schedule"] = asdict(handle.schedule)  # not compared: another gives the same gradient, to rounding
    return handle, backend, memory


def _check_streams(
    recipe: Recipe,
    model: Any,
    handle: StreamHandle,
    check: Callable[[StreamHandle], None],
    start: Start,
    notify: Notify,
) -> None:
    """Check the model itself, or one of its configuration where its weights are still to come, in parts.

    Raises:
        UnsupportedModelError: It does not stream exactly.
    """
    deferred = models.deferred_of(model)
    if deferred is None:
        handle.check()
        check(handle)
        return

    def check_small() -> int:
        trial = make_trial_model(recipe, model, start.device)
        with stream_model(recipe, trial, handle.schedule, handle.sequence_parallel) as small:
            small.check()
            check(small)
            return len(small.layers)

    # Ranks that share a sequence compute each call together; any other rank would find what rank 0 finds.
    layers = check_small() if recipe.sequence_parallel_size > 1 else start.world.main(check_small)
    if deferred.note is not None:
        notify(deferred.note)
    notify(
        f"the weights are shared between ranks: streaming was checked on a model of the same configuration with "
        f"{layers} of the {len(handle.layers)} layers and random weights"
    )


def _one_level(recipe: Recipe) -> Recipe:
    """Where ranks share the weights a layer's are whole while it computes, and no other's: none is made again there.

    Raises:
        ArgumentError: The recipe asks for two levels.
    """
    if not shares_weights(recipe):
        return recipe
    if recipe.engine.levels == 2:
        raise ArgumentError(
            "with two levels a layer's backward computes those before it again, whose weights are on other ranks then",
            where="engine.levels",
            mend="delete the line, or write deepspeed: zero2; offload: host holds layer inputs as well",
        )
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"levels": 1})})


def _schedule_of(checkpoint: train.Checkpoint | None) -> Schedule | None:
    """The schedule a run was going on with, if this version knows it."""
    kept = checkpoint.state["identity"].get("schedule") if checkpoint is not None else None
    try:
        return Schedule(**kept) if kept is not None else None
    except (TypeError, ArgumentError):
        return None


def train_run(
    run: Run,
    console: Console,
    *,
    objective: train.Objective,
    steps: train.StepStream,
    validation: Callable[[], Iterable[train.MicroBatch]] | None,
    learning_rate_at: Callable[[int], float] | None = None,
    begin: Begin = lambda backend, progress, stop: None,
) -> Outcome:
    """Train, and where the run comes to its end save the model and let it answer the sample prompt.

    Args:
        run: Built from its recipe; used once.
        console: Where progress is shown.
        objective: What is minimised.
        steps: Its micro-batches.
        validation: The held-out ones, anew at each call; None where nothing is held out.
        learning_rate_at: The learning rate of each step, from 0; None is the recipe's schedule over all of them.
        begin: See :data:`Begin`.

    Raises:
        RunError: It failed on the way; the checkpoints saved before are intact.
    """
    directory = run.directory
    before = run.checkpoint.state["progressed"]["tokens"] if run.checkpoint else 0
    world = run.start.world
    moved_aside = world.main(directory.move_aside) if run.start.replaces else None
    with _claimed(run):
        keep_log(directory.path, read_environment())
        run.watchdog.event = lambda name, details: train.append_event(directory.events, name, **details)
        writer = _make_writer(run)
        started = time.perf_counter()
        failures = train.record_failure(directory.events) if world.is_main else nullcontext()
        with train.StopRequest() as stop, failures:
            progressed = _train(
                run, objective, steps, validation, writer, stop, console, learning_rate_at or _schedule(run), begin
            )
        seconds = time.perf_counter() - started
        finished = progressed.step >= run.plan.total_steps
        sample = _finish(run, writer) if finished else None
        if world.is_main:
            train.append_event(directory.events, "finish" if finished else "stop", step=progressed.step)
        run.backend.close()
        run.start.close()
    newest = train.checkpoint_path(directory.checkpoints, progressed.step)
    return Outcome(
        progressed=progressed,
        finished=finished,
        exit_code=0 if finished else stop.exit_code,
        checkpoint=newest if newest.exists() else None,
        moved_aside=moved_aside,
        sample=sample,
        records=train.read_records(directory.metrics),
        tokens=progressed.tokens - before,
        seconds=seconds,
    )


@contextmanager
def _claimed(run: Run) -> Iterator[None]:
    """The run directory is this run's within; rank 0 holds it for all."""
    with ExitStack() as held:
        text = dump_recipe(run.recipe, comment=f"resolved from {run.loaded.path}")
        run.start.world.main(lambda: held.enter_context(run.directory.claim(run.start.identity, text)))
        if run.start.world.size > 1:
            train.check_shared_folder(run.directory.path, run.start.world)
        yield


def _train(
    run: Run,
    objective: train.Objective,
    steps: train.StepStream,
    validation: Callable[[], Iterable[train.MicroBatch]] | None,
    writer: train.ModelWriter,
    stop: train.StopRequest,
    console: Console,
    learning_rate_at: Callable[[int], float],
    begin: Begin,
) -> train.Progressed:
    """The loop, with the optimizer the recipe asks for."""
    recipe, plan, directory = run.recipe, run.plan, run.directory
    first_step = run.checkpoint.step if run.checkpoint else 0
    world = run.start.world
    if world.is_main:
        train.supersede(directory.checkpoints, first_step)
        train.append_event(directory.events, "resume" if run.checkpoint else "start", step=first_step)
    told = _tell(run.watchdog)
    with train.Progress(console, plan.total_steps, first_step, recipe.logging_steps, told) as progress:
        begin(run.backend, progress, stop)
        return train.train(
            run.backend,
            objective,
            learning_rate_at,
            steps,
            None if validation is None else lambda: share_out(validation(), world),
            settings=train_settings(recipe, plan, run.handle.schedule),
            run=directory,
            identity=run.start.identity,
            writer=writer,
            resume_from=run.checkpoint,
            progress=progress,
            stop=stop,
            handle=run.handle,
            world=world,
            next_schedule=partial(_next_schedule, run),
        )


def _next_schedule(run: Run, install: bool) -> Schedule | None:
    """What the planner takes in place of the schedule that ran out of memory, put into the engine if asked."""
    failed = run.handle.schedule
    run.handle.remove()  # the planner wants the bare model
    try:
        found = plan_model(model=run.model, below=failed, **run.start.planned_for).schedule
    except ArgumentError:
        found = None
    if install and found is not None:
        run.handle.reschedule(found)
        run.start.identity["schedule"] = asdict(found)
    return found


def _tell(watchdog: Watchdog) -> Callable[[int, str], None]:
    """Pass on to the ranks' watchdog what a step does."""
    return lambda step, doing: watchdog.at(step, doing, patient=doing.startswith(PATIENT))


def _schedule(run: Run) -> Callable[[int], float]:
    """The learning rate as the recipe asks."""
    return optim.build_schedule(
        run.recipe.lr_scheduler_type,
        learning_rate=run.recipe.learning_rate,
        total_steps=run.plan.total_steps,
        warmup_steps=run.plan.warmup_steps,
    )


def _finish(run: Run, writer: train.ModelWriter) -> str | None:
    """Write ``final/`` and return what the model says to the sample prompt."""
    world, backend = run.start.world, run.backend
    train.write_final_together(run.directory.final, writer, world)
    sample = run.recipe.sample
    if sample is None:
        return None

    def say() -> str:
        return models.sample_text(
            run.model,
            run.tokenizer,
            sample.prompt,
            max_new_tokens=sample.max_new_tokens,
            temperature=SAMPLE_TEMPERATURE,
            seed=run.recipe.seed,
        )

    run.handle.remove()
    if not run.start.shares_weights:
        return world.main(say)
    with backend.called_directly():  # all ranks compute each token together, and draw the same
        return world.together(say)


def _make_writer(run: Run) -> train.ModelWriter:
    saved = [p for p in run.model.parameters() if p.requires_grad or run.recipe.finetuning_type == "full"]
    num_bytes = sum(models.count_weights(parameter) * parameter.element_size() for parameter in saved)
    tokenizer = models.SavedTokenizer(run.tokenizer)
    if run.start.shares_weights:
        main = run.start.world.is_main

        def gather(folder: Path) -> None:
            models.save_gathered(run.model, run.tokenizer, folder, run.backend.weights, is_main=main)

        return train.ModelWriter(gather, num_bytes, together=True)

    def write(folder: Path) -> None:
        models.save_pretrained(run.model, tokenizer, folder)

    def snapshot() -> Callable[[Path], None]:
        tokenizer.read()  # here and once: a tokenizer is not for two threads
        return partial(models.save_pretrained, run.model, tokenizer, weights=models.copy_weights(run.model))

    return train.ModelWriter(write, num_bytes, snapshot)
