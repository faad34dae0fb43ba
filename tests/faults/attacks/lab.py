"""A folder with a tiny recipe, forked runs in it, and the checks that every attack makes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.kit import Done, Zygotes, complete_checkpoints, differences, read_lines, state_of, write_sft

RUN = Path("runs/tiny")
"""Where a run of the tiny recipe is."""

UNFORESEEN = re.compile(r"Traceback|this is a bug|Fatal Python error|Exception ignored")
LIMIT = 120.0
"""Seconds after which a run counts as hung."""
STOP = "os.kill(os.getpid(), signal.SIGTERM)"
"""Lines for :func:`tests.faults.attacks.inside.act`: ask the run to stop after its step."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        kind: The table it is listed in.
        title: The deed, as a reader wants it.
        run: Does it and returns the outcome in a few words; fails where the outcome is not what it should be.
    """

    kind: str
    title: str
    run: Callable[[Lab], str]


class Attacks(list[Attack]):
    """The attacks of one kind, collected by a decorator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __call__(self, title: str) -> Callable[[Callable[[Lab], str]], Callable[[Lab], str]]:
        """Add the decorated function under ``title``."""

        def add(function: Callable[[Lab], str]) -> Callable[[Lab], str]:
            self.append(Attack(self.kind, title, function))
            return function

        return add


@dataclass
class Lab:
    """A folder for one attack, and runs forked in it.

    Attributes:
        folder: Holds ``tiny.yaml`` and ``rows.jsonl``.
        zygotes: Fork the runs, two at a time.
        whole: A folder with the same recipe, run to its end undisturbed.
    """

    folder: Path
    zygotes: Zygotes
    whole: Path

    @property
    def path(self) -> Path:
        """The directory of the run."""
        return self.folder / RUN

    def write(self, **changes: Any) -> None:
        """Write rows and recipe, with changed keys."""
        write_sft(self.folder, **changes)

    def start(self, *arguments: str, acts: list[tuple[str, int, str]] | None = None, **options: Any) -> Done:
        """Run ``streamtune sft tiny.yaml`` to its end; assert that nothing in its output was unforeseen.

        Args:
            arguments: Further arguments.
            acts: Of :func:`tests.faults.attacks.inside.act`.
            options: Of :meth:`tests.faults.kit.Zygote.run`.
        """
        if acts:
            options |= {"hook": "tests.faults.attacks.inside:act", "acts": acts}
        then: Callable[[int], None] = options.pop("after", lambda pid: None)
        timers: list[threading.Timer] = []

        def after(pid: int) -> None:
            timers.append(threading.Timer(LIMIT, os.kill, (pid, signal.SIGKILL)))
            timers[0].start()
            then(pid)

        done = self.zygotes.run(options.pop("at", self.folder), *arguments, after=after, **options)
        timers[0].cancel()
        timers[0].join()
        assert done.seconds < LIMIT, f"did not end within {LIMIT} s: {done.output}"
        assert not UNFORESEEN.search(done.output), done.output
        return done

    def trained(self, *arguments: str, **options: Any) -> Done:
        """As :meth:`start`, of a run that must come to its end."""
        done = self.start(*arguments, **options)
        assert done.status == 0, (done.status, done.output)
        return done

    def refused(self, *words: str, status: int = 2, arguments: tuple[str, ...] = (), **options: Any) -> str:
        """As :meth:`start`, of a run that must end with an error that has these words; return what it printed."""
        done = self.start(*arguments, **options)
        text = in_line(done.output)
        assert done.status == status, (done.status, done.output)
        for word in words:
            assert re.search(word, text), (word, text)
        return text

    def goes_on(self, *arguments: str) -> None:
        """Start again; assert that the run comes to the same end as the undisturbed one, to the last bit."""
        self.trained(*arguments)
        found = differences(state_of(self.path), state_of(self.whole / RUN))
        assert not found, found

    def half(self, *arguments: str) -> None:
        """Run up to the fifth of ten steps, stopped by SIGTERM."""
        done = self.start(*arguments, acts=[("step", 5, STOP)])
        assert done.status == 143, (done.status, done.output)
        assert complete_checkpoints(self.path), done.output

    def copy_whole(self) -> None:
        """Put the undisturbed, finished run into this folder."""
        self.path.parent.mkdir(exist_ok=True)
        shutil.copytree(self.whole / RUN, self.path)

    def cut(self) -> None:
        """Put the finished run here without its end: it goes on from step 8."""
        self.copy_whole()
        shutil.rmtree(self.path / "final")
        shutil.rmtree(checkpoints(self.path)[-1])

    def victim(self, name: str = "victim") -> Path:
        """Write a file outside the run that nothing may change."""
        path = self.folder / name
        path.write_text("precious\n")
        return path

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Wait until the run here has recorded a step."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            file = self.path / "metrics.jsonl"
            if file.exists() and file.read_text().count("\n") >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"no step {step} within {seconds:.0f} s")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the recorded events of one kind."""
        return [event for event in read_lines(self.path / "events.jsonl") if event["event"] == kind]


def in_line(output: str) -> str:
    """Return what was printed as one line, without the frames of panels."""
    return " ".join(re.sub(r"[│╭╮╰╯─┃━]", " ", output).split())


def digest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by name; a link by its target. The lock's text may change."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}"
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or (path.is_file() and path.name != ".lock")
    }


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Read a JSON file, let ``change`` alter it, write it back."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))
