"""Make a model ready to train.

Choose its precision, place its weights, plan, put the engine into it, check it, and make its backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from streamtune import models, train
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError, UserError
from streamtune.plan.planner import Plan
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.scored import Completions
from streamtune.plan.simulate.simulate import simulate
from streamtune.plan.simulate.workload import Mode, Workload
from streamtune.run.cluster import cluster_here
from streamtune.run.device import stream_model
from streamtune.run.model import make_blueprint, make_trial_model
from streamtune.run.plan import LongestStep, PlanInputs, make_workload, place_recipe, plan_model, shares_prompts
from streamtune.run.ranks import make_backend, sequence_ranks
from streamtune.run.start import Doing, Start
from streamtune.run.weight_choices import (
    choices_made,
    describe_precision,
    describe_tiers,
    has_choice,
    placed_before,
    precise,
)
from streamtune.schedule import Schedule
from streamtune.tasks.task import Notify, PreparedRows

TIERS = "tiers"
"""Name of the choices of :func:`place_weights` in the identity of a run; they are not compared."""


@dataclass(frozen=True)
class Streamed:
    """A model with the engine in it, ready to train."""

    handle: StreamHandle
    backend: train.Backend
    memory: Plan | None
    """The planner's schedule, and what a step of the longest rows holds and takes by it; None where none was asked."""
    baselines: Mapping[str, int]
    """Peak bytes of that step by plain autograd and by gradient checkpointing; empty where no schedule was planned."""
    plan_below: Callable[[Schedule], Plan]
    """Plans again, for less memory than a schedule that ran out of it. The model must not be streamed then."""


def place_weights(start: Start, prepared: PreparedRows, longest: int, notify: Notify) -> Start:
    """Return the start with the precision of trained weights, and weights or optimizer on the host where nothing fits
    otherwise.

    A resumed run keeps what it was started with.

    Args:
        start: The start of the run; its model is not loaded.
        longest: Tokens of the longest row, or of the longest prompt with its completion.
    """
    recipe, task, world = start.recipe, start.task, start.world
    begun = start.checkpoint is not None or bool(start.continued)

    def completions(model: Any) -> Completions | None:
        share = task.scores and shares_prompts(task, model, start.device)
        return task.own_completions(prepared, longest, share=share)

    before = start.checkpoint.state["identity"].get(TIERS) if start.checkpoint is not None else None

    def choose() -> dict[str, Any]:
        chosen = placed_before(recipe, before) or place_recipe(
            recipe,
            task.planned_length(longest),
            start.device,
            completions,
            begun=begun,
            cluster_of=partial(cluster_here, recipe, world=world, device=start.device) if world.size > 1 else None,
        )
        moved = {key: getattr(chosen.engine, key) for key in ("weights", "optimizer")}
        return {"precision": choices_made(recipe, chosen), "tiers": moved}

    chosen = recipe if begun else precise(recipe)
    if world.size == 1 or (not begun and has_choice(recipe)):  # else weights stay where they are
        # What is wrong with a model that cannot be made on meta, loading it says.
        with suppress(UserError, RuntimeError):
            made = world.main(choose)  # one rank chooses for all
            engine = recipe.engine.model_copy(update=made["tiers"])
            chosen = recipe.model_copy(update={**made["precision"], "engine": engine})
    moved = describe_tiers(recipe, chosen)
    if moved is not None:
        notify(moved)
        start.identity[TIERS] = {"weights": chosen.engine.weights, "optimizer": chosen.engine.optimizer}
    if precision := choices_made(recipe, chosen):
        start.identity["recipe"] |= precision
        with suppress(UserError, RuntimeError):
            if (note := describe_precision(recipe, chosen, make_blueprint(chosen, start.device))) is not None:
                notify(note)
    return start if moved is None and not precision else start.with_recipe(chosen)


BASELINES: tuple[Mode, ...] = ("plain", "checkpoint")


@dataclass(frozen=True)
class PlannedStart:
    """The schedule of a run, before its engine is made."""

    plan_below: Callable[[Schedule], Plan]
    """See :class:`Streamed`."""
    schedule: Schedule | None = None
    """The schedule of all ranks; None where the recipe fixes it."""
    reserve: int | None = None
    """Bytes to reserve on the host for what the engine stores there; None where it stores nothing."""
    memory: Plan | None = None
    """The plan, on rank 0."""
    baselines: Mapping[str, int] = field(default_factory=dict)
    """See :class:`Streamed`; on rank 0."""


