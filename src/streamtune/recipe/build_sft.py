"""A recipe to a run of supervised fine-tuning.

build_sft   recipe -> tokenizer, data, model, engine, step plan; reads everything, writes nothing
run_sft     train, save the model, try it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streamtune import data, models, optim, train
from streamtune.engine import Schedule, StreamHandle, check_packing
from streamtune.errors import ArgumentError
from streamtune.plan import Plan
from streamtune.recipe.build import (
    blame_recipe,
    choose_device,
    make_sources,
    make_tokenizer,
    prepare_data,
    quiet_libraries,
    stream_model,
)
from streamtune.recipe.build_batches import Batches, Steps
from streamtune.recipe.build_model import choose_quantization, make_model, make_optimizer
from streamtune.recipe.build_plan import plan_model
from streamtune.recipe.build_settings import StepPlan, plan_steps, train_settings
from streamtune.recipe.dump import dump_recipe
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

__all__ = ["Outcome", "SftRun", "build_sft", "run_sft"]

FREE_KEYS = frozenset(
    {
        # Where things go and what is shown,
        "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "sample",
        # how the same gradient is computed,
        "engine", "device", "per_device_eval_batch_size", "trust_remote_code",
        # and what the fingerprint of the data covers, wherever the files are now.
        "datasets",
    }
)  # fmt: skip
"""Keys that may change between the start of a run and its resumption."""

SAMPLE_TEMPERATURE = 0.3
"""Of the sample at the end. The likeliest token each time would go in circles where little is learnt yet."""


@dataclass
class SftRun:
    """Everything a run of supervised fine-tuning needs, built and checked."""

    loaded: LoadedRecipe
    directory: train.RunDirectory
    checkpoint: train.Checkpoint | None
    """Where the run goes on from; None starts at the beginning."""
    identity: dict[str, Any]
    replaces: bool
    """Whether ``directory`` holds another run, which is moved aside first."""
    device: torch.device
    quantization: str | None
    """``nf4`` or ``int8``: of the frozen linear layers."""
    tokenizer: PreTrainedTokenizerBase
    data: data.PreparedData
    model: Any
    parameters: models.ParameterCount
    handle: StreamHandle
    plan: StepPlan
    memory: Plan | None
    """The planner's schedule, and what a step of the longest rows holds and takes by it; None where none was asked."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe


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
    losses: list[float]
    """The training loss of every step, those before a resume included."""
    tokens: int
    """Tokens trained on since it was started or resumed."""
    seconds: float
    """Time the loop took since it was started or resumed."""


