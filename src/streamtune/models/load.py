"""Make a causal language model: from a checkpoint, from a configuration, or on ``meta`` without values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from streamtune.base.adapters import base_of
from streamtune.errors import ArgumentError
from streamtune.models.adapters.initial_values import LayerQuantizer
from streamtune.models.config import (
    build_config,
    check_path_exists,
    read_config,
    requested_vocab_size,
    wrap_constructor_errors,
    wrap_loading_errors,
)
from streamtune.models.folder import check_model_folder, read_without_mmap, refuse_file_changes
from streamtune.models.frozen_parts import TrainedParts, freeze_parts, narrow_frozen_weights
from streamtune.models.model_class import auto_class_of
from streamtune.models.positions import RopeChange
from streamtune.models.quantize import logical_numel, quantize
from streamtune.models.weights_check import (
    DRAFT_LAYERS,
    check_file_dtypes,
    check_loading_report,
    check_quantization_trainable,
    check_weights_finite,
    write_untied_embeddings,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelOptions:
    """Options for making a model from a checkpoint or a configuration."""

    dtype: str = "auto"
    """Dtype of the weights: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the checkpoint's dtype, or float32 if
    there is no checkpoint."""
    quantization: str | None = None
    """Quantisation of frozen layers and experts, ``nf4`` or ``int8``, or None."""
    rope: RopeChange | None = None
    """Change to the rotary positions in the configuration."""
    layer_quantizer: LayerQuantizer | None = None
    """Quantiser that changes weights before they are quantised (LoftQ); None quantises the loaded weights."""
    trained: TrainedParts | None = None
    """Parameters to train; None trains all, or for a vision-language model, all of its language model."""

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The torch dtype of the weights; None for ``auto``."""
        return None if self.dtype == "auto" else DTYPES[self.dtype]


DEFAULT_OPTIONS = ModelOptions()


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of a model; a shared parameter counts once."""

    total: int
    trainable: int


def count_parameters(model: torch.nn.Module) -> ParameterCount:
    """Return the number of all parameters and of trainable parameters; 4-bit weights are counted before packing.

    Example:
        >>> count_parameters(torch.nn.Linear(3, 2)).total
        8
    """
    sizes = [(full_parameter_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return ParameterCount(sum(n for n, _ in sizes), sum(n for n, trainable in sizes if trainable))


def full_parameter_size(parameter: torch.Tensor) -> int:
    """Return the number of elements of a whole parameter, even if this rank has only a shard of the parameter."""
    sharded_numel: int | None = getattr(parameter, "ds_numel", None)  # a parameter sharded by ZeRO-3 is empty
    return logical_numel(parameter) if sharded_numel is None else sharded_numel


def unloaded_layers_warning(model: Any) -> str | None:
    """Return a warning if the checkpoint of ``model`` has layers that ``transformers`` does not load, else None.

    These layers predict several tokens ahead (multi-token prediction). Causal language models of ``transformers``
    ignore their weights without a warning.
    """
    config = model.config.get_text_config(decoder=True)
    counts = {name: getattr(config, name, None) for name in DRAFT_LAYERS}
    name = next((name for name, count in counts.items() if isinstance(count, int) and count > 0), None)
    if name is None or not model.config.name_or_path:
        return None
    return (
        f"the checkpoint has layers for multi-token prediction ({name}: {counts[name]}); transformers does not load "
        "them, so they are neither trained nor saved"
    )


def load_model(
    name_or_path: str,
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load a model from a local folder, with ``config.json`` and safetensors, or by its name on the hub.

    Args:
        name_or_path: Folder, or name on the hub.
        options: Dtype, quantisation and rotary positions of the model.
        device: Device of the weights.
        trust_remote_code: True allows Python code in the checkpoint to run.
        allow_pickle: True allows pickled weights, from which only tensors are read.

    Raises:
        ArgumentError: The checkpoint does not exist, is unsafe to read (``models.folder``), lacks weights, cannot be
            quantised as requested, or was written to while it was read.
    """
    check_path_exists(name_or_path)
    with refuse_file_changes(name_or_path), read_without_mmap(name_or_path):
        safetensors = check_model_folder(name_or_path, allow_pickle=allow_pickle)
        config = read_config(name_or_path, trust_remote_code)
        if options.rope is not None and config is not None:
            options.rope.apply(config)
        check_quantization_trainable(name_or_path, config, options.quantization, device)
        with wrap_loading_errors(name_or_path):
            model, report = auto_class_of(config).from_pretrained(
                name_or_path,
                config=config,
                dtype=options.torch_dtype or "auto",
                trust_remote_code=trust_remote_code,
                use_safetensors=True if safetensors else None,  # False would refuse safetensors next to a pickle
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
            )
        check_loading_report(name_or_path, model, report)
        write_untied_embeddings(model)
        check_file_dtypes(name_or_path, config)
        check_weights_finite(model, name_or_path)
        freeze_parts(model, options.trained)
        narrow_frozen_weights(model, options.trained)
        if options.quantization is not None:  # before the weights are copied: mapped weights are read layer by layer
            quantize(model, options.quantization, torch.device(device), layer_quantizer=options.layer_quantizer)
        return _copy_mapped_weights(model.to(device))


