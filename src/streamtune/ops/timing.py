"""Times of kernels, by which one of several is chosen."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

__all__ = ["median_time"]


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