def build_sft(
    loaded: LoadedRecipe,
    *,
    resume: str = "auto",
    dry_run: bool = False,
    notify: Callable[[str], None] = lambda message: None,
    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> SftRun:
    """Load or make everything the recipe names. Nothing is written.

    Args:
        loaded: The recipe.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        dry_run: Plan a fixed schedule too: what it would hold is what a dry run is for.
        notify: Told what is worth knowing on the way, a sentence at a time.
        doing: Shows what takes a while, for as long as it does.

    Raises:
        UserError: With the line of the recipe that is to blame.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        OutOfMemoryError: The weights alone do not fit.
    """
    recipe = loaded.recipe
    with blame_recipe(loaded):
        device = choose_device(recipe.device)
        quantization = choose_quantization(recipe, device)
        quiet_libraries(device)
        directory = train.RunDirectory(Path(recipe.output_dir))
        before = directory.read_identity()
        checkpoint = train.find_checkpoint(directory, resume, notify)
        identity = _identify(recipe, quantization)
        started = {directory.path: before} if before is not None and resume != "never" else {}
        if checkpoint is not None:
            started[checkpoint.path] = checkpoint.state["identity"]
        # What is continued must have been started under the same settings: checked before the data is read, with
        # which it takes minutes, and once more with it.
        _check_same(started, identity)
        sources = make_sources(loaded)
        with doing("reading the tokenizer" if checkpoint else "making the tokenizer"):
            tokenizer = make_tokenizer(recipe, sources, checkpoint, notify)
        prepared = prepare_data(recipe, sources, tokenizer, notify)
        identity["data"] = prepared.fingerprint
        _check_same(started, identity)

        with doing("loading the model"):
            model = make_model(recipe, tokenizer, checkpoint, device)
        longest = min(prepared.report.length_percentiles["max"], recipe.max_length)
        if (note := models.check_positions(model, longest)) is not None:
            notify(note)
        if checkpoint is None and (note := models.left_out(model)) is not None:
            notify(note)
        memory = None
        if recipe.engine.schedule == "auto" or dry_run:
            longest = recipe.max_length if recipe.packing else longest
            with doing("planning the steps"):
                memory = plan_model(recipe, model, longest, device, keep=_schedule_of(checkpoint), notify=notify)
        handle = _stream_exactly(recipe, model, memory, doing)
        if memory is not None and not dry_run and memory.schedule.uses_host:
            handle.tiers.reserve(memory.simulation.host_bytes, device)
        identity["schedule"] = asdict(handle.schedule)  # not compared: another gives the same gradient, to rounding
    return SftRun(
        loaded=loaded,
        directory=directory,
        checkpoint=checkpoint,
        identity=identity,
        replaces=before is not None and resume == "never",
        device=device,
        quantization=quantization,
        tokenizer=tokenizer,
        data=prepared,
        model=model,
        parameters=models.count_parameters(model),
        handle=handle,
        plan=plan_steps(recipe, Batches(prepared, tokenizer).num_train),
        memory=memory,
    )


def _identify(recipe: Recipe, quantization: str | None) -> dict[str, Any]:
    """What a run that is gone on with must have in common with the one that was started."""
    identity: dict[str, Any] = {"recipe": recipe.model_dump(mode="json", exclude={*FREE_KEYS, "quantization"})}
    if recipe.objective == "sft":  # runs were started before there was another
        del identity["recipe"]["objective"]
    if quantization is not None:  # what `auto` became: on another device it is another model
        identity["recipe"]["quantization"] = quantization
    return identity


def _check_same(started: Mapping[Path, dict[str, Any]], identity: dict[str, Any]) -> None:
    for where, started_as in started.items():
        train.check_same_run(started_as, identity, where=where)


def _stream_exactly(
    recipe: Recipe, model: Any, memory: Plan | None, doing: Callable[[str], AbstractContextManager[Any]]
) -> StreamHandle:
    """The engine in the model, checked on that very model."""
    handle = stream_model(recipe, model, memory.schedule if memory is not None else None)
    with doing("checking that this model streams exactly"):
        handle.check()
        if recipe.packing:
            check_packing(handle)
    return handle


def _schedule_of(checkpoint: train.Checkpoint | None) -> Schedule | None:
    """The schedule a run was going on with, if this version knows it."""
    kept = checkpoint.state["identity"].get("schedule") if checkpoint is not None else None
    try:
        return Schedule(**kept) if kept is not None else None
    except (TypeError, ArgumentError):
        return None


def run_sft(run: SftRun, console: Console) -> Outcome:
    """Train, and where the run comes to its end save the model and let it answer the sample prompt.

    Args:
        run: From :func:`build_sft`; used once.
        console: Where progress is shown.

    Raises:
        RunError: It failed on the way; the checkpoints saved before are intact.
    """
    directory = run.directory
    before = run.checkpoint.state["progressed"]["tokens"] if run.checkpoint else 0
    moved_aside = directory.move_aside() if run.replaces else None
    with directory.claim(run.identity, dump_recipe(run.recipe, comment=f"resolved from {run.loaded.path}")):
        writer = _make_writer(run)
        started = time.perf_counter()
        with train.StopRequest() as stop, train.record_failure(directory.events):
            progressed = _train(run, writer, stop, console)
        seconds = time.perf_counter() - started
        finished = progressed.step >= run.plan.total_steps
        sample = _finish(run, writer) if finished else None
        train.append_event(directory.events, "finish" if finished else "stop", step=progressed.step)
    newest = train.checkpoint_path(directory.checkpoints, progressed.step)
    return Outcome(
        progressed=progressed,
        finished=finished,
        exit_code=0 if finished else stop.exit_code,
        checkpoint=newest if newest.exists() else None,
        moved_aside=moved_aside,
        sample=sample,
        losses=[record["loss"] for record in train.read_records(directory.metrics) if "loss" in record],
        tokens=progressed.tokens - before,
        seconds=seconds,
    )


def _train(run: SftRun, writer: train.ModelWriter, stop: train.StopRequest, console: Console) -> train.Progressed:
    """The loop, with optimizer, schedule and batches as the recipe asks."""
    recipe, plan, directory = run.recipe, run.plan, run.directory
    first_step = run.checkpoint.step if run.checkpoint else 0
    train.supersede(directory.checkpoints, first_step)
    train.append_event(directory.events, "resume" if run.checkpoint else "start", step=first_step)
    optimizer = make_optimizer(recipe, run.model)
    learning_rate_at = optim.build_schedule(
        recipe.lr_scheduler_type,
        learning_rate=recipe.learning_rate,
        total_steps=plan.total_steps,
        warmup_steps=plan.warmup_steps,
    )
    batches = Batches(run.data, run.tokenizer)
    with train.Progress(console, plan.total_steps, first_step, recipe.logging_steps) as progress:
        return train.train(
            run.model,
            train.SupervisedObjective(run.handle),
            optimizer,
            learning_rate_at,
            Steps(batches, recipe),
            (lambda: batches.held_out(recipe.per_device_eval_batch_size)) if run.data.validation else None,
            settings=train_settings(recipe, plan, run.handle.schedule),
            run=directory,
            identity=run.identity,
            writer=writer,
            resume_from=run.checkpoint,
            progress=progress,
            stop=stop,
            handle=run.handle,
        )


def _finish(run: SftRun, writer: train.ModelWriter) -> str | None:
    """Write ``final/`` and return what the model says to the sample prompt."""
    train.write_final(run.directory.final, writer)
    run.handle.remove()
    sample = run.recipe.sample
    if sample is None:
        return None
    return models.sample_text(
        run.model,
        run.tokenizer,
        sample.prompt,
        max_new_tokens=sample.max_new_tokens,
        temperature=SAMPLE_TEMPERATURE,
        seed=run.recipe.seed,
    )


def _make_writer(run: SftRun) -> train.ModelWriter:
    saved = [p for p in run.model.parameters() if p.requires_grad or run.recipe.finetuning_type == "full"]
    return train.ModelWriter(
        write=lambda folder: models.save_pretrained(run.model, run.tokenizer, folder),
        num_bytes=sum(parameter.nbytes for parameter in saved),
    )
