"""Limits of 32-bit indices: kernels that count elements in an int get at most ``MAX_ELEMENTS`` of them at a time.

Many device kernels (torch's own, cuDNN's, Triton's) multiply a row number by a row length in 32 bits. Past 2^31
elements that wraps to another address: at best a crash, at worst other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MAX_ELEMENTS", "blocks"]

MAX_ELEMENTS = (1 << 31) - 1
"""The largest int of 32 bits."""


def blocks(length: int, size: int) -> Iterator[slice]:
    """Cut ``length`` rows into slices of at most ``size``, at least one row each."""
    size = max(1, size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
