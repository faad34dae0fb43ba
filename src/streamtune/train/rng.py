"""The random state of a process: every generator a training step may draw from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """Torch's generators as tensors; those of ``random`` and numpy as plain JSON values."""

    tensors: dict[str, Tensor]
    """``cpu`` and ``cuda:0`` ... -> uint8"""
    plain: dict[str, Any]
    """``python`` and ``numpy`` -> nested lists of numbers and strings"""


def seed_everything(seed: int, rank: int = 0, step: int = 0) -> None:
    """Seed ``random``, numpy and torch on every device. ``seed`` is below 2**32, which is as far as numpy goes.

    Ranks draw differently: two that drop out the same units would be less random together than one is alone.
    ``step`` is for ranks that start there without a random state to go on with.
    """
    if rank > 0 or step > 0:
        seed = int(np.random.SeedSequence((seed, rank, step) if step else (seed, rank)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Have torch refuse what gives another result from run to run. Call it before a device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_rng() -> RngState:
    """Read the state of every generator; draws nothing."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    return RngState(tensors, plain)


def restore_rng(state: RngState) -> None:
    """Put every generator back to ``state``. A device that is not there any more is left out."""
    torch.set_rng_state(state.tensors["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in state.tensors:
            torch.cuda.set_rng_state(state.tensors[f"cuda:{index}"], index)
    version, internal, gauss = state.plain["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state.plain["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Give back the random state at the end, whatever the block draws."""
    state = capture_rng()
    try:
        yield
    finally:
        restore_rng(state)
