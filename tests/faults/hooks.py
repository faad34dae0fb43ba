"""What is done to a forked run before it begins; each gets the job (see ``zygote``)."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shutil
import signal
import time
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
    import streamtune.recipe.build_sft as build_sft
    from streamtune.train import LocalBackend, loop, saver, sharded_checkpoint
    from streamtune.train.objective import SupervisedObjective

    phases: dict[str, tuple[Any, str]] = {
        "loading": (build_sft, "make_model"),
        "forward": (SupervisedObjective, "score"),
        "optimizer": (LocalBackend, "step"),
        "evaluating": (loop, "evaluate"),
        "saving": (saver, "save_checkpoint"),
        "final": (sharded_checkpoint, "write_final"),
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
