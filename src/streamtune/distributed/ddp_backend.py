"""Plain data parallelism: every rank keeps a whole model and optimizer, gradients are averaged once a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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
        share_out: Of that state, the slices that a rank of so many writes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        local: Any,
        share_out: Callable[[Any, int, int], Iterator[Any]],
    ) -> None:
        device = next(model.parameters()).device
        self.share_out = share_out
        self.config: Mapping[str, Any] = {}
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

    def slices(self) -> Iterator[tuple[str, str, tuple[int, ...], int, Tensor]]:
        """See :class:`streamtune.train.Backend`. Every rank has all of it; parameters are shared out for writing."""
        tensors = self.local.optimizer_tensors()
        found: Iterator[Any] = self.share_out(tensors, distributed.get_rank(), self.size)
        return found

    def load_slices(self, saved: Any) -> None:
        """See :class:`streamtune.train.Backend`."""
        self.local.load_slices(saved)

    def weights(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """See :class:`streamtune.train.Backend`."""
        found: Iterator[tuple[str, Tensor | None]] = self.local.weights(names)
        return found

    def called_directly(self) -> AbstractContextManager[Any]:
        """See :class:`streamtune.train.Backend`."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to let go of."""
