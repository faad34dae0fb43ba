"""Prepare a model for training: precision, placement (device or host), plan, streaming, checks and backend."""

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
from streamtune.run.cluster import cluster_of_run
from streamtune.run.device import stream_model
from streamtune.run.model import make_meta_model, make_trial_model
from streamtune.run.plan import LongestStep, PlanInputs, choose_placement, make_workload, plan_model, shares_prompts
from streamtune.run.ranks import make_backend, sequence_ranks, with_loss_scale
from streamtune.run.start import Doing, Start
from streamtune.run.weight_choices import (
    changed_precision_keys,
    describe_placement,
    describe_precision,
    has_precision_choice,
    with_best_precision,
    with_saved_placement,
)
from streamtune.schedule import Schedule
from streamtune.tasks.task import Notify, PreparedRows

TIERS = "tiers"
"""Key of the placement (:func:`with_chosen_placement`) in a run's identity; a resumed run does not compare it."""


@dataclass(frozen=True)
class TrainableModel:
    """A model changed by ``streamtune.stream``, with its training backend."""

    handle: StreamHandle
    backend: train.Backend
    memory: Plan | None
    """Plan of a step with the longest rows: schedule, memory and time; None if nothing was planned."""
    baseline_bytes: Mapping[str, int]
    """Peak bytes of a step with the longest rows without streaming, by ``plain`` (autograd) and ``checkpoint``
    (gradient checkpointing); empty if nothing was planned."""
    plan_smaller: Callable[[Schedule], Plan]
    """Function from a schedule that ran out of memory to the plan of a smaller schedule; call it after
    ``handle.remove()``."""


def with_chosen_placement(start: Start, prepared: PreparedRows, longest_row: int, notify: Notify) -> Start:
    """Return ``start`` with a precision, and with optimizer or weights in host memory if they do not fit on the device.

    A resumed run keeps its precision and placement.

    Args:
        start: Start of the run; its model is not loaded yet.
        prepared: Tokenized rows.
        longest_row: Tokens of the longest row, or of the longest prompt with its completion.
        notify: Function called with notes on the choices.
    """
    recipe, task, world = start.recipe, start.task, start.world
    resumed = start.checkpoint is not None or bool(start.resumed_identities)

    def completions(model: Any) -> Completions | None:
        may_share = task.scores_completions and not prepared.has_images
        share = may_share and shares_prompts(task, model, start.device)
        return task.make_measured_shape_function(prepared, longest_row, share=share)

    saved_tiers = start.checkpoint.state["identity"].get(TIERS) if start.checkpoint is not None else None

    def choose_on_rank_0() -> dict[str, Any]:
        chosen = with_saved_placement(recipe, saved_tiers) or choose_placement(
            recipe,
            task.planned_length(longest_row),
            start.device,
            completions,
            resumed=resumed,
            cluster_of=partial(cluster_of_run, recipe, world=world, device=start.device) if world.size > 1 else None,
        )
        tiers = {key: getattr(chosen.engine, key) for key in ("weights", "optimizer")}
        return {"precision": changed_precision_keys(recipe, chosen), "tiers": tiers}

    chosen = recipe if resumed else with_best_precision(recipe)
    if world.size == 1 or (not resumed and has_precision_choice(recipe)):  # else weights stay on the device
        # If the model cannot be made on meta, loading it raises the error.
        with suppress(UserError, RuntimeError):
            choice = world.run_on_rank_0(choose_on_rank_0)  # rank 0 chooses for all ranks
            engine = recipe.engine.model_copy(update=choice["tiers"])
            chosen = recipe.model_copy(update={**choice["precision"], "engine": engine})
    placement_note = describe_placement(recipe, chosen)
    if placement_note is not None:
        notify(placement_note)
        start.identity[TIERS] = {"weights": chosen.engine.weights, "optimizer": chosen.engine.optimizer}
    if precision := changed_precision_keys(recipe, chosen):
        start.identity["recipe"] |= precision
        with suppress(UserError, RuntimeError):
            if (note := describe_precision(recipe, chosen, make_meta_model(chosen, start.device))) is not None:
                notify(note)
    return start if placement_note is None and not precision else start.with_recipe(chosen)


BASELINES: tuple[Mode, ...] = ("plain", "checkpoint")


@dataclass(frozen=True)
class PlannedSchedule:
    """The planned schedule of a run."""

    plan_smaller: Callable[[Schedule], Plan]
    """Function from a schedule that ran out of memory to the plan of a smaller schedule."""
    schedule: Schedule | None = None
    """Schedule of all ranks; None if the recipe fixes the schedule."""
    reserved_host_bytes: int | None = None
    """Bytes of host memory to reserve for offloaded tensors; None if nothing is offloaded to the host."""
    memory: Plan | None = None
    """Plan, on rank 0; None on other ranks, or if nothing was planned."""
    baseline_bytes: Mapping[str, int] = field(default_factory=dict)
    """Peak bytes of a step with the longest rows without streaming, by mode (``plain``, ``checkpoint``); on rank 0."""


