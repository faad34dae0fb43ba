"""Starts ranks of :mod:`tests.distributed.watched` as the launcher does, and waits until they end."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

from streamtune.distributed.failure import RankEnd
from streamtune.distributed.hosts import free_port
from streamtune.distributed.local_ranks import LocalRanks

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


def environment(count: int, **more: str) -> dict[str, str]:
    """Return the variables of ranks on this machine."""
    return {
        **os.environ,
        "PYTHONPATH": f"{SRC}:{ROOT}",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "STREAMTUNE_RUN_ID": secrets.token_hex(8),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(*arguments: str, count: int = 2, **more: str) -> LocalRanks:
    command = [sys.executable, "-m", "tests.distributed.watched", *arguments]
    return LocalRanks(command, 0, count, environment(count, **more), "here")


def wait(ranks: LocalRanks, seconds: float) -> list[RankEnd]:
    """Return how the ranks ended; ranks that have not ended in time are killed and left out."""
    ends: list[RankEnd] = []
    until = time.monotonic() + seconds
    try:
        while ranks.running_ranks and time.monotonic() < until:
            ends += ranks.poll()
            time.sleep(0.02)
        return sorted(ends, key=lambda end: end.rank)
    finally:
        ranks.close()
