"""Find the decoder layers of a model, and refuse models that are known not to stream exactly.

Layers are recognised by their class and the arguments of their forward, not by the name of a model family.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from transformers import PreTrainedModel

from streamtune.engine.call import hands_on_cache, takes_cache
from streamtune.engine.hf_names import (
    ATTENTIONS,
    CHECKPOINTED_LAYER,
    HUB_KERNELS,
    KEY_CALLS,
    KNOWN_ATTENTION,
    MTP_MODEL,
    STATE_CALLS,
    STATES_IN_MODULES,
    attention_of,
    chooses_attention,
    inside,
    names_attention,
)
from streamtune.engine.own_attention import FORMS, is_ours
from streamtune.engine.scan import code_names
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.sharded import FlatParametersError
from streamtune.errors import ArgumentError, UnsupportedModelError

_GradientCheckpointingLayer = inside(CHECKPOINTED_LAYER)

REFUSED_OUTPUTS = {
    "output_attentions": "attention weights are never built",
}


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the ``transformers`` model inside of wrappers: ``torch.compile``, DDP, a DeepSpeed engine, adapters.

    Raises:
        UnsupportedModelError: There is none, or it is wrapped by FSDP1.
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
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is of its kind where nobody imported it
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise FlatParametersError(type(model).__name__)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers that take a key/value cache, in order.

    A layer is a ``GradientCheckpointingLayer`` whose forward has a cache argument. In a model without any, the members
    of its module lists count as layers, also those that take the cache in ``**kwargs`` and pass it to their attention.
    """
    return list(_outermost_layers(model, False)) or list(_outermost_layers(model, True))


def _outermost_layers(module: nn.Module, in_lists: bool) -> Iterator[nn.Module]:
    """Yield the layers inside of a module; with ``in_lists`` the members of module lists count as such."""
    for child in module.children():
        listed = isinstance(module, nn.ModuleList) and in_lists and hands_on_cache(child)
        if listed or (isinstance(child, _GradientCheckpointingLayer) and takes_cache(child)):
            yield child
        else:
            yield from _outermost_layers(child, in_lists)


def carries_states(layer: nn.Module) -> bool:
    """Return True if a module of the layer calls a function that carries a state from token to token."""
    return any(STATE_CALLS & set(code_names(type(module))) for module in layer.modules())


def keeps_keys(layer: nn.Module) -> bool:
    """Return True if a module of the layer seems to call a function that keeps keys and values."""
    return any(KEY_CALLS & set(code_names(type(module))) for module in layer.modules())


def both_at_once(model: nn.Module) -> str | None:
    """Return the class of a decoder layer that keeps keys and values and carries a state too, or None."""
    found = (type(layer).__name__ for layer in decoder_layers(model) if carries_states(layer) and keeps_keys(layer))
    return next(found, None)


