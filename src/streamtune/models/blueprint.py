"""A model's shape without its weights: built on ``meta`` from its configuration, for a step that is only simulated."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.errors import ArgumentError
from streamtune.models.load import (
    DEFAULTS,
    DTYPES,
    ModelOptions,
    build_config,
    check_exists,
    is_memory_error,
    loading_error,
    making_model,
    read_config,
)
from streamtune.models.quantize import quantize
from streamtune.models.safety import check_folder


def blueprint(
    source: str | Mapping[str, Any],
    options: ModelOptions = DEFAULTS,
    *,
    vocab_size: int | None = None,
    trust_remote_code: bool = False,
    new_tokens: int = 0,
) -> PreTrainedModel:
    """Build a causal language model on ``meta``: parameters have shapes and dtypes and take no memory.

    Args:
        source: A hub name or folder, of which the configuration alone is read, or the keys of a configuration.
        options: Dtype, quantisation and positions; weights that are not there are not changed.
        vocab_size: Size of the vocabulary where ``source`` is keys and has none among them.
        trust_remote_code: Allow code that comes with the checkpoint to run.
        new_tokens: Number of rows for tokens beyond those of a checkpoint.

    Raises:
        ArgumentError: There is no such checkpoint, or it is not a configuration of a causal language model.
    """
    remote: dict[str, Any] = {}
    if isinstance(source, str):
        config, remote = read_plain_config(source, trust_remote_code), {"trust_remote_code": trust_remote_code}
        if new_tokens:
            config.get_text_config(decoder=True).vocab_size += new_tokens
    else:
        config = build_config({"vocab_size": vocab_size, **source} if vocab_size else dict(source))
    if options.rope is not None:
        options.rope.apply(config)
    own = getattr(config, "dtype", None)
    wanted = (
        DTYPES[options.dtype] if options.dtype != "auto" else own if isinstance(own, torch.dtype) else torch.float32
    )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, **remote)
    except Exception as error:  # classes of models check little of what they are given
        if is_memory_error(error):
            raise
        if isinstance(source, str):
            raise loading_error("model", source, error) from error
        with making_model(source):
            raise
    if options.quantization is not None:
        quantize(model, options.quantization, torch.device("meta"))
    return model


def read_plain_config(name_or_path: str, trust_remote_code: bool) -> Any:
    """Read the configuration of a checkpoint.

    Raises:
        ArgumentError: There is no such checkpoint, or its weights are quantised already.
    """
    check_exists(name_or_path)
    check_folder(name_or_path, allow_pickle=True, reads_weights=False)
    config = read_config(name_or_path, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ArgumentError(
            f"the weights of '{name_or_path}' are quantised already, and how is not known before they are loaded",
            where="model_name_or_path",
            mend="plan with the checkpoint they were made from, and finetuning_type: qlora",
        )
    return config


def small_like(model: Any, layers: Sequence[nn.Module], *, seed: int) -> PreTrainedModel:
    """Build a model of the first layers of ``model``, enough to have one of each kind, with random weights.

    Args:
        model: With or without adapters, which are left out; its weights are not read.
        layers: Its decoder layers.
        seed: Of the weights. The caller's random state is left as it was.
    """
    base = base_of(model)
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    count = _until_all_kinds(text, layers)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, key, value[:count])
    text.num_hidden_layers = count
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: PreTrainedModel = type(base)._from_config(config, dtype=base.dtype)
    return made.train()


def _until_all_kinds(text: Any, layers: Sequence[nn.Module]) -> int:
    """Return the smallest number of layers, from the first on, that has a layer of every kind."""
    types = getattr(text, "layer_types", None) or [""] * len(layers)
    kinds = [
        (type(layer), kind, tuple((name, tuple(x.shape)) for name, x in layer.named_parameters()))
        for layer, kind in zip(layers, types, strict=False)
    ]
    return max((kinds.index(kind) for kind in kinds), default=0) + 1
