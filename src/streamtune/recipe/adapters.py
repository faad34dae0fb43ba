"""Keys of a recipe that describe adapters: which kinds read them, and what excludes what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from streamtune.base.adapters import ADAPTERS
from streamtune.recipe.sharing import WholeWeights
from streamtune.recipe.spec import mistake

OF_ALL = ("lora_target", "lora_exclude", "modules_to_save", "adapter_name_or_path")
OF_KINDS = tuple(dict.fromkeys(key for kind in ADAPTERS.values() for key in kind.reads))
ADAPTER_KEYS = ("adapter_type", *OF_KINDS, *OF_ALL)
"""Keys that have no effect where all weights are trained."""
UNQUANTISED = tuple(name for name, kind in ADAPTERS.items() if not kind.on_quantised)


def unread_adapter_keys(recipe: Any) -> dict[str, str]:
    """Return the keys that are given and have no effect in this recipe, with the setting that says so."""
    given = [key for key in ADAPTER_KEYS if key in recipe.model_fields_set]
    if recipe.finetuning_type == "full":
        return dict.fromkeys(given, "finetuning_type: full")
    unread = [key for key in given if key in OF_KINDS and key not in ADAPTERS[recipe.adapter_type].reads]
    return dict.fromkeys(unread, f"adapter_type: {recipe.adapter_type}")


def adapter_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield what is wrong with the keys of adapters."""
    if recipe.finetuning_type == "full":
        return
    kind = ADAPTERS[recipe.adapter_type]
    if recipe.finetuning_type == "qlora" and not kind.on_quantised:
        yield mistake(
            f"'adapter_type: {recipe.adapter_type}' computes with the weights themselves, and "
            "'finetuning_type: qlora' keeps them in 4 or 8 bits",
            key="adapter_type",
            mend="write finetuning_type: lora, or one of: "
            + ", ".join(f"adapter_type: {name}" for name in ADAPTERS if name not in UNQUANTISED),
        )
    if recipe.finetuning_type == "lora" and kind.start == "quantisation":
        yield mistake(
            f"'adapter_type: {recipe.adapter_type}' starts from what quantisation takes from the weights, and "
            "'finetuning_type: lora' keeps them whole",
            key="adapter_type",
            mend="write finetuning_type: qlora, or adapter_type: pissa, which starts from the weights themselves",
        )
    if kind.start == "gradient":
        yield from _without_gradients(recipe)
    if recipe.adapter_name_or_path is not None:
        decided = [key for key in ADAPTER_KEYS if key in recipe.model_fields_set and key != "adapter_name_or_path"]
        for key in decided:
            yield mistake(
                f"'{key}' is decided by the adapters in {recipe.adapter_name_or_path}",
                key=key,
                mend="delete one of the two lines",
            )


def _without_gradients(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield what ``lora_ga`` cannot be together with: what has no gradient of rows before the first step."""
    mend = "write adapter_type: lora"
    if recipe.objective != "sft":
        what = (
            f"'adapter_type: lora_ga' starts from the gradient of rows that are trained on, and {recipe.objective} has"
        )
        yield mistake(
            f"{what} a reference, or completions that are not written yet",
            key="adapter_type",
            mend=f"{mend}, or pissa",
        )
    elif recipe.streaming:
        what = "'adapter_type: lora_ga' draws rows from all of them, and 'streaming' reads rows as training goes"
        yield mistake(what, key="adapter_type", mend=f"{mend}, or delete streaming")
    elif recipe.teacher is not None:
        what = "'adapter_type: lora_ga' computes gradients before there is a teacher"
        yield mistake(what, key="adapter_type", mend=f"{mend}, or delete teacher")
    elif recipe.sequence_parallel_size > 1:
        what = (
            "'adapter_type: lora_ga' computes gradients on one rank, and ranks that share a sequence have parts of it"
        )
        yield mistake(what, key="adapter_type", mend=f"{mend}, or delete sequence_parallel_size")


def adapters_of_whole_weights(recipe: Any) -> Iterator[WholeWeights]:
    """Yield the adapters of this recipe that are refused where ranks share the weights."""
    if recipe.finetuning_type == "full":
        return
    if not ADAPTERS[recipe.adapter_type].on_shared:
        yield WholeWeights(
            "adapter_type",
            f"adapters of kind {recipe.adapter_type} are made of whole weights or have values that are no parameters, "
            "and ranks that share the weights have and save neither",
            "write deepspeed: zero2, or adapter_type: lora or rslora",
        )
    if recipe.modules_to_save:
        yield WholeWeights(
            "modules_to_save",
            "modules that are saved whole are copies, which are made before ranks that share the weights have any",
            "write deepspeed: zero2, or delete the line",
        )
