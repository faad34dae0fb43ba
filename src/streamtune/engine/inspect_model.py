"""Finds the decoder layers of a model, and raises an error for models that cannot be streamed exactly.

Layers are recognised by their class and the arguments of their forward, not by the name of a model family.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from transformers import PreTrainedModel

from streamtune.base.model_facts import model_device
from streamtune.engine.call import forwarded_cache_argument, layer_cache_argument
from streamtune.engine.hf_names import (
    ATTENTIONS,
    CHECKPOINTED_LAYER,
    HUB_KERNELS,
    KEY_CALLS,
    KNOWN_ATTENTION,
    MTP_MODEL,
    STATE_CALLS,
    STATES_IN_MODULES,
    attention_name,
    has_attention_name,
    hf_internal,
    uses_registered_attention,
)
from streamtune.engine.own_attention import TILED_IMPLEMENTATIONS, is_engine_attention
from streamtune.engine.scan import names_in_forward
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.sharded import FlatParametersError
from streamtune.errors import ArgumentError, UnsupportedModelError

_GradientCheckpointingLayer = hf_internal(CHECKPOINTED_LAYER)

REFUSED_OUTPUTS = {
    "output_attentions": "attention weights are never built",
}


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the ``transformers`` model inside its wrappers: ``torch.compile``, DDP, a DeepSpeed engine, peft adapters.

    Raises:
        UnsupportedModelError: The wrappers contain no ``transformers`` model, or FSDP1 wraps it.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        before = inner
        _refuse_flat_parameters(inner)
        if isinstance(inner, OptimizedModule):
            inner = inner._orig_mod
        elif (unwrap := getattr(inner, "get_base_model", None)) is not None:
            inner = unwrap()
        elif isinstance(wrapped := getattr(inner, "module", None), nn.Module):
            inner = wrapped
        if inner is before:
            break
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is not a transformers model")
    return inner


def _refuse_flat_parameters(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without this import nothing can be wrapped by it
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise FlatParametersError(type(model).__name__)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers in order: the outermost modules that take a key/value cache.

    A layer is a ``GradientCheckpointingLayer`` whose forward has a cache argument. If a model has none, its layers are
    the members of module lists that have a cache argument, or take the cache in ``**kwargs`` and pass it on.

    Example:
        >>> len(decoder_layers(model))
        2
    """
    return list(_outermost_layers(model, False)) or list(_outermost_layers(model, True))