def plan_schedule(
    start: Start, model: Any, longest_step: LongestStep, *, dry_run: bool, notify: Notify, doing: Doing
) -> PlannedSchedule:
    """Plan the schedule of a run, unless the recipe fixes the schedule.

    Args:
        start: Start of the run.
        model: Model on its device, with its adapters, before ``streamtune.stream``.
        longest_step: Longest micro-batch of the run.
        dry_run: True to plan memory and time even with a fixed schedule.
        notify: Function called with messages for the user.
        doing: Function that returns a context manager, which shows a message during a slow activity.

    Raises:
        ArgumentError: No schedule fits in memory.
    """
    recipe, world, device = start.recipe, start.world, start.device
    # Chunk order would gather the weights of every layer once per chunk.
    fixed = {"order": "layer"} if start.weights_are_sharded else {}
    plan_with = partial(plan_model, recipe, model, longest_step, device)
    planned = PlannedSchedule(lambda failed: plan_with(PlanInputs(failed_schedule=failed, fixed=fixed)))
    if recipe.engine.schedule != "auto" and not dry_run:
        return planned

    def plan_on_rank_0() -> tuple[dict[str, Any], int]:
        nonlocal planned
        cluster = cluster_of_run(recipe, model, world, device)
        baselines = _baseline_bytes(make_workload(recipe, meta_copy(model), longest_step, device, cluster))
        inputs = PlanInputs(cluster, resumed_schedule=_saved_schedule(start.checkpoint), fixed=fixed)
        memory = plan_with(inputs, notify=notify)
        planned = replace(planned, memory=memory, baseline_bytes=baselines)
        return asdict(memory.schedule), memory.simulation.streamed_host_bytes

    with doing("planning the steps"):  # rank 0 plans for all ranks, which need the same schedule
        fields, host_bytes = world.run_on_rank_0(plan_on_rank_0)
    schedule = Schedule(**fields)
    reserved_bytes = host_bytes if schedule.stores_on_host and not dry_run else None
    return replace(planned, schedule=schedule, reserved_host_bytes=reserved_bytes)


def _baseline_bytes(workload: Workload) -> Mapping[str, int]:
    """Return the simulated peak bytes of a step by mode (``plain``, ``checkpoint``); empty if it cannot be
    simulated."""
    try:
        return {mode: simulate(replace(workload, mode=mode), Schedule()).peak_bytes for mode in BASELINES}
    except (UserError, NotImplementedError):
        return {}


def stream_and_make_backend(
    start: Start,
    model: Any,
    planned: PlannedSchedule,
    before_backend: Callable[[StreamHandle], None],
    *,
    notify: Notify,
    doing: Doing,
) -> TrainableModel:
    """Stream the model with the planned schedule or the recipe's, check its gradients, and create the training backend.

    Args:
        start: Start of the run.
        model: Model on its device, with its adapters; changed in place.
        planned: Planned schedule.
        before_backend: Function called with the handle of the streamed model, before the backend wraps the model.
        notify: Function called with messages for the user.
        doing: Function that returns a context manager, which shows a message during a slow activity.
    """
    recipe, world = start.recipe, start.world
    handle = stream_model(recipe, model, planned.schedule, sequence_ranks(recipe, world))
    with doing("checking that this model streams exactly"):
        _check_exact_streaming(start, model, handle, notify)
    before_backend(handle)
    with doing("setting up the optimizer"):  # after the checks, because a backend may shard the weights
        backend = with_loss_scale(recipe, make_backend(recipe, model, handle.layers, world, start.device))
    if planned.reserved_host_bytes is not None:
        handle.tiers.reserve(planned.reserved_host_bytes, start.device)
    start.identity["schedule"] = asdict(
        handle.schedule
    )  # not compared: every schedule gives the same gradient, up to rounding
    return TrainableModel(handle, backend, planned.memory, planned.baseline_bytes, planned.plan_smaller)


def _check_exact_streaming(start: Start, model: Any, handle: StreamHandle, notify: Notify) -> None:
    """Check that streaming does not change gradients; if the weights are not loaded yet, check a small copy of the
    model."""
    recipe = start.recipe
    deferred = models.find_deferred_weights(model)
    if deferred is None:
        handle.check()
        start.task.check_model(handle)
        return

    def check_small() -> int:
        small_model = make_trial_model(recipe, model, start.device)
        with stream_model(recipe, small_model, handle.schedule, handle.sequence_parallel) as small_handle:
            small_handle.check()
            start.task.check_model(small_handle)
            return len(small_handle.layers)

    # Ranks that share a sequence compute each call together; otherwise rank 0 checks for all ranks.
    layers = check_small() if recipe.sequence_parallel_size > 1 else start.world.run_on_rank_0(check_small)
    if deferred.note is not None:
        notify(deferred.note)
    notify(
        f"the weights are sharded: streaming was checked on a model of the same configuration with "
        f"{layers} of the {len(handle.layers)} layers and random weights"
    )


def _saved_schedule(checkpoint: train.Checkpoint | None) -> Schedule | None:
    saved = checkpoint.state["identity"].get("schedule") if checkpoint is not None else None
    try:
        return Schedule(**saved) if saved is not None else None
    except (TypeError, ArgumentError):
        return None
