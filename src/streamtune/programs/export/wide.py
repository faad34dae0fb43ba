"""Compute a model in fp32, whatever it is stored in, with the memory of one layer more.

A comparison of two models in bfloat16 sees nothing that is smaller than the roundings of their arithmetic. In fp32 only
the rounding of weights is left. So weights are widened when a layer is called, and as they were when it returns;
quantised ones are written out. Weights may be moved by one random rounding at the same time: how far that moves the
logits is the yardstick of :mod:`streamtune.programs.export.check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.models.quantize import dequantised, is_quantised
from streamtune.programs.export.merge import adapted_modules, inner_module, merged_parameters


class WeightChange(Protocol):
    """A change of weights for the time of a call, such as :class:`Rounding`."""

    def moves(self, module: nn.Module) -> bool:
        """Return True if the weights that this very module owns are changed."""

    def sizes(self, module: nn.Module) -> dict[str, Tensor]:
        """Return what :meth:`move` needs of the module's parameters, by their names; empty for their own values."""

    def move(self, weight: Tensor, size: Tensor) -> Tensor:
        """Return the changed weight, in fp32."""


class Rounding:
    """Moves weights by one random rounding to a dtype: each by up to half of the gap between neighbouring numbers.

    Args:
        model: The model as it trained.
        dtype: The dtype that is rounded to.
        everything: Move all weights; else those that adapters change, by the gaps where their merged values lie.
        seed: Of the draw.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, everything: bool, seed: int) -> None:
        self.dtype, self.everything = dtype, everything
        self._generator = torch.Generator().manual_seed(seed)
        self._wrappers = {id(inner_module(each)[0]): each for each in adapted_modules(model).values()}

    def moves(self, module: nn.Module) -> bool:
        """Return True if the weights that this very module owns are moved."""
        return self.everything or id(module) in self._wrappers

    def sizes(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the values whose rounding is meant, by the name of the parameter; empty for its own."""
        wrapper = self._wrappers.get(id(module))
        return merged_parameters(wrapper) if wrapper is not None and inner_module(wrapper)[1] else {}

    def move(self, weight: Tensor, size: Tensor) -> Tensor:
        """Return the weight moved by half of a gap at most, as wide as numbers of this size have it."""
        gap = torch.finfo(self.dtype).eps * torch.exp2(torch.floor(torch.log2(size.abs().clamp_min(1e-37))))
        drawn = torch.rand(weight.shape, generator=self._generator).to(weight.device) - 0.5
        return weight + drawn * gap


@contextmanager
def widened(model: nn.Module, rounding: WeightChange | None = None) -> Iterator[None]:
    """Let a model compute in fp32 while inside; afterwards it is as before.

    Args:
        model: With or without adapters, in evaluation mode.
        rounding: Changes weights as well.
    """
    base = base_of(model)
    layers = decoder_layers(base)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in base.modules() if id(module) not in inside]
    with ExitStack() as undone:
        undone.enter_context(_wide(outside, rounding))
        open_layers: dict[int, ExitStack] = {}

        def enter(layer: nn.Module, *_: Any) -> None:
            stack = open_layers.setdefault(id(layer), ExitStack())
            stack.enter_context(_wide(list(layer.modules()), rounding))

        def leave(layer: nn.Module, *_: Any) -> None:
            open_layers.pop(id(layer)).close()

        for layer in {id(layer): layer for layer in layers}.values():
            undone.callback(layer.register_forward_pre_hook(enter).remove)
            undone.callback(layer.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _wide(modules: list[nn.Module], rounding: WeightChange | None) -> Iterator[None]:
    """Widen the parameters and buffers of modules while inside."""
    with ExitStack() as undone, torch.no_grad():
        plain: dict[int, nn.Linear] = {}
        done: set[int] = set()
        for module in modules:
            moved = rounding is not None and rounding.moves(module)
            sizes = rounding.sizes(module) if rounding is not None and moved else {}
            for key, x in list(module._parameters.items()):
                if x is None or id(x) in done:
                    continue
                done.add(id(x))
                if is_quantised(x):
                    value = dequantised(x)
                    value = rounding.move(value, sizes.get(key, value)) if rounding is not None and moved else value
                    if value.dim() == 3:  # experts: whatever module has them computes with any tensor
                        undone.callback(module._parameters.__setitem__, key, x)
                        module._parameters[key] = nn.Parameter(value, requires_grad=False)
                    else:
                        plain[id(module)] = _plain_linear(module, value)
                elif x.is_floating_point() and (moved or x.dtype.itemsize < 4):
                    undone.callback(setattr, x, "data", x.data)
                    value = x.data.float()
                    x.data = rounding.move(value, sizes.get(key, value)) if rounding is not None and moved else value
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
    """Return a linear layer with this weight and the module's bias, which may be widened already."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    bias = module._parameters.get("bias")
    if bias is not None:
        linear.bias = nn.Parameter(bias.data.float(), requires_grad=False)
    return linear.eval()
