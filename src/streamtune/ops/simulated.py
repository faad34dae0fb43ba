"""What stands for a device where tensors are on ``meta``: shapes and lifetimes of a step without its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["autocast_kind", "kernel_device", "repeated", "repetitions", "simulating"]

_kind: ContextVar[str] = ContextVar("kind of device that meta tensors stand for", default="cpu")


_times: ContextVar[float] = ContextVar("how often what runs now would run", default=1)


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """What runs inside stands for so many runs that are alike: they hold the same, and cost so many times as much."""
    token = _times.set(_times.get() * times)
    try:
        yield
    finally:
        _times.reset(token)


def repetitions() -> float:
    """How often what runs now would run."""
    return _times.get()


@contextmanager
def simulating(kind: str) -> Iterator[None]:
    """Inside, tensors on ``meta`` stand for tensors on a device of this kind (``cpu`` or ``cuda``)."""
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def kernel_device(device: torch.device) -> str:
    """The kind of device whose kernels a tensor is computed with."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_kind(device: torch.device) -> str:
    """Whose autocast holds for tensors of a device: ``meta`` has none of its own and goes by the CPU's switch."""
    return "cpu" if device.type == "meta" else device.type
