"""Run code that a model wrote, with tests, in a subprocess.

    trainer --spec on stdin--> supervisor (run_tests.py) --fork--> code and tests
            <--which passed--             kills what is left of them, at the latest after the timeout

Limits: time of the clock and of the processor, address space, size of files, open files, core dumps, and 64 processes
at a time. The process works in a temporary directory that is removed, with an environment of its
own (no tokens or keys of the trainer's), and a session of its own; whatever it started is killed with it.

It is no sandbox. The code runs as the same user: it can read that user's files and use the network. Someone who trains
on prompts he does not trust runs the whole trainer in a container. Nor is it proof against code that forges the result
on purpose: the test program is the same process as the code.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from streamtune import interrupts

__all__ = ["CodeLimits", "count_passed"]

SUPERVISOR = Path(__file__).with_name("run_tests.py")
GRACE = 10.0
"""seconds beyond its timeout that the supervisor has to start and to clear up; it never needs them all"""


@dataclass(frozen=True)
class CodeLimits:
    """The resources that code and tests of one completion may use."""

    seconds: float = 5.0
    memory_mib: int = 1024
    file_mib: int = 16


def count_passed(code: str, tests: Sequence[str], limits: CodeLimits) -> int:
    """Run the code, then each test in a copy of what the code left behind, and count the tests that did not raise.

    The count is 0 where the code itself raises, exits, or takes too long. Never raises for what the code does.

    Raises:
        ValueError: The limits are no limits.
        OSError: No process can be started.
    """
    if not (math.isfinite(limits.seconds) and limits.seconds > 0 and limits.memory_mib > 0):
        raise ValueError(f"a timeout of {limits.seconds} s and {limits.memory_mib} MiB are no limits")
    request = {
        "code": code,
        "tests": list(tests),
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_mib << 20,
        "file_bytes": limits.file_mib << 20,
    }
    with interrupts.temporary_directory(prefix="streamtune-tests-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", str(SUPERVISOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=_environment(directory),
            start_new_session=True,
        )
        try:
            answer, _ = process.communicate(json.dumps(request).encode(), timeout=limits.seconds + GRACE)
        except subprocess.TimeoutExpired:
            answer = b""
        finally:
            process.kill()
            if not answer:  # the code may have killed the supervisor, which can then kill nothing
                _kill_session(process.pid)
            process.communicate()
    passed = json.loads(answer)["passed"] if answer else 0
    assert 0 <= passed <= len(tests)
    return int(passed)


def _kill_session(session: int) -> None:
    """Kill every process of a session, as long as there are any (Linux; elsewhere the group of its leader)."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    alive = True
    while alive:
        alive = False
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # pid (name) state parent group session ...: the name may hold blanks and parentheses
                state, _, _, of = file.read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    alive = True


def _environment(directory: str) -> dict[str, str]:
    """Return an environment just enough for Python; one thread, as numerical thread pools reserve address space."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", **one}
