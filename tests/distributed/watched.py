"""A rank that trains nothing: what the tests of launching, agreeing and watching start several of.

    python -m tests.distributed.watched CASE [SECONDS]

Ranks work for a second, then each does what CASE says of it. ``gloo-`` cases do so in a real process group.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from streamtune.distributed import Watchdog, check_ranks_agree, die_with_launcher, read_environment
from streamtune.distributed.failure import Failure, write_failure
from streamtune.distributed.failure_detector import WatchLimits
from streamtune.errors import DataError, StreamTuneError

QUICK = WatchLimits(silence=6.0, no_progress=4.0, start=120.0, straggler_window=5.0)
"""Only so that tests wait less; how long is long enough on a busy machine is tested with what is shipped."""


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def hold_the_interpreter(seconds: float) -> None:
    """Hold the GIL, as a library does that computes without releasing it."""
    sys.setswitchinterval(1000)
    compute(seconds)
    sys.setswitchinterval(0.005)


def main() -> None:
    die_with_launcher()
    case = sys.argv[1]
    environment = read_environment()
    environment.export_variables()
    limits = QUICK if os.environ.get("WATCHED_QUICK") else WatchLimits()
    events = Path(os.environ["WATCHED_EVENTS"]) if "WATCHED_EVENTS" in os.environ else None

    def note(name: str, details: dict[str, Any]) -> None:
        if events is not None:
            with events.open("a") as file:
                file.write(json.dumps({"event": name, **details}) + "\n")

    try:
        if case == "agree":
            facts = json.loads(os.environ["WATCHED_FACTS"])[environment.rank]
            if facts is not None:
                check_ranks_agree(facts, environment, seconds=float(os.environ.get("WATCHED_SECONDS", "60")))
            return
        with Watchdog(environment, event=note, limits=limits) as watchdog:
            work(case, environment.rank, watchdog)
    except StreamTuneError as error:
        if not write_failure(Failure.from_error(error, environment.rank, environment.host)):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def work(case: str, rank: int, watchdog: Watchdog) -> None:
    if case.startswith("gloo-"):
        return collective(case, rank, watchdog)
    for step in (1, 2, 3):
        watchdog.record_phase(step, "batch 1/1")
        compute(0.5)
    other = int(os.environ.get("WATCHED_RANK", "1"))
    if case == "kill" and rank == other:
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "stop" and rank == other:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "raise" and rank == other:
        raise DataError("a row is broken", where="rows.jsonl:7", fix="fix it")
    elif case == "done" and rank != other:
        return
    elif case == "done":
        compute(6)
        return
    elif case == "hold":
        hold_the_interpreter(10) if rank == other else compute(10)
        return
    compute(60)


def collective(case: str, rank: int, watchdog: Watchdog) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1000)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    ranks = torch.nn.parallel.DistributedDataParallel(layers)  # with buffers, which its forward sends
    for step in (1, 2, 3):
        watchdog.record_phase(step, "batch 1/1")
        dist.all_reduce(tensor)
        compute(0.4)
    other = int(os.environ.get("WATCHED_RANK", "1"))
    if case == "gloo-kill" and rank == other:
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "gloo-stop" and rank == other:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "gloo-raise" and rank == other:
        raise DataError("a row is broken", where="rows.jsonl:7", fix="fix it")
    elif case == "gloo-deadlock" and rank == other:
        dist.barrier()
    elif case == "gloo-long" and rank == other:
        compute(float(sys.argv[2]))
    elif case in ("gloo-sleep", "gloo-ddp") and rank == other:
        time.sleep(1000)
    elif case == "gloo-ddp":
        ranks(torch.ones(1, 8))
    elif case == "gloo-straggle":
        for step in range(4, 40):
            watchdog.record_phase(step, "batch 1/1")
            compute(0.25 if rank == other else 0.05)
            dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    dist.barrier()


if __name__ == "__main__":
    main()
