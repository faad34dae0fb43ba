"""Choose which parameters full fine-tuning trains: whole decoder layers, and parameters by patterns of their names.

The choice is made in three steps, each by one recipe key:

    trainable_layers    only the parameters of these decoder layers are trained
    freeze              matching parameters are not trained
    train               matching parameters are trained; alone, all other parameters are frozen

Tied weights are one parameter with several names. A pattern that matches one of the names matches the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.base.patterns import escape_points, find_matches
from streamtune.engine import decoder_layers
from streamtune.engine.hf_names import fp32_weight_names
from streamtune.engine.inspect_model import first_differentiated_layer
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.models.model_class import (
    freeze_other_modules,
    frozen_modules,
    is_inside,
    parameters_at,
    trained_image_modules,
)


@dataclass(frozen=True)
class TrainedParts:
    """Parameters that full fine-tuning trains, as recipe keys choose them.

    Attributes:
        layers: Value of ``trainable_layers``: ``last 8``, ``first 8`` or ``28-35``; None for all layers.
        freeze: Patterns of parameters that are not trained.
        train: Patterns of parameters that are trained.
        frozen_dtype: Dtype of the frozen weights of a checkpoint; None leaves them in the dtype of the trained weights.
        tower: True to train the vision tower of a vision-language model.
        projector: True to train the projector of a vision-language model.
    """

    layers: str | None = None
    freeze: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    frozen_dtype: torch.dtype | None = None
    tower: bool = False
    projector: bool = False


def freeze_parts(model: PreTrainedModel, parts: TrainedParts | None) -> None:
    """Freeze all parameters of a new model that are not trained; None trains all parameters.

    Modules of a vision-language model outside its language model are frozen, unless ``parts`` says otherwise.

    Raises:
        ArgumentError: The model has fewer layers, a pattern matches no parameter, or no parameter is left to train.
    """
    others: set[nn.Parameter] = set()
    if parts is None:
        freeze_other_modules(model)
    else:
        others = set(freeze_other_modules(model, tower=parts.tower, projector=parts.projector))
        _check_tower(model, parts, others)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    if parts is None or not names:
        return
    trained = set(names)
    if parts.layers is not None:
        trained &= {p for layer in _chosen_layers(model, parts.layers) for p in layer.parameters()} | others
    elif parts.train and not parts.freeze:
        trained &= others
    trained -= _matching_parameters(model, names, parts.freeze, "freeze")
    trained |= _matching_parameters(model, names, parts.train, "train")
    if not trained:
        key = next(key for key in ("freeze", "layers") if getattr(parts, key))
        tower = "; to train the projector alone, freeze the language model: freeze: ['.*language_model', lm_head]"
        raise ArgumentError(
            "all parameters are frozen, so nothing is trained",
            where="trainable_layers" if key == "layers" else key,
            fix="narrow the patterns of freeze, or add train: [PATTERN]" + (tower if others else ""),
        )
    for parameter in names:
        parameter.requires_grad_(parameter in trained)


def _check_tower(model: PreTrainedModel, parts: TrainedParts, others: set[nn.Parameter]) -> None:
    """Check that a model has the parts that ``freeze_vision_tower`` and ``freeze_projector`` name.

    Raises:
        ArgumentError: The model has no vision tower, or no projector apart from its other modules.
    """
    for key, wanted in (("freeze_vision_tower", parts.tower), ("freeze_projector", parts.projector)):
        if wanted and not others:
            raise ArgumentError(
                f"'{key}: false' trains a part of a vision-language model, and {type(model).__name__} has none",
                where=key,
                fix="delete the line",
            )


def _chosen_layers(model: PreTrainedModel, text: str) -> list[nn.Module]:
    layers = decoder_layers(model)
    word, _, number = text.partition(" ")
    first, _, last = text.partition("-")
    if number:
        chosen, most = layers[-int(number) :] if word == "last" else layers[: int(number)], int(number)
    else:
        chosen, most = layers[int(first) : int(last) + 1], int(last) + 1
    if most > len(layers):
        raise ArgumentError(
            f"'trainable_layers: {text}' needs {most:,} layers, and the model has {len(layers):,}",
            where="trainable_layers",
            fix=f"write last N or first N, with N up to {len(layers):,}"
            if number
            else f"the layers have numbers 0 to {len(layers) - 1:,}",
        )
    return chosen


def _matching_parameters(
    model: PreTrainedModel, names: dict[nn.Parameter, list[str]], patterns: Sequence[str], key: str
) -> set[nn.Parameter]:
    named = [(name, parameter) for parameter, aliases in names.items() for name in aliases]
    all_names = [name for name, _ in named]
    matches = find_matches(list(map(escape_points, patterns)), all_names, where=key, match_function="match")
    for pattern, found in zip(patterns, matches, strict=True):
        if not found:
            raise ArgumentError(
                _describe_mismatch(model, pattern, key), where=key, fix=_suggest_pattern(pattern, all_names, key)
            )
    return {named[index][1] for found in matches for index in found}


def _describe_mismatch(model: PreTrainedModel, pattern: str, key: str) -> str:
    modules = frozen_modules(model)
    names = [name for name, _ in model.named_parameters() if is_inside(name, modules)]
    if any(find_matches([escape_points(pattern)], names, where=key, match_function="match")):
        shown = ", ".join(modules)
        return f"the pattern '{pattern}' matches only frozen modules ({shown}), which rows of text do not train"
    return f"the pattern '{pattern}' matches the beginning of no parameter name"


def _suggest_pattern(pattern: str, names: Sequence[str], key: str) -> str:
    if find_matches([escape_points(pattern)], names, where=key)[0]:
        return f"patterns match from the beginning of a name: write '.*{pattern}'"
    beginnings = dict.fromkeys(name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name))
    shown = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", name) for name in names))
    near = did_you_mean(pattern, beginnings)
    return "; ".join(filter(None, (near, f"parameters: {shown}")))


def narrow_dtypes(model: PreTrainedModel, parts: TrainedParts | None) -> dict[str, torch.dtype]:
    """Return name -> dtype of the frozen parameters that have fewer bits than the trained parameters."""
    if parts is None or parts.frozen_dtype is None:
        return {}
    wide = fp32_weight_names(model)
    return {
        name: parts.frozen_dtype
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dtype == torch.float32 and wide.isdisjoint(name.split("."))
    }


def narrow_frozen_weights(model: PreTrainedModel, parts: TrainedParts | None) -> None:
    """Cast the frozen parameters of a model to ``parts.frozen_dtype``; a checkpoint of this dtype keeps its values."""
    for name, dtype in narrow_dtypes(model, parts).items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(dtype)


def trained_dtype(model: Any) -> torch.dtype:
    """Return the dtype of a model's weights; with full fine-tuning, of its trained weights if they have one dtype.

    Frozen weights may be narrower (``TrainedParts.frozen_dtype``).
    """
    base: Any = base_of(model)
    dtypes = {p.dtype for p in base.parameters() if p.requires_grad}
    return base.dtype if hasattr(model, "peft_config") or len(dtypes) != 1 else dtypes.pop()


def trained_layers_text(model: Any) -> str:
    """Return the decoder layers with a trained parameter: ``layers 0-3, 28-35``, ``layer 3`` or ``no layer``."""
    numbers = _trained_layer_numbers(base_of(model))
    return f"layer{'s' if len(numbers) > 1 else ''} {_show_ranges(numbers)}" if numbers else "no layer"


def _trained_layer_numbers(base: nn.Module) -> list[int]:
    layers = decoder_layers(base)
    return [number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]


def frozen_parts_note(model: Any, parts: TrainedParts | None) -> str | None:
    """Return a note on the frozen parameters and on how far down the backward runs; None if no parameter is chosen."""
    if parts is None:
        return None
    base = base_of(model)
    count, first = len(decoder_layers(base)), first_differentiated_layer(base)
    if first == count:
        reach = "the layers have no backward"
    elif first < min(_trained_layer_numbers(base), default=count):
        below = "a part for images" if trained_image_modules(base) else "the embedding"
        reach = f"{below} is trained, so the backward runs through all {count} layers"
    else:
        reach = f"the backward ends at layer {first} (of 0 to {count - 1})"
    return f"trained: {', '.join((trained_layers_text(base), *_trained_outside_layers(base)))}; {reach}"


def _trained_outside_layers(model: Any) -> Iterator[str]:
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    for name in trained_image_modules(model):
        parameters = list(parameters_at(model, name).values())
        inside |= set(map(id, parameters))
        yield name if all(p.requires_grad for p in parameters) else f"parts of {name}"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            yield name


def _show_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as ``0-3, 28-35``."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
