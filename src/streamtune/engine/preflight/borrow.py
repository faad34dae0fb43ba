"""Contexts in which the preflight changes a model's flags, attention and parameters, and which restore them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamtune.engine.observe import RandomState

if TYPE_CHECKING:
    from streamtune.engine.stream import StreamHandle

__all__ = ["aliased", "borrowed"]


@contextmanager
def borrowed(handle: StreamHandle) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore afterwards all that the preflight changes.

    That is the training flags, the layers' ``forward``, ``requires_grad`` of the head, the precision of fp32 products
    and the random state.
    """
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
    """Replace the layer's trainable parameters by leaves on the same storage, which have no ``.grad`` and no hooks."""
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
