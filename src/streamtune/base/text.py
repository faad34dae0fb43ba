"""Look-up of names in tables, formatting of sizes, and one line of an error of a library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from streamtune.errors import ArgumentError, did_you_mean

T = TypeVar("T")

Status = Literal["stable", "experimental"]
"""Status of a method. An experimental method has one exactness test, and may change or be removed."""


def look_up(name: str, table: Mapping[str, T], noun: str, *, where: str) -> T:
    """Return ``table[name]``.

    Args:
        name: Key to look up.
        table: Table of known names.
        noun: Noun for the error, such as ``optimizer``.
        where: Recipe key or option that has the name, for the error.

    Raises:
        ArgumentError: ``table`` lacks this name.
    """
    if name not in table:
        fix = did_you_mean(name, table) or f"choose one of: {', '.join(table)}"
        raise ArgumentError(f"unknown {noun} '{name}'", where=where, fix=fix)
    return table[name]


def eval_set_names(records: Iterable[Mapping[str, Any]], metric: str) -> list[str]:
    """Return the names of the evaluation sets that have ``metric``, from record keys such as ``eval_NAME_METRIC``."""
    pattern = re.compile(rf"eval_(.+)_{re.escape(metric)}")
    keys = dict.fromkeys(key for record in records for key in record)
    candidates = [match[1] for key in keys if (match := pattern.fullmatch(key))]

    def is_other(name: str) -> bool:  # such as `nll_loss`, of all rows or of a set
        parts = f"{name}_{metric}".split("_")
        return any("_".join(parts[start:]) in keys for start in range(len(parts) - metric.count("_") - 1))

    return [name for name in candidates if not is_other(name)]


UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([KMGT]i?B?|B)$"
"""Number with a unit: ``80GiB``, ``1.5TB``, ``512 MiB``. ``G`` alone means ``GiB``."""


def parse_size(text: str, *, where: str = "") -> int:
    """Return the number of bytes of a size such as ``80GiB``. ``GiB`` and ``G`` are 1024^3 bytes, ``GB`` is 1000^3.

    Raises:
        ArgumentError: The text is not a size; ``where`` is the recipe key or option that has the text.

    Example:
        >>> parse_size("24GiB")
        25769803776
    """
    text = text.strip()
    if re.match(SIZE_PATTERN, text) is None:
        raise ArgumentError(
            f"expected a size; found {text!r}", where=where, fix="write a number and its unit, such as 80GiB"
        )
    number, prefix, unit = re.match(r"([0-9.]+) ?([KMGT]?)(i?B?)", text).groups()  # type: ignore[union-attr]
    base = 1000 if prefix and unit == "B" else 1024
    return int(float(number) * base ** (UNITS[prefix] if prefix else 0))


def show_size(size: float) -> str:
    """Return a number of bytes as text with a unit, rounded to three digits: ``24 KiB``, ``1.50 GiB``, ``139 GiB``.

    Example:
        >>> show_size(3 << 30)
        '3.00 GiB'
    """
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:  # 1,000 KiB is longer than 0.98 MiB
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f} {unit}"


def first_error_line(error: Exception) -> str:
    """Return the first line of an error message; if it is a heading, the next line and the number of others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[1]}" + (f" (and {len(lines) - 2} more)" if len(lines) > 2 else "")
    return lines[0] if lines else type(error).__name__
