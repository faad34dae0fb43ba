"""Simulate the trials of the probe: the step runs on ``meta`` tensors, for a device that may be elsewhere.

With a fixed schedule a trial simulates it. Where the planner picks one, a trial tests if anything fits, by the schedule
of least memory. That schedule is not the one a run would use, so such a trial has no seconds: the longest gets those of
its plan, the same that ``streamtune plan`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from streamtune.plan.budget import Limits, device_name
from streamtune.plan.planner import choose
from streamtune.plan.rates import Device, Rates
from streamtune.plan.refusal import smallest_step
from streamtune.plan.traffic import Pace
from streamtune.probe.probe import ProbeTask, Trial
from streamtune.probe.steps import Shape
from streamtune.probe.trial import Cause, Outcome
from streamtune.recipe.schema import Recipe
from streamtune.run.cluster import RanksAsked, cluster_of, links_for
from streamtune.run.model import make_blueprint
from streamtune.run.plan import announced, recipe_workload
from streamtune.schedule import Schedule
from streamtune.simulate.simulate import Simulation, simulate
from streamtune.simulate.workload import Workload
from streamtune.sizes import show_size
from streamtune.tasks import task_of

__all__ = ["SimulatedTrials", "simulated"]


def simulated(
    recipe: Recipe, task: ProbeTask, target: Device | None, here: torch.device, rates: Rates, asked: RanksAsked
) -> SimulatedTrials:
    """Return a function that makes trials by simulation.

    Args:
        recipe: The recipe.
        task: Gives the budget, with all sizes.
        target: The device that is simulated; None is the one at hand.
        here: The device at hand.
        rates: The rates of the device that is simulated.
        asked: The number of ranks and nodes on the command line.
    """
    device = torch.device("cuda") if target is not None else here
    model = make_blueprint(recipe, device)
    cluster = cluster_of(recipe, model, asked, links_for(target, here))
    ranks = cluster.ranks_per_node
    workload = recipe_workload(recipe, model, task_of(recipe).shortest, device, cluster=cluster)
    limits = Limits(
        device_bytes=(task.device_bytes or 0) // (ranks if device.type == "cpu" else 1),
        host_bytes=(task.host_bytes or 0) // ranks,
        disk_bytes=(task.disk_bytes or 0) // ranks,
        margin=task.margin,
        shared=device.type == "cpu",
    )
    env: dict[str, Any] = {
        "device": target.title if target is not None else device_name(here),
        "device_bytes": task.device_bytes,
        "rates": rates.source,
        "torch": torch.__version__,
    }
    if cluster.ranks > 1:
        env |= {"cluster": {**asdict(cluster), "describe": cluster.describe()}, "device_bytes": limits.device_bytes}
    rates = replace(rates, host_bandwidth=rates.host_bandwidth / ranks)
    return SimulatedTrials(workload, limits, rates, task.schedule, recipe.engine.written(), env)


@dataclass
class SimulatedTrials:
    """Makes trials by simulating their steps.

    Where the planner picks the schedule, a length fits if some schedule fits. For that, only the thriftiest is
    simulated: a plan takes several simulations, and it is made for the longest only, by :meth:`planned`.
    """

    workload: Workload
    limits: Limits
    rates: Rates
    schedule: Schedule | None
    """The recipe's; None where the planner picks one."""
    written: dict[str, Any]
    env: dict[str, Any]

    def __call__(self, shape: Shape, tell: Callable[[str], None]) -> Outcome:
        """Return the outcome of a simulated step of a shape."""
        step = self._step(shape)
        if shape.mode != "stream" or self.schedule is not None:
            return self._tried(step, self.schedule or Schedule())  # a baseline reads nothing of it
        schedule, found = smallest_step(step, self.limits, self.written, simulate)
        return replace(self._judged(step, found, schedule), step_seconds=None)

    def planned(self, trial: Trial, notify: Callable[[str], None] = lambda message: None) -> Trial:
        """Return the trial of the longest with the fastest schedule that fits it."""
        if self.schedule is not None or trial.shape.mode != "stream":
            return trial
        plan = choose(self._step(trial.shape), self.limits, self.rates, fixed=self.written, simulate=announced(notify))
        return replace(trial, outcome=self._judged(self._step(trial.shape), plan.simulation, plan.schedule))

    def _step(self, shape: Shape) -> Workload:
        return replace(self.workload, mode=shape.mode, length=shape.length, batch_size=shape.batch_size)

    def _tried(self, step: Workload, schedule: Schedule) -> Outcome:
        return self._judged(step, simulate(step, schedule), schedule)

    def _judged(self, step: Workload, simulation: Simulation, schedule: Schedule) -> Outcome:
        pace, ranks = Pace(step, self.rates), step.cluster.ranks_per_node
        outcome = _judged(simulation, schedule, self.limits, pace)
        alone = step.cluster.ranks == 1
        if not alone:
            outcome = replace(outcome, reason=outcome.reason.replace("the step takes", "a rank's step takes"))
        return replace(
            outcome,
            host_bytes=ranks * simulation.host_bytes,  # of the node: all of its ranks hold as much
            disk_bytes=ranks * simulation.disk_bytes,
            host_terms={name: ranks * size for name, size in simulation.host_terms.items()},
            traffic=None if alone else pace.traffic(schedule).to_json(),
            env=self.env,
        )


def _used(simulation: Simulation, limits: Limits) -> dict[Cause, tuple[int, int]]:
    """Return the bytes used in each tier, and how many there are."""
    shared = simulation.host_bytes if limits.shared else 0
    return {
        "device memory": (simulation.peak_bytes + shared, limits.device),
        "host memory": (simulation.host_bytes - shared, limits.host),
        "disk memory": (simulation.disk_bytes, limits.disk),
    }


def _judged(simulation: Simulation, schedule: Schedule, limits: Limits, pace: Pace) -> Outcome:
    """Return the outcome of a simulated step: if it does not fit, with the tier that lacks most."""
    tiers = _used(simulation, limits)
    cause = max(tiers, key=lambda name: tiers[name][0] - tiers[name][1])
    used, usable = tiers[cause]
    outcome = Outcome(
        fits=used <= usable,
        peak_bytes=simulation.peak_bytes,
        host_bytes=simulation.host_bytes,
        disk_bytes=simulation.disk_bytes,
        step_seconds=pace.seconds(simulation.work, schedule),
        terms=simulation.terms,
        schedule=schedule,
    )
    if outcome.fits:
        return outcome
    left = f" ({limits.margin:.0%} is left free)" if limits.margin else ""
    where = f" in the {simulation.phase}" if cause == "device memory" else ""
    reason = f"{cause}: the step takes {show_size(used)}{where} of {show_size(usable)}{left}"
    return replace(outcome, cause=cause, reason=reason)
