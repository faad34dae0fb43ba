"""Choose between device and host for weights and optimizer, where a recipe leaves that open.

A step is fastest with everything on the device, so the host is asked only where no schedule fits otherwise. The states
of the optimizer go there first, which pass once a step; then weights, which pass with every layer, twice or more. Each
place is tried in every precision that the recipe leaves open (:mod:`streamtune.run.precision`), the best first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits
from streamtune.plan.choices import excess_of
from streamtune.plan.estimate import Simulate
from streamtune.plan.refusal import exceeds_host, smallest_step
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.simulate import Simulation, holdings_of, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import make_schedule
from streamtune.run.precision import Settings, precisions


def placements(recipe: Settings, limits: Limits, cluster: Cluster, *, begun: bool = False) -> list[Settings]:
    """Return the recipe as it is, then with the optimizer and then with the weights on the host, in each precision.

    Only what the recipe leaves to the planner and does not contradict is returned. Nothing goes to the host where the
    device's memory is the machine's, or ranks or DeepSpeed divide the work.

    Args:
        begun: The recipe has the precision of a resumed run: no other is asked for.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    chosen = [recipe] if begun else precisions(recipe)
    moved = [_moved(each, limits, cluster) for each in chosen]
    return [*chosen, *(each for found in moved for each in found)]


def _moved(recipe: Settings, limits: Limits, cluster: Cluster) -> list[Settings]:
    """Return the recipe with the optimizer and with the weights on the host, as far as it leaves that open."""
    spec, full = recipe.engine, recipe.finetuning_type == "full"
    alone = cluster.ranks == 1 and cluster.engine == "none"
    if spec.schedule == "fixed" or limits.shared or not limits.host_bytes or not alone:
        return []
    tiers: list[dict[str, str]] = []
    if full and spec.optimizer == "auto" and spec.weights != "host":
        tiers.append({"optimizer": "host"})
    if spec.weights == "auto":
        tiers.append({"weights": "host"})
    found: list[Settings] = []
    for tier in tiers:
        with suppress(ValidationError):  # the recipe contradicts it
            engine = type(spec).model_validate({**dict(spec), **tier})
            type(recipe).model_validate({**dict(recipe), "engine": engine})
            found.append(recipe.model_copy(update={"engine": engine}))
    return found


def placed_before(recipe: Settings, tiers: Mapping[str, str] | None) -> Settings | None:
    """Return the recipe with what a resumed run had on the host; None where that is unknown or contradicted.

    Args:
        tiers: ``weights`` and ``optimizer`` of the run; None if it left both where they were.
    """
    spec = recipe.engine
    if tiers is None or spec.schedule == "fixed":
        return None
    if any(getattr(spec, key) not in ("auto", value) for key, value in tiers.items()):
        return None
    return recipe.model_copy(update={"engine": spec.model_copy(update=dict(tiers))})


def first_that_fits(
    choices: Sequence[Settings],
    workload_of: Callable[[Settings], Workload],
    limits: Limits,
    *,
    simulate: Simulate = simulate,
) -> Settings:
    """Return the first of some :func:`placements` whose step fits by some schedule.

    Where none does, the last that the host has room for: its longest row is the longest of all.

    Args:
        workload_of: Makes the step of one of them.
        simulate: Simulates a step of each choice, by the schedule of least memory.
    """
    if len(choices) == 1:
        return choices[0]
    chosen = choices[0]
    for choice in choices:
        workload = workload_of(choice)
        if choice is not choices[-1] and is_hopeless(workload, choice.engine.written(), limits):
            continue
        found: Simulation | None = None
        with suppress(ArgumentError):  # what is written contradicts it
            if choice.engine.schedule == "fixed":
                found = simulate(workload, make_schedule(choice.engine))
            else:
                _, found = smallest_step(workload, limits, choice.engine.written(), simulate)
        if found is None:
            continue
        if excess_of(found, limits) <= 0:
            return choice
        if not exceeds_host(found, limits):
            chosen = choice
    return chosen


def is_hopeless(workload: Workload, written: Mapping[str, Any], limits: Limits) -> bool:
    """Return True if what the device holds of a step, whatever the rows, exceeds its memory; nothing is simulated.

    Args:
        written: Fields of its schedule that are given.
    """
    return holdings_of(workload, written.get("weights", "device")).on_device > limits.device


def describe_tiers(recipe: TrainingSettings, chosen: TrainingSettings) -> str | None:
    """Return a sentence on what was moved to the host, with its key; None if nothing was."""
    before, now = recipe.engine, chosen.engine
    if now.weights != before.weights:
        key, what = "weights", "weights, and the optimizer of those that are trained,"
    elif now.optimizer != before.optimizer:
        key, what = "optimizer", "the states of the optimizer"
    else:
        return None
    return (
        f"no schedule fits with everything on the device: {what} wait in the machine's memory, as "
        f"engine: {{{key}: host}} says"
    )
