"""Measure how fast the kernel provides host memory: ``python -m benchmarks.host_pages [--gib 4]``.

The engine touches the pages that an accelerator copies to with all threads, before they are locked. Here they are
compared with pages that processes share, touched by one thread, as locking does it.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable

import torch

from streamtune.engine.memory.host import map_pages, touch_pages

GIB = 1024**3


def rate(mapped: Callable[[int], mmap.mmap], nbytes: int, threads: int) -> float:
    """Return GiB/s of mapping and touching."""
    torch.set_num_threads(threads)
    start = time.perf_counter()
    region = torch.frombuffer(pages := mapped(nbytes), dtype=torch.uint8)
    touch_pages(region)
    seconds = time.perf_counter() - start
    del region
    pages.close()
    return nbytes / GIB / seconds


def main() -> None:
    """Measure both in turns and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_pages")
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    threads, size = torch.get_num_threads(), options.gib * GIB
    ways = {
        "shared, one thread": lambda: rate(lambda nbytes: mmap.mmap(-1, nbytes), size, 1),
        f"an arena's, {threads} threads": lambda: rate(map_pages, size, threads),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            found[name].append(way())
    for name, rates in found.items():
        print(f"{name}: {statistics.median(rates):.1f} GiB/s ({min(rates):.1f} to {max(rates):.1f})")


if __name__ == "__main__":
    main()