def _copy_mapped_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Replace weights and buffers that may be memory-mapped from a file by copies; return the model.

    A write to the file would change mapped weights during training. Mapped weights also have the file's alignment, for
    which CPU kernels may round differently. Then a resumed run would not repeat the losses of an uninterrupted run.
    """
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                in_file = buffer is not None and name not in module._non_persistent_buffers_set
                if in_file and buffer.device.type == "cpu":
                    copies.setdefault(id(buffer), buffer.clone(memory_format=torch.preserve_format))
                    module._buffers[name] = copies[id(buffer)]
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and type(parameter) is torch.nn.Parameter:  # quantised weights are new
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
    return model


def init_model(
    config: Mapping[str, Any],
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    vocab_size: int,
    token_ids: Mapping[str, int],
    device: str = "cpu",
    seed: int,
) -> PreTrainedModel:
    """Build a model from a configuration, with random weights, without a download.

    Weights are drawn on the CPU, so they do not depend on ``device``. The global generator state does not change.

    Args:
        config: ``model_type`` and keys of its transformers configuration class. Missing keys have the class's defaults.
        options: Dtype, quantisation and rotary positions of the model.
        vocab_size: Number of the tokenizer's tokens; ``config`` may set a larger vocabulary.
        token_ids: Values of ``bos_token_id``, ``eos_token_id`` and ``pad_token_id``.
        device: Device of the weights.
        seed: Seed of the random weights.
    """
    keys = {**token_ids, **config, "vocab_size": requested_vocab_size(config, vocab_size)}
    hf_config = build_config(keys)
    if options.rope is not None:
        options.rope.apply(hf_config)
    with torch.random.fork_rng(), wrap_constructor_errors(config):
        torch.manual_seed(seed)
        model = auto_class_of(hf_config).from_config(hf_config, dtype=options.torch_dtype or torch.float32)
    recompute_tables(model)
    freeze_parts(model, options.trained)
    check_weights_finite(model, where="model.init")
    if options.quantization is not None:
        quantize(model, options.quantization, torch.device(device), layer_quantizer=options.layer_quantizer)
    return model.to(device)


def recompute_tables(model: PreTrainedModel) -> None:
    """Compute the tables of a model from ``from_config`` again, in float32 (GPT-J, CodeGen).

    ``from_config`` computes them in the dtype of the weights, and bfloat16 has only 8 bits for a position.
    ``from_pretrained`` computes them in float32, and they are not saved. So a saved model would differ.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for module in model.modules():
            if module._non_persistent_buffers_set and next(module.parameters(), None) is None:
                model._init_weights(module)


def build_meta_model(
    source: str | Mapping[str, Any],
    options: ModelOptions = DEFAULT_OPTIONS,
    *,
    vocab_size: int | None = None,
    trust_remote_code: bool = False,
    new_token_count: int = 0,
) -> PreTrainedModel:
    """Build a causal language model on ``meta``: parameters have shapes and dtypes, and need no memory.

    Args:
        source: Folder or hub name, from which only the configuration is read; or the keys of a configuration.
        options: Dtype, quantisation and rotary positions of the model.
        vocab_size: Vocabulary size, if ``source`` is a configuration without ``vocab_size``.
        trust_remote_code: True allows Python code in the checkpoint to run.
        new_token_count: Number of tokens added to the vocabulary of a checkpoint.

    Example:
        >>> shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
        >>> build_meta_model(shape).device.type
        'meta'
    """
    remote: dict[str, Any] = {}
    if isinstance(source, str):
        config, remote = read_unquantized_config(source, trust_remote_code), {"trust_remote_code": trust_remote_code}
        if new_token_count:
            config.get_text_config(decoder=True).vocab_size += new_token_count
    else:
        config = build_config({"vocab_size": vocab_size, **source} if vocab_size else dict(source))
    if options.rope is not None:
        options.rope.apply(config)
    config_dtype = getattr(config, "dtype", None)
    dtype = options.torch_dtype or (config_dtype if isinstance(config_dtype, torch.dtype) else torch.float32)
    with (
        wrap_loading_errors(source) if isinstance(source, str) else wrap_constructor_errors(source),
        torch.device("meta"),
    ):
        model = auto_class_of(config).from_config(config, dtype=dtype, **remote)
    freeze_parts(model, options.trained)
    narrow_frozen_weights(model, options.trained)
    if options.quantization is not None:
        quantize(model, options.quantization, torch.device("meta"))
    return model


def read_unquantized_config(name_or_path: str, trust_remote_code: bool) -> Any:
    check_path_exists(name_or_path)
    check_model_folder(name_or_path, allow_pickle=True, reads_weights=False)
    config = read_config(name_or_path, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ArgumentError(
            f"the weights of '{name_or_path}' are already quantised, so their layout is known only after loading",
            where="model_name_or_path",
            fix="use the unquantised checkpoint, with finetuning_type: qlora",
        )
    return config


def make_small_copy(model: Any, layers: Sequence[nn.Module], *, seed: int) -> PreTrainedModel:
    """Return a model of the class of ``model`` with random weights and only a few first layers.

    The number of layers is the smallest that includes each kind of layer. Adapters are left out, and no weights are
    read. The global generator state does not change.
    """
    base = base_of(model)
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    count = _layer_count_with_all_kinds(text, layers)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(text, key, value[:count])
    text.num_hidden_layers = count
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made: PreTrainedModel = type(base)._from_config(config, dtype=base.dtype)
    return made.train()


def _layer_count_with_all_kinds(config: Any, layers: Sequence[nn.Module]) -> int:
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [
        (type(layer), kind, tuple((name, tuple(x.shape)) for name, x in layer.named_parameters()))
        for layer, kind in zip(layers, types, strict=False)
    ]
    return max((kinds.index(kind) for kind in kinds), default=0) + 1
