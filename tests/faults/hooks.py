"""What is done to a forked run before it begins; each gets the job (see ``zygote``)."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


# --- a small disk -----------------------------------------------------------------------------------------------------


def on_a_small_disk(job: dict[str, Any]) -> int:
    """The run on a tmpfs of 1 MiB with ``job["ballast"]`` bytes on it; then, these deleted, the run again.

    Exit code 0: the first run ended in 0 or 1, left a complete checkpoint if it had saved one, and the second went to
    the end; what it came to is copied to ``job["cwd"]/kept``. 77: no file system can be mounted here.
    """
    from tests.faults.kit import complete_checkpoints, read_lines

    folder = Path(job["cwd"])
    disk = folder / "runs"
    disk.mkdir()
    if not _mount_tmpfs(disk):
        return 77
    (disk / "ballast").write_bytes(b"\0" * int(job["ballast"]))
    first = _fork_main(job)
    saved = [r for r in read_lines(disk / "tiny/events.jsonl") if r["event"] == "checkpoint"] if first == 1 else []
    print("FIRST", first, "SAVED", len(saved), flush=True)
    if first not in (0, 1) or (saved and not complete_checkpoints(disk / "tiny")):
        return 1
    (disk / "ballast").unlink()
    second = _fork_main(job)
    if second == 0:
        shutil.copytree(disk / "tiny", folder / "kept")
    return second


def _mount_tmpfs(target: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 and libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0:
        return False
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    return libc.mount(b"tmpfs", str(target).encode(), b"tmpfs", 0, b"size=1m") == 0


def _fork_main(job: dict[str, Any]) -> int:
    from streamtune.cli import main

    pid = os.fork()
    if pid == 0:
        try:
            main(job["argv"])
        except SystemExit as left:
            os._exit(int(left.code or 0))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- a signal in a phase ----------------------------------------------------------------------------------------------


def sigterm_while(job: dict[str, Any]) -> None:
    """A real SIGTERM from the middle of ``job["phase"]``, the second time it is reached (loading: the first)."""
    import streamtune.run.build as build
    from streamtune import train
    from streamtune.train import LocalBackend, loop, saver
    from streamtune.train.objective import SupervisedObjective

    phases: dict[str, tuple[Any, str]] = {
        "loading": (build, "make_model"),
        "forward": (SupervisedObjective, "score"),
        "optimizer": (LocalBackend, "step"),
        "evaluating": (loop, "evaluate"),
        "saving": (saver, "save_checkpoint"),
        "final": (train, "write_final_model"),
    }
    owner, name = phases[job["phase"]]
    once = job["phase"] in ("loading", "evaluating", "final")
    _before(owner, name, at=1 if once else 2, then=_sigterm)


def _sigterm() -> None:
    print(f"SIGNAL {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)


def _before(owner: Any, name: str, *, at: int, then: Callable[[], None]) -> None:
    real, calls = getattr(owner, name), [0]

    @functools.wraps(real)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            then()
        return real(*arguments, **more)

    setattr(owner, name, wrapped)


# --- numbers that are not finite, memory that runs out ----------------------------------------------------------------


def not_finite(job: dict[str, Any]) -> None:
    """The loss of micro-batch ``job["micro"]`` (from 1) is NaN, or that of batches with a row in ``job["rows"]``."""
    from dataclasses import replace

    from streamtune.train.objective import SupervisedObjective

    real, calls = SupervisedObjective.score, [0]

    def score(self: Any, model: Any, batch: Any, totals: Any) -> Any:
        found = real(self, model, batch, totals)
        if totals is None:
            return found
        calls[0] += 1
        bad = calls[0] == job.get("micro") or any(o.endswith(tuple(job.get("rows", ()))) for o in batch.origins)
        return replace(found, loss=found.loss * math.nan) if bad else found

    SupervisedObjective.score = score  # type: ignore[method-assign]


def out_of_memory(job: dict[str, Any]) -> None:
    """From micro-batch ``job["micro"]`` on, chunks of more than ``job["most"]`` tokens do not fit in memory."""
    import torch

    from streamtune.train.objective import SupervisedObjective

    real, calls = SupervisedObjective.score, [0]

    def score(self: Any, model: Any, batch: Any, totals: Any) -> Any:
        calls[0] += totals is not None
        found = real(self, model, batch, totals)
        if calls[0] >= job["micro"] and self._handle.schedule.chunk_size > job["most"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return found

    SupervisedObjective.score = score  # type: ignore[method-assign]


def not_finite_but_the_first(job: dict[str, Any]) -> None:
    """Every loss is NaN but those of the first step's two micro-batches."""
    from dataclasses import replace

    from streamtune.train.objective import SupervisedObjective

    real, calls = SupervisedObjective.score, [0]

    def score(self: Any, model: Any, batch: Any, totals: Any) -> Any:
        found = real(self, model, batch, totals)
        calls[0] += totals is not None
        return replace(found, loss=found.loss * math.nan) if totals is not None and calls[0] > 2 else found

    SupervisedObjective.score = score  # type: ignore[method-assign]


