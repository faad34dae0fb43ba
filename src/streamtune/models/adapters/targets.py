"""Choose the layers that get adapters by the names in a recipe: linear layers, and experts stacked in one tensor.

A name in a recipe is the end of a layer's name, or a regular expression that matches such an end. In a vision-language
model, a name selects layers of the language model. Only a name that none of them has selects layers of the vision tower
and the projector. ``vision-tower`` and ``vision-projector`` select all linear layers of these parts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.base.adapters import AdapterSpec
from streamtune.base.patterns import PLAIN, escape_points, find_matches
from streamtune.engine.hf_names import CONV1D, hf_internal
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.models.model_class import frozen_modules, is_inside, is_projector

if TYPE_CHECKING:  # peft imports every quantiser: two seconds
    from peft import PeftConfig

PEFT_FORM = r"(.*\.)?({})$"
"""Regular expression that peft makes of a key of ``rank_pattern``."""
ALL = "all-linear"
"""Name in a recipe for the linear layers of the language model, without head and routers."""
IMAGE_PARTS = {"vision-tower": False, "vision-projector": True}
"""Names in a recipe for the linear layers of a part for images -> True for the projector."""


@contextmanager
def suppress_pattern_warnings() -> Iterator[None]:
    """Context manager: suppress peft's warning about a pattern that matches no module, because it may match experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The following \w+_pattern keys", category=RuntimeWarning)
        yield


def is_unquantized(weight: Any) -> bool:
    return type(weight) is nn.Parameter and weight.is_floating_point()


def linear_layer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of a model's linear layers. Of a vision-language model, only its language model is searched."""
    frozen = frozen_modules(model)
    return [name for name in _all_linear_names(model) if not is_inside(name, frozen)]


