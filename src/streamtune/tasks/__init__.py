"""The kinds of training: supervised fine-tuning (``sft``), preferences (``dpo``), reinforcement learning (``grpo``)."""

from typing import Any

from streamtune.recipe.keys.preset import ObjectiveKeys
from streamtune.tasks.dpo import Dpo
from streamtune.tasks.grpo.task import Grpo
from streamtune.tasks.sft import Sft
from streamtune.tasks.task import Task

__all__ = ["TASKS", "Task", "task_of"]

TASKS: dict[str, type[Task[Any]]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo}
"""Value of the recipe key ``objective`` -> class of the task."""


def task_of(recipe: ObjectiveKeys) -> Task[Any]:
    """Return the task for the recipe key ``objective``, without checking settings or loading reward functions."""
    return TASKS[recipe.objective](recipe)
