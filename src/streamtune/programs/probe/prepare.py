"""Make whole training steps of a recipe on random tokens: a trial of the probe runs them, in its own process.

They are the training loop's own functions with the recipe's own objective and reference, on batches shaped like the
recipe's (:meth:`streamtune.tasks.task.Task.random_step`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from streamtune import train
from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.optim import BlockAdamW
from streamtune.plan.budget import Budget
from streamtune.plan.simulate.memory import device_held_bytes
from streamtune.plan.simulate.scored import Completions, PlainScores, use_checkpointing
from streamtune.programs.probe.trial import BudgetExceededError, Shape, TrainingStep
from streamtune.recipe.keys.engine import EngineSpec
from streamtune.recipe.settings import TrainingSettings
from streamtune.run.device import prepare_libraries, stream_model
from streamtune.run.model import make_model_alone, make_reference_alone, train_largest
from streamtune.run.plan import LongestStep, place_recipe, plan_model, shares_prompts
from streamtune.run.precision import precise
from streamtune.run.ranks import local_backend, local_optimizer
from streamtune.run.reference import streamed
from streamtune.schedule import Schedule
from streamtune.tasks import Task, task_of
from streamtune.tasks.preference import GivenReference
from streamtune.tasks.task import RandomStep, TrialStep
from streamtune.train.loop import take_gradients
from streamtune.train.step import explain_out_of_memory


def prepare_step(recipe: TrainingSettings, device_name: str, budget: Budget, shape: Shape) -> TrainingStep:
    """Make the model, the optimizer and the step of a trial, in its process.

    Raises:
        BudgetExceededError: The planner finds no schedule for this shape.
    """
    device = torch.device(device_name)
    prepare_libraries(device)
    recipe = _placed(task_of(recipe), shape, budget, device) if shape.mode == "stream" else precise(recipe)
    task = task_of(recipe)
    model = make_model_alone(recipe, device)
    held = make_reference_alone(recipe, device, task.reference_name) if task.holds_reference else None
    share = shape.mode == "stream" and task.can_share(model, beside=held)
    handle: StreamHandle | None = None
    if shape.mode == "stream":
        schedule = _planned(task, model, shape, budget, share, 0 if held is None else device_held_bytes(held))
        handle = stream_model(recipe, model, schedule)
    elif shape.mode == "checkpoint":
        use_checkpointing(model)
    train_largest(recipe, model)
    optimizer = local_optimizer(recipe, model)
    if isinstance(optimizer, BlockAdamW):
        optimizer.train_together()
    trial = TrialStep(
        model=model,
        handle=handle,
        scorer=PlainScores(model) if handle is None else handle,
        reference=make_reference(task, model, handle, held),
        length=shape.length,
        batch_size=shape.batch_size,
        share=share,
    )
    return TrainingStep(
        model, optimizer, partial(take_step, recipe, trial, optimizer, task.random_step(trial)), handle, held
    )


def make_reference(
    task: Task[Any], model: Any, handle: StreamHandle | None, held: Any | None
) -> train.Reference | None:
    """Return the reference: the model without its adapters, the second model, or given log-probs; None without one.

    Args:
        task: The task.
        model: The trained model.
        handle: Its engine; None where it is not streamed.
        held: The second model, if there is one.
    """
    if not task.compares:
        return None
    if task.precomputes:
        return GivenReference()
    if handle is None:
        plain: Any = PlainScores(model if held is None else held)
        return train.ModelReference(model if held is None else held, plain, temperature=task.temperature)
    if held is None:
        return train.ModelReference(model, handle, temperature=task.temperature)
    return streamed(held, handle, temperature=task.temperature)


def _placed(task: Task[Any], shape: Shape, budget: Budget, device: torch.device) -> TrainingSettings:
    """Return the recipe as a run of batches like these has it: precision, and weights or optimizer on the host."""
    recipe = task.recipe

    def completions(model: Any) -> Completions | None:
        return task.completions(share=task.scores and shares_prompts(task, model, device))

    sizes = _sized(recipe.engine, budget)
    return place_recipe(recipe, shape.length, device, completions, sizes=sizes, rows=shape.batch_size)


def _sized(engine: EngineSpec, budget: Budget) -> EngineSpec:
    """Return the engine of a recipe with the memory of a budget."""
    sizes = {"device_memory": budget.device_bytes, "host_memory": budget.host_bytes, "disk_memory": budget.disk_bytes}
    given = {name: f"{size}B" for name, size in sizes.items() if size is not None}
    return engine.model_copy(update={**given, "margin": budget.margin})


def _planned(
    task: Task[Any], model: Any, shape: Shape, budget: Budget, share: bool, reference_bytes: int
) -> Schedule | None:
    """Return the planner's schedule for a run of batches like these; None if the recipe fixes the schedule."""
    recipe = task.recipe
    if recipe.engine.schedule == "fixed":
        return None
    engine = _sized(recipe.engine, budget)
    like = recipe.model_copy(update={"engine": engine, "per_device_train_batch_size": shape.batch_size})
    device = model_device(model)
    completions = task.completions(share=share)
    try:
        return plan_model(like, model, LongestStep(shape.length, completions, reference_bytes), device).schedule
    except ArgumentError as error:
        raise BudgetExceededError("device", f"device memory: {error.what}") from error


def take_step(
    recipe: TrainingSettings, trial: TrialStep, optimizer: torch.optim.Optimizer, random_step: RandomStep
) -> float:
    """Run one optimizer step, as ``train.loop`` does; return the norm of the gradient, nan for one of losses alone."""
    settings = train.TrainSettings(
        total_steps=1,
        steps_per_epoch=1,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=0,
        save_steps=0,
        save_total_limit=1,
        bf16=bool(recipe.bf16),
        seed=recipe.seed,
        out_of_memory_mend="",
    )
    objective, make_batches = random_step
    batches = make_batches()
    backend = local_backend(recipe, trial.model, optimizer)
    context = train.StepContext(backend, objective, settings, trial.handle)
    gradients = partial(take_gradients, context, batches, step=1, stop=train.StopRequest())
    if recipe.clip_norm == "lagged":
        backend.load_state({"norm_before": recipe.max_grad_norm})  # as after a first step, which takes two backwards
    backend.begin_step(0.0, gradients)
    gradients()
    norm = backend.clip_gradients(settings.max_grad_norm)
    # Nothing is to be learnt from random tokens: the update runs whole and leaves the weights as they are.
    with explain_out_of_memory("the optimizer at step 1", batches, settings.out_of_memory_mend):
        backend.step(0.0)
    backend.close()
    return norm
