"""Start, watch and end the ranks of another machine over ssh; ``local_ranks`` does the same on this machine."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamtune.base.safe_path import safe_environment
from streamtune.distributed.failure import Failure, RankEnd
from streamtune.distributed.hosts import Host
from streamtune.errors import DistributedError

SSH = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o LogLevel=ERROR --"
)
"""Command to which the host and a shell command line are appended; ``--`` ends the options of ssh."""
SSH_VARIABLE = "STREAMTUNE_SSH"
"""Variable with another command, to which the host and a shell command line are appended."""
AGENT = "streamtune.distributed.agent"
"""Module that is started on other machines. This package does not import it, so that ``python -m`` loads it once."""

PING_SECONDS = 2.0
"""Seconds between two messages to an agent; an agent ends its ranks if no message arrives."""
HELLO_SECONDS = 25.0
STARTUP_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that Python needs at its start. They are part of the command; other variables are sent to the agent."""
EXPORTED_PREFIXES = (
    "CUDA_DEVICE", "CUDA_LAUNCH", "CUBLAS_", "DEEPSPEED_", "DS_", "FI_", "GLOO_", "HF_", "HUGGING", "KMP_", "LANG",
    "LC_", "MKL_", "NCCL_", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "OMP_", "PYTHON", "PYTORCH_", "STREAMTUNE_",
    "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "XDG_CACHE_HOME",
)  # fmt: skip
"""Prefixes of variables that are passed to other machines; ``STREAMTUNE_EXPORT=NAME,NAME`` adds more."""


def exported_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that are passed to ranks on other machines, selected by name or prefix."""
    additional_names = {name.strip() for name in environ.get("STREAMTUNE_EXPORT", "").split(",")}
    return {
        name: value
        for name, value in safe_environment(environ).items()
        if name in STARTUP_VARIABLES or name in additional_names or name.upper().startswith(EXPORTED_PREFIXES)
    }


class RemoteRanks:
    """Starts the ranks of another machine over ssh, watches and ends them.

    Raises:
        DistributedError: The ssh command cannot be run.
    """

    def __init__(self, host: Host) -> None:
        self.host = host.address
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._error_lines: list[str] = []
        self._running: set[int] = set()
        self._signals: list[int] = []
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        variables = safe_environment()
        assignments = [f"{name}={shlex.quote(variables[name])}" for name in STARTUP_VARIABLES if name in variables]
        python = shlex.quote(sys.executable)
        line = f"cd {shlex.quote(str(Path.cwd()))} && exec env {' '.join(assignments)} {python} -P -m {AGENT}"
        ssh = shlex.split(os.environ.get(SSH_VARIABLE) or SSH)
        try:
            self._process = subprocess.Popen(
                [*ssh, host.name, line],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            raise DistributedError(f"cannot run {ssh[0]}: {error.strerror}", where=host.where) from None
        self._host = host
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read_messages, self._read_stderr)
        ]
        for thread in (*self._threads, threading.Thread(target=self._ping_agent, daemon=True)):
            thread.start()

    def wait_for_hello(self, deadline: float) -> dict[str, Any]:
        """Return the first message of the agent, a dict with its ``version``, ``devices`` and a free ``port``.

        Args:
            deadline: Monotonic time in seconds until which the message must arrive.

        Raises:
            DistributedError: No message arrived in time, or the connection was closed.
        """
        try:
            message = self._messages.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise self._unreachable_error(f"no answer within {HELLO_SECONDS:.0f} seconds") from None
        if message is None or "hello" not in message:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            raise self._unreachable_error("the connection was closed")
        return dict(message["hello"])

    def _unreachable_error(self, default_reason: str) -> DistributedError:
        reason = "\n".join(self._last_error_lines(4)) or default_reason
        code = self._process.poll()
        ran = code not in (None, 255)  # 255 is ssh's own exit code; others are the command's
        what = f"{self.host} cannot run streamtune" if ran else f"{self.host} cannot be reached"
        fix = (
            f"install the same version on {self.host}: `{sys.executable} -m streamtune` must run in {Path.cwd()}"
            if ran
            else f"`ssh {self._host.name} true` must work without a password"
        )
        return DistributedError(f"{what}: {reason}", where=self._host.where, fix=fix)

    def _last_error_lines(self, count: int) -> list[str]:
        if self._process.poll() is not None:
            self._threads[1].join(2)  # a child process may keep the pipe open
        return self._error_lines[-count:]

    def start(self, arguments: Sequence[str], first_rank: int, count: int, environment: Mapping[str, str]) -> None:
        self._running = set(range(first_rank, first_rank + count))
        request = {
            "arguments": list(arguments),
            "first_rank": first_rank,
            "count": count,
            "environment": dict(environment),
            "host": self.host,
        }
        self._send({"start": request})

    @property
    def running_ranks(self) -> list[int]:
        """Ranks whose end has not been reported."""
        return sorted(self._running)

    def poll(self) -> list[RankEnd]:
        """Return how ranks ended since the last call, and print new output of rank 0.

        If the connection is lost, all running ranks count as ended.
        """
        ends: list[RankEnd] = []
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return ends
            if message is None:
                ends += self._ends_after_lost_connection()
            elif "end" in message:
                ends.append(self._rank_end_from_message(message["end"]))
            elif "refused" in message:
                failure = Failure.from_dict(message["refused"])
                ends += [RankEnd(rank, self.host, failure.exit_code, failure) for rank in self.running_ranks]
                self._running.clear()
            elif "out" in message:
                stream = sys.stdout if message["to"] == 1 else sys.stderr
                stream.write(message["out"])
                stream.flush()

    def _rank_end_from_message(self, message: dict[str, Any]) -> RankEnd:
        self._running.discard(message["rank"])
        failure = Failure.from_dict(message["failure"]) if message["failure"] else None
        tail, sent_signals = tuple(message["tail"]), tuple(message["sent_signals"])
        log = f"{self.host}:{message['log']}" if message["log"] else ""
        return RankEnd(message["rank"], self.host, message["code"], failure, tail, log, sent_signals=sent_signals)

    def _ends_after_lost_connection(self) -> list[RankEnd]:
        reason = "; ".join(self._last_error_lines(2)) or "it was closed"
        ends = []
        for rank in self.running_ranks:
            what = f"the connection to {self.host} was lost: {reason}"
            failure = Failure(rank, self.host, what, own=not self._signals)
            ends.append(RankEnd(rank, self.host, 255, failure, sent_signals=tuple(self._signals)))
        self._running.clear()
        return ends

    def send_signal(self, signum: int) -> None:
        self._signals.append(signum)
        self._send({"signal": signum})

    def kill(self) -> None:
        self._signals.append(signal.SIGKILL)
        self._send({"kill": True})

    def close(self) -> list[RankEnd]:
        """Kill the remaining ranks and close the connection; if it is broken, the agent kills its ranks after a
        timeout."""
        self.kill()
        self._closed.set()
        with suppress(OSError, ValueError), self._write_lock:
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for thread, stream in zip(self._threads, (self._process.stdout, self._process.stderr), strict=True):
            thread.join(2)
            if stream is not None and not thread.is_alive():  # a child process may keep the pipe open
                stream.close()
        return self.poll()

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError, ValueError), self._write_lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._messages.put(json.loads(line))
            except ValueError:  # output of the login shell
                self._error_lines.append(line.decode("utf-8", errors="replace").strip())
        self._messages.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._error_lines.append(line.decode("utf-8", errors="replace").strip())
            del self._error_lines[:-20]

    def _ping_agent(self) -> None:
        while not self._closed.wait(PING_SECONDS):
            self._send({"ping": True})
