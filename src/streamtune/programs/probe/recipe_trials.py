"""Trials of a recipe: a training step is run, or simulated.

    prepare_step            builds a whole training step on random tokens; a trial runs it in its own process
    make_simulated_trials   simulates steps on ``meta`` tensors, for this device or another

A measured step calls the functions of the training loop, with the recipe's objective and reference model. Its batches
have the shape of the recipe's batches (:meth:`streamtune.tasks.task.Task.make_random_step`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from streamtune import train
from streamtune.base.model_facts import model_device
from streamtune.base.text import show_size
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.ops.devices import device_name
from streamtune.optim import BlockAdamW
from streamtune.plan.budget import Budget, Limits
from streamtune.plan.choices import excess_bytes
from streamtune.plan.least_memory import simulate_least_memory_step
from streamtune.plan.planner import choose
from streamtune.plan.rates import Device, Rates
from streamtune.plan.simulate.memory import device_model_bytes
from streamtune.plan.simulate.scored import Completions, PlainScores, use_checkpointing
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import Workload
from streamtune.plan.traffic import StepTimeModel
from streamtune.programs.probe.probe import ProbeTask, Trial
from streamtune.programs.probe.trial import BudgetExceededError, Cause, Outcome, Shape, TrainingStep
from streamtune.recipe.keys.engine import EngineSpec
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.cluster import RequestedRanks, cluster_of, link_bandwidths
from streamtune.run.device import prepare_libraries, stream_model
from streamtune.run.model import make_model_without_data, make_reference_without_data, train_largest_block
from streamtune.run.plan import (
    LongestStep,
    announce_simulations,
    blueprint_cache,
    choose_placement,
    plan_model,
    recipe_workload,
    shares_prompts,
)
from streamtune.run.ranks import local_backend, local_optimizer, with_loss_scale
from streamtune.run.reference import wrap_reference
from streamtune.run.weight_choices import exceeds_device_at_any_length, placement_choices, with_best_precision
from streamtune.schedule import Schedule
from streamtune.tasks import Task, task_of
from streamtune.tasks.preference import PrecomputedReference
from streamtune.tasks.task import RandomStep, TrialStep
from streamtune.train.loop import compute_step_gradients
from streamtune.train.step import explain_out_of_memory


def prepare_step(recipe: TrainingSettings, device_name: str, budget: Budget, shape: Shape) -> TrainingStep:
    """Build the model, the optimizer and the training step of a trial, in the trial's process.

    Raises:
        BudgetExceededError: No streaming schedule fits the budget.
    """
    device = torch.device(device_name)
    prepare_libraries(device)
    recipe = (
        _resolve_placement(task_of(recipe), shape, budget, device)
        if shape.mode == "stream"
        else with_best_precision(recipe)
    )
    task = task_of(recipe)
    model = make_model_without_data(recipe, device)
    second_model = make_reference_without_data(recipe, device, task.reference_name) if task.has_second_model else None
    share = shape.mode == "stream" and task.can_share_prompts(model, second_model=second_model)
    handle: StreamHandle | None = None
    if shape.mode == "stream":
        schedule = _plan_schedule(
            task, model, shape, budget, share, 0 if second_model is None else device_model_bytes(second_model)
        )
        handle = stream_model(recipe, model, schedule)
    elif shape.mode == "checkpoint":
        use_checkpointing(model)
    train_largest_block(recipe, model)
    optimizer = local_optimizer(recipe, model)
    if isinstance(optimizer, BlockAdamW):
        optimizer.merge_blocks()
    trial = TrialStep(
        model=model,
        handle=handle,
        scorer=PlainScores(model) if handle is None else handle,
        reference=make_reference(task, model, handle, second_model),
        length=shape.length,
        batch_size=shape.batch_size,
        share=share,
    )
    return TrainingStep(
        model,
        optimizer,
        partial(run_optimizer_step, recipe, trial, optimizer, task.make_random_step(trial)),
        handle,
        second_model,
    )


def make_reference(
    task: Task[Any], model: Any, handle: StreamHandle | None, second_model: Any | None
) -> train.Reference | None:
    """Return the reference model of a trial's objective; None if the objective uses none.

    The reference is ``second_model`` if it is given, precomputed log-probabilities, or the model without its adapters.

    Args:
        handle: Handle of the streamed model; None if the model is not streamed.
        second_model: Separate reference model; None if there is none.
    """
    if not task.uses_reference:
        return None
    if task.precomputes_reference:
        return PrecomputedReference()
    return wrap_reference(task, model, handle, second_model)


def _resolve_placement(task: Task[Any], shape: Shape, budget: Budget, device: torch.device) -> TrainingSettings:
    """Return the recipe with the precision, and the placement of weights and optimizer, that suit this shape."""
    recipe = task.recipe

    def completions(model: Any) -> Completions | None:
        return task.make_shape_function(share=task.scores_completions and shares_prompts(task, model, device))

    spec = _with_budget(recipe.engine, budget)
    return choose_placement(recipe, shape.length, device, completions, memory_spec=spec, batch_size=shape.batch_size)


def _with_budget(engine: EngineSpec, budget: Budget) -> EngineSpec:
    sizes = {"device_memory": budget.device_bytes, "host_memory": budget.host_bytes, "disk_memory": budget.disk_bytes}
    given = {name: f"{size}B" for name, size in sizes.items() if size is not None}
    return engine.model_copy(update={**given, "margin": budget.margin})


def _plan_schedule(
    task: Task[Any], model: Any, shape: Shape, budget: Budget, share: bool, reference_bytes: int
) -> Schedule | None:
    """Return the streaming schedule that the planner chooses for this shape; None if the recipe fixes the schedule."""
    recipe = task.recipe
    if recipe.engine.schedule == "fixed":
        return None
    engine = _with_budget(recipe.engine, budget)
    like = recipe.model_copy(update={"engine": engine, "per_device_train_batch_size": shape.batch_size})
    device = model_device(model)
    completions = task.make_shape_function(share=share)
    try:
        return plan_model(like, model, LongestStep(shape.length, completions, reference_bytes), device).schedule
    except ArgumentError as error:
        raise BudgetExceededError("device", f"device memory: {error.what}") from error


def run_optimizer_step(
    recipe: TrainingSettings, trial: TrialStep, optimizer: torch.optim.Optimizer, random_step: RandomStep
) -> float:
    """Run one optimizer step as ``train.loop`` does; return the gradient norm (NaN if no gradient is computed)."""
    settings = train.TrainSettings(
        total_steps=1,
        steps_per_epoch=1,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=0,
        save_steps=0,
        save_total_limit=1,
        autocast_dtype=recipe.autocast_dtype,
        seed=recipe.seed,
        out_of_memory_fix="",
    )
    objective, make_batches = random_step
    batches = make_batches()
    backend = with_loss_scale(recipe, local_backend(recipe, trial.model, optimizer))
    context = train.StepContext(backend, objective, settings, trial.handle)
    gradients = partial(compute_step_gradients, context, batches, step=1, stop=train.StopRequest())
    if recipe.clip_norm == "lagged":
        backend.load_state({"norm_before": recipe.max_grad_norm})  # as after a first step, which takes two backwards
    backend.begin_step(0.0, gradients)
    gradients()
    norm = backend.clip_gradients(settings.max_grad_norm)
    # A learning rate of 0: the whole update runs, and random tokens change no weight.
    with explain_out_of_memory("the optimizer at step 1", batches, settings.out_of_memory_fix):
        backend.step(0.0)
    backend.close()
    return norm


# --- simulated -------------------------------------------------------------------------------------------------------


def make_simulated_trials(
    recipe: TrainingSettings,
    task: ProbeTask,
    target: Device | None,
    local_device: torch.device,
    rates: Rates,
    ranks_asked: RequestedRanks,
) -> SimulatedTrials:
    """Return a callable that runs trials by simulation.

    Args:
        task: Settings of the search, with all budgets in bytes.
        target: Device to simulate; None: the local device.
        rates: Compute rates and bandwidths of the simulated device.
        ranks_asked: Numbers of ranks and nodes from the command line.
    """
    device = torch.device("cuda") if target is not None else local_device
    model_of = blueprint_cache(device)
    model = model_of(with_best_precision(recipe))
    cluster = cluster_of(recipe, model, ranks_asked, link_bandwidths(target, local_device))
    ranks = cluster.ranks_per_node
    limits = Limits(
        device_bytes=(task.device_bytes or 0) // (ranks if device.type == "cpu" else 1),
        host_bytes=(task.host_bytes or 0) // ranks,
        disk_bytes=(task.disk_bytes or 0) // ranks,
        margin=task.margin,
        shared=device.type == "cpu",
    )
    env: dict[str, Any] = {
        "device": target.title if target is not None else device_name(local_device),
        "device_bytes": task.device_bytes,
        "rates": rates.source,
        "torch": torch.__version__,
    }
    if cluster.ranks > 1:
        env |= {"cluster": {**asdict(cluster), "describe": cluster.describe()}, "device_bytes": limits.device_bytes}
    rates = replace(rates, host_bandwidth=rates.host_bandwidth / ranks)
    tiers = [
        PlacedStep(
            recipe_workload(choice, model_of(choice), task_of(choice).min_row_tokens, device, cluster=cluster),
            choice.engine.schedule_fields(),
        )
        for choice in placement_choices(recipe, limits, cluster)
    ]
    return SimulatedTrials(tiers, limits, rates, task.schedule, env)


@dataclass(frozen=True)
class PlacedStep:
    """A training step with a placement of weights and optimizer: on the device or on the host."""

    workload: Workload
    written: dict[str, Any]
    """Schedule fields that the recipe sets."""


@dataclass
class SimulatedTrials:
    """Callable that runs trials by simulation.

    If the recipe fixes a schedule, a trial simulates this schedule. Otherwise a length fits if the schedule with the
    least memory fits. The trial then has no step time, because training would use a faster schedule. :meth:`plan_trial`
    finds the fastest schedule and its step time for the longest length. If no schedule fits on the device, placements
    of weights or optimizer on the host are tried.
    """

    tiers: list[PlacedStep]
    """Placements of weights and optimizer, in the order in which they are tried."""
    limits: Limits
    rates: Rates
    schedule: Schedule | None
    env: dict[str, Any]
    used: dict[Shape, PlacedStep] = field(default_factory=dict)
    """Placement for each shape: the first that fits, or else the placement that exceeds the limits least."""
    _too_large: dict[int, int] = field(default_factory=dict)
    """{placement index: tokens of the smallest shape that does not fit}; larger shapes skip the placement."""

    def __call__(self, shape: Shape, notify_phase: Callable[[str], None]) -> Outcome:
        step = _workload_of_shape(self.tiers[0].workload, shape)
        if shape.mode != "stream" or self.schedule is not None:
            schedule = self.schedule or Schedule()  # a baseline does not read it
            return self._make_outcome(step, simulate(step, schedule), schedule)
        tried: list[tuple[float, PlacedStep, Outcome]] = []
        for number, tier in enumerate(self.tiers):
            step = _workload_of_shape(tier.workload, shape)
            size = shape.length * shape.batch_size
            if number < len(self.tiers) - 1 and (
                size >= self._too_large.get(number, size + 1)
                or exceeds_device_at_any_length(step, tier.written, self.limits)
            ):
                continue
            with (
                suppress(ArgumentError) if tried else nullcontext()
            ):  # the recipe's fields may contradict weights on the host
                schedule, found = simulate_least_memory_step(step, self.limits, tier.written, simulate)
                excess = excess_bytes(found, self.limits)
                tried.append((excess, tier, replace(self._make_outcome(step, found, schedule), step_seconds=None)))
                if excess <= 0:
                    break
                self._too_large[number] = min(size, self._too_large.get(number, size))
        _, self.used[shape], outcome = min(tried, key=lambda each: each[0])
        return outcome

    def plan_trial(self, trial: Trial, notify: Callable[[str], None] = lambda message: None) -> Trial:
        """Return the trial with the fastest schedule that fits, and its step time."""
        if self.schedule is not None or trial.shape.mode != "stream":
            return trial
        tier = self.used[trial.shape]
        step = _workload_of_shape(tier.workload, trial.shape)
        plan = choose(step, self.limits, self.rates, fixed=tier.written, simulate=announce_simulations(notify))
        return replace(trial, outcome=self._make_outcome(step, plan.simulation, plan.schedule))

    def _make_outcome(self, step: Workload, simulation: Simulation, schedule: Schedule) -> Outcome:
        time_model, ranks = StepTimeModel(step, self.rates), step.cluster.ranks_per_node
        outcome = _judge_simulation(simulation, schedule, self.limits, time_model)
        alone = step.cluster.ranks == 1
        if not alone:
            outcome = replace(outcome, reason=outcome.reason.replace("the step needs", "a rank's step needs"))
        return replace(
            outcome,
            host_bytes=ranks * simulation.host_bytes,  # of the whole node
            disk_bytes=ranks * simulation.disk_bytes,
            host_terms={name: ranks * size for name, size in simulation.host_terms.items()},
            traffic=None if alone else time_model.traffic(schedule).to_json(),
            env=self.env,
        )


def _workload_of_shape(workload: Workload, shape: Shape) -> Workload:
    return replace(workload, mode=shape.mode, length=shape.length, batch_size=shape.batch_size)


def _tier_usage(simulation: Simulation, limits: Limits) -> dict[Cause, tuple[int, int]]:
    """Return {kind of memory: (used bytes, usable bytes)} of a step, for device, host and disk."""
    shared = simulation.host_bytes if limits.shared else 0
    return {
        "device memory": (simulation.peak_bytes + shared, limits.device_limit),
        "host memory": (simulation.host_bytes - shared, limits.host_limit),
        "disk memory": (simulation.disk_bytes, limits.disk_limit),
    }


def _judge_simulation(simulation: Simulation, schedule: Schedule, limits: Limits, time_model: StepTimeModel) -> Outcome:
    """Return the outcome of a simulated step; if it does not fit, ``cause`` is the memory that lacks the most bytes."""
    tiers = _tier_usage(simulation, limits)
    cause = max(tiers, key=lambda name: tiers[name][0] - tiers[name][1])
    used, usable = tiers[cause]
    outcome = Outcome(
        fits=used <= usable,
        peak_bytes=simulation.peak_bytes,
        host_bytes=simulation.host_bytes,
        disk_bytes=simulation.disk_bytes,
        step_seconds=time_model.seconds(simulation.work, schedule),
        terms=simulation.terms,
        schedule=schedule,
    )
    if outcome.fits:
        return outcome
    left = f" ({limits.margin:.0%} is left free)" if limits.margin else ""
    where = f" in the {simulation.phase}" if cause == "device memory" else ""
    reason = f"{cause}: the step needs {show_size(used)}{where}, {show_size(usable)} are usable{left}"
    return replace(outcome, cause=cause, reason=reason)
