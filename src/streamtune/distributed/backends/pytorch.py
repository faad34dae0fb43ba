"""PyTorch's own engines for several ranks: ``DistributedDataParallel`` and FSDP2.

DDP keeps a whole model and optimizer on every rank and averages gradients once a step. FSDP2 shards weights, gradients
and optimizer, a decoder layer at a time: ``fully_shard`` puts hooks around a decoder layer's call, and the engine's
autograd node runs inside that call. So a layer is gathered once for the forward and once for the backward, and its
gradient is reduced once, on any number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from streamtune.optim import pack_number, unpack_number
from streamtune.train.backend import TorchBackend
from streamtune.train.slices import MASTER, Slice, SliceReader, share_out_whole


class DdpBackend(TorchBackend):
    """PyTorch's ``DistributedDataParallel``.

    Args:
        module: Streamed already, the same on every rank.
        optimizer: Over its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        device = next(module.parameters()).device
        # Packed on each rank from the same weights; they are no tensors that could be sent.
        packed = [name for name, p in module.named_parameters() if type(p).__name__ == "PackedExperts"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, packed)
        self.engine = DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
        self.size = distributed.get_world_size()

    @property
    def model(self) -> Any:
        """See :class:`streamtune.train.Backend`."""
        return self.engine

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`. Gradients cross the wire with the last micro-batch."""
        return nullcontext() if last else self.engine.no_sync()

    def backward(self, loss: Tensor) -> None:
        """See :class:`streamtune.train.Backend`."""
        (loss * self.size).backward()

    def slices(self) -> Iterator[Slice]:
        """See :class:`streamtune.train.Backend`. Every rank has all of it; parameters are shared out for writing."""
        return share_out_whole(self.optimizer_tensors(), distributed.get_rank(), self.size)


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


class FsdpBackend(TorchBackend):
    """FSDP2 over all ranks.

    Args:
        module: Streamed already, the same on every rank.
        make_optimizer: The optimizer over the parameters of a model, once they are shared.
        layers: The decoder layers.
    """

    module: Any  # fully_shard makes an FSDPModule of it

    def __init__(
        self, module: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], layers: Iterable[nn.Module]
    ) -> None:
        for layer in layers:
            if not isinstance(layer, FSDPModule):  # its weights may have come shared
                fully_shard(layer)
        fully_shard(module)
        super().__init__(module, make_optimizer(module))
        self.size = distributed.get_world_size()

    def backward(self, loss: Tensor) -> None:
        """See :class:`streamtune.train.Backend`. Every micro-batch is reduced: a whole gradient would not fit."""
        (loss * self.size).backward()

    def _number(self, norm: Tensor) -> float:
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def stepped(self) -> Iterator[Tensor]:
        """See :class:`streamtune.train.Backend`."""
        return (p.to_local() if isinstance(p, DTensor) else p for p in super().stepped())

    def slices(self) -> Iterator[Slice]:
        """See :class:`streamtune.train.Backend`."""
        self.module.reshard()  # what a forward without backward leaves gathered: parameters are the optimizer's again
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    yield Slice(name, key, tuple(value.shape), _offset(parameter), value.to_local().reshape(-1))
                elif distributed.get_rank() == 0 and value is not None:  # a count of steps
                    count = value if isinstance(value, Tensor) else pack_number(value)
                    yield Slice(name, key, (), 0, count.reshape(1))

    def load_slices(self, saved: SliceReader) -> None:
        """See :class:`streamtune.train.Backend`."""
        trained = [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        saved.check_parameters([name for name, _ in trained])
        for name, parameter in trained:
            state: dict[str, Any] = {}
            for key in saved.keys(name):
                if saved.shape(name, key) == ():
                    fused = self.optimizer.defaults.get("fused")
                    count = unpack_number(saved.read(name, key, 0, 1).reshape(()))
                    state[key] = count.to(parameter.device if fused else "cpu") if isinstance(count, Tensor) else count
                elif key != MASTER:  # weights are float32 here, or have no other
                    state[key] = torch.zeros_like(parameter, requires_grad=False)
                    local = state[key].to_local()
                    if local.numel():
                        values = saved.read(name, key, _offset(parameter), local.numel())
                        local.copy_(values.reshape(local.shape))
            self.optimizer.state[parameter] = state

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See :class:`streamtune.train.Backend`."""
        return whole_weights(self.module, names)

    @contextmanager
    def called_directly(self) -> Iterator[None]:
        """See :class:`streamtune.train.Backend`. Gathers weights outside of layers, as a call of the model does."""
        self.module.unshard()
        try:
            yield
        finally:
            self.module.reshard()
