"""Models and schedule of an evaluation: the trained model, the reference, and the engine's schedule.

The model is loaded as in training (:mod:`streamtune.programs.export.source`), without trainable weights. A whole model
is never quantised here, even for a QLoRA recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamtune import models, train
from streamtune.base.adapters import base_of
from streamtune.engine import StreamHandle, decoder_layers
from streamtune.plan.simulate.scored import Completions
from streamtune.programs.export.source import Notify, TrainedModel, load_trained, load_trained_tokenizer
from streamtune.recipe.keys.model_and_tokenizer import ModelKeys
from streamtune.recipe.settings import ModelSettings, TrainingSettings
from streamtune.run.model import choose_quantization, make_reference_model
from streamtune.run.plan import LongestStep, plan_model
from streamtune.run.reference import load_reference, reference_model
from streamtune.schedule import Schedule
from streamtune.tasks import Task


@dataclass(frozen=True)
class EvaluatedModel:
    """A trained model, frozen, on its device."""

    model: Any
    adapters: bool
    """True for adapters on a base: without them it is the model before training"""


def load_evaluated_tokenizer(trained: TrainedModel, recipe: ModelKeys) -> Any:
    """Load the tokenizer of a trained model, with the recipe's chat template if it lacks one."""
    tokenizer = load_trained_tokenizer(
        trained, recipe.model_name_or_path if trained.base is None else None, recipe.trust_remote_code
    )
    if recipe.chat_template is not None and not tokenizer.chat_template:
        models.set_chat_template(tokenizer, recipe.chat_template)
    return tokenizer


def load_evaluated(
    trained: TrainedModel,
    recipe: ModelSettings,
    tokenizer: Any,
    device: torch.device,
    *,
    notify: Notify = lambda text: None,
) -> EvaluatedModel:
    """Load a trained model for the rows of a recipe.

    Args:
        trained: Model from :func:`streamtune.programs.export.source.find_trained`.
        recipe: Recipe with the dtype, and the base of adapters that name none.
        tokenizer: Tokenizer from :func:`load_evaluated_tokenizer`.
        device: Device of the weights.
        notify: Callback, called if the adapters' base is not the recipe's model.

    Raises:
        ArgumentError: The model cannot be loaded, or its base is missing.
    """
    own = trained.loaded is not None and trained.settings.get("dtype") == recipe.dtype
    dtype = None if own or recipe.dtype in ("auto", "mixed") else recipe.dtype
    base, unknown = _base(trained, recipe, notify)
    if unknown:
        made = make_reference_model(recipe, tokenizer, device, change=models.QuantisedBefore.load(Path(trained.folder)))
        models.use_saved_ends(made, Path(trained.folder))
        model = models.load_lora(made, Path(trained.folder)).requires_grad_(False).eval()
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
        notify("this is a whole model: it is evaluated as it is, without the quantisation that the recipe trains on")
    return EvaluatedModel(model, trained.adapters)


def _base(trained: TrainedModel, recipe: ModelKeys, notify: Notify) -> tuple[str | None, bool]:
    """Return the base that overrides the adapters' own (None: no override), and True if the recipe must make it."""
    if not trained.adapters:
        return None, False
    named, asked = trained.base, recipe.model_name_or_path
    if named is None:
        made = trained.settings.get("model")
        if made is None:
            notify(f"nothing says which model the adapters in {trained.folder} belong to: they go on the recipe's")
            return asked, asked is None
        if asked is not None or recipe.model is None or recipe.model.init != made.get("init"):
            notify("the recipe's model is another one: the adapters are evaluated on the base they were trained on")
        return None, False
    if asked is not None and _same(named, asked):
        return None, False
    if asked is not None and Path(named).is_absolute() and not models.is_folder(named):
        notify(f"the adapters were trained on {named}, which is not here: they are put on the recipe's model, {asked}")
        return asked, False
    mine = asked if asked is not None else "made from a configuration"
    notify(f"the adapters were trained on {named}, and evaluated on it; the recipe's model is another one: {mine}")
    return None, False


def _same(one: str, other: str) -> bool:
    if models.is_folder(one) and models.is_folder(other):
        return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
    return one == other


# --- references -----------------------------------------------------------------------------------------------------


def load_held_reference(task: Task[Any], found: EvaluatedModel, tokenizer: Any, device: torch.device) -> Any | None:
    """Load the reference as a second model; None without a reference, or if it is the model without its adapters.

    The reference is the model that the task names, else the model before training.

    Raises:
        ArgumentError: There is no such model, or its vocabulary differs.
    """
    if not task.compares or not task.scores or (found.adapters and task.reference_name is None):
        return None
    held = load_reference(task, found.model, tokenizer, device)
    if held is None:  # a recipe of adapters, and a whole model, such as a merged model
        held = make_reference_model(task.recipe, tokenizer, device).requires_grad_(False).eval()
    return held


def make_scored_reference(
    task: Task[Any], model: Any, handle: StreamHandle, held: Any | None
) -> train.ModelReference | None:
    """Return the reference in the form that objectives call; None if the loss has none."""
    if not task.compares or not task.scores:  # of sft it is a teacher, which evaluations do not ask
        return None
    return reference_model(task, model, handle, held)


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
    """Return the planner's schedule for rows of ``length`` tokens; None if the recipe fixes the schedule.

    The plan is for a training step of one small weight, without gradients and optimizer state of the others. It counts
    layer inputs, which an evaluation does not hold, so it overestimates the memory.

    Raises:
        ArgumentError: Nothing fits.
    """
    if recipe.engine.schedule != "auto":
        return None
    with _one_trainable(model):
        found = plan_model(recipe, model, LongestStep(length, completions, reference_bytes), device)
    return found.schedule


@contextmanager
def _one_trainable(model: Any) -> Iterator[None]:
    """Make the smallest weight of the first layer trainable while inside: a step needs one."""
    layer = decoder_layers(base_of(model))[0]
    weights = [each for each in layer.parameters() if each.is_floating_point()]
    smallest = min(weights, key=lambda each: each.numel())
    smallest.requires_grad_(True)
    try:
        yield
    finally:
        smallest.requires_grad_(False)
