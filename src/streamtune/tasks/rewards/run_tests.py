"""Supervisor program, run in a subprocess, that runs code with tests. It imports only the standard library.

The program forks. The child process sets the limits and runs the code, then the tests one by one. The child then writes
a secret and the number of passed tests to a pipe. The parent waits for this message or for the timeout, kills all of
its descendants, and prints the result. Code that exits early has not written the secret, so ``sys.exit(0)`` passes no
test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
MAX_PROCESSES = 64  # at a time; RLIMIT_NPROC counts all of the user's, and none of root's
POLL_SECONDS = 0.1
COUNT_DIGITS, MESSAGE_BYTES = 8, 40  # of a number of tests; with 32 of the secret before it


def main() -> None:
    """Run code and tests of a JSON request on stdin, and print ``{"passed": n}``, the number of passed tests."""
    request = json.load(sys.stdin)
    # Orphans of the code become children of this process, not of init, so that it finds all of them.
    _prctl(SET_CHILD_SUBREAPER, 1)
    _prctl(SET_PDEATHSIG, signal.SIGKILL)
    secret = secrets.token_hex(16)
    read_end, write_end = os.pipe()
    deadline = time.monotonic() + request["seconds"]
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(read_end)
        _run_child(request, secret, write_end)
    with contextlib.suppress(OSError):  # both processes do it, because either may run first
        os.setpgid(child, child)
    os.close(write_end)
    message = _read_message(read_end, deadline, child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # all at once, or processes that fork would run ahead of the loop below
    _kill_descendants()
    mark, passed = message[: len(secret)], message[len(secret) :]
    print(json.dumps({"passed": int(passed) if mark == secret.encode() else 0}))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the child ---------------------------------------------------------------------------------------------------


def _run_child(request: dict[str, Any], secret: str, write_end: int) -> None:
    try:
        _prctl(SET_PDEATHSIG, signal.SIGKILL)
        null_device = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null_device, descriptor)
        code, tests = request.pop("code"), request.pop("tests")
        _set_limits(**request)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(code, "<completion>", "exec"), namespace)
        passed = sum(_passes_test(test, dict(namespace)) for test in tests)
        os.write(write_end, f"{secret}{passed:0{COUNT_DIGITS}}".encode())
    except BaseException:  # anything that the code raises, SystemExit and MemoryError too: no test has passed
        pass
    finally:
        os._exit(0)


def _passes_test(test: str, namespace: dict[str, Any]) -> bool:
    try:
        exec(compile(test, "<tests>", "exec"), namespace)
    except BaseException:
        return False
    return True


def _set_limits(seconds: float, memory_bytes: int, file_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with contextlib.suppress(ValueError, OSError):  # not every system lets every limit be set
            resource.setrlimit(kind, (limit, limit))


# --- the parent --------------------------------------------------------------------------------------------------


def _read_message(pipe: int, deadline: float, child: int) -> bytes:
    """Return the child's message; empty if the child ends without one, has too many processes, or takes too long."""
    message = b""
    while len(message) < MESSAGE_BYTES:  # not until the pipe is closed: a process that the code left behind may hold it
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return b""
        if not _is_readable(pipe, min(seconds_left, POLL_SECONDS)):
            if (_has_ended(child) and not _is_readable(pipe, 0)) or len(_descendants()) > MAX_PROCESSES:
                return b""
            continue
        part = os.read(pipe, MESSAGE_BYTES - len(message))
        if not part:
            return b""
        message += part
    return message


def _is_readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _has_ended(child: int) -> bool:
    """Return True if the child has ended. The child is not reaped, because its process group must be killed first."""
    return hasattr(os, "waitid") and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_descendants() -> None:
    """Kill and reap descendants until none is left. Children of a killed process become children of this process."""
    while True:
        for process in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state parent ...: the name may hold blanks and parentheses
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    descendants, previous_count = {os.getpid()}, 0
    while len(descendants) > previous_count:
        previous_count = len(descendants)
        descendants |= {process for process, parent in parents.items() if parent in descendants}
    return sorted(descendants - {os.getpid()})


if __name__ == "__main__":
    main()
