"""Silence what quantisers log while they are imported (kernels for other machines that they did not find).

This module imports none of these libraries: :func:`quiet_imports` is to be called before the first of them is imported.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

__all__ = ["imports_are_quiet", "packed_call", "quiet_imports", "run_packed"]

LOGGERS = ("torchao", "bitsandbytes", "torch.utils._pytree")


def quiet_imports() -> None:
    """Let the loggers of libraries that peft and transformers import log errors only."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def imports_are_quiet() -> bool:
    """Return True if :func:`quiet_imports` was called."""
    return logging.getLogger(LOGGERS[0]).level == logging.ERROR  # torch sets those of its own loggers anew


def packed_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """Pack a call for :func:`run_packed` in another process, which logs as little on import as this one."""
    return pickle.dumps((function, args)), imports_are_quiet()


def run_packed(first: Any, packed: bytes, quiet: bool) -> None:
    """Make the call, with ``first`` before its arguments. The modules it needs are imported here and not before."""
    if quiet:
        quiet_imports()
    function, args = pickle.loads(packed)
    function(first, *args)
