"""Quantise a frozen base model to 8 or 4 bits, to train adapters on it: QLoRA (Dettmers et al., arXiv 2305.14314).

    int8  torchao, weight-only: symmetric, one scale per output channel. CPU and CUDA.
    nf4   bitsandbytes: 4 bits per weight in blocks of 64, block scales in 8 bits ("double quantisation").
          CUDA, and the CPU through the same package.

The weight of every ``nn.Linear`` except the head is quantised, as in the paper, and so are experts that are one 3-D
tensor per layer (:mod:`streamtune.models.packed`). Embedding, norms and biases do not change. Layers are moved to the
device and quantised there one by one, so the unquantised model is never on the device as a whole. Each call dequantises
the weights; forward and backward compute in the activations' dtype.

peft's ``prepare_model_for_kbit_training`` is not used: it turns on gradient checkpointing, and casts all unquantised
weights to fp32. The adapters are fp32, also on bf16 weights (peft's default).

int4 is not supported, because torchao's 4-bit kernels have no backward.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamtune.base.text import show_size
from streamtune.engine.hf_names import QUANTIZERS, fp32_weight_names, hf_internal
from streamtune.errors import ArgumentError
from streamtune.models.adapters.initial_values import LayerQuantizer, LoftqQuantizer
from streamtune.models.model_class import frozen_modules, is_inside
from streamtune.models.packed import PackedExperts, pack_experts, shard_packed_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Package that each quantisation needs; the extra ``streamtune[quant]`` installs both packages."""
QUANTISED = ("Params4bit", "Int8Tensor", "PackedExperts")
"""Class names of quantised weights: in bitsandbytes, in torchao, and of stacked experts."""


def choose_quantization(kind: str, device: torch.device) -> str:
    """Return the quantisation to use, ``nf4`` or ``int8``; ``auto`` is nf4 on an accelerator, int8 on the CPU.

    Raises:
        ArgumentError: The package for this quantisation is not installed.
    """
    chosen = kind if kind != "auto" else "int8" if device.type == "cpu" else "nf4"
    package = PACKAGES[chosen]
    if not _is_installed(package):
        other, theirs = next(item for item in PACKAGES.items() if item[0] != chosen)
        fix = f"pip install {package} (or streamtune[quant])"
        if _is_installed(theirs):
            fix += f", or write quantization: {other} ({theirs} is installed)"
        raise ArgumentError(f"{chosen} needs {package}, which is not installed", where="quantization", fix=fix)
    return chosen


def quantize(
    model: PreTrainedModel, kind: str, device: torch.device, *, layer_quantizer: LayerQuantizer | None = None
) -> None:
    """Quantise the linear layers and experts of ``model`` in place, freeze them and move them to ``device``.

    Other weights do not change. A model with an already quantised checkpoint is not quantised again.

    Args:
        model: Model with its weights.
        kind: Quantisation, ``nf4`` or ``int8``.
        device: Device of the quantised weights; on ``meta`` no value is computed.
        layer_quantizer: Quantiser of linear layers that changes their weights first (LoftQ).

    Raises:
        ArgumentError: The checkpoint is already quantised, and ``kind`` differs or ``layer_quantizer`` is not None.
    """
    current = quantization_kind(model)
    if current is not None and layer_quantizer is not None:
        raise ArgumentError(
            f"this checkpoint is already quantised ({current}), but adapters of kind loftq need its original weights: "
            "they start from the quantisation error",
            where="adapter_type",
            fix="use the unquantised checkpoint, or write adapter_type: lora",
        )
    if current is None:
        if isinstance(layer_quantizer, LoftqQuantizer):
            layer_quantizer.record_layers(model)
        _quantize_layers(model, kind, device, layer_quantizer)
        if layer_quantizer is not None:
            layer_quantizer.store_factors_on(model)
    elif current != kind:
        raise ArgumentError(
            f"this checkpoint is already quantised as {current}, but {kind} is requested",
            where="quantization",
            fix=f"write quantization: {current}" if current in PACKAGES else "use the unquantised checkpoint",
        )
    for module in model.modules():
        # On CPUs with AVX512-BF16 bitsandbytes repacks a weight for another kernel at its first use in evaluation. That
        # kernel rounds differently and has no backward, and the weight stays repacked when training continues.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization_kind(model: nn.Module) -> str | None:
    """Return the quantisation of a model: ``int8``, ``nf4``, the library's name of another quantisation, or None."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            return str(weight.quant_type)
        if type(weight).__name__ == "Int8Tensor" and weight.act_quant_kwargs is None:
            return "int8"
    quantizer = getattr(model, "hf_quantizer", None)
    return None if quantizer is None else str(quantizer.quantization_config.quant_method.value)


def unquantized_experts_note(model: nn.Module) -> str | None:
    """Return a note if a quantised model has stacked experts that are not quantised, else None.

    Such experts occur in a checkpoint that is already quantised, and in a model class that keeps experts in fp32.
    """
    if quantization_kind(model) is None:
        return None
    stacked = [p for _, _, p in stacked_experts(model) if type(p) is nn.Parameter and not p.requires_grad]
    if not stacked:
        return None
    expert_bytes, model_bytes = sum(p.nbytes for p in stacked), sum(_parameter_bytes(p) for p in model.parameters())
    dtype = str(stacked[0].dtype).removeprefix("torch.")
    return (
        f"linear layers are quantised, but experts stay in {dtype}: {show_size(expert_bytes)} of the model's "
        f"{show_size(model_bytes)}"
    )


def _parameter_bytes(parameter: torch.Tensor) -> int:
    if isinstance(parameter, PackedExperts):
        return sum(part.nbytes for part in parameter.packed_tensors())
    packed: torch.Tensor = getattr(parameter, "qdata", parameter)  # the wrapper of torchao's int8 has no bytes
    return packed.nbytes


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield (name, module, parameter) for experts stacked in one 3-D parameter per layer."""
    for name, module in model.named_modules():
        if "expert" not in f"{name}.{type(module).__name__}".lower() or isinstance(module, nn.modules.conv._ConvNd):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and parameter.is_floating_point():
                yield f"{name}.{key}", module, parameter


