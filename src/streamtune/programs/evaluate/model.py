"""Load the trained model and the reference model of an evaluation, and plan the evaluation's schedule.

All weights are frozen. A model without adapters is not quantised, even if the recipe uses QLoRA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamtune import models, train
from streamtune.base.adapters import base_of
from streamtune.data.templates import image_text
from streamtune.engine import StreamHandle, decoder_layers
from streamtune.errors import ArgumentError
from streamtune.plan.simulate.scored import Completions
from streamtune.programs.export.source import Notify, TrainedModel, load_trained, load_trained_tokenizer
from streamtune.recipe.keys.model_and_tokenizer import ModelKeys
from streamtune.recipe.settings import ModelSettings, TrainingSettings
from streamtune.run.model import choose_quantization, make_reference_model
from streamtune.run.plan import LongestStep, plan_model
from streamtune.run.reference import load_reference, wrap_reference
from streamtune.schedule import Schedule
from streamtune.tasks import Task


@dataclass(frozen=True)
class EvaluatedModel:
    """A trained model on its device, with all weights frozen."""

    model: Any
    adapters: bool
    """True if the model has adapters; with its adapters disabled, it is the model before training."""


def load_evaluated_tokenizer(trained: TrainedModel, recipe: ModelKeys, *, notify: Notify = lambda text: None) -> Any:
    """Load the tokenizer of a trained model; if it has no chat template, set the recipe's.

    ``notify`` is called with a note if the recipe has another chat template than the tokenizer.
    """
    tokenizer = load_trained_tokenizer(
        trained, recipe.model_name_or_path if trained.base is None else None, recipe.trust_remote_code
    )
    if recipe.chat_template is None:
        return tokenizer
    own = tokenizer.chat_template
    with suppress(ArgumentError) if own else nullcontext():  # a file that the model's tokenizer makes unnecessary
        models.set_chat_template(tokenizer, recipe.chat_template, image_text(tokenizer))
        if tokenizer.chat_template == own:
            return tokenizer
    if own:
        tokenizer.chat_template = own
        notify("'chat_template' has no effect: the model's tokenizer has another chat template, which is used")
    return tokenizer


def load_evaluated(
    trained: TrainedModel,
    recipe: ModelSettings,
    tokenizer: Any,
    device: torch.device,
    *,
    notify: Notify = lambda text: None,
) -> EvaluatedModel:
    """Load a trained model to score the rows of a recipe.

    Args:
        trained: Model from :func:`streamtune.programs.export.source.find_trained`.
        recipe: Recipe that sets the dtype, and the base model of adapters that do not record their base model.
        notify: Called with a note if the adapters' base model is not the recipe's model.

    Raises:
        ArgumentError: The model cannot be loaded, or its base model is missing.
    """
    own = trained.loaded is not None and trained.settings.get("dtype") == recipe.dtype
    dtype = None if own or recipe.dtype in ("auto", "mixed") else recipe.dtype
    base, unknown = _choose_base_override(trained, recipe, notify)
    if unknown:
        made = make_reference_model(
            recipe, tokenizer, device, change=models.SavedLoftqQuantizer.load(Path(trained.folder))
        )
        models.add_saved_eos_tokens(made, Path(trained.folder))
        model = models.load_peft_adapters(made, Path(trained.folder)).requires_grad_(False).eval()
        return EvaluatedModel(model, adapters=True)
    quantization = trained.quantization
    if trained.adapters and not trained.identity:
        quantization = choose_quantization(recipe, device)
    model, _ = load_trained(
        trained,
        device=str(device),
        base=base,
        dtype=dtype,
        quantization=quantization,
        trust_remote_code=recipe.trust_remote_code,
        notify=notify,
    )
    if recipe.finetuning_type == "qlora" and not trained.adapters:
        notify("this model has no adapters: it is evaluated without the quantisation that the recipe sets")
    return EvaluatedModel(model, trained.adapters)


def _choose_base_override(trained: TrainedModel, recipe: ModelKeys, notify: Notify) -> tuple[str | None, bool]:
    """Return the base model to load, and True if that model has to be built from the recipe's configuration.

    The base model is None if the base model that the adapters record is used.
    """
    if not trained.adapters:
        return None, False
    named, recipe_base = trained.base, recipe.model_name_or_path
    if named is None:
        made = trained.settings.get("model")
        if made is None:
            notify(f"the adapters in {trained.folder} do not record their base model: the recipe's model is used")
            return recipe_base, recipe_base is None
        if recipe_base is not None or recipe.model is None or recipe.model.init != made.get("init"):
            notify(
                "the recipe names a different model: the adapters are evaluated on the base model they were trained on"
            )
        return None, False
    if recipe_base is not None and _is_same_model(named, recipe_base):
        return None, False
    if recipe_base is not None and Path(named).is_absolute() and not models.is_local_folder(named):
        notify(f"the adapters' base model {named} does not exist here: the recipe's model, {recipe_base}, is used")
        return recipe_base, False
    of_recipe = recipe_base if recipe_base is not None else "built from a configuration"
    notify(
        f"the adapters are evaluated on their own base model, {named}; the recipe names a different model: {of_recipe}"
    )
    return None, False


def _is_same_model(first: str, second: str) -> bool:
    if models.is_local_folder(first) and models.is_local_folder(second):
        return Path(first).expanduser().resolve() == Path(second).expanduser().resolve()
    return first == second


# --- references -----------------------------------------------------------------------------------------------------


def load_second_model(task: Task[Any], evaluated: EvaluatedModel, tokenizer: Any, device: torch.device) -> Any | None:
    """Load the reference model: the model that the recipe names as reference, otherwise the model before training.

    Return None if the objective needs no reference, or if the reference is the trained model without its adapters.

    Raises:
        ArgumentError: The reference model does not exist, or its vocabulary differs.
    """
    if not task.uses_reference or not task.scores_completions or (evaluated.adapters and task.reference_name is None):
        return None
    second_model = load_reference(task, evaluated.model, tokenizer, device)
    if second_model is None:  # the recipe trains adapters, but this model has none: it may be merged
        second_model = make_reference_model(task.recipe, tokenizer, device).requires_grad_(False).eval()
    return second_model


def make_eval_reference(
    task: Task[Any], model: Any, handle: StreamHandle, second_model: Any | None
) -> train.ModelReference | None:
    """Return the reference model of the objective; None if the objective needs none."""
    if not task.uses_reference or not task.scores_completions:  # the teacher of sft is not used by evaluations
        return None
    return wrap_reference(task, model, handle, second_model)


# --- schedule -------------------------------------------------------------------------------------------------------


def plan_evaluation(
    recipe: TrainingSettings,
    model: Any,
    length: int,
    device: torch.device,
    *,
    completions: Completions | None = None,
    reference_bytes: int = 0,
) -> Schedule | None:
    """Return the fastest schedule that fits in memory for rows of ``length`` tokens; None if the recipe sets one.

    The planner simulates a training step in which one small weight is trained. Memory is overestimated, because a
    training step stores layer inputs and an evaluation does not.

    Raises:
        ArgumentError: No schedule fits.
    """
    if recipe.engine.schedule != "auto":
        return None
    with _make_one_weight_trainable(model):
        found = plan_model(recipe, model, LongestStep(length, completions, reference_bytes), device)
    return found.schedule


@contextmanager
def _make_one_weight_trainable(model: Any) -> Iterator[None]:
    """Context manager: make the first layer's smallest weight trainable, as the planner simulates training."""
    layer = decoder_layers(base_of(model))[0]
    weights = [each for each in layer.parameters() if each.is_floating_point()]
    smallest = min(weights, key=lambda each: each.numel())
    smallest.requires_grad_(True)
    try:
        yield
    finally:
        smallest.requires_grad_(False)
