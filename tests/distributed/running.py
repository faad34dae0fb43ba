"""A training command of several ranks in the background, which tests inspect, disturb and wait for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.distributed.ranks_kit import SRC

__all__ = ["Running", "command"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "streamtune", *arguments]


class Running:
    """``streamtune sft tiny.yaml ...`` in ``folder``, in a session of its own as a terminal gives it.

    Within, and after, no process of it is left.
    """

    def __init__(
        self,
        folder: Path,
        call: Sequence[str],
        output: str = "runs/tiny",
        terminal: int | None = None,
        **environment: str,
    ) -> None:
        self.run = folder / output
        self._err = (folder / "stderr.txt").open("wb+")
        self._seen: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            call,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.DEVNULL if terminal is None else terminal,
            stderr=self._err if terminal is None else terminal,
            start_new_session=True,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        for process in [*self._seen.values(), self.process]:
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
        self.process.wait()
        self._err.close()

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
        except psutil.NoSuchProcess:
            pass

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank."""
        self._look()
        for process in self._seen.values():
            try:
                if process.environ().get("RANK") == str(number) and "streamtune" in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"no rank {number}: {self.stderr}")

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        """Wait until the run has finished this step."""
        until = time.monotonic() + seconds
        while self.step < step:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < until, f"step {self.step}: {self.stderr}"
            time.sleep(0.05)
        self._look()

    @property
    def step(self) -> int:
        try:
            return int(json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    @property
    def stderr(self) -> str:
        return Path(self._err.name).read_text()

    def wait(self, seconds: float) -> int:
        """Return the exit code if the run ends in time; all its processes must have ended."""
        code = self.process.wait(seconds)
        until = time.monotonic() + 2
        while (left := [p for p in self._seen.values() if p.is_running() and p.status() != "zombie"]) and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
        assert not left, f"left behind: {[p.cmdline() for p in left]}"
        return code
