"""PyTorch's FSDP2 as backend: weights, gradients and optimizer are shared, a decoder layer at a time.

``fully_shard`` puts hooks around a decoder layer's call, and the engine's node runs inside that call: a layer is
gathered once for the forward and once for the backward, and its gradient is reduced once, on any number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["FsdpBackend", "share_layer", "whole_weights"]


def _offset(parameter: Tensor) -> int:
    """Return the offset of this rank's rows in the flattened parameter."""
    assert isinstance(parameter, DTensor)
    _, first = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(first[0]) * math.prod(parameter.shape[1:])


def share_layer(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Broadcast rank 0's weights of a module; of a decoder layer, each rank keeps its part.

    Modules outside of the layers are one group, which :class:`FsdpBackend` shares when all of it is loaded.

    Args:
        module: Holds the weights on rank 0, uninitialised tensors on the others.
        layers: The decoder layers.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            distributed.broadcast(parameter.data, 0)
    if any(module is layer for layer in layers):
        fully_shard(module)


def whole_weights(model: Any, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the parameters one by one: each whole on rank 0, None on the other ranks, which must iterate too.

    Args:
        model: Shared.
        names: Only these.
    """
    model.reshard()  # what a forward without backward leaves gathered
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            values: Any = parameter.detach()
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            yield name, whole.cpu() if distributed.get_rank() == 0 else None


class FsdpBackend:
    """FSDP2 over all ranks.

    Args:
        model: Streamed already, the same on every rank.
        make_optimizer: The optimizer over the parameters of a model, once they are shared.
        layers: The decoder layers.
    """

    def __init__(
        self, model: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer], layers: Iterable[nn.Module]
    ) -> None:
        for layer in layers:
            if not isinstance(layer, FSDPModule):  # its weights may have come shared
                fully_shard(layer)
        fully_shard(model)
        self.model = model
        self.config: Mapping[str, Any] = {}
        self.optimizer = make_optimizer(model)
        self.size = distributed.get_world_size()

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`. Every micro-batch is reduced: a whole gradient would not fit."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """See :class:`streamtune.train.Backend`."""
        (loss * self.size).backward()

    def clip_gradients(self, max_norm: float) -> float:
        """See :class:`streamtune.train.Backend`."""
        trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trained])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        value = float(whole.item())
        if max_norm > 0 and math.isfinite(value):
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return value

    def step(self, learning_rate: float) -> None:
        """See :class:`streamtune.train.Backend`."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.optimizer.zero_grad(set_to_none=True)

    def reset_optimizer(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.optimizer.state.clear()

    def slices(self) -> Iterator[tuple[str, str, tuple[int, ...], int, Tensor]]:
        """See :class:`streamtune.train.Backend`."""
        self._let_go()
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    yield name, key, tuple(value.shape), _offset(parameter), value.to_local().reshape(-1)
                elif distributed.get_rank() == 0:  # a count of steps
                    yield name, key, (), 0, value.reshape(1)

    def load_slices(self, saved: Any) -> None:
        """See :class:`streamtune.train.Backend`."""
        trained = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        saved.check_parameters([name for name, _ in trained])
        for name, parameter in trained:
            state: dict[str, Tensor] = {}
            for key in saved.keys(name):
                if saved.shape(name, key) == ():
                    fused = self.optimizer.defaults.get("fused")
                    state[key] = saved.read(name, key, 0, 1).reshape(()).to(parameter.device if fused else "cpu")
                elif key != "master":  # weights are float32 here, or have no other
                    state[key] = torch.zeros_like(parameter, requires_grad=False)
                    local = state[key].to_local()  # type: ignore[attr-defined]
                    if local.numel():
                        values = saved.read(name, key, _offset(parameter), local.numel())
                        local.copy_(values.reshape(local.shape))
            self.optimizer.state[parameter] = state

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See :class:`streamtune.train.Backend`."""
        return whole_weights(self.model, names)

    def _let_go(self) -> None:
        """Free weights that a forward without backward left gathered: parameters are again those of the optimizer."""
        self.model.reshard()

    @contextmanager
    def called_directly(self) -> Iterator[None]:
        """See :class:`streamtune.train.Backend`. Gathers weights outside of layers, as a call of the model does."""
        self.model.unshard()
        try:
            yield
        finally:
            self.model.reshard()

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
