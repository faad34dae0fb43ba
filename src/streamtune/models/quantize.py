"""A frozen base in 8 or 4 bits, to train adapters on: QLoRA (Dettmers et al., arXiv 2305.14314).

    int8  torchao, weight-only: one scale to an output channel, symmetric. CPU and CUDA.
    nf4   bitsandbytes: 4 bits to a weight in blocks of 64, scales of blocks in 8 bits ("double quantisation").
          CUDA, and the CPU through the same package.

The weight of every ``nn.Linear`` but the head is quantised, as in the paper, and so are experts that are one 3-D tensor
a layer (:mod:`streamtune.models.packed`). Embedding, norms and biases stay as they are. One layer after the other is
moved to the device and quantised there, so the device never holds the unquantised model. Forward and backward compute
in the dtype of the activations, with weights dequantised in each call: the same for a chunk as for the sequence.

peft's ``prepare_model_for_kbit_training`` is not used. It turns on gradient checkpointing, which streaming replaces,
and casts the rest of a bitsandbytes base to fp32: twice the bytes for embedding and head, norms that give fp32 to
layers made for bf16, and adapters trained on another model than the one they are used with. The adapters themselves are
fp32, also on bf16 weights (peft's default).

There is no int4. torchao's 4-bit kernels have no backward (``aten::_weight_int4pack_mm_for_cpu``), peft refuses its
``Int4Tensor``, and its form that does run on every device spends a byte on each weight, as int8 does.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamtune.base.text import show_size
from streamtune.engine.hf_names import QUANTIZERS, inside, kept_wide
from streamtune.errors import ArgumentError
from streamtune.models.adapters.start import LoftqStart, QuantisationChange
from streamtune.models.packed import PackedExperts, divide_experts, pack_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGES = {"int8": "torchao", "nf4": "bitsandbytes"}
"""Package that each kind needs; the extra ``streamtune[quant]`` installs both."""
QUANTISED = ("Params4bit", "Int8Tensor", "PackedExperts")
"""Classes of a quantised weight: of bitsandbytes, of torchao, and of experts that are one tensor."""


def choose_quantization(kind: str, device: torch.device) -> str:
    """Return ``nf4`` or ``int8``, whose package is installed; ``auto`` is nf4 on an accelerator, int8 on the CPU."""
    chosen = kind if kind != "auto" else "int8" if device.type == "cpu" else "nf4"
    package = PACKAGES[chosen]
    if not _installed(package):
        other, theirs = next(item for item in PACKAGES.items() if item[0] != chosen)
        fix = f"pip install {package} (or streamtune[quant])"
        if _installed(theirs):
            fix += f", or write quantization: {other}, which is here"
        raise ArgumentError(f"{chosen} needs {package}, which is not installed", where="quantization", fix=fix)
    return chosen


def quantize(
    model: PreTrainedModel, kind: str, device: torch.device, *, change: QuantisationChange | None = None
) -> None:
    """Quantise the linear layers and the experts of ``model`` in place and freeze them; they move to ``device``.

    The other weights stay. A model that came quantised from its checkpoint is left as it is, and refused if it has
    another kind or ``change`` is given: a change of the weights of linear layers before they are quantised.
    """
    before = quantization(model)
    if before is not None and change is not None:
        raise ArgumentError(
            f"the weights of this checkpoint are quantised already ({before}), and adapters of kind loftq start from "
            "what that took from them",
            where="adapter_type",
            fix="use the checkpoint they were made from, or write adapter_type: lora",
        )
    if before is None:
        if isinstance(change, LoftqStart):
            change.prepare(model)
        _convert(model, kind, device, change)
        if change is not None:
            change.finish(model)
    elif before != kind:
        raise ArgumentError(
            f"the weights of this checkpoint are quantised already ({before}), and {kind} is asked for",
            where="quantization",
            fix=f"write quantization: {before}" if before in PACKAGES else "use the checkpoint they were made from",
        )
    for module in model.modules():
        # On CPUs with AVX512-BF16 bitsandbytes packs a weight for another kernel when it is first used in evaluation.
        # That kernel rounds differently and has no backward, and the weight stays packed when training goes on.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(model: nn.Module) -> str | None:
    """Return the quantisation of a model: ``int8``, ``nf4``, the library's name for another kind, or None."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            return str(weight.quant_type)
        if type(weight).__name__ == "Int8Tensor" and weight.act_quant_kwargs is None:
            return "int8"
    quantizer = getattr(model, "hf_quantizer", None)
    return None if quantizer is None else str(quantizer.quantization_config.quant_method.value)


