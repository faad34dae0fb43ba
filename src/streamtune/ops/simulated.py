"""Simulation of a device by tensors on ``meta``: shapes and lifetimes of a step without its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["DeviceFunctions", "autocast_kind", "kernel_device", "repeated", "repetitions", "simulating"]

_kind: ContextVar[str] = ContextVar("kind of device that meta tensors stand for", default="cpu")


_times: ContextVar[float] = ContextVar("how often what runs now would run", default=1)


class DeviceFunctions(TorchFunctionMode):
    """Base of modes that choose an operator as the simulated device would; they do not change what is computed."""


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """Count one run of the code inside as ``times`` equal runs: the same memory, ``times`` the cost."""
    token = _times.set(_times.get() * times)
    try:
        yield
    finally:
        _times.reset(token)


def repetitions() -> float:
    """Return the number of runs that the current one counts as."""
    return _times.get()


@contextmanager
def simulating(kind: str) -> Iterator[None]:
    """Let tensors on ``meta`` stand, while inside, for tensors on a device of this kind (``cpu`` or ``cuda``)."""
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def kernel_device(device: torch.device) -> str:
    """Return the kind of device whose kernels compute with tensors of a device."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_kind(device: torch.device) -> str:
    """Return the kind of device whose autocast applies to tensors of a device; for ``meta`` that is the CPU's."""
    return "cpu" if device.type == "meta" else device.type
