"""Put the engine into a loaded model: plan, stream, check, and make the backend that updates the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from streamtune import models, train
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.plan import Plan
from streamtune.recipe.schema import Recipe
from streamtune.run.cluster import cluster_here
from streamtune.run.model import make_trial_model
from streamtune.run.plan import plan_model
from streamtune.run.ranks import make_backend, sequence_ranks, shares_weights
from streamtune.run.streaming import stream_model
from streamtune.schedule import Schedule
from streamtune.simulate.scored import Completions

if TYPE_CHECKING:
    pass
from streamtune.run.start import Doing, Notify, Start

__all__ = ["plan_and_stream"]


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
    """Put the engine into the model, with the planner's schedule if the recipe asks for one.

    Args:
        recipe: The recipe.
        model: On its device, with its adapters; changed in place.
        start: The start of the run.
        rows: Sequences of a micro-batch, or what ``completions`` takes for one.
        length: Tokens of the longest sequence, or of the longest completion with its prompt.
        completions: The completions of a micro-batch, where the objective scores completions.
        check: Another check of that very model, besides that it streams exactly.
        reference_bytes: Of a second model that is held and not trained.
        dry_run: Plan a fixed schedule too: a dry run is there to show what it would hold.
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

    def plan() -> tuple[dict[str, Any], int]:
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
        return asdict(memory.schedule), memory.simulation.host_bytes

    schedule, host_bytes = None, 0
    if recipe.engine.schedule == "auto" or dry_run:
        with doing("planning the steps"):  # one rank measures and chooses for all: they have to walk in step
            planned, host_bytes = start.world.main(plan)
            schedule = Schedule(**planned)
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
    """Check the model itself, or a small one of its configuration if its weights are provided later, in parts.

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
    """Return the recipe with one level if ranks share the weights, which are whole only while their layer computes.

    Two levels would run the forward of other layers in a layer's backward.

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
    """Return the schedule of the run that a checkpoint is from; None if it has none that this version knows."""
    kept = checkpoint.state["identity"].get("schedule") if checkpoint is not None else None
    try:
        return Schedule(**kept) if kept is not None else None
    except (TypeError, ArgumentError):
        return None
