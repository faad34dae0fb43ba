"""Test if completions share their prompts, by the recipe and by the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamtune.engine import check_branches, stream
from streamtune.errors import UnsupportedModelError
from streamtune.tasks.task import Task

__all__ = ["can_share"]


def can_share(task: Task[Any], model: Any, notify: Callable[[str], None] = lambda message: None) -> bool:
    """Return True if the recipe allows completions to share their prompts, and a test shows that the model can.

    Args:
        task: The task.
        model: On its device, not streamed; left as it is.
        notify: Called with the reason if it cannot.

    Raises:
        UnsupportedModelError: They cannot, and the recipe asks for it.
    """
    if not task.may_share:
        return False
    with stream(model) as handle:
        try:
            check_branches(handle)
        except UnsupportedModelError as error:
            if getattr(task.recipe, "share_prefix", None) == "always":
                error.where = "share_prefix"
                raise
            notify(f"each completion has its own copy of the prompt: {error.what}")
            return False
    return True
