"""Choose the dtype of the weights that are trained, where a recipe leaves it open.

A step of a fine-tuning changes a weight by about its learning rate. bfloat16 has 8 bits: of weights near 0.02 two
numbers lie 1.2e-4 apart, and a step of 1e-5 that is rounded to the nearest number is lost. So weights of a narrow
checkpoint are trained in float32 and computed in bfloat16 (``dtype: mixed``). Where these do not fit, weights stay
bfloat16 and each step is rounded stochastically, which is right on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from streamtune import models
from streamtune.base.optimizer_table import state_bytes
from streamtune.base.text import show_size
from streamtune.errors import UserError
from streamtune.recipe.settings import TrainingSettings

Settings = TypeVar("Settings", bound=TrainingSettings)

KEYS = ("dtype", "bf16", "weight_rounding", "optim_states")
"""Keys of a recipe that are chosen here."""


def precisions(recipe: Settings) -> list[Settings]:
    """Return the recipe with each precision that it leaves open, the best first; the recipe alone where it says one.

    Raises:
        ArgumentError: The checkpoint's configuration cannot be read.
    """
    if recipe.dtype != "auto" or recipe.model_name_or_path is None:
        return [recipe]
    own = models.checkpoint_dtype(recipe.model_name_or_path, recipe.trust_remote_code)
    if own not in (torch.bfloat16, torch.float16):
        return [recipe]
    half = {"dtype": "bfloat16"} if own == torch.float16 else {}
    if recipe.finetuning_type != "full":  # adapters are float32; modules that are trained whole are not
        whole = recipe.modules_to_save or recipe.adapter_name_or_path  # which may have such modules
        rounding = {"weight_rounding": "stochastic"} if whole and _may_round(recipe) else {}
        return [_with(recipe, **half, **rounding)]
    if recipe.deepspeed is not None:  # which keeps float32 weights beside these
        return [_with(recipe, **half)]
    casts = recipe.bf16 is None and recipe.engine.fetch_dtype != "bfloat16"
    wide = _with(recipe, dtype="mixed", **({"bf16": True} if casts else {}))
    if recipe.fsdp:
        return [wide]
    narrow: dict[str, Any] = {"dtype": "bfloat16"}
    if _may_round(recipe):
        narrow["weight_rounding"] = "stochastic"
    if recipe.optim == "adamw" and recipe.optim_states == "param":  # the nearest number loses steps of moments too
        narrow["optim_states"] = "bfloat16"
    return [wide, _with(recipe, **narrow)]


def precise(recipe: Settings) -> Settings:
    """Return the recipe with the best precision that it leaves open, whatever fits; as it is where that is unknown.

    Loading the checkpoint reports what is wrong with it.
    """
    try:
        return precisions(recipe)[0]
    except UserError:
        return recipe


def has_choice(recipe: TrainingSettings) -> bool:
    """Return True if the precision of a recipe depends on what fits."""
    try:
        return len(precisions(recipe)) > 1
    except UserError:
        return False


def as_before(recipe: Settings, before: Mapping[str, Any]) -> Settings:
    """Return the recipe with the precision of the resumed run, where the recipe leaves it open.

    Args:
        before: The compared settings of that run. Without a precision it trains in the checkpoint's dtype.
    """
    fields = type(recipe).model_fields
    given = {key: before.get(key, fields[key].default) for key in KEYS}
    open_keys = [key for key in KEYS if getattr(recipe, key) == fields[key].default]
    return _with(recipe, **{key: given[key] for key in open_keys})


def choices_made(recipe: TrainingSettings, chosen: TrainingSettings) -> dict[str, Any]:
    """Return the keys of precision that differ, with the values of ``chosen``."""
    return {key: getattr(chosen, key) for key in KEYS if getattr(recipe, key) != getattr(chosen, key)}


def describe_precision(recipe: TrainingSettings, chosen: TrainingSettings, model: Any) -> str | None:
    """Return the chosen precision, its reason and its cost in one line; None if nothing was chosen.

    Args:
        recipe: The recipe as it was read.
        model: A model of the recipe, on ``meta`` or loaded: its trained weights are counted.
    """
    made = choices_made(recipe, chosen)
    if not made:
        return None
    more = show_size(_more_bytes(recipe, model))
    if chosen.dtype == "mixed":
        computed = " and computed in bfloat16" if chosen.bf16 else ""
        return (
            f"weights of fewer bits are trained in float32{computed} (dtype: mixed): {more} more than in the "
            "checkpoint's dtype, which would round small steps away"
        )
    if chosen.finetuning_type != "full" or chosen.deepspeed is not None:
        texts = []
        if "dtype" in made:
            texts.append(
                "the checkpoint is float16, whose gradients underflow without a scaled loss: it is loaded in bfloat16"
            )
        if "weight_rounding" in made and any(p.dtype != torch.float32 for p in model.parameters() if p.requires_grad):
            texts.append(
                "modules_to_save are bfloat16: each step of theirs is rounded stochastically (weight_rounding)"
            )
        return "; ".join(texts) or None
    if chosen.weight_rounding == "stochastic":
        how = "each step is rounded stochastically (weight_rounding: stochastic): right on average, with more noise"
    else:
        how = f"'optim: {chosen.optim}' rounds each step to the nearest number, which loses small ones"
    if chosen.step_kind.gradients == "block":
        how = f"'optim: {chosen.optim}' keeps the block that it trains in float32"
    return f"float32 weights do not fit, which take {more} more: weights are bfloat16, and {how}"


def loses_steps(recipe: TrainingSettings, model: Any) -> str | None:
    """Return a warning if trained weights are bfloat16 and steps are rounded to the nearest number; None if not."""
    keeps_float32 = recipe.deepspeed is not None or recipe.step_kind.gradients == "block"
    if keeps_float32 or recipe.weight_rounding == "stochastic":
        return None
    trained = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if not trained:
        return None
    dtype = str(trained[0].dtype).removeprefix("torch.")
    rounded = "" if not _may_round(recipe) else ", or write weight_rounding: stochastic"
    return (
        f"{dtype} weights are trained and each step is rounded to the nearest number: at a learning rate of "
        f"{recipe.learning_rate:g} most small steps are lost; delete 'dtype' to train float32 weights{rounded}"
    )


def _may_round(recipe: TrainingSettings) -> bool:
    return not (recipe.step_kind.gradients in ("block", "none") or recipe.fsdp or recipe.deepspeed is not None)


def _more_bytes(recipe: TrainingSettings, model: Any) -> int:
    """Return how many bytes float32 weights, gradients and states take beyond bfloat16 ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    more = sum(4 * models.count_weights(p) for p in trained)
    if recipe.optim == "adamw" and recipe.optim_states == "param":
        shapes = [tuple(p.shape) for p in trained]
        more += sum(state_bytes("adamw", shape, 4, {}) - state_bytes("adamw", shape, 2, {}) for shape in shapes)
    return more


def _with(recipe: Settings, **values: Any) -> Settings:
    return recipe.model_copy(update=values) if values else recipe
