"""Look names of users up in a table (losses, optimizers, schedules of the learning rate), and in the names of metrics.

This module is a leaf: it imports nothing heavy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from streamtune.errors import ArgumentError, did_you_mean

T = TypeVar("T")

Status = Literal["stable", "experimental"]
"""The status of a method: an experimental one has a single test of exactness, and may change or go."""


def look_up(name: str, known: Mapping[str, T], kind: str, *, where: str) -> T:
    """Return ``known[name]``.

    Raises:
        ArgumentError: No ``kind`` has that name; ``where`` is the key that gave it.
    """
    if name not in known:
        mend = did_you_mean(name, known) or f"choose one of: {', '.join(known)}"
        raise ArgumentError(f"no {kind} is called '{name}'", where=where, mend=mend)
    return known[name]


def set_names(records: Iterable[Mapping[str, Any]], metric: str) -> list[str]:
    """Return the names of the held-out sets of which the records have a metric: that of ``eval_NAME_loss``."""
    pattern = re.compile(rf"eval_(.+)_{re.escape(metric)}")
    keys = dict.fromkeys(key for record in records for key in record)
    found = [match[1] for key in keys if (match := pattern.fullmatch(key))]

    def is_other(name: str) -> bool:  # `nll_loss`, of all rows or of a set
        parts = f"{name}_{metric}".split("_")
        return any("_".join(parts[start:]) in keys for start in range(len(parts) - metric.count("_") - 1))

    return [name for name in found if not is_other(name)]
