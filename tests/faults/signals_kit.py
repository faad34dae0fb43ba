"""Real commands in processes of their own, sent a signal as a terminal does, and what is wrong with how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.kit import ROOT

MARK = "STREAMTUNE_TEST_MARK"
END_SECONDS = 5.0
SFT = ("sft", "tiny.yaml")
COMMANDS: dict[str, tuple[str, ...]] = {
    "sft": SFT,
    "dpo": ("dpo", "tiny.yaml"),
    "grpo": ("grpo", "tiny.yaml"),
    "plan": ("plan", "tiny.yaml"),
    "probe": ("probe-max-len", "tiny.yaml", "--device-memory", "1GiB", "--from", "32", "--to", "256"),
    "simulate": ("probe-max-len", "tiny.yaml", "--device", "h100-80gb", "--method", "simulate", "--to", "4096"),
    "bench": ("bench", "tiny.yaml", "--lengths", "32,64", "--repeats", "1"),
    "table": ("bench", "tiny.yaml", "--table", "bp-time", "--lengths", "32,64", "--repeats", "1"),
    "verify": ("verify", "tiny.yaml"),
    "validate": ("validate", "tiny.yaml"),
    "nproc": (*SFT, "--nproc", "2", "--set", "train_batch_size=2"),
}


@dataclass
class Ended:
    """How a command ended."""

    code: int
    output: str
    seconds: float
    """From the signal to the end."""
    sent: bool = True
    """Whether it still ran when the signal was due."""
    lasted: float = 0.0
    """From the moment the handlers were in place to the signal or, where none was sent, the end."""
    wrong: list[str] = field(default_factory=list)


def is_ready(pid: int) -> bool:
    """Return whether the process handles SIGTERM, which Python itself does not: from then on, the command does."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def interrupt(
    folder: Path,
    arguments: tuple[str, ...],
    when: float | Callable[[str], bool],
    *,
    signum: int = signal.SIGINT,
    code: int = 130,
    seconds: float = END_SECONDS,
) -> Ended:
    """Run a command in ``folder``, send its process group ``signum``, and see how it ends.

    Args:
        folder: With its recipe.
        arguments: The command's.
        when: Seconds after the handlers are in place, or what says so of the output so far.
        signum: The signal.
        code: The exit code that it should end with.
        seconds: Time it may take to end.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    path = folder / "output.txt"
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, which a command would inherit and respect
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamtune", *arguments],
            cwd=folder,
            env={**environment(), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not is_ready(process.pid) and process.poll() is None:
            time.sleep(0.002)
        ready = began = time.monotonic()
        while process.poll() is None and (
            time.monotonic() < began + when if isinstance(when, float) else not when(path.read_text())
        ):
            time.sleep(0.005)
        sent = process.poll() is None
        began = time.monotonic()
        if sent:
            os.killpg(process.pid, signum)
        found = process.wait(90)
        took = time.monotonic() - began
        found_left = left(mark)
    finally:
        for one in left(mark, patience=0):
            with suppress(psutil.Error):
                one.kill()
        process.wait()
    ended = Ended(found, path.read_text(errors="replace"), took, sent, began - ready)
    if sent and found not in (code, 0):
        ended.wrong.append(f"exit code {found}")
    if took > seconds:
        ended.wrong.append(f"ended after {took:.1f} s")
    ended.wrong += [f"'{word}' in the output" for word in ("Traceback", "this is a bug") if word in ended.output]
    if found_left:
        ended.wrong.append(f"left behind: {[one.pid for one in found_left]}")
    if ended.wrong:
        ended.wrong.append(ended.output[-1500:])
    return ended


def environment() -> dict[str, str]:
    """This process's, for a command that computes with one thread as forked runs do."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def left(mark: str, patience: float = 2.0) -> list[psutil.Process]:
    """Processes that still carry the mark of a command, after they had a moment to end."""
    until = time.monotonic() + patience
    while True:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == mark and process.status() != "zombie":
                    found.append(process)
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def events(run: Path) -> list[dict[str, object]]:
    """The events of a run."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
