"""Start, watch and end the ranks of this machine as child processes.

Each rank has its own process group, so Ctrl-C in a terminal reaches only the launcher, which sends the signal to each
rank once. Processes that a rank has started are killed when the rank ends. If the launcher dies, the kernel kills its
ranks.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

from streamtune.base.interrupts import block_signals, remove_on_signal
from streamtune.distributed.environment import RankEnvironment, count_usable_cpus
from streamtune.distributed.failure import ERROR_FILE_VARIABLE, RankEnd, last_log_lines, read_failure
from streamtune.errors import ArgumentError

PARENT_VARIABLE = "STREAMTUNE_LAUNCHER_PID"
LOG_FILE_VARIABLE = "STREAMTUNE_LOG_FILE"
"""Variable with the path of a rank's log file until the rank has a run directory."""
PR_SET_PDEATHSIG = 1

Output = tuple[IO[bytes] | int | None, IO[bytes] | int | None]
"""Standard output and error of a process."""


class LocalRanks:
    """Starts the ranks of this machine as processes, watches and ends them.

    Args:
        command: Command that each rank runs.
        first_rank: Lowest rank on this machine.
        count: Number of ranks on this machine.
        environment: Environment variables, with ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT`` and the run's id.
        host: Name of this machine in messages.
        main_output: Standard output and error of rank 0; None: inherited from this process.

    Raises:
        ArgumentError: A process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        first_rank: int,
        count: int,
        environment: Mapping[str, str],
        host: str,
        main_output: Output = (None, None),
    ) -> None:
        self.host = host
        self._folder = tempfile.TemporaryDirectory(prefix="streamtune-ranks-")
        remove_on_signal(self._folder.name)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._signals: list[int] = []
        try:
            with block_signals():  # a rank that gets a signal before it has handlers would show a traceback
                for local_rank in range(count):
                    rank = first_rank + local_rank
                    variables = self._rank_variables(environment, rank, local_rank, count)
                    self._running[rank] = self._start_process(command, rank, variables, main_output)
        except OSError as error:
            self.kill()
            raise ArgumentError(f"cannot start the ranks: {error}") from None

    def _rank_variables(self, common: Mapping[str, str], rank: int, local_rank: int, count: int) -> dict[str, str]:
        threads = str(max(1, count_usable_cpus() // count))
        return {
            "OMP_NUM_THREADS": threads,
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(count),
            "STREAMTUNE_HOST": self.host,
            PARENT_VARIABLE: str(os.getpid()),
            ERROR_FILE_VARIABLE: str(self._error_path(rank)),
            LOG_FILE_VARIABLE: str(self._log_path(rank)),
        }

    def _start_process(
        self,
        command: Sequence[str],
        rank: int,
        environment: Mapping[str, str],
        main_output: Output,
    ) -> subprocess.Popen[bytes]:
        with nullcontext() if rank == 0 else self._log_path(rank).open("ab") as log:
            out, err = main_output if log is None else (log, log)
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0
            )

    def _error_path(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank:04d}.json"

    def _log_path(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank:04d}.log"

    @property
    def running_ranks(self) -> list[int]:
        return list(self._running)

    def process_of_rank(self, rank: int) -> subprocess.Popen[bytes]:
        return self._running[rank]

    def poll(self) -> list[RankEnd]:
        """Return how ranks ended since the last call, and kill the processes that these ranks had started."""
        ends = []
        for rank, process in list(self._running.items()):
            # WNOWAIT does not reap the process, so the process id still names the process group.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            del self._running[rank]
            log = self._log_path(rank)
            failure = read_failure(self._error_path(rank))
            tail = last_log_lines(log) if code != 0 and failure is None else ()
            moved_log = str(log.resolve()) if log.is_symlink() else ""
            ends.append(RankEnd(rank, self.host, code, failure, tail, moved_log, sent_signals=tuple(self._signals)))
        return ends

    def send_signal(self, signum: int) -> None:
        self._signals.append(signum)
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(signum)

    def kill(self) -> None:
        """Kill every rank and all processes that the ranks have started."""
        self._signals.append(signal.SIGKILL)
        for process in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> list[RankEnd]:
        """Kill all running ranks, wait up to 10 s, remove temporary files, and return how the ranks ended."""
        self.kill()
        ends: list[RankEnd] = []
        deadline = time.monotonic() + 10
        while self._running and time.monotonic() < deadline:
            ends += self.poll()
            time.sleep(0.01)
        self._folder.cleanup()
        return ends


def die_with_launcher() -> None:
    """Let the kernel kill this process when its launcher ends (Linux); no-op in a process without a launcher."""
    launcher = os.environ.pop(PARENT_VARIABLE, None)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the call above
        os._exit(128 + signal.SIGKILL)


def count_devices() -> int:
    """Return the number of CUDA devices without importing torch; 0 without a driver."""
    import ctypes

    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return count.value


def rank_log_path(directory: Path, rank: int) -> Path:
    return directory / "logs" / f"rank-{rank:04d}.log"


def redirect_rank_output(environment: RankEnvironment) -> int | None:
    """Redirect the output of a rank other than 0 to a temporary log file; no-op if the launcher has redirected it.

    Returns:
        File descriptor of the previous standard error; None if nothing was redirected.
    """
    if environment.is_main or os.environ.get(LOG_FILE_VARIABLE):
        return None
    descriptor, name = tempfile.mkstemp(prefix=f"streamtune-rank-{environment.rank:04d}-", suffix=".log")
    os.environ[LOG_FILE_VARIABLE] = name
    atexit.register(Path(name).unlink, missing_ok=True)
    previous_stderr = os.dup(2)
    _redirect_output(descriptor)
    return previous_stderr


def move_log_to_run(directory: Path, environment: RankEnvironment) -> None:
    """Move the log of a rank other than 0 into the run directory, and continue it there.

    If the log cannot be moved, it stays where it is.
    """
    current = os.environ.get(LOG_FILE_VARIABLE)
    if environment.is_main or not current or Path(current).is_symlink():
        return
    target, source = rank_log_path(directory, environment.rank), Path(current)
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent.is_symlink():
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(target, flags, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        with source.open("rb") as old_log, os.fdopen(os.dup(descriptor), "ab") as new_log:
            shutil.copyfileobj(old_log, new_log)
        _redirect_output(descriptor)
        source.unlink()
        if os.environ.get(ERROR_FILE_VARIABLE):  # the launcher reads the last lines at the old path
            source.symlink_to(target.resolve())


def _redirect_output(descriptor: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
