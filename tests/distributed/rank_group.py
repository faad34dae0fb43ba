"""One start of several ranks for many cases: what a test asks of them comes back as JSON, a line a case.

    found = run_ranks(2, "tests.distributed.equality_cases", ["zero1", "zero2"])     # case -> what rank 0 returned

Each rank imports the module and calls its ``run(case)`` for one case after the other. An error in a rank is the test's.
Ranks of this machine are forked of a process that has imported the libraries once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300
"""Seconds for all cases of a group together."""


@dataclass(frozen=True)
class Place:
    """Place of a rank: the start of its command, and additional variables."""

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def run_ranks(
    size: int, module: str, cases: Sequence[Any], patience: float = PATIENCE, places: Sequence[Place] = ()
) -> dict[str, Any]:
    """What rank 0 returned of each case, by the case as JSON; each rank in its place, or all of them here.

    Raises:
        AssertionError: A rank failed; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(size)]
        results = Path(folder) / "results.jsonl"
        port = _free_port()
        environments = [
            {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "DS_ACCELERATOR": "cpu",
            }
            for rank in range(size)
        ]
        work = (module, str(results), json.dumps(list(cases)))
        start = partial(_start_in, places) if places else _start_forked
        ranks = [start(rank, environments[rank], logs[rank], work) for rank in range(size)]
        until = time.monotonic() + patience
        try:
            codes = [rank.wait(until - time.monotonic()) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            said = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
        assert codes == [0] * size, "\n".join(
            f"rank {i} ended with {codes[i]}:\n{text[-6000:]}" for i, text in enumerate(said)
        )
        return dict(json.loads(line) for line in results.read_text().splitlines())


Work = tuple[str, str, str]
"""Module, file of the results, cases as JSON."""


def fork_server() -> Any:
    """Return a multiprocessing context whose processes are forked from one that has imported all libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.rank_imports"])
    return context


class _Forked:
    """A rank on this machine."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def wait(self, seconds: float) -> int | None:
        self._process.join(max(seconds, 0))
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _start_forked(rank: int, environment: dict[str, str], log: Path, work: Work) -> _Forked:
    process = fork_server().Process(target=_run_forked, args=(environment, str(log), work))
    process.start()
    return _Forked(process)


def _run_forked(environment: dict[str, str], log: str, work: Work) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    _run_and_leave(work)


def _start_in(places: Sequence[Place], rank: int, environment: dict[str, str], log: Path, work: Work) -> Any:
    with log.open("w") as file:  # a pipe that nobody reads yet would stop the rank that fills it
        return subprocess.Popen(
            [*places[rank].command, sys.executable, "-m", "tests.distributed.rank_group", *work],
            cwd=ROOT,
            env={**environment, **places[rank].environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _run_and_leave(work: Work) -> None:
    """Run the cases and end the process, whatever threads exist."""
    try:
        _main(*work)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others wait in a collective that this rank will never join


def _main(module: str, results: str, cases: str) -> None:
    import torch

    from streamtune.distributed.pytorch import join_process_group, leave_process_group

    join_process_group(torch.device("cpu"))
    run = importlib.import_module(module).run
    for case in json.loads(cases):
        found = run(case)
        if os.environ["RANK"] == "0":
            with Path(results).open("a") as file:
                file.write(json.dumps([case if isinstance(case, str) else json.dumps(case), found]) + "\n")
    leave_process_group()


if __name__ == "__main__":
    _run_and_leave((sys.argv[1], sys.argv[2], sys.argv[3]))
