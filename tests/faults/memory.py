"""The most memory a process takes of itself, whatever it was forked from and whatever ran in it before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

__all__ = ["forget_peak", "peak_mib", "peak_of_children"]

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


@contextmanager
def peak_of_children(program: str) -> Iterator[Callable[[], float]]:
    """Looks at the child processes twenty times a second; what it gives returns MiB of the largest that was seen.

    Args:
        program: What the command line of those that count has in it: this process may have others from before.
    """
    over, seen, this = threading.Event(), [0.0], psutil.Process()

    def look() -> None:
        while not over.wait(0.05):
            for child in this.children(recursive=True):
                with suppress(psutil.Error):  # it ended meanwhile
                    if any(program in word for word in child.cmdline()):  # not so until exec: a fork is as its parent
                        seen[0] = max(seen[0], child.memory_info().rss / 1024**2)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: seen[0]
    finally:
        over.set()
        thread.join()