def plan_start(
    start: Start, model: Any, longest: LongestStep, *, dry_run: bool, notify: Notify, doing: Doing
) -> PlannedStart:
    """Plan the schedule of a run if the recipe asks for one.

    Args:
        model: The model on its device, with its adapters, not yet streamed.
        dry_run: Plan a fixed schedule too: a dry run shows what it would hold.

    Raises:
        ArgumentError: Nothing fits.
    """
    recipe, world, device = start.recipe, start.world, start.device
    # In the order of chunks every layer would be gathered once for every chunk.
    fixed = {"order": "layer"} if start.shares_weights else {}
    plan_given = partial(plan_model, recipe, model, longest, device)
    found = PlannedStart(lambda failed: plan_given(PlanInputs(below=failed, fixed=fixed)))
    if recipe.engine.schedule != "auto" and not dry_run:
        return found

    def plan() -> tuple[dict[str, Any], int]:
        nonlocal found
        cluster = cluster_here(recipe, model, world, device)
        baselines = _baseline_bytes(make_workload(recipe, meta_copy(model), longest, device, cluster))
        given = PlanInputs(cluster, keep=_schedule_of(start.checkpoint), fixed=fixed)
        memory = plan_given(given, notify=notify)
        found = replace(found, memory=memory, baselines=baselines)
        return asdict(memory.schedule), memory.simulation.streamed_host_bytes

    with doing("planning the steps"):  # one rank measures and chooses for all: they have to walk in step
        planned, host_bytes = world.main(plan)
    schedule = Schedule(**planned)
    return replace(found, schedule=schedule, reserve=host_bytes if schedule.uses_host and not dry_run else None)


def _baseline_bytes(workload: Workload) -> Mapping[str, int]:
    """Return the peak bytes of a step by plain autograd (``plain``) and by gradient checkpointing (``checkpoint``).

    Empty where they cannot be simulated.
    """
    try:
        return {mode: simulate(replace(workload, mode=mode), Schedule()).peak_bytes for mode in BASELINES}
    except (UserError, NotImplementedError):
        return {}


def stream_start(
    start: Start,
    model: Any,
    planned: PlannedStart,
    first: Callable[[StreamHandle], None],
    *,
    notify: Notify,
    doing: Doing,
) -> Streamed:
    """Put the engine into the model, with the planned schedule or the recipe's, and make its backend.

    Args:
        model: The model on its device, with its adapters; changed in place.
        first: Called with the streamed model, before a backend has it.
    """
    recipe, world = start.recipe, start.world
    handle = stream_model(recipe, model, planned.schedule, sequence_ranks(recipe, world))
    with doing("checking that this model streams exactly"):
        _check_streams(start, model, handle, notify)
    first(handle)
    with doing("setting up the optimizer"):  # after the checks: ranks that share the weights have them no longer whole
        backend = make_backend(recipe, model, handle.layers, world, start.device)
    if planned.reserve is not None:
        handle.tiers.reserve(planned.reserve, start.device)
    start.identity["schedule"] = asdict(handle.schedule)  # not compared: another gives the same gradient, to rounding
    return Streamed(handle, backend, planned.memory, planned.baselines, planned.plan_below)


def _check_streams(start: Start, model: Any, handle: StreamHandle, notify: Notify) -> None:
    """Check the model itself, or a small one of its configuration if its weights come later, in parts."""
    recipe = start.recipe
    deferred = models.deferred_of(model)
    if deferred is None:
        handle.check()
        start.task.check_model(handle)
        return

    def check_small() -> int:
        trial = make_trial_model(recipe, model, start.device)
        with stream_model(recipe, trial, handle.schedule, handle.sequence_parallel) as small:
            small.check()
            start.task.check_model(small)
            return len(small.layers)

    # Ranks that share a sequence compute each call together; any other rank would find what rank 0 finds.
    layers = check_small() if recipe.sequence_parallel_size > 1 else start.world.main(check_small)
    if deferred.note is not None:
        notify(deferred.note)
    notify(
        f"the weights are shared between ranks: streaming was checked on a model of the same configuration with "
        f"{layers} of the {len(handle.layers)} layers and random weights"
    )


def _schedule_of(checkpoint: train.Checkpoint | None) -> Schedule | None:
    """Return the schedule of the run that a checkpoint is from; None if it has none that this version knows."""
    kept = checkpoint.state["identity"].get("schedule") if checkpoint is not None else None
    try:
        return Schedule(**kept) if kept is not None else None
    except (TypeError, ArgumentError):
        return None