def check_streamable(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Refuse models that are known not to stream exactly."""
    name = type(model).__name__
    _refuse_flat_parameters(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; only causal decoders are streamed")
    if not layers:
        raise UnsupportedModelError(
            f"{name} has no decoder layer with a key/value cache, so there is nothing to stream"
        )
    own = own_attention(model, layers)
    if own is not None and own not in FORMS:
        raise UnsupportedModelError(
            f"{name} computes its attention itself, by {own!r}, which does not know the tile of a chunk",
            fix="load it with attn_implementation='eager'",
        )
    configs = attention_configs(model, layers)
    if own is None:
        for config in configs:
            _check_attention(name, attention_of(config))
    if isinstance(model, inside(MTP_MODEL)):
        raise UnsupportedModelError(
            f"{name} holds layers for multi-token prediction, which only draft: transformers gives them no loss",
            fix="stream the causal language model they belong to",
        )
    for layer in layers:
        if "forward" in layer.__dict__:
            raise UnsupportedModelError(
                f"{name} has a {type(layer).__name__} whose forward was replaced on the instance (a device map of "
                "accelerate does that, and so do patches); chunks would go around it",
                fix="load the model onto one device, or undo the patch",
            )
        for module in layer.modules():
            if any(hasattr(module, state) for state in STATES_IN_MODULES):
                raise UnsupportedModelError(
                    f"{name} has layers whose {type(module).__name__} keeps a state in the module itself, which no "
                    "chunk can be given"
                )
            if _iterates(module):
                raise UnsupportedModelError(
                    f"{name} has a spectral norm in its {type(layer).__name__}, which takes a step of its power "
                    "iteration in each call, so one for each chunk",
                    fix="remove it, or train without streaming",
                )
            if isinstance(module, nn.modules.batchnorm._NormBase):
                raise UnsupportedModelError(
                    f"{name} has a {type(module).__name__} in its {type(layer).__name__}; its statistic is of "
                    "the whole sequence or batch, not a sum over chunks"
                )
    for flag, why in REFUSED_OUTPUTS.items():
        if any(getattr(config, flag, False) for config in configs):
            raise UnsupportedModelError(
                f"{name} is configured with {flag}=True, but {why}", fix=f"set model.config.{flag} = False"
            )


def _iterates(module: nn.Module) -> bool:
    """Return True for a spectral norm, as a parametrisation or as a hook."""
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def _check_attention(model: str, name: str | None) -> None:
    """Refuse an attention function that is not one of ``transformers``' own: ours would be used in its place."""
    if name is None or is_ours(name) or name.startswith(HUB_KERNELS):
        return
    function = inside(ATTENTIONS).get(name)
    known = name in KNOWN_ATTENTION and str(getattr(function, "__module__", "transformers.")).startswith(
        "transformers."
    )
    if not known:
        raise UnsupportedModelError(
            f"{model} attends by {name!r}, a function that somebody registered; chunk by chunk StreamTune's own "
            "attention would be used in its place, and may compute something else",
            fix=f"call model.set_attn_implementation() with one of {', '.join(KNOWN_ATTENTION)}: these compute the "
            "same, and streaming stands in for them",
        )


def owners(model: PreTrainedModel, layers: list[nn.Module]) -> list[PreTrainedModel]:
    """Return the models that contain any of the layers, the outermost first."""
    inside = {id(layer) for layer in layers}
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(id(child) in inside for child in module.modules())
    ]


def own_attention(model: PreTrainedModel, layers: list[nn.Module]) -> str | None:
    """Return the attention of layers that do not use ``transformers``' ``AttentionInterface``; None for others."""
    owner = owners(model, layers)[-1]
    return None if chooses_attention(owner) else str(attention_of(owner.config))


def attention_configs(model: PreTrainedModel, layers: list[nn.Module]) -> list[Any]:
    """Return the configs from which the decoder and its layers read their attention implementation, each once."""
    found: list[Any] = [model.config.get_text_config(decoder=True)]
    found += [module.config for module in owners(model, layers)]
    for layer in layers:
        found += [m.config for m in layer.modules() if hasattr(m, "config") and names_attention(m.config)]
    return list({id(config): config for config in found}.values())


def form_for(ranks: SequenceParallel, model: Any, layers: list[nn.Module], head: bool) -> str:
    """Return ``ulysses`` or ``ring`` for this model; ``head`` is True if its head is streamed."""
    name = type(model).__name__
    if not head:
        raise ArgumentError("ranks that share a sequence share its loss: the head must be streamed, head=True")
    if (own := own_attention(model, layers)) is not None:
        raise UnsupportedModelError(
            f"{name} computes its attention itself ({own}), so ranks cannot share its sequence",
            fix="set sequence_parallel_size: 1",
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters and not all(
        carries_states(layer) and not keeps_keys(layer) for layer in layers
    ):
        raise UnsupportedModelError(
            f"{name} takes no position_ids, so a rank cannot be told where its tokens are",
            fix="set sequence_parallel_size: 1",
        )
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", 0)
    divides = all(count % ranks.size == 0 for count in (heads if isinstance(heads, list | tuple) else [heads]))
    if ranks.form == "ulysses" and not divides:
        raise ArgumentError(
            f"{heads} attention heads of {name} cannot be shared out to {ranks.size} ranks",
            fix="set sequence_parallel: ring, or let sequence_parallel_size divide the heads",
        )
    if ranks.form == "auto":
        return "ulysses" if divides else "ring"
    return ranks.form
