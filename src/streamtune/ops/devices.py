"""Devices: simulation on ``meta``, limits and timing of kernels, and copies of small tensors on the host.

On ``meta`` a step has its shapes and lifetimes, without values. The limit is the number of elements that a kernel can
count. Timing chooses between kernels.

Reading a device tensor on the host waits for all earlier work of the device. So small tensors that decide what runs
(positions, masks, starts of rows) are copied to the host once, however often they are read.
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

_kind: ContextVar[str] = ContextVar("device type that meta tensors simulate", default="cpu")
_times: ContextVar[float] = ContextVar("runs that the current run counts as", default=1)
_every: ContextVar[bool] = ContextVar("every iteration of a loop runs", default=False)

T = TypeVar("T")


class DeviceFunctions(TorchFunctionMode):
    """Base class of modes that choose operators as the simulated device would, without changing what is computed."""


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """Context manager: count one run of the code inside as ``times`` equal runs, with the same memory."""
    with _set(_times, _times.get() * times):
        yield


def repetitions() -> float:
    """Return the number of runs that the current run counts as."""
    return _times.get()


@contextmanager
def all_turns() -> Iterator[None]:
    """Context manager: loops run every iteration, also the iterations that :func:`turns` would skip and count."""
    with _set(_every, True):
        yield


def turns(items: Sequence[T], device: torch.device) -> Iterator[T]:
    """Yield the items of a loop whose iterations, except the first and the last, have equal cost and are independent.

    On ``meta`` the second iteration counts for all between the first and the last; the rest are skipped.
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
    """Context manager: tensors on ``meta`` simulate tensors on this device type, ``cpu`` or ``cuda``."""
    with _set(_kind, kind):
        yield


def kernel_device(device: torch.device) -> str:
    """Return the device type whose kernels compute with tensors on ``device``; for ``meta``, the simulated type."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_kind(device: torch.device) -> str:
    """Return the device type whose autocast applies to tensors on ``device``; for ``meta``, the CPU."""
    return "cpu" if device.type == "meta" else device.type


# --- kernels ---------------------------------------------------------------------------------------------------------

MAX_ELEMENTS = (1 << 31) - 1
"""Largest number of elements that a kernel with 32-bit counts can process."""


def blocks(length: int, size: int) -> Iterator[slice]:
    """Yield slices that cut ``length`` rows into parts of at most ``size`` rows; a ``size`` below 1 counts as 1."""
    size = max(1, size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def median_time(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the median time of ``runs`` calls in seconds; the device is synchronised before and after each call."""
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
"""By device tensor: its version when it was copied, and the copy on the host."""


def host_copy(x: Tensor) -> Tensor:
    """Return ``x`` if it is on the host, else its host copy, made once per version of ``x``. Must not be written to."""
    if x.device.type == "cpu":
        return x
    known = known_host_copy(x)
    if known is None:
        known = x.detach().to("cpu")
        _remember(x, known)
    return known


def known_host_copy(x: Tensor) -> Tensor | None:
    """Return the host copy of ``x`` without waiting for the device; None if there is no copy of its current version."""
    if not _copies:
        return None
    version, copy = _copies.get(_source(x), (-1, None))
    return copy if copy is not None and version == x._version else None


def with_host_copy(copy: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on ``device``, such that :func:`host_copy` of the result does not wait for the device."""
    x = copy.to(device, non_blocking=True)
    if x is not copy:
        _remember(x, copy)
    return x


def forget_host_copies() -> None:
    """Forget all copies. Each model call does this first, because writing to ``x.data`` does not change the version."""
    _copies.clear()


def _remember(x: Tensor, copy: Tensor) -> None:
    if not x.is_inference():  # an inference tensor has no version
        _copies[_source(x)] = (x._version, copy)


def _source(x: Tensor) -> Tensor:
    """Return the base of ``x`` if ``x`` is a view with the same shape, dtype, strides and offset; else ``x``."""
    base = x._base
    if base is None or (base.shape, base.dtype) != (x.shape, x.dtype):
        return x
    return base if (base.stride(), base.storage_offset()) == (x.stride(), x.storage_offset()) else x
