"""What the preflight borrows from a model and gives back: its flags, its attention, its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamtune.engine.ambient import RandomState

if TYPE_CHECKING:
    from streamtune.engine.stream import StreamHandle

__all__ = ["aliased", "borrowed"]


@contextmanager
def borrowed(handle: StreamHandle) -> Iterator[None]:
    """Evaluation mode without a trace: all that a forward reads or moves is put back."""
    model = handle.model
    training = [(module, module.training) for module in model.modules()]
    forwards: list[Any] = [layer.__dict__.get("forward") for layer in handle.layers]
    head = model.get_output_embeddings()
    frozen = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
    precision = torch.get_float32_matmul_precision()
    device = next(model.parameters()).device
    try:
        with RandomState.now(device).replayed(), torch.enable_grad():
            torch.set_float32_matmul_precision("highest")
            for module, _ in training:
                module.training = False
            for parameter in frozen:
                parameter.requires_grad_(False)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, flag in training:
            module.training = flag
        for parameter in frozen:
            parameter.requires_grad_(True)
        for layer, forward in zip(handle.layers, forwards, strict=True):
            layer.forward = forward


@contextmanager
def aliased(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The layer's trainable parameters as leaves of their own, on the same storage: no ``.grad`` and no hook is met."""
    names = {id(p): name for name, p in layer.named_parameters() if p.requires_grad}
    aliases: dict[int, nn.Parameter] = {}
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in names:
                    before.append((module, name, parameter))
                    alias = aliases.setdefault(id(parameter), nn.Parameter(parameter.detach()))
                    module._parameters[name] = alias
        yield {names[key]: alias for key, alias in aliases.items()}
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
