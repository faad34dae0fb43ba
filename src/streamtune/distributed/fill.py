"""Weights into a model on ``meta`` whose ranks share them: one layer at a time is whole, on rank 0 and then on each.

For each decoder layer, and for each other module with weights of its own: rank 0 reads or draws them, the others
allocate tensors for them, and the engine distributes them and keeps the part of each rank. So a rank holds its part of
the layers before, and one whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor


class LayerSource(Protocol):
    """Weights that are not loaded yet: ``streamtune.models.Deferred``."""

    def names_in(self, module: nn.Module, recurse: bool = True) -> list[str]:
        """Return the names of a module's parameters that this source has loaded or is to load."""
        ...

    def awaits(self, name: str) -> bool:
        """Return True if it is still to be loaded; a parameter that is used in several places is loaded once."""
        ...

    def shape(self, name: str) -> nn.Parameter:
        """Return a parameter with its shape and dtype."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values of parameters, on the CPU."""
        ...

    def place(self, name: str, values: Tensor) -> None:
        """Set the values of a parameter wherever it is used."""
        ...

    def close(self) -> None:
        """Finish loading: all values are placed."""
        ...


def fill(
    model: nn.Module,
    layers: Iterable[nn.Module],
    source: LayerSource,
    *,
    device: torch.device,
    main: Callable[[Callable[[], Any]], Any],
    share: Callable[[nn.Module], None],
) -> None:
    """Load the weights of ``model``, shared among the ranks.

    Args:
        model: On ``meta``, buffers on the CPU.
        layers: Its decoder layers.
        source: The weights.
        device: The device on which a layer is whole, before it is shared.
        main: Calls a function on rank 0, and raises its error on all ranks.
        share: Called by all ranks with a module that has weights on rank 0, uninitialised tensors on the others.
    """
    layers = list(layers)
    inside = {id(module) for layer in layers for module in layer.modules()}
    # From the last to the first: a module comes after those below it.
    others = [module for module in reversed(list(model.modules())) if id(module) not in inside]
    for module, names in (
        *((layer, source.names_in(layer)) for layer in layers),
        *((module, source.names_in(module, recurse=False)) for module in others),
    ):
        _place(source, [name for name in names if source.awaits(name)], device, main)
        if names:
            _move(module, device)
            share(module)
    source.close()
    _move(model, device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                moved = module._buffers[key] = buffer.to(device)
                distributed.broadcast(moved, 0)


def _place(
    source: LayerSource, names: list[str], device: torch.device, main: Callable[[Callable[[], Any]], Any]
) -> None:
    """Place the values on rank 0, and uninitialised tensors for them on the others."""
    found: dict[str, Tensor] = {}
    main(lambda: found.update(source.read(names)))
    for name in names:
        like = source.shape(name)
        values = found.pop(name).to(like.dtype) if distributed.get_rank() == 0 else torch.empty_like(like, device="cpu")
        source.place(name, values.detach().to(device))


def _move(module: nn.Module, device: torch.device) -> None:
    """Move parameters that came with the model and are not shared yet, such as adapters, to ``device``."""
    for parameter in module.parameters():
        shared = hasattr(parameter, "ds_id") or isinstance(parameter, DTensor)
        if not shared and parameter.device.type not in (device.type, "meta"):
            parameter.data = parameter.data.to(device)