def left_whole(model: nn.Module) -> str | None:
    """Return a note if a quantised model has experts in one tensor that are not quantised, else None.

    It came quantised from its checkpoint, or keeps them in fp32.
    """
    if quantization(model) is None:
        return None
    stacked = [p for _, _, p in stacked_experts(model) if type(p) is nn.Parameter and not p.requires_grad]
    if not stacked:
        return None
    size, whole = sum(p.nbytes for p in stacked), sum(_nbytes(p) for p in model.parameters())
    dtype = str(stacked[0].dtype).removeprefix("torch.")
    return (
        f"linear layers are quantised; experts in one tensor a layer stay in {dtype}: {show_size(size)} of the model's "
        f"{show_size(whole)}"
    )


def _nbytes(parameter: torch.Tensor) -> int:
    """Return the bytes that hold a parameter, without the scales of its blocks."""
    if isinstance(parameter, PackedExperts):
        return sum(part.nbytes for part in parameter.parts())
    packed: torch.Tensor = getattr(parameter, "qdata", parameter)  # the wrapper of torchao's int8 has no bytes
    return packed.nbytes


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield the experts that are one 3-D tensor of a layer: name, module and tensor."""
    for name, module in model.named_modules():
        if "expert" not in f"{name}.{type(module).__name__}".lower() or isinstance(module, nn.modules.conv._ConvNd):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and parameter.is_floating_point():
                yield f"{name}.{key}", module, parameter


def logical_size(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter: bitsandbytes packs two in a byte, ZeRO-3 leaves a rank a part."""
    state = getattr(parameter, "quant_state", None)
    whole: int = getattr(parameter, "ds_numel", parameter.numel())
    return whole if state is None else state.shape.numel()


def is_quantised(weight: Any) -> bool:
    return type(weight).__name__ in QUANTISED


def dequantised(weight: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the dequantised weight in its shape, computed in ``dtype`` from its parts."""
    if isinstance(weight, PackedExperts):
        return weight.written(dtype)
    if type(weight).__name__ == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(weight.quant_state)
        state.dtype = dtype  # else the weight is rounded to its original dtype
        return dequantize_4bit(weight.data, state).to(dtype)
    return weight.qdata.to(dtype) * weight.scale.to(dtype)


def divide_packed(model: nn.Module, *, keeps_objects: bool) -> None:
    """Let ranks divide the 4-bit weights of a model: as numbers of the dtype of its other weights, with the same bits.

    Engines that share weights divide floating-point parameters. The scales of blocks stay whole on each rank, with the
    module: a 32nd of the packed weights.

    ``keeps_objects`` is True for an engine that gathers weights into the parameter that it divided (ZeRO-3), False for
    one that replaces it (FSDP2).
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad), torch.float32)
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if type(weight).__name__ != "Params4bit":
            continue
        if weight.nbytes % dtype.itemsize:
            raise ArgumentError(
                f"the 4-bit weight of {name} has {weight.nbytes:,} bytes, which do not make whole numbers of {dtype}",
                where="finetuning_type",
                fix="write deepspeed: zero2 (each rank keeps the quantised base), or finetuning_type: lora",
            )
        held: Any = module
        held.quant_state, held.quant_storage = weight.quant_state, dtype
        packed = weight.data.view(-1).view(torch.uint8).view(dtype)[:, None]
        if keeps_objects:
            weight.data, weight.quant_storage = packed, dtype
        else:  # bitsandbytes takes the scales from the module if the weight has none
            held.weight = nn.Parameter(packed, requires_grad=False)
    divided: set[int] = set()
    for module in list(model.modules()):  # wrappers of adapters come before their base layers
        inner: Any = module
        while isinstance(below := getattr(inner, "base_layer", None), nn.Module):
            inner = below
        if id(inner) not in divided and any(isinstance(x, PackedExperts) for x in inner._parameters.values()):
            divided.add(id(inner))
            divide_experts(module, dtype)


