"""Simulation of a device by tensors on ``meta``: shapes and lifetimes of a step without its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch.overrides import TorchFunctionMode

_kind: ContextVar[str] = ContextVar("kind of device that meta tensors stand for", default="cpu")


_times: ContextVar[float] = ContextVar("how often what runs now would run", default=1)

_every: ContextVar[bool] = ContextVar("each turn of a loop runs", default=False)

Item = TypeVar("Item")


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
def all_turns() -> Iterator[None]:
    """Run each turn of the loops inside, also those that :func:`turns` would count instead."""
    token = _every.set(True)
    try:
        yield
    finally:
        _every.reset(token)


def turns(items: Sequence[Item], device: torch.device) -> Iterator[Item]:
    """Yield the items of a loop whose turns are alike but for the first and the last, and keep nothing for later ones.

    On ``meta`` the second turn counts for all between the first and the last, which are left out.
    """
    if device.type != "meta" or len(items) < 4 or _every.get():
        yield from items
        return
    yield items[0]
    with repeated(len(items) - 2):
        yield items[1]
    yield items[-1]


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
