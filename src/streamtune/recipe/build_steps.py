"""A recipe to whole training steps on random tokens: what a trial of the probe runs, in its own process.

They are the training loop's own functions, on batches shaped like the recipe's. Gradients are accumulated over two
micro-batches where the recipe does so over several: those of the first are there during the second, and that is all
that more of them would add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from streamtune import train
from streamtune.engine import Schedule, StreamHandle
from streamtune.errors import ArgumentError
from streamtune.plan.checkpointing import use_checkpointing
from streamtune.plan.steps import BudgetExceededError, Shape, StepBudget, TrainingStep
from streamtune.recipe.build import quiet_libraries, stream_model
from streamtune.recipe.build_model import make_model_alone, make_optimizer
from streamtune.recipe.build_plan import plan_model
from streamtune.recipe.schema import Recipe
from streamtune.train.routers import StepRouters
from streamtune.train.step import accumulate_gradients, clip_gradients, update_weights

__all__ = ["OBJECTIVES", "prepare_step"]


def prepare_step(recipe: Recipe, objective: str, device_name: str, budget: StepBudget, shape: Shape) -> TrainingStep:
    """Model, optimizer and step of a trial, in its process.

    Raises:
        BudgetExceededError: The planner finds no schedule for this shape.
    """
    device = torch.device(device_name)
    quiet_libraries(device)
    model = make_model_alone(recipe, device)
    handle: StreamHandle | None = None
    if shape.mode == "stream":
        handle = stream_model(recipe, model, _planned(recipe, model, shape, budget))
    elif shape.mode == "checkpoint":
        use_checkpointing(model)
    optimizer = make_optimizer(recipe, model)
    step = OBJECTIVES[objective](recipe, model, optimizer, handle, shape)
    return TrainingStep(model, optimizer, step, handle)


def _planned(recipe: Recipe, model: Any, shape: Shape, budget: StepBudget) -> Schedule | None:
    """The schedule a run of rows like these would take; None where the recipe says it."""
    if recipe.engine.schedule == "fixed":
        return None
    sizes = {"device_memory": budget.device_bytes, "host_memory": budget.host_bytes, "disk_memory": budget.disk_bytes}
    given = {name: f"{size}B" for name, size in sizes.items() if size is not None}
    engine = recipe.engine.model_copy(update={**given, "margin": budget.margin})
    like = recipe.model_copy(update={"engine": engine, "per_device_train_batch_size": shape.batch_size})
    try:
        return plan_model(like, model, shape.length, next(model.parameters()).device).schedule
    except ArgumentError as error:
        raise BudgetExceededError("device", f"device memory: {error.what}") from error


def _sft_step(
    recipe: Recipe, model: Any, optimizer: torch.optim.Optimizer, handle: StreamHandle | None, shape: Shape
) -> Callable[[], None]:
    """One optimizer step of supervised fine-tuning, as ``train.loop`` takes it."""
    settings = train.TrainSettings(
        total_steps=1,
        steps_per_epoch=1,
        max_grad_norm=recipe.max_grad_norm,
        eval_steps=0,
        save_steps=0,
        save_total_limit=1,
        bf16=recipe.bf16,
        seed=recipe.seed,
        out_of_memory_mend="",
    )
    batches = _random_batches(recipe, model, shape)
    loss, stop = train.SupervisedObjective(handle), train.StopRequest()

    def step() -> None:
        routers = StepRouters(handle, batches)
        accumulate_gradients(
            model, loss, batches, routers, settings=settings, step=1, progress=lambda activity: None, stop=stop
        )
        clip_gradients(model, settings.max_grad_norm)
        # Nothing is to be learnt from random tokens: the update runs whole and leaves the weights as they are.
        update_weights(optimizer, 0.0, settings=settings, step=1, micro_batches=batches)

    return step


def _random_batches(recipe: Recipe, model: Any, shape: Shape) -> list[train.MicroBatch]:
    """The micro-batches of a step, every token trained on: more of them would not hold more at a time than two do.

    Where the recipe packs, a sequence is two rows of half its length, which takes the way of packed ones.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(recipe.seed)
    vocab = model.get_input_embeddings().weight.shape[0]
    rows, length = shape.batch_size, shape.length
    positions = None
    if recipe.packing and length >= 4:
        halves = [torch.arange(length - length // 2), torch.arange(length // 2)]
        positions = torch.cat(halves).expand(rows, length)
    batches = []
    for _ in range(min(recipe.gradient_accumulation_steps, 2)):
        ids = torch.randint(0, vocab, (rows, length), generator=generator)
        labels = ids.roll(-1, dims=1)
        labels[:, -1] = train.IGNORE_INDEX
        batch = train.MicroBatch(ids, torch.ones_like(ids), labels, ("random tokens",) * rows, positions)
        batches.append(batch.to(device))
    return batches


Step = Callable[[Recipe, Any, torch.optim.Optimizer, StreamHandle | None, Shape], Callable[[], None]]

OBJECTIVES: dict[str, Step] = {"sft": _sft_step}
"""Objective -> function that makes its whole training step for recipe, model, optimizer, stream and shape."""
