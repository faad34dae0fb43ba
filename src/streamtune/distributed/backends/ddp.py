"""Plain data parallelism: every rank keeps a whole model and optimizer, gradients are averaged once a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from streamtune.train.backend import TorchBackend
from streamtune.train.slices import Slice, share_out_whole

__all__ = ["DdpBackend"]


class DdpBackend(TorchBackend):
    """PyTorch's ``DistributedDataParallel``.

    Args:
        module: Streamed already, the same on every rank.
        optimizer: Over its parameters.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        device = next(module.parameters()).device
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
