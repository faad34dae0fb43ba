"""Merge adapters into the weights of a model, one module at a time; and compute a model in fp32.

peft's merge rules are applied to LoRA on linear layers, embeddings, convolutions and stacked experts, to DoRA,
``modules_to_save``, and adapters on adapters. A rule is applied to a dequantised fp32 copy of one module's weights.
The copy is rounded once, to the written dtype. The model is not changed:

    for name, weight in merged_weights(model):      # "model.layers.0.self_attn.q_proj.weight", [out, in]

Comparisons of models use :func:`computing_in_fp32`, because rounding errors of bfloat16 arithmetic would hide
differences. Weights are converted to fp32 during the call of their layer, one layer at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.engine.hf_names import tied_weights
from streamtune.errors import ArgumentError
from streamtune.models.quantize import dequantize_weight, is_quantized


def merged_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model, value) of each weight and persistent buffer, merged and dequantised.

    Tied weights are yielded once, or separately if adapters make them differ (:func:`needs_untying`).

    Args:
        model: Model with or without adapters; unchanged after the iteration.
        dtype: Dtype of floating-point weights; None keeps each dtype (for quantised weights, the model's dtype).
    """
    base, untied = base_of(model), needs_untying(model)
    tied = {} if untied else tied_weights(base)
    seen: set[int] = set()
    for name, value, own in _iterate_weights(base, base, "", base.dtype):
        if name in tied or id(own) in seen:
            continue
        if not untied:
            seen.add(id(own))
        yield name, value() if dtype is None or not own.is_floating_point() else value().to(dtype)