def logical_numel(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter before 4-bit packing (bitsandbytes) and sharding (ZeRO-3)."""
    state = getattr(parameter, "quant_state", None)
    numel: int = getattr(parameter, "ds_numel", parameter.numel())
    return numel if state is None else state.shape.numel()


def is_quantized(weight: Any) -> bool:
    return type(weight).__name__ in QUANTISED


def dequantize_weight(weight: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a quantised weight as a plain tensor in its original shape, dequantised in ``dtype``."""
    if isinstance(weight, PackedExperts):
        return weight.dequantize(dtype)
    if type(weight).__name__ == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(weight.quant_state)
        state.dtype = dtype  # else the weight is rounded to its original dtype
        return dequantize_4bit(weight.data, state).to(dtype)
    return weight.qdata.to(dtype) * weight.scale.to(dtype)


def shard_packed_weights(model: nn.Module, *, keeps_parameter_objects: bool) -> None:
    """Make packed weights shardable: their packed bytes become parameters of the model's floating-point dtype.

    ZeRO-3 and FSDP2 shard only floating-point parameters. Block scales are not sharded: each rank's module has all
    scales, a 32nd of the size of the packed weights.

    ``keeps_parameter_objects`` is True for a backend that gathers weights into the sharded parameter (ZeRO-3), False
    for a backend that replaces the parameter (FSDP2).
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad), torch.float32)
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ != "Params4bit":
            continue
        if weight.nbytes % dtype.itemsize:
            raise ArgumentError(
                f"the 4-bit weight of {name} has {weight.nbytes:,} bytes, not a multiple of the size of {dtype}",
                where="finetuning_type",
                fix="write deepspeed: zero2 (each rank keeps the quantised base), or finetuning_type: lora",
            )
        layer: Any = module
        layer.quant_state, layer.quant_storage = weight.quant_state, dtype
        packed = weight.data.view(-1).view(torch.uint8).view(dtype)[:, None]
        if keeps_parameter_objects:
            weight.data, weight.quant_storage = packed, dtype
        else:  # bitsandbytes reads the scales from the module if the weight has none
            layer.weight = nn.Parameter(packed, requires_grad=False)
    sharded: set[int] = set()
    for module in list(model.modules()):  # wrappers of adapters come before their base layers
        inner: Any = module
        while isinstance(base := getattr(inner, "base_layer", None), nn.Module):
            inner = base
        if id(inner) not in sharded and any(isinstance(x, PackedExperts) for x in inner._parameters.values()):
            sharded.add(id(inner))
            shard_packed_experts(module, dtype)


def _quantize_layers(
    model: PreTrainedModel, kind: str, device: torch.device, layer_quantizer: LayerQuantizer | None
) -> None:
    linear_layers = list(_linear_layers_to_quantize(model))
    if not linear_layers:
        raise ArgumentError(
            f"{type(model).__name__} has no nn.Linear layers to quantise",
            where="finetuning_type",
            fix="write finetuning_type: lora",
        )
    (_quantize_to_int8 if kind == "int8" else _quantize_to_nf4)(model, linear_layers, device, layer_quantizer)
    fp32_names, hidden_size = fp32_weight_names(model), model.config.get_text_config(decoder=True).hidden_size
    for name, module, parameter in list(stacked_experts(model)):
        if fp32_names.isdisjoint(name.split(".")):
            key = name.rpartition(".")[2]
            transposed = _is_output_dim_last(module, key, parameter.shape, hidden_size)
            packed = pack_experts(parameter, kind, device, transposed=transposed)
            module._parameters[key] = nn.Parameter(packed, requires_grad=False)


def _is_output_dim_last(module: nn.Module, key: str, shape: torch.Size, hidden_size: int) -> bool:
    """Return True if experts are ``[E, in, out]``, by the module's ``is_transposed``, else by the hidden size."""
    if (declared := getattr(module, "is_transposed", None)) is not None:
        return bool(declared)
    first, last = (shape[2], shape[1]) if key.startswith("down") else (shape[1], shape[2])
    return first == hidden_size != last


def _linear_layers_to_quantize(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, layer) for each ``nn.Linear`` except the head, layers tied to the embedding, and fp32 layers."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    excluded = {id(module.weight) for module in ends if hasattr(module, "weight")}
    fp32_names, frozen = fp32_weight_names(model), frozen_modules(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or id(module.weight) in excluded:
            continue
        if fp32_names.isdisjoint(name.split(".")) and not is_inside(name, frozen):
            yield name, module


def _quantize_to_int8(
    model: Any, linear_layers: list[tuple[str, nn.Linear]], device: torch.device, layer_quantizer: LayerQuantizer | None
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import TorchAoConfig

    config = Int8WeightOnlyConfig(set_inductor_config=False)

    def quantise(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
        alone = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        alone.weight = nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(alone, config)
        return alone.weight, dequantize_weight(alone.weight)

    for name, linear in linear_layers:
        linear.to(device).requires_grad_(False)
        if layer_quantizer is None:
            quantize_(linear, config)
        else:
            linear.weight = layer_quantizer.quantize_layer(name, linear.weight.data, quantise)
    # As from_pretrained does: peft reads here how to quantise merged weights again.
    model.hf_quantizer = hf_internal(QUANTIZERS).from_config(TorchAoConfig(config), pre_quantized=False)


def _quantize_to_nf4(
    model: Any, linear_layers: list[tuple[str, nn.Linear]], device: torch.device, layer_quantizer: LayerQuantizer | None
) -> None:
    import bitsandbytes

    settings = {"quant_type": "nf4", "compress_statistics": True}

    def quantise(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
        packed = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings).to(device)
        return packed, dequantize_weight(packed)

    for name, linear in linear_layers:
        quantised = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=linear.weight.dtype,
            device="meta",
            **settings,
        )
        if layer_quantizer is None:
            quantised.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **settings)
        else:
            quantised.weight = layer_quantizer.quantize_layer(name, linear.weight.data.to(device), quantise)
        quantised.bias = linear.bias
        parent, _, last = name.rpartition(".")
        if device.type == "meta":  # bitsandbytes does not quantise on meta
            quantised.weight = _nf4_weight_on_meta(linear.weight)
        else:
            quantised = quantised.to(device)  # moving it quantises it
        setattr(model.get_submodule(parent), last, quantised.requires_grad_(False))
    model.is_loaded_in_4bit = True  # as from_pretrained does: peft reads this, not the layer's class


def _nf4_weight_on_meta(weight: torch.Tensor) -> Any:
    import bitsandbytes

    settings = {"quant_type": "nf4", "compress_statistics": True, "blocksize": 64}
    # bitsandbytes caches the table from its first call, whose tensor must not be on meta.
    bitsandbytes.functional.quantize_4bit(torch.zeros(64, 64), **settings)
    packed, state = bitsandbytes.functional.quantize_4bit(weight.data, **settings)
    state.offset = torch.zeros(())  # read when the state is saved
    return bitsandbytes.nn.Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **settings)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
