"""The rules about the loss of supervised rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from streamtune.recipe.spec import mistake

__all__ = ["FOCAL_GAMMA", "loss_mistakes"]

FOCAL_GAMMA = 2.0
"""The exponent of the focal loss where the recipe does not say."""

OF_ROWS = {"focal_gamma": FOCAL_GAMMA, "label_smoothing_factor": 0.0, "z_loss_coef": 0.0}
"""Keys of the loss of supervised rows, and their defaults."""


def loss_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys of the loss of supervised rows."""
    if recipe.preset is not None and recipe.objective != "sft":
        yield mistake(f"'preset: {recipe.preset}' is for sft", key="preset", mend="delete the line")
    given = [key for key, default in OF_ROWS.items() if getattr(recipe, key) != default]
    if recipe.objective != "sft":
        for key in given:
            yield mistake(
                f"'{key}' is of the loss of sft and has no meaning in {recipe.objective}",
                key=key,
                mend="delete the line",
            )
        return
    if "focal_gamma" in given and recipe.loss_type != "focal":
        yield mistake(
            f"'focal_gamma' is read with 'loss_type: focal', and loss_type is '{recipe.loss_type}'",
            key="focal_gamma",
            mend="write loss_type: focal, or delete the line",
        )
    if "label_smoothing_factor" in given and recipe.loss_type != "nll":
        yield mistake(
            f"'label_smoothing_factor' smooths the targets of 'loss_type: nll', and loss_type is '{recipe.loss_type}'",
            key="label_smoothing_factor",
            mend="delete one of the two",
        )
