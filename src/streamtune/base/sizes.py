"""Bytes as people write them: ``80GiB`` to a number and back. A leaf like ``errors``: it imports nothing heavy."""

from __future__ import annotations

import re

from streamtune.errors import ArgumentError

UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGT]i?B?|B)$"
"""A number and its unit: ``80GiB``, ``1.5TB``, ``512 MiB``. ``G`` alone is ``GiB``."""


def parse_size(text: str, *, where: str = "") -> int:
    """``80GiB`` in bytes. ``GiB`` and ``G`` are 1024^3, ``GB`` is 1000^3.

    Args:
        text: A number with a unit.
        where: Who asks, for the error.

    Raises:
        ArgumentError: This is no size.
    """
    text = text.strip()
    if re.match(SIZE_PATTERN, text) is None:
        raise ArgumentError(f"{text!r} is no size", where=where, mend="write a number and its unit, such as 80GiB")
    number, prefix, unit = re.match(r"([0-9.]+) ?([KMGT]?)(i?B?)", text).groups()  # type: ignore[union-attr]
    base = 1000 if prefix and unit == "B" else 1024
    return int(float(number) * base ** (UNITS[prefix] if prefix else 0))


def show_size(size: float) -> str:
    """Bytes in three digits: ``24 KiB``, ``1.50 GiB``, ``139 GiB``."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:  # 1,000 KiB is longer than 0.98 MiB
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"
