"""How much memory of the machine may be used before it would begin to swap or the system to kill."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_host_bytes", "reserved_host_bytes"]

LIMITS = (
    ("memory.max", "memory.current"),  # control groups, version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)
"""The files of a container's limit and of what it uses."""

RESERVE = 1 << 28
"""Bytes that are left to the rest of the machine at least."""

SHARE = 0.02
"""Part of the machine's memory that is left to the rest of it at least."""


def free_host_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping: what is available, within the limit of a container.

    Args:
        root: Where the control group of this process is mounted.
    """
    free = int(psutil.virtual_memory().available)
    for limit_name, used_name in LIMITS:
        limit, used = _number(root / limit_name), _number(root / used_name)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used + _reclaimable((root / used_name).parent)))
    return free


def reserved_host_bytes() -> int:
    """Bytes to leave alone."""
    return max(RESERVE, int(SHARE * psutil.virtual_memory().total))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such limit, or the word "max"
        return None


def _reclaimable(folder: Path) -> int:
    """Cached pages of files that the system gives back when memory is asked for."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(numbers.get("total_inactive_file", numbers.get("inactive_file", "0")))
