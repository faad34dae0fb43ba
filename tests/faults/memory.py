"""The most memory a process takes of itself, whatever it was forked from and whatever ran in it before."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["forget_peak", "peak_mib"]

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak() -> bool:
    """Begin anew with what is taken now; whether this system can (Linux).

    ``ru_maxrss`` cannot: it survives ``exec``, so that the child of a large process is large from birth.
    """
    try:
        FORGET.write_text("5")  # see proc(5)
    except OSError:
        return False
    return True


def peak_mib() -> float:
    """Of resident memory, since :func:`forget_peak` or else since this program was started."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024)
