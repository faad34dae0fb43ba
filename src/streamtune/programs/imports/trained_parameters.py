"""Convert fields that freeze parameters to the recipe keys ``trainable_layers``, ``freeze`` and ``train``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .conversion import Conversion
from .field_rules import names_all_layers

FULL = "only full fine-tuning reads this field"


def convert_frozen_layers(conversion: Conversion) -> None:
    """Convert LLaMA-Factory's ``finetuning_type: freeze``, which trains some layers, or some modules of them."""
    name = "freeze_trainable_layers"
    given, count = name in conversion.left, conversion.get(name, 2)
    conversion.pop_field(name)
    conversion.write_key("finetuning_type", "full", "finetuning_type", note="of the layers in trainable_layers")
    layers = f"{'last' if isinstance(count, int) and count > 0 else 'first'} {count}".replace(" -", " ")
    if count == 0:
        conversion.report_unneeded(name, why="no layer is trained, only freeze_extra_modules")
    elif given:
        conversion.write_key("trainable_layers", layers, name)
    else:
        conversion.write_default("trainable_layers", layers)
    modules = _names(conversion, "freeze_trainable_modules")
    if modules and modules != ["all"]:
        # LLaMA-Factory trains names that contain ".LAYER.MODULE": freeze the other modules of a layer.
        others = "|".join(map(re.escape, modules))
        conversion.write_key("freeze", [rf"\D*\d+\.(?!{others})"], "freeze_trainable_modules")
    conversion.mark_unneeded("freeze_trainable_modules", why="all modules of a layer, as in StreamTune")
    extra = [f".*{re.escape(each)}" for each in _names(conversion, "freeze_extra_modules")]
    if extra:
        conversion.write_key("train", extra, "freeze_extra_modules")
    conversion.mark_unneeded("freeze_extra_modules", why="no value")


def convert_unfrozen_parameters(conversion: Conversion) -> None:
    """Convert axolotl's ``unfrozen_parameters``, the only trained parameters: patterns in which a ``.`` is a point."""
    name = "unfrozen_parameters"
    patterns = _names(conversion, name)
    if patterns and conversion.ours.get("finetuning_type", "full") != "full":
        conversion.report_lost(name, why="adapters train no weights of the model; see modules_to_save")
    elif patterns:
        rows = [re.fullmatch(r"(.+)\[\d*(?::\d*)?\]", pattern) for pattern in patterns]
        whole = [pattern if found is None else found[1] for pattern, found in zip(patterns, rows, strict=True)]
        if any(rows):
            conversion.report_lost(name, why="StreamTune trains all rows of a parameter, not a range such as [:32000]")
        conversion.write_key("train", [re.sub(r"\.(?=[*?{])", r"\\.", pattern) for pattern in whole], name)
    conversion.mark_unneeded(name, why="no value")


def convert_frozen_parameters(conversion: Conversion) -> None:
    """Convert ms-swift's fields that freeze parameters, and then train some of them, by prefixes and patterns."""
    full = conversion.ours.get("finetuning_type") == "full"
    ratio = conversion.get("freeze_parameters_ratio") or 0
    frozen = ("freeze_parameters", "freeze_parameters_regex")
    trained = ("trainable_parameters", "additional_trainable_parameters", "trainable_parameters_regex")
    if not full:
        conversion.mark_unneeded(*frozen, "freeze_parameters_ratio", *trained, why=FULL)
        return
    everything = isinstance(ratio, int | float) and ratio >= 1
    if ratio and not everything:
        why = "StreamTune freezes no share of the parameters: write trainable_layers: last N"
        conversion.report_lost("freeze_parameters_ratio", why=why)
    elif everything and not any(map(conversion.get, trained)):
        conversion.report_lost("freeze_parameters_ratio", why="nothing is trained: name trainable_parameters")
    conversion.mark_unneeded("freeze_parameters_ratio", why="train names all trained parameters" if ratio else "off")
    if everything:
        conversion.mark_unneeded(*frozen, why="freeze_parameters_ratio: 1 freezes all parameters")
    for name in frozen:
        _add_patterns(conversion, "freeze", name)
    if everything or conversion.ours.get("freeze"):
        for name in trained:
            _add_patterns(conversion, "train", name)
    elif ratio and any(map(conversion.get, trained)):
        for name in filter(conversion.get, trained):
            conversion.report_lost(name, why="see freeze_parameters_ratio")
    conversion.mark_unneeded(*frozen, why="no value")
    conversion.mark_unneeded(*trained, why="no parameter is frozen")


IMAGE_PARTS = {"freeze_vision_tower": "vision-tower", "freeze_projector": "vision-projector"}
"""{StreamTune's key for weights: name in ``lora_target`` for adapters}."""


def convert_tower(conversion: Conversion, fields: Mapping[str, str], target: str) -> None:
    """Convert fields that freeze the vision tower or the projector, whose weights or adapters are trained otherwise.

    Args:
        conversion: Conversion of the recipe.
        fields: {field: StreamTune's key}.
        target: Field that names the layers with adapters.
    """
    parts, everything = ["all-linear"], names_all_layers(conversion.get(target, "all"))
    for name, key in fields.items():
        if conversion.get(name) is False:
            if conversion.ours.get("finetuning_type") == "full":
                conversion.write_key(key, False, name)
            elif everything:
                parts.append(IMAGE_PARTS[key])
                conversion.write_key("lora_target", list(parts), name, replaces=True)
                conversion.mark_unneeded(target, why=f"see {name}")
            else:
                conversion.report_lost(
                    name,
                    why=f"in StreamTune, names select layers of the language model first: add {IMAGE_PARTS[key]} "
                    "to lora_target, or patterns such as 'visual.*q_proj'",
                )
        conversion.mark_unneeded(name, why="frozen, as in StreamTune")


def _add_patterns(conversion: Conversion, key: str, name: str) -> None:
    """Add the prefixes, or the pattern, of a field of ms-swift to a list of patterns."""
    if name.endswith("_regex"):
        pattern = conversion.get(name)
        if pattern is None:
            return
        if not isinstance(pattern, str) or re.search(r"\[[^]]*\.|^\(\?", pattern):
            conversion.report_lost(name, why="this pattern has another meaning in StreamTune: rewrite it for " + key)
            return
        # ms-swift searches anywhere in a name, and a "." is any character.
        any_character = re.sub(r"(?<!\\)\.(?![*+?{])", ".{1}", pattern)
        found = [f".*(?:{any_character})"]
    else:
        found = [re.escape(prefix) for prefix in _names(conversion, name)]
    if found:
        conversion.write_key(key, [*conversion.ours.get(key, []), *found], name, replaces=True)


def _names(conversion: Conversion, name: str) -> list[str]:
    """Return the names in a field: a list, or a text separated by commas or blanks; empty if it has another type."""
    value: Any = conversion.get(name, [])
    names = re.split(r"[,\s]+", value) if isinstance(value, str) else value
    return [each for each in names if isinstance(each, str) and each] if isinstance(names, list) else []
