"""What quantisers say while they are imported (kernels for other machines that they did not find), and how to hush it.

Imports no library itself: a process must be told before it imports the first.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

__all__ = ["hush_imports", "imports_are_hushed", "packed_call", "run_packed"]

LOUD = ("torchao", "bitsandbytes", "torch.utils._pytree")


def hush_imports() -> None:
    """Let the loggers of what peft and transformers import speak of errors only."""
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)


def imports_are_hushed() -> bool:
    """Whether :func:`hush_imports` was called."""
    return logging.getLogger(LOUD[0]).level == logging.ERROR  # torch sets those of its own loggers anew


def packed_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """A call for :func:`run_packed` in another process, which is to be as quiet as this one."""
    return pickle.dumps((function, args)), imports_are_hushed()


def run_packed(first: Any, packed: bytes, hushed: bool) -> None:
    """Make the call, ``first`` before its arguments. What it needs is imported here and not before."""
    if hushed:
        hush_imports()
    function, args = pickle.loads(packed)
    function(first, *args)
