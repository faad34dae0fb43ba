"""Look names of users up in a table: losses, optimizers, schedules of the learning rate.

This module is a leaf: it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from streamtune.errors import ArgumentError, did_you_mean

__all__ = ["look_up"]

T = TypeVar("T")


def look_up(name: str, known: Mapping[str, T], kind: str, *, where: str) -> T:
    """Return ``known[name]``.

    Raises:
        ArgumentError: No ``kind`` has that name; ``where`` is the key that gave it.
    """
    if name not in known:
        mend = did_you_mean(name, known) or f"choose one of: {', '.join(known)}"
        raise ArgumentError(f"no {kind} is called '{name}'", where=where, mend=mend)
    return known[name]
