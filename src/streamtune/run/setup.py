"""Resolve a recipe for the device and the ranks at hand, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from streamtune import train
from streamtune.distributed import agree
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.run.device import choose_device, quiet_libraries
from streamtune.run.model import choose_quantization
from streamtune.run.ranks import device_of_rank, make_world, shares_weights
from streamtune.tasks import TASKS, Task
from streamtune.tasks.steps import accumulation
from streamtune.tasks.task import Notify

__all__ = ["Setup", "resolve"]


@dataclass(frozen=True)
class Setup:
    """A recipe with everything that follows from it on the device and the ranks at hand."""

    loaded: LoadedRecipe
    task: Task[Any]
    device: torch.device
    """The device of this rank."""
    world: train.World
    """The ranks that train together."""
    quantization: str | None
    """``nf4`` or ``int8``: of the frozen linear layers."""
    shares_weights: bool
    """True if each rank holds a part of the weights."""
    micro_batches: int
    """Micro-batches of a rank in an optimizer step."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe

    @property
    def sharing(self) -> train.World | None:
        """The ranks that share the weights; None where each has all of them."""
        return self.world if self.shares_weights else None

    @property
    def rows_per_step(self) -> int:
        """Rows, or what the task's unit says, of an optimizer step on all ranks together."""
        return self.recipe.per_device_train_batch_size * self.micro_batches * self.world.data_size


def resolve(loaded: LoadedRecipe, notify: Notify) -> Setup:
    """Check the settings of the objective, choose the device, and join the ranks.

    Args:
        loaded: The recipe.
        notify: See :data:`streamtune.tasks.task.Notify`.

    Raises:
        ArgumentError: A setting that the objective does not accept, a device that is not there, a quantisation that is
            not installed, or ranks that cannot be laid out as the recipe asks.
        DistributedError: The ranks have other versions or another recipe, or do not reach each other.
    """
    recipe = loaded.recipe
    task = TASKS[recipe.objective].of_run(recipe, loaded.path.parent, notify)
    device = device_of_rank(choose_device(recipe.device))
    if recipe.deterministic:
        train.use_deterministic_kernels()
    quantization = choose_quantization(recipe, device)
    quiet_libraries(device)
    agree(_facts(recipe))
    shares = shares_weights(recipe)
    world = make_world(recipe, device, shares_weights=shares)
    return Setup(loaded, task, device, world, quantization, shares, accumulation(recipe, world))


def _facts(recipe: Recipe) -> dict[str, str]:
    """Return the settings of a recipe that must be the same on all ranks: all but the places of files."""
    settings = recipe.model_dump(mode="json", exclude={"output_dir", "datasets"})
    return {f"recipe {name}": json.dumps(value) for name, value in settings.items()}