def image_layer_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers outside the language model, in the vision tower and the projector."""
    frozen = frozen_modules(model)
    return [name for name in _all_linear_names(model) if is_inside(name, frozen)]


def _all_linear_names(model: PreTrainedModel) -> list[str]:
    linear, unread = (nn.Linear, hf_internal(CONV1D)), nn.modules.linear.NonDynamicallyQuantizableLinear
    # torch's MultiheadAttention reads the weight of its last layer without calling the layer.
    return [name for name, x in model.named_modules() if isinstance(x, linear) and not isinstance(x, unread)]


def has_suffix(name: str, suffix: str) -> bool:
    """Return True if ``name`` is ``suffix`` or ends in ``.suffix``, as peft matches target names."""
    return name == suffix or name.endswith(f".{suffix}")


def find_ends(ends: Sequence[str], names: Sequence[str], where: str) -> list[list[str]]:
    """Return, for each of ``ends``, the names that end in it or, for a regular expression, in a text that it matches.

    Raises:
        ArgumentError: One of ``ends``, of the recipe key ``where``, is not a regular expression, or takes too long.
    """
    patterns = [end for end in ends if not PLAIN.fullmatch(end)]
    matches = find_matches(
        list(map(escape_points, patterns)), names, where=where, match_function="match", template=PEFT_FORM
    )
    found = {end: [names[index] for index in each] for end, each in zip(patterns, matches, strict=True)}
    return [found[end] if end in found else [name for name in names if has_suffix(name, end)] for end in ends]


def match_suffixes(suffixes: Sequence[str], names: Sequence[str], where: str, kind: str, model: nn.Module) -> list[str]:
    """Return the names that end in one of ``suffixes``; a suffix that no name ends in raises an ArgumentError.

    ``where`` is the recipe key for the error. ``kind`` is the word for a name in the error, such as ``module``.
    """
    matches = find_ends(suffixes, names, where)
    for suffix, matching in zip(suffixes, matches, strict=True):
        if not matching:
            known = sorted({name.rsplit(".", 1)[-1] for name in names} - {str(i) for i in range(len(names))})
            known += IMAGE_PARTS if where == "lora_target" and frozen_modules(model) else []
            raise ArgumentError(
                f"{type(model).__name__} has no {kind} called '{suffix}'",
                where=where,
                fix=did_you_mean(suffix, known) or f"choose among: {', '.join(known)}",
            )
    chosen = {name for matching in matches for name in matching}
    return [name for name in names if name in chosen]


def _adaptable_tensor_names(model: PreTrainedModel) -> list[str]:
    linear, frozen = {f"{name}.weight" for name in linear_layer_names(model)}, frozen_modules(model)
    adaptable = [
        name for name, x in model.named_parameters() if x.dim() == 3 or (is_router(model, name) and name not in linear)
    ]
    return [name for name in adaptable if not is_inside(name, frozen)]


def is_router(model: nn.Module, name: str) -> bool:
    config: Any = getattr(model, "config", None)
    experts = {getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")} - {None}
    if not any(part in ("gate", "router") for part in name.split(".")):
        return False
    module, _, last = name.rpartition(".")
    module_found: Any = model
    for part in (module if last == "weight" else name).split("."):
        module_found = getattr(module_found, part)
    weight = getattr(module_found, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[0] in experts


def write_out_image_parts(model: PreTrainedModel, spec: AdapterSpec) -> AdapterSpec:
    """Return ``spec`` with full names of layers in place of ``vision-tower`` and ``vision-projector``.

    Raises:
        ArgumentError: The model has no part for images, or no linear layer is selected.
    """
    if isinstance(spec.target, str) or not set(spec.target) & set(IMAGE_PARTS):
        return spec
    images, target = image_layer_names(model), list[str]()
    for end in spec.target:
        target += [name for name in images if is_projector(name) is IMAGE_PARTS[end]] if end in IMAGE_PARTS else [end]
    if not target or not images:
        missing = next(end for end in spec.target if end in IMAGE_PARTS)
        raise ArgumentError(
            f"{type(model).__name__} has no linear layer in a {missing.replace('-', ' ')}",
            where="lora_target",
            fix=f"delete {missing}",
        )
    return replace(spec, target=target)


def linear_target_names(model: PreTrainedModel, spec: AdapterSpec) -> list[str]:
    """Return the full names of the linear layers that ``spec`` selects for adapters."""
    language, images = linear_layer_names(model), image_layer_names(model)
    excluded = match_suffixes(spec.exclude, [*language, *images], "lora_exclude", "linear layer", model)
    ends, head = _named_ends(spec), model.get_output_embeddings()
    match_suffixes(ends, [*language, *images], "lora_target", "linear layer", model)
    chosen = set[str]()
    if selects_all(spec):
        chosen |= {x for x in language if model.get_submodule(x) is not head and not is_router(model, x)}
    for end, in_language in zip(ends, find_ends(ends, language, "lora_target"), strict=True):
        chosen |= set(in_language or find_ends([end], images, "lora_target")[0])
    if not (remaining := [name for name in (*language, *images) if name in chosen - set(excluded)]):
        raise ArgumentError(
            "lora_exclude excludes all layers of lora_target", where="lora_exclude", fix="exclude fewer layers"
        )
    return remaining


def selects_all(spec: AdapterSpec) -> bool:
    """Return True if ``spec`` selects all linear layers of the language model, alone or beside other names."""
    return ALL in ([spec.target] if isinstance(spec.target, str) else spec.target)


def _named_ends(spec: AdapterSpec) -> list[str]:
    return [] if isinstance(spec.target, str) else [end for end in spec.target if end != ALL]


def peft_target_options(model: PreTrainedModel, spec: AdapterSpec) -> tuple[dict[str, Any], list[str]]:
    """Return the options with which peft selects the targets of LoRA: linear layers, or tensors such as experts.

    Return also the full names of all linear layers with adapters if peft cannot select them by the options; else an
    empty list.
    """
    tensors, linear = _adaptable_tensor_names(model), [*linear_layer_names(model), *image_layer_names(model)]
    others = [
        end for end in _named_ends(spec) if PLAIN.fullmatch(end) and not find_ends([end], linear, "lora_target")[0]
    ]
    tensor_suffixes = [end for end in others if find_ends([end], tensors, "lora_target")[0]]
    modules = [end for end in _named_ends(spec) if end not in tensor_suffixes]
    full_names: list[str] = []
    if modules or selects_all(spec):
        targets = [*([ALL] if selects_all(spec) else []), *modules]
        full_names = linear_target_names(model, replace(spec, target=targets))
    excluded = list(spec.exclude)
    if selects_all(spec):
        excluded += [name for name in linear_layer_names(model) if is_router(model, name)]
    options = {
        "target_modules": ALL if selects_all(spec) else modules,
        "target_parameters": tensor_suffixes or None,
        "exclude_modules": _exclude(excluded, model),
    }
    by_end = all(PLAIN.fullmatch(end) for end in (*modules, *spec.exclude)) and not (selects_all(spec) and modules)
    return options, [] if by_end and not set(full_names) & set(image_layer_names(model)) else full_names


def _exclude(suffixes: Sequence[str], model: PreTrainedModel) -> list[str] | str | None:
    """Return peft's ``exclude_modules`` for names that end in ``suffixes``, and for modules that are always frozen.

    A regular expression names the modules, because a vision tower has hundreds of linear layers.
    """
    if not (frozen := frozen_modules(model)):
        return list(suffixes) or None
    patterns = [rf"{re.escape(name)}(\..*)?" for name in frozen]
    patterns += [rf"(.*\.)?{re.escape(suffix)}" for suffix in suffixes]
    return "|".join(patterns)


def write_expert_targets(
    model: PreTrainedModel, spec: AdapterSpec, config: PeftConfig, whole: Collection[str] = ()
) -> None:
    """Write the names of the expert tensors that get adapters into ``config``; routers only if the recipe names them.

    Tensors inside the modules ``whole``, which are trained themselves, get no adapters.

    Raises:
        ArgumentError: Adapters of this kind, or with dropout, are not supported on stacked experts.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    options: Any = config
    if not spec.adapter_kind.is_lora:
        return
    convert_peft_config_for_transformers(config, model, None)
    if selects_all(spec):
        named = set(options.target_parameters or ()) & set(_named_ends(spec))
        names = {name for name in options.target_parameters or () if not name.endswith("gate.weight")} | named
        full_names = [name for name, _ in model.named_parameters() if any(has_suffix(name, end) for end in names)]
        if any(is_inside(name, whole) for name in full_names):
            names = {name for name in full_names if not is_inside(name, whole)}
        options.target_parameters = sorted(names) or None
    if not options.target_parameters:
        return
    unsupported = None if spec.adapter_kind.on_experts else f"adapters of kind {spec.kind}"
    if unsupported or spec.dropout:
        raise ArgumentError(
            f"{unsupported or 'dropout of adapters'} cannot be used on experts stacked in one tensor "
            f"({', '.join(sorted(options.target_parameters))})",
            where="adapter_type" if unsupported else "lora_dropout",
            fix="name other layers: lora_target: [q_proj, k_proj, v_proj, o_proj]",
        )


