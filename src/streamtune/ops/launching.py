"""Limits and times of kernels: the elements that they can count, and the seconds by which one of several is chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

__all__ = ["MAX_ELEMENTS", "blocks", "median_time"]

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