def _convert(model: PreTrainedModel, kind: str, device: torch.device, change: QuantisationChange | None) -> None:
    linears = list(_linears(model))
    if not linears:
        raise ArgumentError(
            f"{type(model).__name__} has no nn.Linear layers to quantise", where="finetuning_type", fix="write lora"
        )
    (_to_int8 if kind == "int8" else _to_nf4)(model, linears, device, change)
    wide, width = kept_wide(model), model.config.get_text_config(decoder=True).hidden_size
    for name, module, parameter in list(stacked_experts(model)):
        if wide.isdisjoint(name.split(".")):
            key = name.rpartition(".")[2]
            transposed = _outputs_last(module, key, parameter.shape, width)
            packed = pack_experts(parameter, kind, device, transposed=transposed)
            module._parameters[key] = nn.Parameter(packed, requires_grad=False)


def _outputs_last(module: nn.Module, key: str, shape: torch.Size, width: int) -> bool:
    """Return True for experts ``[E, in, out]``: by their class, or else by the width of the model."""
    if (said := getattr(module, "is_transposed", None)) is not None:
        return bool(said)
    first, last = (shape[2], shape[1]) if key.startswith("down") else (shape[1], shape[2])
    return first == width != last


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield each ``nn.Linear`` with its name, but the head, any tied to the embedding, and those kept in fp32."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    kept = {id(module.weight) for module in ends if hasattr(module, "weight")}
    names = kept_wide(model)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and id(module.weight) not in kept and names.isdisjoint(name.split(".")):
            yield name, module


def _to_int8(
    model: Any, linears: list[tuple[str, nn.Linear]], device: torch.device, change: QuantisationChange | None
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import TorchAoConfig

    config = Int8WeightOnlyConfig(set_inductor_config=False)

    def quantise(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
        alone = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        alone.weight = nn.Parameter(weight.clone(), requires_grad=False)
        quantize_(alone, config)
        return alone.weight, dequantised(alone.weight)

    for name, linear in linears:
        linear.to(device).requires_grad_(False)
        if change is None:
            quantize_(linear, config)
        else:
            linear.weight = change.quantised(name, linear.weight.data, quantise)
    # As after from_pretrained: peft reads here how to quantise merged weights again.
    model.hf_quantizer = inside(QUANTIZERS).from_config(TorchAoConfig(config), pre_quantized=False)


def _to_nf4(
    model: Any, linears: list[tuple[str, nn.Linear]], device: torch.device, change: QuantisationChange | None
) -> None:
    import bitsandbytes

    settings = {"quant_type": "nf4", "compress_statistics": True}

    def quantise(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
        packed = bitsandbytes.nn.Params4bit(weight, requires_grad=False, **settings).to(device)
        return packed, dequantised(packed)

    for name, linear in linears:
        quantised = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=linear.weight.dtype,
            device="meta",
            **settings,
        )
        if change is None:
            quantised.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **settings)
        else:
            quantised.weight = change.quantised(name, linear.weight.data.to(device), quantise)
        quantised.bias = linear.bias
        parent, _, last = name.rpartition(".")
        if device.type == "meta":  # bitsandbytes does not quantise there
            quantised.weight = _packed_on_meta(linear.weight)
        else:
            quantised = quantised.to(device)  # moving it quantises it
        setattr(model.get_submodule(parent), last, quantised.requires_grad_(False))
    model.is_loaded_in_4bit = True  # as after from_pretrained: peft reads this, not the layer's class


def _packed_on_meta(weight: torch.Tensor) -> Any:
    """Return a 4-bit weight on ``meta``, with shapes and no values, for a model that is only simulated."""
    import bitsandbytes

    settings = {"quant_type": "nf4", "compress_statistics": True, "blocksize": 64}
    # bitsandbytes keeps its table of values from the first tensor, which must be a real one.
    bitsandbytes.functional.quantize_4bit(torch.zeros(64, 64), **settings)
    packed, state = bitsandbytes.functional.quantize_4bit(weight.data, **settings)
    state.offset = torch.zeros(())  # read when the state is saved
    return bitsandbytes.nn.Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **settings)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
