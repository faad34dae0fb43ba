"""Silence what quantisers log on import (kernels for other machines, not found); leave them out if none is needed.

This module imports none of these libraries. :func:`quiet_imports` and :func:`leave_out_quantisers` are to be called
before the first of them is imported.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable
from typing import Any

QUANTISERS = ("torchao", "bitsandbytes")
LOGGERS = (*QUANTISERS, "torch.utils._pytree")


def quiet_imports() -> None:
    """Let the loggers of libraries that peft and transformers import log errors only."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def imports_are_quiet() -> bool:
    """Return True if :func:`quiet_imports` was called."""
    return logging.getLogger(LOGGERS[0]).level == logging.ERROR  # torch sets those of its own loggers anew


_own = False


def own_process() -> None:
    """Note that this process runs one command and then ends."""
    global _own
    _own = True


def process_is_own() -> bool:
    """Return True if :func:`own_process` was called."""
    return _own


def leave_out_quantisers() -> None:
    """Let imports from now on find no quantiser, as if none were installed.

    peft and transformers import each one that they find, which takes a fourth of the time that all imports take. They
    remember what they found, so this is for a process of its own in which nothing is quantised.
    """
    for name in QUANTISERS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as documented, of a module that is not there


def packed_call(function: Callable[..., None], *args: Any) -> tuple[bytes, bool]:
    """Pack a call for :func:`run_packed` in another process, which logs as little on import as this one."""
    return pickle.dumps((function, args)), imports_are_quiet()


def run_packed(first: Any, packed: bytes, quiet: bool) -> None:
    """Make the call, with ``first`` before its arguments. The modules it needs are imported here and not before."""
    if quiet:
        quiet_imports()
    function, args = pickle.loads(packed)
    function(first, *args)
