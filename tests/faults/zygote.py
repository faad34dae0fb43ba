"""Runs of the real command line, forked from a process that has imported everything: a second each instead of ten.

    python -m tests.faults.zygote        one JSON job a line on stdin; {"pid": n}, then {"status": n, ...} on stdout

A job: ``{"cwd": folder, "argv": [...], "output": file, "arm": [...] | null, "hook": name | null}``. ``arm`` are the
arguments of ``faults_arm`` (``shim.c``); ``hook`` (a name in ``hooks``, or ``module:name``) is called in the forked
process before the command, or in its place where it returns an exit code.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def warm_up() -> None:
    """Import what a run imports, by running one; nothing that is left of it is a thread, which a fork would lose."""
    from streamtune.cli import main
    from streamtune.run import build  # noqa: F401
    from streamtune.train import progress as plot
    from tests.faults.kit import write_sft

    plot.draw_loss = lambda *rest, **more: None  # half of the time of such a run, and no part of what is tested
    with TemporaryDirectory() as name, contextlib.chdir(name), open(os.devnull, "w") as nowhere:  # noqa: PTH123
        write_sft(Path(name))
        with contextlib.redirect_stdout(nowhere), contextlib.suppress(SystemExit):
            main(["sft", "tiny.yaml", "--set", "max_steps=2"])
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    others = [name for name in names[1:] if name != "jemalloc_bg_thd"]  # which starts itself again in a fork
    assert not others, f"a fork would lose these threads: {others}"


def run(job: dict[str, Any]) -> int:
    """The job, in the forked process."""
    from streamtune.cli import main
    from tests.faults import hooks

    os.chdir(job["cwd"])
    descriptor = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if job.get("hook"):
        module, _, name = job["hook"].rpartition(":")
        code: int | None = getattr(import_module(module) if module else hooks, name)(job)
        if code is not None:
            return code
    if job.get("arm"):
        library = ctypes.CDLL(None)
        below, classes, at, action, error, log, graves = job["arm"]
        library.faults_arm(below.encode(), classes, ctypes.c_long(at), action, error, log.encode(), graves.encode())
    try:
        main(job["argv"])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def serve() -> None:
    """Take jobs until stdin ends."""
    warm_up()
    print(json.dumps({"ready": True}), flush=True)
    library = ctypes.CDLL(None)
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        counter, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(counter)
            code = 70
            try:
                code = run(job)
                os.write(told, str(library.faults_counted()).encode() if job.get("arm") else b"0")
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(told)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        found = os.read(counter, 32)
        os.close(counter)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "counted": int(found or 0)}), flush=True)


if __name__ == "__main__":
    serve()
