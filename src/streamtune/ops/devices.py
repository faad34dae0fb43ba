"""Differences between device types, simulation by ``meta`` tensors, timing of kernels, and cached CPU copies.

CUDA (with ROCm), Intel's ``xpu`` and Apple's ``mps`` have different functions for memory, random state and names. The
functions below call the right one, and other modules call only these. Streams, pinned memory and fused kernels are used
on CUDA alone: elsewhere copies are synchronous and attention is computed by its formula.

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
from typing import Any, TypeVar

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


# --- device types ----------------------------------------------------------------------------------------------------


def _backend(device: torch.device) -> Any:
    """Return ``torch.cuda``, ``torch.xpu`` or ``torch.mps``; None for other types, such as ``cpu`` and ``meta``."""
    return getattr(torch, device.type) if device.type in ACCELERATORS else None


ACCELERATORS = ("cuda", "xpu", "mps")
"""Types of the devices on which a model can be trained, besides ``cpu``."""


def is_available(kind: str) -> bool:
    """Return True if this process has an accelerator of a type of :data:`ACCELERATORS`."""
    return bool(torch.backends.mps.is_available() if kind == "mps" else getattr(torch, kind).is_available())


def accelerators() -> list[torch.device]:
    """Return the accelerators of this process: all CUDA and Intel devices, and Apple's, which has no index."""
    found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return [*found, torch.device("mps")] if is_available("mps") else found


def has_streams(device: torch.device) -> bool:
    """Return True if copies and computation overlap on streams, with pinned host memory: on CUDA."""
    return device.type == "cuda"


def has_bfloat16(device: torch.device) -> bool:
    """Return False for a CUDA device that only emulates bfloat16: below compute capability 8.0 (T4, V100, RTX 20)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return bool(torch.cuda.get_device_properties(device).major >= 8)


def has_float64(device: torch.device) -> bool:
    """Return False if the device has no float64: Apple's, and some of Intel's."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def to_float64(x: Tensor) -> Tensor:
    """Return ``x`` in float64, on the CPU if its device has no float64."""
    return (x if has_float64(x.device) else x.cpu()).double()


def simulated_device_type(device: torch.device) -> str:
    """Return the device type to simulate for a model on ``device``: ``cuda``, or ``cpu`` where no kernel is fused."""
    return "cuda" if device.type in ("cuda", "meta") else "cpu"


def shares_host_memory(device: torch.device) -> bool:
    """Return True if the device computes in the host's memory: the CPU, and Apple's unified memory."""
    return device.type in ("cpu", "mps")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; on a CPU nothing is queued."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif (backend := _backend(device)) is not None:
        backend.synchronize(device)


def free_device_bytes(device: torch.device) -> int:
    """Return the free bytes of a device with its own memory, including memory reserved by PyTorch and not used."""
    backend = _backend(device)
    free, _ = backend.mem_get_info(device)
    return int(free + backend.memory_reserved(device) - backend.memory_allocated(device))


def device_name(device: torch.device) -> str:
    """Return the name of a device, as its driver gives it."""
    if device.type == "mps":
        return "Apple GPU"
    return "this machine's CPU" if device.type == "cpu" else str(_backend(device).get_device_name(device))


def empty_cache(device: torch.device) -> None:
    """Free the memory that PyTorch has reserved on an accelerator and does not use."""
    if (backend := _backend(device)) is not None:
        backend.empty_cache()


def reset_peak_bytes(device: torch.device) -> None:
    """Reset the peak memory of a device that counts it."""
    if device.type in ("cuda", "xpu"):
        _backend(device).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes since the last reset; None if the device does not count them (CPU, Apple)."""
    return int(_backend(device).max_memory_allocated(device)) if device.type in ("cuda", "xpu") else None


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's own random generator; None for the CPU and ``meta``."""
    if device.type == "mps":
        return torch.mps.get_rng_state()
    backend = _backend(device)
    state: Tensor | None = None if backend is None else backend.get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of a device's own random generator."""
    if device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        _backend(device).set_rng_state(state, device)


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
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


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
    x = copy.to(device, non_blocking=has_streams(device))
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
