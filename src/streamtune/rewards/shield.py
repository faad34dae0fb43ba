"""Calls of a user's function that leave training as it is: state of the process that it changes is put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["shielded"]


@contextmanager
def shielded() -> Iterator[None]:
    """Put back torch's generators, grad mode and default dtype, the working directory and the standard streams.

    A function that calls ``torch.manual_seed`` to be repeatable itself would have every rollout draw the same numbers.
    Within, torch's generators start from a number that is drawn of the state outside: what a function draws is another
    stream than what the rollouts draw, and the same in a run that was resumed. The generators of ``random`` and numpy
    are the functions' own: no step of training draws from them while it rolls out.
    """
    streams, folder = (sys.stdout, sys.stderr), _working_directory()
    with _own_generators():
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            if folder is not None and _working_directory() != folder:
                with suppress(OSError):
                    os.chdir(folder)


@contextmanager
def _own_generators() -> Iterator[None]:
    """Keep torch as it is; nothing is to be kept where it is not imported yet."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(torch.randint(2**31, ())))
        try:
            yield
        finally:
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - a string is what is compared
    except OSError:
        return None
