"""Devices: their simulation by tensors on ``meta``, limits and times of their kernels, and what the host reads of them.

On ``meta`` a step has its shapes and lifetimes without its numbers. Limits are the elements that a kernel can count;
times are the seconds by which one of several kernels is chosen.

Reading a tensor of a device waits for all work before it. Small tensors that decide what runs (positions, masks, starts
of rows) are copied to the host once, however often they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_kind: ContextVar[str] = ContextVar("kind of device that meta tensors stand for", default="cpu")
_times: ContextVar[float] = ContextVar("how often what runs now would run", default=1)
_every: ContextVar[bool] = ContextVar("each turn of a loop runs", default=False)

T = TypeVar("T")


class DeviceFunctions(TorchFunctionMode):
    """Base of modes that choose an operator as the simulated device would; they do not change what is computed."""


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """Count one run of the code inside as ``times`` equal runs: the same memory, ``times`` the cost."""
    with _set(_times, _times.get() * times):
        yield


def repetitions() -> float:
    """Return the number of runs that the current one counts as."""
    return _times.get()


@contextmanager
def all_turns() -> Iterator[None]:
    """Run each turn of the loops inside, also those that :func:`turns` would count instead."""
    with _set(_every, True):
        yield


def turns(items: Sequence[T], device: torch.device) -> Iterator[T]:
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
    with _set(_kind, kind):
        yield


def kernel_device(device: torch.device) -> str:
    """Return the kind of device whose kernels compute with tensors of a device."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_kind(device: torch.device) -> str:
    """Return the kind of device whose autocast applies to tensors of a device; for ``meta`` the CPU's applies."""
    return "cpu" if device.type == "meta" else device.type


# --- kernels ---------------------------------------------------------------------------------------------------------

MAX_ELEMENTS = (1 << 31) - 1
"""The largest int of 32 bits."""


def blocks(length: int, size: int) -> Iterator[slice]:
    """Cut ``length`` rows into slices of at most ``size``, at least one row each."""
    size = max(1, size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def median_time(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the median of the seconds that ``runs`` calls take on a device, each waited for."""
    times = []
    for _ in range(runs):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- copies on the host ----------------------------------------------------------------------------------------------

_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""For a tensor of a device, its version when it was copied, and the copy."""


def host_copy(x: Tensor) -> Tensor:
    """Return ``x`` on the host: itself, or one copy until it is written to. Not to be written to."""
    if x.device.type == "cpu":
        return x
    known = known_host_copy(x)
    if known is None:
        known = x.detach().to("cpu")
        _remember(x, known)
    return known


def known_host_copy(x: Tensor) -> Tensor | None:
    """Return the copy of ``x`` on the host if there is one, without waiting for the device."""
    if not _copies:
        return None
    version, copy = _copies.get(_source(x), (-1, None))
    return copy if copy is not None and version == x._version else None


def with_host_copy(copy: Tensor, device: torch.device) -> Tensor:
    """Return ``copy`` on a device, where it can be read without waiting for the device."""
    x = copy.to(device, non_blocking=True)
    if x is not copy:
        _remember(x, copy)
    return x


def forget_host_copies() -> None:
    """Forget all copies, as each call of a model does first: ``x.data`` can be written to without a new version."""
    _copies.clear()


def _remember(x: Tensor, copy: Tensor) -> None:
    if not x.is_inference():  # such a tensor has no version
        _copies[_source(x)] = (x._version, copy)


def _source(x: Tensor) -> Tensor:
    """Return the tensor of which ``x`` is a view with the same numbers at the same places, or ``x``."""
    base = x._base
    if base is None or (base.shape, base.dtype) != (x.shape, x.dtype):
        return x
    return base if (base.stride(), base.storage_offset()) == (x.stride(), x.storage_offset()) else x
