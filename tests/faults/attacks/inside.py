"""The hook of the attacks: lines of Python that run inside a forked run, right before a moment of it."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["act"]


def _moments() -> dict[str, tuple[Any, str]]:
    """Name the owner and the function that begins each moment of a run of sft."""
    import streamtune.run.build as build
    from streamtune import train
    from streamtune.tasks.sft import Sft
    from streamtune.train import LocalBackend, loop, saver
    from streamtune.train.objective import SupervisedObjective

    return {
        "tokenizer": (build, "make_shared_tokenizer"),
        "data": (Sft, "prepare"),
        "model": (build, "make_model"),
        "plan": (build, "plan_schedule"),
        "forward": (SupervisedObjective, "score"),
        "step": (LocalBackend, "step"),
        "evaluation": (loop, "evaluate"),
        "save": (saver, "save_checkpoint"),
        "final": (train, "write_final_model"),
    }


def act(job: dict[str, Any]) -> None:
    """Run ``job["acts"]``: triples of a moment, which time it is (0: every time) and the lines; ``start`` is now.

    The lines see ``os``, ``signal``, ``shutil``, ``time``, ``Path``, ``remove`` and ``run``, the directory of the run.
    """
    names = {"os": os, "signal": signal, "shutil": shutil, "time": time, "Path": Path}
    names["remove"] = _remove  # type: ignore[assignment]
    names["run"] = Path(job["cwd"]) / "runs/tiny"  # type: ignore[assignment]
    for moment, time_of, lines in job["acts"]:
        code = compile(lines, f"<attack before {moment}>", "exec")
        if moment == "start":
            exec(code, dict(names))
            continue
        owner, name = _moments()[moment]
        setattr(owner, name, _wrapped(getattr(owner, name), time_of, code, names))


def _remove(folder: Path) -> None:
    """Delete a folder, whatever a save writes and renames there meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def _wrapped(real: Any, time_of: int, code: Any, names: dict[str, Any]) -> Any:
    calls = [0]

    @functools.wraps(real)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        calls[0] += 1
        if time_of in (0, calls[0]):
            exec(code, dict(names))
        return real(*arguments, **more)

    return wrapped
