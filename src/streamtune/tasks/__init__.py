"""The objectives: what each adds to a run, a plan, a probe and a verification, and nothing else."""

from typing import Any

from streamtune.recipe.keys.preset import ObjectiveKeys
from streamtune.tasks.dpo import Dpo
from streamtune.tasks.grpo.task import Grpo
from streamtune.tasks.sft import Sft
from streamtune.tasks.task import Task

__all__ = ["TASKS", "Task", "task_of"]

TASKS: dict[str, type[Task[Any]]] = {"sft": Sft, "dpo": Dpo, "grpo": Grpo}
"""Each ``objective`` of a recipe, and its task."""


def task_of(recipe: ObjectiveKeys) -> Task[Any]:
    """Return the task of a recipe, for questions that need neither data nor rewards."""
    return TASKS[recipe.objective](recipe)
