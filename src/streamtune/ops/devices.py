"""Simulation of a device by ``meta`` tensors, limits and timing of kernels, and cached CPU copies of small tensors.

A training step on ``meta`` has the shapes and tensor lifetimes of a real step, but no values.

Reading a device tensor on the CPU waits for all queued work of the device. So small tensors that are read often
(positions, masks, row starts) are copied to the CPU once.
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
_times: ContextVar[float] = ContextVar("number of runs that the simulated run stands for", default=1)
_all_iterations: ContextVar[bool] = ContextVar("every iteration of a loop runs", default=False)

T = TypeVar("T")


class SimulatedDeviceMode(TorchFunctionMode):
    """Base class of function modes that replace operators on ``meta`` by the simulated device's operators."""


@contextmanager
def _set_context_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def repeat_work(times: float) -> Iterator[None]:
    """Context manager: a simulation on ``meta`` counts the work inside ``times`` times, and its memory once."""
    with _set_context_variable(_times, _times.get() * times):
        yield


def current_run_count() -> float:
    """Return how often a simulation counts the current work: the product of all active :func:`repeat_work`."""
    return _times.get()


@contextmanager
def run_all_iterations() -> Iterator[None]:
    """Context manager: :func:`loop_or_simulate` yields every item, also on ``meta``."""
    with _set_context_variable(_all_iterations, True):
        yield


def loop_or_simulate(items: Sequence[T], device: torch.device) -> Iterator[T]:
    """Yield all ``items``; of four or more items on ``meta``, only the first, the second and the last.

    On ``meta``, the work for the second item counts for all items between the first and the last. So these items must
    be independent and cost the same.
    """
    if device.type != "meta" or len(items) < 4 or _all_iterations.get():
        yield from items
        return
    yield items[0]
    with repeat_work(len(items) - 2):
        yield items[1]
    yield items[-1]


@contextmanager
def simulate_device_type(device_type: str) -> Iterator[None]:
    """Context manager: tensors on ``meta`` simulate tensors on ``device_type``, which is ``cpu`` or ``cuda``."""
    with _set_context_variable(_kind, device_type):
        yield


def kernel_device_type(device: torch.device) -> str:
    """Return the device type whose kernels are used: the simulated type for ``meta``, else ``device.type``."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_device_type(device: torch.device) -> str:
    """Return the device type to pass to ``torch.autocast``: ``cpu`` for ``meta``, else ``device.type``."""
    return "cpu" if device.type == "meta" else device.type


# --- kernels ---------------------------------------------------------------------------------------------------------

MAX_ELEMENTS = (1 << 31) - 1
"""Largest number of tensor elements that a kernel with 32-bit indices can process."""


def block_slices(row_count: int, block_size: int) -> Iterator[slice]:
    """Yield consecutive slices that cover ``range(row_count)``, each of at most ``block_size`` rows (at least 1)."""
    block_size = max(1, block_size)
    for start in range(0, row_count, block_size):
        yield slice(start, min(start + block_size, row_count))


def median_time(run: Callable[[], object], device: torch.device, run_count: int) -> float:
    """Return the median time of ``run_count`` calls of ``run``, in seconds; each call waits for the device."""
    times = []
    for _ in range(run_count):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- copies on the host ----------------------------------------------------------------------------------------------

_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By device tensor: its ``_version`` when it was copied, and the copy on the CPU."""


def host_copy(x: Tensor) -> Tensor:
    """Return ``x`` if it is on the CPU, else a read-only CPU copy, which is cached until ``x`` is changed in place."""
    if x.device.type == "cpu":
        return x
    known = cached_host_copy(x)
    if known is None:
        known = x.detach().to("cpu")
        _cache_host_copy(x, known)
    return known


def cached_host_copy(x: Tensor) -> Tensor | None:
    """Return the cached CPU copy of ``x`` without waiting for the device; None if ``x`` has none or was changed."""
    if not _copies:
        return None
    version, copy = _copies.get(_source_of_view(x), (-1, None))
    return copy if copy is not None and version == x._version else None


def to_device_with_host_copy(copy: Tensor, device: torch.device) -> Tensor:
    """Return ``copy`` on ``device``, and cache ``copy`` as the CPU copy of the result (:func:`host_copy`)."""
    x = copy.to(device, non_blocking=True)
    if x is not copy:
        _cache_host_copy(x, copy)
    return x


def clear_host_copies() -> None:
    """Clear the cache of CPU copies. Each model call does so first, because the cache misses writes to ``x.data``."""
    _copies.clear()


def _cache_host_copy(x: Tensor, copy: Tensor) -> None:
    if not x.is_inference():  # an inference tensor has no version
        _copies[_source_of_view(x)] = (x._version, copy)


def _source_of_view(x: Tensor) -> Tensor:
    """Return ``x._base`` if it has the shape, dtype, strides and storage offset of ``x``; else ``x``."""
    base = x._base
    if base is None or (base.shape, base.dtype) != (x.shape, x.dtype):
        return x
    return base if (base.stride(), base.storage_offset()) == (x.stride(), x.storage_offset()) else x
