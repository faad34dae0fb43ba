"""A recipe to simulated trials of the probe: the step is walked on ``meta`` tensors, on a device that may be elsewhere.

With a fixed schedule a trial simulates it; where the planner picks one, a trial is a plan for that length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from streamtune.engine import Schedule
from streamtune.errors import ArgumentError
from streamtune.plan.budget import device_name
from streamtune.plan.choices import Limits
from streamtune.plan.cost import Rates, predict_seconds
from streamtune.plan.devices import Device
from streamtune.plan.planner import choose
from streamtune.plan.probe import ProbeTask, RunTrial
from streamtune.plan.simulate import Simulation, simulate
from streamtune.plan.steps import Shape
from streamtune.plan.trial import Cause, Outcome
from streamtune.recipe.build_plan import make_blueprint, make_workload
from streamtune.recipe.schema import Recipe
from streamtune.sizes import show_size

__all__ = ["simulated"]


def simulated(recipe: Recipe, task: ProbeTask, target: Device | None, here: torch.device, rates: Rates) -> RunTrial:
    """Trials by simulation.

    Args:
        recipe: The recipe.
        task: Whose budget is kept: all sizes are given.
        target: The device that is simulated; None is the one at hand.
        here: That one.
        rates: How fast it is.
    """
    device = torch.device("cuda") if target is not None else here
    model = make_blueprint(recipe, device)
    workload = make_workload(recipe, partial(_same, model), 2, device)
    limits = Limits(
        device_bytes=task.device_bytes or 0,
        host_bytes=task.host_bytes or 0,
        disk_bytes=task.disk_bytes or 0,
        margin=task.margin,
        shared=device.type == "cpu",
    )
    env = {
        "device": target.title if target is not None else device_name(here),
        "device_bytes": task.device_bytes,
        "rates": rates.source,
        "torch": torch.__version__,
    }
    remembered = cache(simulate)  # plans of many lengths begin with the same short simulations

    def run(shape: Shape, tell: Callable[[str], None]) -> Outcome:
        step = replace(workload, mode=shape.mode, length=shape.length, batch_size=shape.batch_size)
        if shape.mode != "stream" or task.schedule is not None:
            schedule = task.schedule or Schedule()  # a baseline reads nothing of it
            return replace(_judged(remembered(step, schedule), schedule, limits, rates), env=env)
        try:
            plan = choose(step, limits, rates, fixed=recipe.engine.written(), simulate=remembered)
        except ArgumentError as error:
            return Outcome(False, "device memory", error.what, env=env)
        return replace(_judged(plan.simulation, plan.schedule, limits, rates), env=env)

    return run


def _judged(simulation: Simulation, schedule: Schedule, limits: Limits, rates: Rates) -> Outcome:
    """Whether a simulated step fits, and if not, what of it is too much."""
    tiers: dict[Cause, tuple[int, int]] = {
        "device memory": (simulation.peak_bytes + (simulation.host_bytes if limits.shared else 0), limits.device),
        "host memory": (0 if limits.shared else simulation.host_bytes, limits.host),
        "disk memory": (simulation.disk_bytes, limits.disk),
    }
    cause = max(tiers, key=lambda name: tiers[name][0] - tiers[name][1])
    used, usable = tiers[cause]
    outcome = Outcome(
        fits=used <= usable,
        peak_bytes=simulation.peak_bytes,
        host_bytes=simulation.host_bytes,
        disk_bytes=simulation.disk_bytes,
        step_seconds=predict_seconds(simulation.work, rates),
        terms=simulation.terms,
        schedule=schedule,
    )
    if outcome.fits:
        return outcome
    left = f" ({limits.margin:.0%} is left free)" if limits.margin else ""
    where = f" in the {simulation.phase}" if cause == "device memory" else ""
    reason = f"{cause}: the step takes {show_size(used)}{where} of {show_size(usable)}{left}"
    return replace(outcome, cause=cause, reason=reason)


def _same(model: nn.Module) -> nn.Module:
    return model
