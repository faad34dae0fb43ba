"""Devices: simulation on ``meta``, limits and timing of kernels, and cached host copies of small tensors.

On ``meta`` a step has the shapes and lifetimes of a real step, without values. The limit is the number of elements that
a kernel can count. Timing chooses between kernels.

Reading a device tensor on the host waits for all earlier work of the device. So small tensors that determine the work
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
_times: ContextVar[float] = ContextVar("number of runs that the simulated run stands for", default=1)
_all_iterations: ContextVar[bool] = ContextVar("every iteration of a loop runs", default=False)

T = TypeVar("T")


class DeviceFunctions(TorchFunctionMode):
    """Base class of function modes that choose operators as the simulated device would."""


@contextmanager
def _set_context_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def multiply_run_count(times: float) -> Iterator[None]:
    """Context manager: in a simulation, the code inside counts as run ``times`` times, with the memory of one run."""
    with _set_context_variable(_times, _times.get() * times):
        yield


def current_run_count() -> float:
    """Return how many times the running code counts in a simulation (see :func:`multiply_run_count`)."""
    return _times.get()


@contextmanager
def run_all_iterations() -> Iterator[None]:
    """Context manager: :func:`loop_or_simulate` skips no iteration while active."""
    with _set_context_variable(_all_iterations, True):
        yield


def loop_or_simulate(items: Sequence[T], device: torch.device) -> Iterator[T]:
    """Yield ``items``; in a simulation (device ``meta``), only the first, the second and the last.

    The second then counts for all items between the first and the last, whose iterations must have equal cost and be
    independent.
    """
    if device.type != "meta" or len(items) < 4 or _all_iterations.get():
        yield from items
        return
    yield items[0]
    with multiply_run_count(len(items) - 2):
        yield items[1]
    yield items[-1]


@contextmanager
def simulate_device_type(device_type: str) -> Iterator[None]:
    """Context manager: tensors on ``meta`` stand for tensors on this device type, ``cpu`` or ``cuda``."""
    with _set_context_variable(_kind, device_type):
        yield


def kernel_device_type(device: torch.device) -> str:
    """Return the type of the device whose kernels run; for ``meta``, the simulated type."""
    return _kind.get() if device.type == "meta" else device.type


def autocast_device_type(device: torch.device) -> str:
    """Return the device type to pass to ``torch.autocast``; for ``meta``, ``cpu``."""
    return "cpu" if device.type == "meta" else device.type


# --- kernels ---------------------------------------------------------------------------------------------------------

MAX_ELEMENTS = (1 << 31) - 1
"""Largest number of elements that a kernel with 32-bit counts can process."""


def block_slices(row_count: int, block_size: int) -> Iterator[slice]:
    """Yield slices of at most ``block_size`` (at least 1) that cover ``range(row_count)``."""
    block_size = max(1, block_size)
    for start in range(0, row_count, block_size):
        yield slice(start, min(start + block_size, row_count))


def median_time(run: Callable[[], object], device: torch.device, run_count: int) -> float:
    """Return the median time of ``run_count`` calls, in seconds; the device is synchronised around each call."""
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
"""By device tensor: the version when the tensor was copied, and the copy on the host."""


def host_copy(x: Tensor) -> Tensor:
    """Return ``x`` if it is on the CPU, else a read-only copy on the CPU, cached until ``x`` is changed in place."""
    if x.device.type == "cpu":
        return x
    known = cached_host_copy(x)
    if known is None:
        known = x.detach().to("cpu")
        _cache_host_copy(x, known)
    return known


def cached_host_copy(x: Tensor) -> Tensor | None:
    """Return the cached CPU copy of ``x``, without waiting for the device; None if there is none of its version."""
    if not _copies:
        return None
    version, copy = _copies.get(_source_of_view(x), (-1, None))
    return copy if copy is not None and version == x._version else None


def to_device_with_host_copy(copy: Tensor, device: torch.device) -> Tensor:
    """Return ``copy`` on ``device``, and cache ``copy`` as the result's :func:`host_copy`."""
    x = copy.to(device, non_blocking=True)
    if x is not copy:
        _cache_host_copy(x, copy)
    return x


def clear_host_copies() -> None:
    """Clear the cache of CPU copies, which does not notice writes to ``x.data``; each model call does this first."""
    _copies.clear()


def _cache_host_copy(x: Tensor, copy: Tensor) -> None:
    if not x.is_inference():  # an inference tensor has no version
        _copies[_source_of_view(x)] = (x._version, copy)


def _source_of_view(x: Tensor) -> Tensor:
    """Return the tensor that ``x`` is a view of if shape, dtype, strides and offset are equal; else ``x``."""
    base = x._base
    if base is None or (base.shape, base.dtype) != (x.shape, x.dtype):
        return x
    return base if (base.stride(), base.storage_offset()) == (x.stride(), x.storage_offset()) else x
