"""The ranks of another machine, started over ssh; ``local_ranks`` does the same for this machine."""

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
"""The host follows, whatever it begins with."""
SSH_VARIABLE = "STREAMTUNE_SSH"
"""Names another command, which is given the host and a line for its shell."""
AGENT = "streamtune.distributed.agent"
"""Module that is started on other machines; nothing here imports it, so that ``python -m`` runs it once."""

PING_SECONDS = 2.0
"""Time between two messages to an agent, which ends its ranks if none comes."""
HELLO_SECONDS = 25.0
NEEDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that Python needs to start, so they are written into the command; others go through the connection."""
PASSED = (
    "CUDA_DEVICE", "CUDA_LAUNCH", "CUBLAS_", "DEEPSPEED_", "DS_", "FI_", "GLOO_", "HF_", "HUGGING", "KMP_", "LANG",
    "LC_", "MKL_", "NCCL_", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "OMP_", "PYTHON", "PYTORCH_", "STREAMTUNE_",
    "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "XDG_CACHE_HOME",
)  # fmt: skip
"""Prefixes of the variables that are passed on; ``STREAMTUNE_EXPORT=NAME,NAME`` adds more."""


def passed_on(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that ranks on other machines get from this one: for libraries, not of a login."""
    more = {name.strip() for name in environ.get("STREAMTUNE_EXPORT", "").split(",")}
    return {
        name: value
        for name, value in safe_environment(environ).items()
        if name in NEEDED or name in more or name.upper().startswith(PASSED)
    }


class RemoteRanks:
    """The processes of the ranks of another machine."""

    def __init__(self, host: Host) -> None:
        self.host = host.address
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._complaints: list[str] = []
        self._running: set[int] = set()
        self._sent: list[int] = []
        self._speaking = threading.Lock()
        self._closed = threading.Event()
        known = safe_environment()
        needed = [f"{name}={shlex.quote(known[name])}" for name in NEEDED if name in known]
        python = shlex.quote(sys.executable)
        line = f"cd {shlex.quote(str(Path.cwd()))} && exec env {' '.join(needed)} {python} -P -m {AGENT}"
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
            raise DistributedError(f"{ssh[0]} cannot be run: {error.strerror}", where=host.where) from None
        self._host = host
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._listen, self._listen_to_errors)]
        for thread in (*self._threads, threading.Thread(target=self._ping, daemon=True)):
            thread.start()

    def hello(self, until: float) -> dict[str, Any]:
        """Wait for the agent's first message until the monotonic time ``until``, and return it."""
        try:
            message = self._messages.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            raise self._unreachable(f"no answer within {HELLO_SECONDS:.0f} seconds") from None
        if message is None or "hello" not in message:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            raise self._unreachable("the connection was closed")
        return dict(message["hello"])

    def _unreachable(self, otherwise: str) -> DistributedError:
        said = "\n".join(self._last_complaints(4)) or otherwise
        code = self._process.poll()
        ran = code not in (None, 255)  # 255 is ssh's own code; others are of its command
        what = f"{self.host} cannot run streamtune" if ran else f"{self.host} cannot be reached"
        fix = (
            f"install the same version there, so that `{sys.executable} -m streamtune` runs in {Path.cwd()}"
            if ran
            else f"`ssh {self._host.name} true` must work without a password"
        )
        return DistributedError(f"{what}: {said}", where=self._host.where, fix=fix)

    def _last_complaints(self, count: int) -> list[str]:
        """Return the last lines of standard error; if the command has ended, all of it is read first."""
        if self._process.poll() is not None:
            self._threads[1].join(2)  # a child of it may hold the other end
        return self._complaints[-count:]

    def start(self, arguments: Sequence[str], first_rank: int, count: int, environment: Mapping[str, str]) -> None:
        self._running = set(range(first_rank, first_rank + count))
        asked = {
            "arguments": list(arguments),
            "first_rank": first_rank,
            "count": count,
            "environment": dict(environment),
            "host": self.host,
        }
        self._say({"start": asked})

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended, as far as is known."""
        return sorted(self._running)

    def poll(self) -> list[RankEnd]:
        """Return the ranks that ended since the last call, all if the connection broke; print their output."""
        ends: list[RankEnd] = []
        while True:
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return ends
            if message is None:
                ends += self._lost()
            elif "end" in message:
                ends.append(self._ended(message["end"]))
            elif "refused" in message:
                failure = Failure.from_dict(message["refused"])
                ends += [RankEnd(rank, self.host, failure.exit_code, failure) for rank in self.running]
                self._running.clear()
            elif "out" in message:
                stream = sys.stdout if message["to"] == 1 else sys.stderr
                stream.write(message["out"])
                stream.flush()

    def _ended(self, message: dict[str, Any]) -> RankEnd:
        self._running.discard(message["rank"])
        failure = Failure.from_dict(message["failure"]) if message["failure"] else None
        tail, sent = tuple(message["tail"]), tuple(message["sent"])
        log = f"{self.host}:{message['log']}" if message["log"] else ""
        return RankEnd(message["rank"], self.host, message["code"], failure, tail, log, sent=sent)

    def _lost(self) -> list[RankEnd]:
        """Return the ends of all remaining ranks after the connection was lost."""
        said = "; ".join(self._last_complaints(2)) or "it was closed"
        ends = []
        for rank in self.running:
            what = f"the connection to {self.host} was lost: {said}"
            failure = Failure(rank, self.host, what, own=not self._sent)
            ends.append(RankEnd(rank, self.host, 255, failure, sent=tuple(self._sent)))
        self._running.clear()
        return ends

    def send(self, signum: int) -> None:
        self._sent.append(signum)
        self._say({"signal": signum})

    def kill(self) -> None:
        self._sent.append(signal.SIGKILL)
        self._say({"kill": True})

    def close(self) -> list[RankEnd]:
        """End the ranks that still run there, and the connection. If it is broken, the agent ends by itself."""
        self.kill()
        self._closed.set()
        with suppress(OSError, ValueError), self._speaking:
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
            if stream is not None and not thread.is_alive():  # else a child of it still has the other end
                stream.close()
        return self.poll()

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError, ValueError), self._speaking:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._messages.put(json.loads(line))
            except ValueError:  # what a login prints
                self._complaints.append(line.decode("utf-8", errors="replace").strip())
        self._messages.put(None)

    def _listen_to_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints.append(line.decode("utf-8", errors="replace").strip())
            del self._complaints[:-20]

    def _ping(self) -> None:
        while not self._closed.wait(PING_SECONDS):
            self._say({"ping": True})
