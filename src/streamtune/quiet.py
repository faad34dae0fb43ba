"""Silence what quantisers log while they are imported (kernels for other machines that they did not find).

This module imports none of these libraries: :func:`hush_imports` has to be called before the first of them is imported.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

__all__ = ["hush_imports", "imports_are_hushed", "packed_call", "run_packed"]

LOUD = ("torchao", "bitsandbytes", "torch.utils._pytree")


def hush_imports() -> None:
    """Let the loggers of libraries that peft and transformers import log errors only."""
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)


def imports_are_hushed() -> bool:
    """Return True if :func:`hush_imports` was called."""
    return logging.getLogger(LOUD[0]).level == logging.ERROR  # torch sets those of its own loggers anew


def packed_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """Pack a call for :func:`run_packed` in another process, which logs as little on import as this one."""
    return pickle.dumps((function, args)), imports_are_hushed()


def run_packed(first: Any, packed: bytes, hushed: bool) -> None:
    """Make the call, with ``first`` before its arguments. The modules it needs are imported here and not before."""
    if hushed:
        hush_imports()
    function, args = pickle.loads(packed)
    function(first, *args)