def first_differentiated_layer(model: Any) -> int:
    """Return the number of the lowest layer with a backward; the number of layers if none has one.

    The backward ends at the lowest trained weight. Layers below that weight run only forward and store nothing. A
    trained embedding, of tokens or positions, is below all layers.
    """
    layers = decoder_layers(model)
    if _trains_embeddings(model, layers) or any(p.requires_grad for p in image_parameters(model, layers)):
        return 0
    trained = (number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    return next(trained, len(layers))


def image_parameters(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Iterate over the parameters that compute the features of images: of the vision tower and the projector.

    In some families, a parameter of the projector is not in a module of its own, such as ``image_newline`` of
    LLaVA-NeXT.
    """
    owners = [module for module in model.modules() if hasattr(type(module), "get_image_features")]
    if not owners or not layers:
        return
    owner = owners[-1]  # outer modules only call the innermost one
    yield from owner.parameters(recurse=False)
    for child in owner.children():
        if all(module is not layers[0] for module in child.modules()):
            yield from child.parameters()


def _trains_embeddings(model: Any, layers: Sequence[nn.Module]) -> bool:
    """Return True if an embedding, or a module named after it, has a trained parameter; not in layers or the head."""
    head = model.get_output_embeddings()
    known_ids = {id(module) for part in (*layers, *([] if head is None else [head])) for module in part.modules()}
    return any(
        parameter.requires_grad
        for name, module in model.named_modules()
        if id(module) not in known_ids and (isinstance(module, nn.Embedding) or "embed" in name)
        for parameter in module.parameters(recurse=False)
    )


def has_adapters(module: nn.Module) -> bool:
    """Return True if a module inside ``module`` has adapters of peft, which name the adapted module ``base_layer``."""
    return any(hasattr(each, "base_layer") for each in module.modules())


def autocast_of_mixed_dtypes(model: nn.Module) -> AbstractContextManager[Any]:
    """Return bfloat16 autocast if all trained weights are float32 and some frozen weights bfloat16, without adapters.

    Such a model computes only in autocast, because a linear layer needs inputs of the dtype of its weight.
    """
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for parameter in model.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    if dtypes[True] != {torch.float32} or torch.bfloat16 not in dtypes[False] or has_adapters(model):
        return nullcontext()
    return torch.autocast(model_device(model).type, dtype=torch.bfloat16, cache_enabled=False)


def _outermost_layers(module: nn.Module, in_lists: bool) -> Iterator[nn.Module]:
    """Yield the layers inside a module; with ``in_lists`` also members of module lists that only pass on a cache."""
    for child in module.children():
        listed = isinstance(module, nn.ModuleList) and in_lists and forwarded_cache_argument(child)
        if listed or (isinstance(child, _GradientCheckpointingLayer) and layer_cache_argument(child)):
            yield child
        else:
            yield from _outermost_layers(child, in_lists)


def carries_states(layer: nn.Module) -> bool:
    """Return True if a layer has a recurrent or convolution state, judged by the functions that its code calls."""
    return any(STATE_CALLS & set(names_in_forward(type(module))) for module in layer.modules())


def caches_keys(layer: nn.Module) -> bool:
    """Return True if a layer stores keys and values in the cache, judged by the methods that its code calls."""
    return any(KEY_CALLS & set(names_in_forward(type(module))) for module in layer.modules())


def hybrid_layer_name(model: nn.Module) -> str | None:
    """Return the class name of a layer with both attention and a recurrent state; None if no layer has both."""
    names = (type(layer).__name__ for layer in decoder_layers(model) if carries_states(layer) and caches_keys(layer))
    return next(names, None)


def check_streamable(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Raise an error if a model cannot be streamed with exact gradients.

    Args:
        model: Model of ``transformers``, without wrappers.
        layers: Decoder layers of the model.

    Raises:
        UnsupportedModelError: The model cannot be streamed; the message says why.
    """
    name = type(model).__name__
    _refuse_flat_parameters(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only causal decoders can be streamed")
    if not layers:
        raise UnsupportedModelError(
            f"{name} has no decoder layer with a key/value cache, so there is nothing to stream"
        )
    own_code = own_attention_name(model, layers)
    if own_code is not None and own_code not in TILED_IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"{name} has its own attention code ({own_code!r}), which cannot take the mask of a chunk",
            fix="load it with attn_implementation='eager'",
        )
    configs = attention_configs(model, layers)
    if own_code is None:
        for config in configs:
            _refuse_foreign_attention(name, attention_name(config))
    if isinstance(model, hf_internal(MTP_MODEL)):
        raise UnsupportedModelError(
            f"{name} holds multi-token prediction layers, for which transformers computes no loss",
            fix="stream the causal language model that they belong to",
        )
    for layer in layers:
        if "forward" in layer.__dict__:
            raise UnsupportedModelError(
                f"{name} has a {type(layer).__name__} whose forward was replaced on the instance (by a device map of "
                "accelerate, or by a patch); streaming would not call the replacement",
                fix="load the model onto one device, or undo the patch",
            )
        for module in layer.modules():
            if any(hasattr(module, state) for state in STATES_IN_MODULES):
                raise UnsupportedModelError(
                    f"{name} has layers whose {type(module).__name__} stores a state in the module itself, not in the "
                    "cache, so chunks cannot read or write it"
                )
            if _is_spectral_norm(module):
                raise UnsupportedModelError(
                    f"{name} has a spectral norm in its {type(layer).__name__}, which runs a power-iteration step in "
                    "each call, so once per chunk",
                    fix="remove it, or train without streaming",
                )
            if isinstance(module, nn.modules.batchnorm._NormBase):
                raise UnsupportedModelError(
                    f"{name} has a {type(module).__name__} in its {type(layer).__name__}; its statistics cover the "
                    "whole sequence or batch and are not a sum over chunks"
                )
    for flag, why in REFUSED_OUTPUTS.items():
        if any(getattr(config, flag, False) for config in configs):
            raise UnsupportedModelError(
                f"the configuration of {name} has {flag}=True, but {why}", fix=f"set model.config.{flag} = False"
            )


def _is_spectral_norm(module: nn.Module) -> bool:
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def _refuse_foreign_attention(model: str, name: str | None) -> None:
    if name is None or is_engine_attention(name) or name.startswith(HUB_KERNELS):
        return
    function = hf_internal(ATTENTIONS).get(name)
    from_transformers = name in KNOWN_ATTENTION and str(getattr(function, "__module__", "transformers.")).startswith(
        "transformers."
    )
    if not from_transformers:
        raise UnsupportedModelError(
            f"{model} uses the registered attention function {name!r}; streaming would replace it with StreamTune's "
            "attention, which may compute something else",
            fix=f"call model.set_attn_implementation() with one of {', '.join(KNOWN_ATTENTION)}: streaming computes "
            "the same as these",
        )


def owning_models(model: PreTrainedModel, layers: list[nn.Module]) -> list[PreTrainedModel]:
    """Return the ``PreTrainedModel`` modules that contain any of the layers, the outermost first, the decoder last."""
    inside = {id(layer) for layer in layers}
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(id(child) in inside for child in module.modules())
    ]


def own_attention_name(model: PreTrainedModel, layers: list[nn.Module]) -> str | None:
    """Return the attention implementation of layers that compute attention in their own code.

    None if the layers call the attention function that the config names.
    """
    owner = owning_models(model, layers)[-1]
    return None if uses_registered_attention(owner) else str(attention_name(owner.config))


def attention_configs(model: PreTrainedModel, layers: list[nn.Module]) -> list[Any]:
    """Return the configs, without duplicates, from which decoder and layers read their attention implementation."""
    configs: list[Any] = [model.config.get_text_config(decoder=True)]
    configs += [module.config for module in owning_models(model, layers)]
    for layer in layers:
        configs += [m.config for m in layer.modules() if hasattr(m, "config") and has_attention_name(m.config)]
    return list({id(config): config for config in configs}.values())


def choose_parallel_form(ranks: SequenceParallel, model: Any, layers: list[nn.Module], head: bool) -> str:
    """Return the form of sequence parallelism, ``ulysses`` or ``ring``.

    The form ``auto`` becomes ``ulysses`` if the number of ranks divides the number of attention heads, else ``ring``.

    Args:
        ranks: Ranks that share each sequence, with the requested form.
        model: Model of ``transformers``, without wrappers.
        layers: Decoder layers of the model.
        head: True if the language-model head is streamed.

    Raises:
        ArgumentError: The head is not streamed, or the number of ranks does not divide the heads for ``ulysses``.
        UnsupportedModelError: Ranks cannot share the model's sequences.
    """
    name = type(model).__name__
    if not head:
        raise ArgumentError(
            "sequence parallelism needs a streamed head, found head=False", fix="use stream(model, head=True)"
        )
    if (own_code := own_attention_name(model, layers)) is not None:
        raise UnsupportedModelError(
            f"{name} has its own attention code ({own_code}), which sequence parallelism does not support",
            fix="set sequence_parallel_size: 1",
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters and not all(
        carries_states(layer) and not caches_keys(layer) for layer in layers
    ):
        raise UnsupportedModelError(
            f"{name} takes no position_ids, which sequence parallelism needs to place a rank's tokens",
            fix="set sequence_parallel_size: 1",
        )
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0)
    divides = all(count % ranks.size == 0 for count in (heads if isinstance(heads, list | tuple) else [heads]))
    if ranks.form == "ulysses" and not divides:
        raise ArgumentError(
            f"{heads} attention heads of {name} cannot be divided among {ranks.size} ranks",
            fix="set sequence_parallel: ring, or a sequence_parallel_size that divides the number of heads",
        )
    if ranks.form == "auto":
        return "ulysses" if divides else "ring"
    return ranks.form
