"""Sizes of memory as people write and read them."""

from __future__ import annotations

import re

from streamtune.errors import ArgumentError

__all__ = ["format_bytes", "parse_bytes"]

UNITS = {"": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate(("", "K", "M", "G", "T")) if prefix}


def parse_bytes(text: str, option: str) -> int:
    """``80GiB``, ``1.5 GB`` or plain bytes.

    Args:
        text: What was written.
        option: Where, for the message.

    Raises:
        ArgumentError: It is no size above 0.
    """
    known = {unit.lower(): size for unit, size in UNITS.items()}
    found = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in known or not (size := int(float(found[1]) * known[found[2].lower()])):
        raise ArgumentError(f"{option} takes a size, not {text!r}", mend=f"write {option} 80GiB")
    return size


def format_bytes(size: float) -> str:
    """``80 GiB``, ``1.46 GiB``, ``312 MiB``: three digits."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit] or unit == "KiB":
            number = size / UNITS[unit]
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    raise AssertionError("the last unit takes what is left")
