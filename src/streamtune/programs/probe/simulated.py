"""Simulate the trials of the probe: the step runs on ``meta`` tensors, for a device that may be elsewhere.

With a fixed schedule a trial simulates it. Where the planner picks one, a trial tests if anything fits, by the schedule
of least memory. That schedule is not the one a run would use, so such a trial has no seconds: the longest gets those of
its plan, the same that ``streamtune plan`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from streamtune.base.text import show_size
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits, device_name
from streamtune.plan.planner import choose
from streamtune.plan.rates import Device, Rates
from streamtune.plan.refusal import excess_of, smallest_step
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.plan.traffic import Pace
from streamtune.programs.probe.probe import ProbeTask, Trial
from streamtune.programs.probe.trial import Cause, Outcome, Shape
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.cluster import RanksAsked, cluster_of, links_for
from streamtune.run.plan import announced, blueprints, recipe_workload
from streamtune.run.precision import precise
from streamtune.run.tiers import is_hopeless, placements
from streamtune.schedule import Schedule
from streamtune.tasks import task_of


def simulated(
    recipe: TrainingSettings,
    task: ProbeTask,
    target: Device | None,
    here: torch.device,
    rates: Rates,
    asked: RanksAsked,
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
    model_of = blueprints(device)
    model = model_of(precise(recipe))
    cluster = cluster_of(recipe, model, asked, links_for(target, here))
    ranks = cluster.ranks_per_node
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
    tiers = [
        PlacedStep(
            recipe_workload(choice, model_of(choice), task_of(choice).shortest, device, cluster=cluster),
            choice.engine.written(),
        )
        for choice in placements(recipe, limits, cluster)
    ]
    return SimulatedTrials(tiers, limits, rates, task.schedule, env)


@dataclass(frozen=True)
class PlacedStep:
    """A step with its weights and optimizer in one memory.

    Attributes:
        workload: The step, at any length.
        written: The fields of its schedule that are given.
    """

    workload: Workload
    written: dict[str, Any]


@dataclass
class SimulatedTrials:
    """Makes trials by simulating their steps.

    Where the planner picks the schedule, a length fits if some schedule fits. For that, only the thriftiest is
    simulated: a plan takes several simulations, and it is made for the longest only, by :meth:`planned`. Where weights
    and optimizer may wait on the host, a step that does not fit otherwise is tried so too.
    """

    tiers: list[PlacedStep]
    """The places of weights and optimizer, in the order in which they are tried."""
    limits: Limits
    rates: Rates
    schedule: Schedule | None
    """The recipe's; None where the planner picks one."""
    env: dict[str, Any]
    used: dict[Shape, PlacedStep] = field(default_factory=dict)
    """The place that the outcome of each shape is of: the first that it fits in, or the one that it exceeds least."""
    _too_large: dict[int, int] = field(default_factory=dict)
    """Tokens of the smallest shape that did not fit in a place, by its number; larger ones are not tried there."""

    def __call__(self, shape: Shape, tell: Callable[[str], None]) -> Outcome:
        """Return the outcome of a simulated step of a shape."""
        step = _shaped(self.tiers[0].workload, shape)
        if shape.mode != "stream" or self.schedule is not None:
            return self._tried(step, self.schedule or Schedule())  # a baseline reads nothing of it
        tried: list[tuple[float, PlacedStep, Outcome]] = []
        for number, tier in enumerate(self.tiers):
            step = _shaped(tier.workload, shape)
            size = shape.length * shape.batch_size
            if number < len(self.tiers) - 1 and (
                size >= self._too_large.get(number, size + 1) or is_hopeless(step, tier.written, self.limits)
            ):
                continue
            with suppress(ArgumentError) if tried else nullcontext():  # what is written contradicts weights on the host
                schedule, found = smallest_step(step, self.limits, tier.written, simulate)
                excess = excess_of(found, self.limits)
                tried.append((excess, tier, replace(self._judged(step, found, schedule), step_seconds=None)))
                if excess <= 0:
                    break
                self._too_large[number] = min(size, self._too_large.get(number, size))
        _, self.used[shape], outcome = min(tried, key=lambda each: each[0])
        return outcome

    def planned(self, trial: Trial, notify: Callable[[str], None] = lambda message: None) -> Trial:
        """Return the trial of the longest with the fastest schedule that fits it."""
        if self.schedule is not None or trial.shape.mode != "stream":
            return trial
        tier = self.used[trial.shape]
        step = _shaped(tier.workload, trial.shape)
        plan = choose(step, self.limits, self.rates, fixed=tier.written, simulate=announced(notify))
        return replace(trial, outcome=self._judged(step, plan.simulation, plan.schedule))

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


def _shaped(workload: Workload, shape: Shape) -> Workload:
    return replace(workload, mode=shape.mode, length=shape.length, batch_size=shape.batch_size)


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
