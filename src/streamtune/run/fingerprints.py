"""A recipe to fingerprints of what a run reads again each time it is started, beside its data.

    base        model_name_or_path: configuration and weights of a folder, the commit of a model on a hub
    adapter     the base that adapters in that folder name
    reference   ref_model_name_or_path
    rewards     the source of the user's own reward functions

A model that is made from ``model.init`` is decided by that key and ``seed``, and what ``tokenizer.train`` makes by the
data: these are compared as such. A run goes on with the tokenizer of its checkpoint, so a change there is only noted.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from streamtune import models, rewards
from streamtune.recipe.schema import Recipe
from streamtune.tasks import Task

__all__ = ["fingerprint_inputs", "fingerprint_tokenizer_files", "reads_base"]


def fingerprint_inputs(task: Task[Any], folder: Path, *, resumed: bool, hubs: bool) -> dict[str, str]:
    """Return the fingerprints by the keys of :data:`streamtune.train.FILES`, without those of what is not read.

    Args:
        task: The task.
        folder: Where it is.
        resumed: True if the run goes on from a checkpoint.
        hubs: Ask for the commits of models on a hub: once they are loaded, the answer is at hand.

    Raises:
        ArgumentError: A file cannot be read.
    """
    found: dict[str, str | None] = {}
    recipe = task.recipe
    name, reference = recipe.model_name_or_path, task.reference_name
    if name is not None and reads_base(task, resumed=resumed) and _is_at_hand(name, hubs):
        found["base"] = models.fingerprint_model(name, code=recipe.trust_remote_code)
        if (base := models.adapter_base(name)) is not None:
            found["adapter"] = models.fingerprint_model(base, code=recipe.trust_remote_code)
    if reference is not None and _is_at_hand(reference, hubs):
        found["reference"] = models.fingerprint_model(reference, code=recipe.trust_remote_code)
    if sources := rewards.reward_sources(list(task.reward_funcs), folder):
        found["rewards"] = models.fingerprint_files(sources.items())
    return {key: value for key, value in found.items() if value is not None}


def fingerprint_tokenizer_files(recipe: Recipe) -> str | None:
    """Return the fingerprint of the tokenizer's files in a folder, and of a chat template in a file; None without."""
    name = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path
    parts = [models.fingerprint_tokenizer(name)] if name is not None else []
    template = recipe.chat_template
    if template is not None and "{" not in template:
        with suppress(OSError, RuntimeError):  # no name of a file, which reading it says
            if (path := Path(template).expanduser()).is_file():
                parts.append(models.fingerprint_files([("chat_template", path)]))
    return " ".join(part for part in parts if part is not None) or None


def reads_base(task: Task[Any], *, resumed: bool) -> bool:
    """Return True if a start reads the base: under adapters, as the reference, or because nothing is trained yet."""
    if not resumed or task.recipe.finetuning_type != "full":
        return True
    return task.reference_name is None and task.compares


def _is_at_hand(name: str, hubs: bool) -> bool:
    return hubs or models.is_folder(name)
