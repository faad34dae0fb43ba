"""Plain data parallelism: every rank keeps a whole model and optimizer, gradients are averaged once a step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DdpBackend"]


class DdpBackend:
    """PyTorch's ``DistributedDataParallel``.

    Args:
        model: Streamed already, the same on every rank.
        optimizer: Over its parameters.
        local: What saves and loads the optimizer's state, which is whole here.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, local: Any) -> None:
        device = next(model.parameters()).device
        self.module, self.optimizer, self.local = model, optimizer, local
        self.engine = DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
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

    def clip_gradients(self, max_norm: float) -> float:
        """See :class:`streamtune.train.Backend`."""
        return float(self.local.clip_gradients(max_norm))

    def step(self, learning_rate: float) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.local.step(learning_rate)

    def drop_gradients(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.local.drop_gradients()

    def reset_optimizer(self) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.local.reset_optimizer()

    def optimizer_tensors(self) -> Mapping[str, Tensor]:
        """See :class:`streamtune.train.Backend`."""
        found: Mapping[str, Tensor] = self.local.optimizer_tensors()
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.local.load_optimizer_tensors(tensors)

    def whole(self) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to let go of."""
