"""Peak memory of a run, and recognition of errors that mean it ran out."""

from __future__ import annotations

import sys

import psutil
import torch

GIB = 1 << 30


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement. On the CPU the peak is the process's own and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return peak bytes: of the device's allocator since its last reset, or the process's resident memory on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Not on Windows.

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is one of those by which Python, torch and CUDA report that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in message or "out of memory" in message)