def _iterate_weights(
    module: Any, original: Any, prefix: str, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Yield (name, function that computes the value to write, the model's own tensor) of each weight in ``module``.

    Args:
        module: Module or its peft wrapper.
        original: Module whose dtypes are written: the original of a copy in ``modules_to_save``, otherwise ``module``.
        prefix: Prefix of the names.
        dtype: Dtype of dequantised weights.
    """
    original = getattr(module, "original_module", original)
    inner, chain = inner_module(module)
    merged = merged_parameters(module) if chain else {}
    originals = inner_module(original)[0]
    for key, x in inner._parameters.items():
        if x is None:
            continue
        like = originals._parameters.get(key)
        like = x if like is None else like
        # The dtype of a quantised weight cannot be written.
        yield f"{prefix}{key}", _make_value_function(x, merged.get(key), dtype if is_quantized(like) else like.dtype), x
    for key, buffer in inner._buffers.items():
        if buffer is not None and key not in inner._non_persistent_buffers_set:
            yield f"{prefix}{key}", _make_value_function(buffer, None, buffer.dtype), buffer
    for key, child in inner.named_children():
        yield from _iterate_weights(child, originals._modules.get(key, child), f"{prefix}{key}.", dtype)


def _make_value_function(own_value: Tensor, merged_value: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
    def make() -> Tensor:
        if merged_value is not None:
            return merged_value.to(dtype)
        return (dequantize_weight(own_value) if is_quantized(own_value) else own_value.detach()).to(dtype)

    return make


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> outermost peft wrapper, for each module with adapters or in ``modules_to_save``.

    Raises:
        ArgumentError: The adapters are a learned prompt, which cannot be merged.
    """
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise ArgumentError(
                f"adapters of type {config.peft_type.value} are a learned prompt, which cannot be merged into weights",
                where="RUN",
                fix="--no-merge exports the adapters alone",
            )
    return dict(_iterate_adapted_modules(base_of(model), ""))


def _iterate_adapted_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    inner, chain = inner_module(module)
    if chain or inner is not module:
        yield prefix, module
    for key, child in inner.named_children():
        yield from _iterate_adapted_modules(child, f"{prefix}.{key}" if prefix else key)


def inner_module(module: Any) -> tuple[nn.Module, list[Any]]:
    """Return the module inside peft's wrappers, and the wrappers with adapters, outermost first.

    For a module in ``modules_to_save``, the trained copy is returned.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    chain: list[Any] = []
    while True:
        if isinstance(module, ModulesToSaveWrapper):
            active = list(module.active_adapters)
            module = module.modules_to_save[active[0]] if active else module.original_module
        elif isinstance(module, TrainableTokensWrapper):
            module = module.token_adapter
        elif isinstance(module, BaseTunerLayer):
            chain.append(module)
            module = module.base_layer
        else:
            return module, chain


def merged_parameters(wrapper: nn.Module) -> dict[str, Tensor]:
    """Return a wrapped module's own parameters in fp32, with the adapters of all its wrappers merged."""
    inner, chain = inner_module(wrapper)
    with _using_fp32_parameters(inner, chain), torch.no_grad():
        for layer in reversed(chain):  # adapters on adapters: merge the inner ones first
            _merge_adapters(layer, inner)
        return {key: x.data for key, x in inner._parameters.items() if x is not None}


def _merge_adapters(layer: Any, inner: nn.Module) -> None:
    """Merge the active adapters of one wrapper into the fp32 weights of the module inside, with peft's rule.

    The rule is applied to ``inner`` itself: a wrapper in between, such as one of new tokens, may return copies of its
    weights.

    Raises:
        ArgumentError: peft has no rule for this kind, such as activated LoRA.
    """
    from peft.tuners import ia3, lora

    # The merge rules of quantised layers would quantise the result again.
    rule = type(layer).merge
    if type(layer).__name__ in ("Linear4bit", "TorchaoLoraLinear"):
        rule = (ia3.Linear if isinstance(layer, ia3.IA3Layer) else lora.Linear).merge
    read = ("quantization_backend", "fan_in_fan_out")  # use the rule of plain layers
    before = {name: vars(layer)[name] for name in read if name in vars(layer)}
    layer.quantization_backend, layer.fan_in_fan_out = None, bool(before.get("fan_in_fan_out"))
    base_layer, layer.base_layer = layer.base_layer, inner
    try:
        rule(layer)
    except (NotImplementedError, RuntimeError) as error:
        raise ArgumentError(
            f"peft cannot merge these adapters: {error}", where="RUN", fix="--no-merge exports the adapters alone"
        ) from error
    finally:
        layer.base_layer = base_layer
        for name in read:
            delattr(layer, name)
        vars(layer).update(before)
        layer.merged_adapters.clear()
        getattr(layer, "_caches", {}).clear()


@contextmanager
def _using_fp32_parameters(module: nn.Module, wrappers: list[Any]) -> Iterator[None]:
    """Context manager: replace a module's parameters by fp32 copies, and convert 16-bit adapters to fp32."""
    before = dict(module._parameters)
    below = {id(x) for x in module.parameters()}
    narrow = [x for layer in wrappers for x in layer.parameters() if id(x) not in below and x.dtype.itemsize == 2]
    held = [(x, x.data) for x in narrow]
    for key, x in before.items():
        if x is not None:
            plain = dequantize_weight(x) if is_quantized(x) else x.detach().to(torch.float32, copy=True)
            module._parameters[key] = nn.Parameter(plain, requires_grad=False)
    for x, values in held:
        x.data = values.float()
    try:
        yield
    finally:
        module._parameters.update(before)
        for x, values in held:
            x.data = values


def needs_untying(model: nn.Module) -> bool:
    """Return True if adapters make two tied weights differ, so that both must be written.

    Raises:
        ArgumentError: The tied weights are not embedding and LM head, so they cannot be untied.
    """
    base = base_of(model)
    adapted = set(adapted_modules(model)) if hasattr(base, "peft_config") or base is not model else set()
    touched = {
        pair
        for pair in tied_weights(base).items()
        if adapted & {name.rpartition(".")[0] for name in pair}
        and not _is_shared_copy(base, pair)
        and len({_hash_merged_weight(base, name) for name in pair}) > 1
    }
    if not touched:
        return False
    ends = {id(inner_module(end)[0]) for end in (base.get_input_embeddings(), base.get_output_embeddings())}
    for name in {name for pair in touched for name in pair}:
        module = base.get_submodule(name.rpartition(".")[0])
        if id(inner_module(module)[0]) not in ends:
            raise ArgumentError(
                f"the adapters change {name}, which is tied to another weight and cannot be untied",
                where="RUN",
                fix="--no-merge exports the adapters alone",
            )
    return True


def _is_shared_copy(base: Any, pair: tuple[str, str]) -> bool:
    """Return True if two tied weights are the same trained tensor, without adapters to merge."""
    found = [(inner_module(base.get_submodule(name.rpartition(".")[0])), name.rpartition(".")[2]) for name in pair]
    if any(chain for (_, chain), _ in found):
        return False
    first, second = (inner._parameters.get(key) for (inner, _), key in found)
    return first is not None and first is second


def _hash_merged_weight(base: Any, name: str) -> bytes:
    """Return a hash of a merged weight, to compare tied weights without keeping both in memory."""
    place, _, key = name.rpartition(".")
    module = base.get_submodule(place)
    inner, chain = inner_module(module)
    value: Tensor = merged_parameters(module)[key] if chain else inner._parameters[key].detach()  # type: ignore[union-attr]
    return hashlib.sha256(value.float().cpu().contiguous().numpy().data).digest()


# --- in fp32 ----------------------------------------------------------------------------------------------------------


class WeightChange(Protocol):
    """Interface of a change that is applied to weights while a model runs, such as :class:`Rounding`."""

    def changes_module(self, module: nn.Module) -> bool:
        """Return True if parameters of ``module`` itself (not of its submodules) are changed."""

    def change_sizes(self, module: nn.Module) -> dict[str, Tensor]:
        """Return parameter name -> argument ``size`` of :meth:`change_weight`; its default is the parameter itself."""

    def change_weight(self, weight: Tensor, size: Tensor) -> Tensor:
        """Return the changed weight, in fp32."""


class Rounding:
    """Changes each weight at random, by up to half of the gap between neighbouring numbers of a dtype.

    The gap is measured at the merged value of the weight.

    Args:
        model: Trained model.
        dtype: Dtype of the rounding.
        everything: True to change all weights, not only the weights that adapters change.
        seed: Random seed.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, everything: bool, seed: int) -> None:
        self.dtype, self.everything = dtype, everything
        self._generator = torch.Generator().manual_seed(seed)
        self._wrappers = {id(inner_module(each)[0]): each for each in adapted_modules(model).values()}

    def changes_module(self, module: nn.Module) -> bool:
        return self.everything or id(module) in self._wrappers

    def change_sizes(self, module: nn.Module) -> dict[str, Tensor]:
        wrapper = self._wrappers.get(id(module))
        return merged_parameters(wrapper) if wrapper is not None and inner_module(wrapper)[1] else {}

    def change_weight(self, weight: Tensor, size: Tensor) -> Tensor:
        """Return the weight, changed by up to half of the gap at ``size``."""
        gap = torch.finfo(self.dtype).eps * torch.exp2(torch.floor(torch.log2(size.abs().clamp_min(1e-37))))
        drawn = torch.rand(weight.shape, generator=self._generator).to(weight.device) - 0.5
        return weight + drawn * gap


@contextmanager
def computing_in_fp32(model: nn.Module, rounding: WeightChange | None = None) -> Iterator[None]:
    """Context manager: the model (in evaluation mode) computes in fp32, with its weights changed by ``rounding``."""
    base = base_of(model)
    layers = decoder_layers(base)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in base.modules() if id(module) not in inside]
    with ExitStack() as undone:
        undone.enter_context(_widen_modules(outside, rounding))
        open_layers: dict[int, ExitStack] = {}

        def enter(layer: nn.Module, *_: Any) -> None:
            stack = open_layers.setdefault(id(layer), ExitStack())
            stack.enter_context(_widen_modules(list(layer.modules()), rounding))

        def leave(layer: nn.Module, *_: Any) -> None:
            open_layers.pop(id(layer)).close()

        for layer in {id(layer): layer for layer in layers}.values():
            undone.callback(layer.register_forward_pre_hook(enter).remove)
            undone.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _widen_modules(modules: list[nn.Module], rounding: WeightChange | None) -> Iterator[None]:
    """Context manager: convert parameters and buffers of ``modules`` to fp32, and apply ``rounding`` to them."""
    with ExitStack() as undone, torch.no_grad():
        plain: dict[int, nn.Linear] = {}
        done: set[int] = set()
        for module in modules:
            moved = rounding is not None and rounding.changes_module(module)
            sizes = rounding.change_sizes(module) if rounding is not None and moved else {}
            for key, x in list(module._parameters.items()):
                if x is None or id(x) in done:
                    continue
                done.add(id(x))
                if is_quantized(x):
                    value = dequantize_weight(x)
                    value = (
                        rounding.change_weight(value, sizes.get(key, value))
                        if rounding is not None and moved
                        else value
                    )
                    if value.dim() == 3:  # experts: their module accepts plain tensors
                        undone.callback(module._parameters.__setitem__, key, x)
                        module._parameters[key] = nn.Parameter(value, requires_grad=False)
                    else:
                        plain[id(module)] = _plain_linear(module, value)
                elif x.is_floating_point() and (moved or x.dtype.itemsize < 4):
                    undone.callback(setattr, x, "data", x.data)
                    value = x.data.float()
                    x.data = (
                        rounding.change_weight(value, sizes.get(key, value))
                        if rounding is not None and moved
                        else value
                    )
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize < 4:
                    undone.callback(module._buffers.__setitem__, key, buffer)
                    module._buffers[key] = buffer.float()
        for module in modules:
            for key, child in list(module._modules.items()):
                if child is not None and id(child) in plain:
                    undone.callback(module._modules.__setitem__, key, child)
                    module._modules[key] = plain[id(child)]
        yield


def _plain_linear(module: Any, weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bias = module._parameters.get("bias")
    if bias is not None:
        linear.bias = nn.Parameter(bias.data.float(), requires_grad=False)
    return linear.eval()
