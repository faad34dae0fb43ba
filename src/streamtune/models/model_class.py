"""The class of a checkpoint's model, and the part of a vision-language model that is trained: its language model.

A vision-language model has a vision tower and a projector beside its language model. Text alone uses neither of them.
They are frozen, so training keeps their weights bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.engine.hf_names import CAUSAL_NAMES, IMAGE_TEXT_NAMES, TEXT_CLASS_ONLY, hf_internal
from streamtune.errors import UnsupportedModelError


def is_vision_language(config: Any) -> bool:
    """Return True if a configuration belongs to a model of a vision-language class of ``transformers``.

    Some families have a class for text alone as well. Then the configuration's ``architectures`` decide.
    """
    kind = getattr(config, "model_type", None)
    name = hf_internal(IMAGE_TEXT_NAMES).get(kind)
    text_name = hf_internal(CAUSAL_NAMES).get(kind)
    if name is None or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return False
    if text_name is None or name == text_name:
        return True
    return kind not in TEXT_CLASS_ONLY and name in (getattr(config, "architectures", None) or ())


def auto_class_of(config: Any) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """Return the class with which ``transformers`` makes a model of a configuration that generates text."""
    return AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM


def loader_class_name(model: Any, *, adapters: bool) -> str:
    """Return the name of the class whose ``from_pretrained`` loads a saved ``model``, or its saved ``adapters``.

    Peft has no class for adapters on a vision-language model. The class of ``transformers`` loads them with their base.
    """
    if is_vision_language(base_of(model).config):
        return AutoModelForImageTextToText.__name__
    return "AutoPeftModelForCausalLM" if adapters else AutoModelForCausalLM.__name__


def architecture_name(model: nn.Module) -> str:
    """Return the name of a model's class without its suffix, such as ``Qwen3`` for ``Qwen3ForCausalLM``."""
    return type(model).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def frozen_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the outermost modules that are not part of the language model, such as the vision tower.

    The language model is the module with the decoder layers, and the embedding and the head. The list also has the
    names of parameters beside these modules, such as ``model.image_newline``. It is empty for a model that is not a
    vision-language model.

    Raises:
        UnsupportedModelError: ``transformers`` does not know the model's embedding of tokens.
    """
    layers = decoder_layers(model) if is_vision_language(model.config) else []
    if not layers:
        return []
    try:
        ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no embedding of tokens that transformers knows",
            where="model_name_or_path",
            fix="use a causal language model",
        ) from error
    names = {id(module): name for name, module in model.named_modules()}
    parts = {names[each] for each in ends if each in names}
    parts.add(names[id(layers[0])].rpartition(".")[0].rpartition(".")[0])  # the parent of the list of layers
    found: list[str] = []

    def visit(prefix: str, module: nn.Module) -> None:
        found.extend(f"{prefix}{key}" for key, value in module._parameters.items() if value is not None)
        for key, child in module.named_children():
            name = f"{prefix}{key}"
            if name in parts:
                continue
            if any(part.startswith(f"{name}.") for part in parts):
                visit(f"{name}.", child)
            elif any(True for _ in child.parameters()):
                found.append(name)

    if "" not in parts:
        visit("", model)
    return found


def parameters_at(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """Return name -> parameter of all parameters in the module ``name``, or of the parameter ``name`` itself."""
    owner, _, last = name.rpartition(".")
    parameter = model.get_submodule(owner)._parameters.get(last)
    if parameter is not None:
        return {name: parameter}
    return {f"{name}.{inner}": value for inner, value in model.get_submodule(name).named_parameters()}


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return True if the module or tensor ``name`` is one of ``modules``, or is inside one of them."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def frozen_modules_note(model: Any) -> str | None:
    """Return a note that names the modules of a vision-language model that are not trained; None for other models."""
    base, has_adapters = base_of(model), hasattr(model, "peft_config")
    trains = {name: {p.requires_grad for p in parameters_at(base, name).values()} for name in frozen_modules(base)}
    frozen = [name for name, flags in trains.items() if flags == {False}]
    if len(frozen) == len(trains):
        how = " (lora_target: [all-linear, vision-tower] adapts the vision tower too)" if has_adapters else ""
        return f"only the language model is trained; frozen: {', '.join(frozen)}{how}" if frozen else None
    trained = [name if flags == {True} else f"a part of {name}" for name, flags in trains.items() if True in flags]
    rest = f"; frozen: {', '.join(frozen)}" if frozen else ""
    if has_adapters:
        return f"adapters are trained in {', '.join(trained_image_modules(model))} too{rest}"
    return f"trained with the language model: {', '.join(trained)}{rest}"


def trained_image_modules(model: Any) -> list[str]:
    """Return the names of the outermost modules outside the language model that have trained parameters or adapters."""
    base: Any = base_of(model)
    return [name for name in frozen_modules(base) if any(p.requires_grad for p in parameters_at(base, name).values())]


def trains_only_images(model: Any) -> bool:
    """Return True if all trained parameters and adapters of a model are outside its language model."""
    base: Any = base_of(model)
    images = {id(p) for name in frozen_modules(base) for p in parameters_at(base, name).values()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return bool(trained) and all(id(p) in images for p in trained)


PROJECTOR = ("projector", "connector", "merger", "aligner")
"""Parts of the names of modules that project images to the language model. In some families they are in the tower."""


def is_projector(name: str) -> bool:
    """Return True if a module or parameter outside the language model belongs to the projector."""
    return any(part in name for part in PROJECTOR)


def freeze_other_modules(model: PreTrainedModel, *, tower: bool = False, projector: bool = False) -> list[nn.Parameter]:
    """Freeze the parameters of a vision-language model outside its language model; return those that are trained.

    Args:
        tower: True to train the vision tower.
        projector: True to train the projector.
    """
    trained: list[nn.Parameter] = []
    for part in frozen_modules(model):
        for name, parameter in parameters_at(model, part).items():
            alone = name == part  # beside the modules, as LLaVA-NeXT's image_newline
            parameter.requires_grad_(projector if alone or is_projector(name) else tower)
            trained += [parameter] if parameter.requires_grad else []
    return trained