def whole_module_names(model: PreTrainedModel, suffixes: Sequence[str]) -> list[str]:
    """Return the full names of the modules that ``modules_to_save`` selects, without modules inside another of them.

    Peft matches short names differently: to peft, ``norm`` also names ``input_layernorm``.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = match_suffixes(suffixes, names, "modules_to_save", "module", model)
    return [name for name in found if not is_inside(name.rpartition(".")[0], set(found))]


def selected_tied_layers(model: PreTrainedModel, modules: Collection[str]) -> list[str]:
    """Return the full names of the tied embedding and head that ``modules`` contain; an empty list if not tied."""
    names = all_embedding_and_head_names(model)
    return [name for name in names if is_inside(name, modules)] if is_tied(model) else []


def is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and model.get_input_embeddings().weight is head.weight


def all_embedding_and_head_names(model: PreTrainedModel) -> list[str]:
    """Return the full names of the embedding and the head, also if they are tied."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(end)] for end in ends if end is not None]


def embedding_and_head_names(model: PreTrainedModel) -> list[str]:
    """Return the full names of the embedding and the head; no head if they are tied."""
    names = all_embedding_and_head_names(model)
    return names[:1] if is_tied(model) else names  # peft trains a tied head with the embedding


def explicit_target_names(model: PreTrainedModel, spec: AdapterSpec) -> list[str]:
    """Return the full names of the layers and tensors that a list ``lora_target`` selects; none for ``all-linear``."""
    language = [*linear_layer_names(model), *_adaptable_tensor_names(model)]
    ends, images = _named_ends(spec), image_layer_names(model)
    chosen = [
        name
        for end, in_language in zip(ends, find_ends(ends, language, "lora_target"), strict=True)
        for name in in_language or find_ends([end], images, "lora_target")[0]
    ]
    excluded = {name for each in find_ends(spec.exclude, chosen, "lora_exclude") for name in each}
    return [name for name in dict.fromkeys(chosen) if name not in excluded]


def module_and_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of all modules and parameters against which peft matches patterns."""
    modules = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters()]
    return [*modules, *parameters, *(f"base_model.model.{name}" for name in modules)]


def lora_layers(adapted_model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name in the base model, layer) for each LoRA layer of peft."""
    from peft.tuners.lora import LoraLayer

    for name, module in adapted_model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace(".base_layer", ""), module
