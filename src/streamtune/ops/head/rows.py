"""The positions of a batch that predict something, and the dtypes a head computes and sums in.

Shape suffixes as in ``ops.head.cross_entropy``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from streamtune.ops.simulated import autocast_kind

__all__ = ["TargetRows", "autocast_dtype", "cast", "scaled"]


class TargetRows:
    """The positions that predict something, in chunks: slices if all do, else indices, which copy a chunk."""

    def __init__(self, targets_BT: Tensor, ignore_index: int, chunk_size: int) -> None:
        self.targets, self.chunk_size = targets_BT.flatten(), chunk_size
        self.positions = (self.targets != ignore_index).nonzero().squeeze(-1)
        self.every = len(self.positions) == len(self.targets)

    def chunks(self) -> Iterator[Tensor | slice]:
        """Yield indices into the flattened positions, at most ``chunk_size`` at a time."""
        for start in range(0, len(self.positions), self.chunk_size):
            chunk = slice(start, min(start + self.chunk_size, len(self.positions)))
            yield chunk if self.every else self.positions[chunk]

    def gradient(self, hidden_NC: Tensor) -> Tensor:
        """Return a buffer for the gradient of the hidden states, zero wherever nothing is predicted."""
        return torch.empty_like(hidden_NC) if self.every else torch.zeros_like(hidden_NC)

    def divisor(self, num_items: Tensor | float | None) -> Tensor | float:
        """Return the divisor of the summed loss: ``num_items``, or for None the number of positions, at least 1."""
        if num_items is None:
            return max(1, len(self.positions))
        return num_items.to(self.targets.device) if isinstance(num_items, Tensor) else num_items


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the dtype autocast would run the head in, or None. Autocast itself is off: the sums keep their dtypes."""
    kind = autocast_kind(hidden.device)
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast the tensors to ``dtype``; return them as they are where it is None."""
    return tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)


def scaled(grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], factor: Tensor) -> list[Tensor | None]:
    """Multiply the gradients of the sum by the upstream gradient, in the wider dtype, and cast to the input's.

    ``factor`` stays a fp32 scalar: rounded to bf16 it would scale the whole gradient by up to 0.4%.
    """
    out: list[Tensor | None] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if grad is None or dtype is None:
            out.append(None)
        else:
            out.append(grad.to(torch.promote_types(grad.dtype, dtype)).mul_(factor).to(dtype))
    return out
