"""PyTorch's FSDP2 as backend: weights, gradients and optimizer are shared, a decoder layer at a time.

``fully_shard`` puts hooks around a decoder layer's call, and the engine's node stands inside that call: a layer is
gathered once for the forward and once for the backward, and its gradient is reduced once, on any number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streamtune.errors import CheckpointError

__all__ = ["FsdpBackend"]


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
            fully_shard(layer)
        fully_shard(model)
        self.model = model
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

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """See :class:`streamtune.train.Backend`."""
        found: dict[str, Tensor] = {}
        keep = distributed.get_rank() == 0
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    if keep:
                        found[f"{name}/{key}"] = whole.cpu()
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See :class:`streamtune.train.Backend`."""
        raise CheckpointError("this run cannot be resumed yet")

    def whole(self) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to let go of."""