def hangups(job: dict[str, Any]) -> None:
    """Three SIGHUPs in the third forward, under ``nohup`` where the job says so."""
    from streamtune.train.objective import SupervisedObjective

    signal.signal(signal.SIGHUP, signal.SIG_IGN if job.get("nohup") else signal.SIG_DFL)

    def hang_up() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)

    _before(SupervisedObjective, "score", at=3, then=hang_up)


def output_is_full(job: dict[str, Any]) -> None:
    """Standard output and error are full."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def reader_goes(job: dict[str, Any]) -> None:
    """Standard output is a pipe whose reader goes in the fifth forward."""
    from streamtune.train.objective import SupervisedObjective

    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    _before(SupervisedObjective, "score", at=5, then=lambda: os.close(reading))


# --- many starts in one place ----------------------------------------------------------------------------------------


def many_starts(job: dict[str, Any]) -> int:
    """``job["count"]`` runs of the same command, each after up to ``job["seconds"]``, in one place.

    Whichever comes to ``job["held_at"]`` (``loading``, or a micro-batch from 1) waits there until the others ended.
    ``started-N.txt`` is what each printed, ``started.json`` their processes and exit codes.
    """
    folder, count, draw = Path(job["cwd"]), int(job["count"]), random.Random(job["seed"])
    offsets = [draw.uniform(0.0, job["seconds"]) for _ in range(count)]
    pids: dict[int, int] = {}
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            output = os.open(folder / f"started-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _wait_for_the_others(job["held_at"], folder, count - 1)
            time.sleep(offsets[number])
            os._exit(_main_code(job["argv"]))
        pids[pid] = number
    codes: dict[int, tuple[int, int]] = {}
    while len(codes) < count:
        pid, status = os.wait()
        codes[pids[pid]] = (pid, os.waitstatus_to_exitcode(status))
        (folder / f"ended-{len(codes)}").touch()
    (folder / "started.json").write_text(json.dumps([codes[number] for number in range(count)]))
    return 0


def _main_code(argv: list[str]) -> int:
    from streamtune.cli import main

    try:
        main(argv)
    except SystemExit as left:
        sys.stdout.flush()
        sys.stderr.flush()
        return int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 70
    return 0


def _wait_for_the_others(held_at: str | int, folder: Path, others: int) -> None:
    import streamtune.run.build as build
    from streamtune.train.objective import SupervisedObjective

    def wait() -> None:
        until = time.monotonic() + 120.0
        while not (folder / f"ended-{others}").exists() and time.monotonic() < until:
            time.sleep(0.02)

    if held_at == "loading":
        _before(build, "make_model", at=1, then=wait)
    else:
        _before(SupervisedObjective, "score", at=int(held_at), then=wait)
