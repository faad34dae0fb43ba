"""The longest sequence that plain autograd has memory for, measured on the model rather than by a formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.simulate.memory import LiveBytes

__all__ = ["Room", "measure_room"]

MARGIN = 0.8
"""Part of the free memory that is planned with."""

GIB = 1 << 30


@dataclass(frozen=True)
class Room:
    """Bytes that are free, and what a forward of T tokens holds: ``per_token T + per_square T^2``.

    Attributes:
        model: The model that was measured.
        measured: The dtype it was measured in.
        free: Free bytes on the model's device.
        host_free: Free bytes on the host, where the truth's gradients are kept.
        per_token, per_square: Bytes; the second where attention weights are kept.
    """

    model: nn.Module
    measured: torch.dtype
    free: int
    host_free: int
    per_token: float
    per_square: float

    def longest(self, dtype: torch.dtype) -> int:
        """Return the most tokens that plain autograd in ``dtype`` has memory for; 0 where not even the weights fit."""
        wider = dtype.itemsize / self.measured.itemsize
        spare = MARGIN * self.free - self._needed(0, dtype)
        if spare <= 0 or self._kept(dtype) > MARGIN * self.host_free:
            return 0
        a, b = wider * self.per_square, wider * self.per_token
        return int(spare / b) if a <= 0 else int((math.sqrt(b * b + 4 * a * spare) - b) / (2 * a))

    def lacks(self, tokens: int, dtype: torch.dtype) -> str:
        """Return the memory that plain autograd in ``dtype`` lacks for so many tokens, in words; empty if none."""
        needs = [("", self._needed(tokens, dtype), self.free), (" of the host", self._kept(dtype), self.host_free)]
        for where, needed, free in needs:
            if needed > MARGIN * free:
                return f"it takes {needed / GIB:.1f} GiB{where} more, {free / GIB:.1f} GiB are free"
        return ""

    def _needed(self, tokens: int, dtype: torch.dtype) -> float:
        """Return the bytes of widened weights, of gradients held at a time, and of activations, wider in proportion."""
        parameters = list(self.model.parameters())
        weights = sum(p.numel() * max(dtype.itemsize - p.dtype.itemsize, 0) for p in parameters)
        on_host = parameters[0].device.type == "cpu"
        largest = max((p.numel() for p in parameters if p.requires_grad), default=0) * dtype.itemsize
        wider = dtype.itemsize / self.measured.itemsize
        activations = wider * (self.per_token * tokens + self.per_square * tokens**2)
        return weights + (self._kept(dtype) if on_host else largest) + activations

    def _kept(self, dtype: torch.dtype) -> int:
        """Return the bytes of the truth's gradients."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad) * dtype.itemsize


def measure_room(model: nn.Module, measured: torch.dtype, forward: Callable[[int], Tensor], tokens: int) -> Room:
    """Measure what two short forwards with their graphs hold, from which follows what a longer one holds.

    Args:
        model: The model, without an adapter's wrapper.
        measured: The dtype that ``forward`` computes in.
        forward: The loss on so many tokens.
        tokens: Tokens of the longer of the two.
    """
    half, whole = tokens // 2, tokens
    held = []
    for size in (half, whole):
        with LiveBytes(model, decoder_layers(model)) as live:
            loss = forward(size)
        held.append(live.peak)
        del loss
    # b T + a T^2 through both points
    square = max(0.0, (held[1] / whole - held[0] / half) / (whole - half))
    per_token = max(1.0, held[1] / whole - square * whole)
    host_free = int(psutil.virtual_memory().available)
    device = next(model.parameters()).device
    free = host_free
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Room(model, measured, free, host_free, per_token, square)
