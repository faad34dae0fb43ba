"""A disk that is full, fails or is read-only, at any call: the run ends with a message, and no checkpoint is lost."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import (
    ALL,
    COUNT,
    FAIL_ON,
    FAIL_ONCE,
    FSYNC,
    MKDIR,
    OPEN,
    RENAME,
    TEAR_ON,
    WRITE,
    Zygotes,
    complete_checkpoints,
    differences,
    report,
    size,
    state_of,
    write_sft,
)

FAILURES = {
    # what stops when a disk is full: deleting and reading still work
    "ENOSPC": (errno.ENOSPC, TEAR_ON, OPEN | MKDIR | WRITE),
    "EIO": (errno.EIO, FAIL_ONCE, OPEN | RENAME | FSYNC | MKDIR | WRITE),
    "EROFS": (errno.EROFS, FAIL_ON, ALL & ~WRITE & ~FSYNC),
}
CHANGES = {"save_steps": 5, "save_total_limit": 1}
"""Two saves, of which the second deletes the first."""


@pytest.mark.quick("ENOSPC")
@pytest.mark.parametrize("failure", FAILURES)
def test_the_disk_fails_at_any_call(zygotes: Zygotes, tmp_path: Path, failure: str) -> None:
    number, action, classes = FAILURES[failure]
    write_sft(tmp_path / "counted", **CHANGES)
    done = zygotes.run(tmp_path / "counted", arm=(str(tmp_path / "counted/runs"), classes, 0, COUNT, 0, "", ""))
    whole = state_of(tmp_path / "counted/runs/tiny")

    def trial(place: int) -> list[str]:
        folder = tmp_path / f"at-{place}"
        write_sft(folder, **CHANGES)
        broken = zygotes.run(folder, arm=(str(folder / "runs"), classes, place, action, number, "", ""))
        wrong = judge(folder / "runs/tiny", broken.status, broken.output)
        again = zygotes.run(folder)
        if again.status != 0:
            wrong.append(f"does not go on: {again.output[-600:]}")
        else:
            wrong += differences(state_of(folder / "runs/tiny"), whole)
        shutil.rmtree(folder)
        return [f"{failure} at call {place}: {text}" for text in wrong]

    places = range(1, done.counted + 1)
    found = zygotes.each(trial, places if size(1, 0) else random.Random(5).sample(places, 2))
    report(f"disk_{failure}", trials=len(found), intact=sum(not texts for texts in found))
    assert [text for texts in found for text in texts] == []


def judge(run: Path, status: int, output: str) -> list[str]:
    """What is wrong with how a run ended on a broken disk."""
    wrong = []
    if status not in (0, 1, 2):
        wrong.append(f"exit code {status}")
    if "Traceback" in output or "this is a bug" in output:
        wrong.append(f"a traceback: {output[-1500:]}")
    if status == 1 and not ("are needed" in output or "are free" in output):
        wrong.append(f"no figures: {output[-600:]}")
    events = run / "events.jsonl"
    committed = [r for r in lines(events) if r["event"] == "checkpoint"]
    if committed and not complete_checkpoints(run):
        wrong.append("no complete checkpoint is left")
    return wrong


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may be torn."""
    from streamtune.train import read_records

    return read_records(path)


@pytest.mark.full
def test_a_disk_of_one_mebibyte_fills_up_at_any_place(zygotes: Zygotes, tmp_path: Path) -> None:
    """A real tmpfs, with ever more on it already."""
    write_sft(tmp_path / "whole", **CHANGES)
    assert zygotes.run(tmp_path / "whole").status == 0
    whole = state_of(tmp_path / "whole/runs/tiny")

    def trial(kibibytes: int) -> tuple[int, list[str]]:
        folder = tmp_path / f"ballast-{kibibytes}"
        write_sft(folder, **CHANGES)
        done = zygotes.run(folder, hook="on_a_small_disk", ballast=kibibytes << 10)
        if done.status == 77:
            pytest.skip("no file system can be mounted here")
        assert done.status == 0, done.output
        assert "Traceback" not in done.output, done.output
        first = int(done.output.split("FIRST ")[1].split()[0])
        found = differences(state_of(folder / "kept"), whole)
        shutil.rmtree(folder)
        return first, found

    steps = range(200, 1016, 8) if size(1, 0) else (400, 800)
    found = zygotes.each(trial, steps)
    failed = sum(first == 1 for first, _ in found)
    report("disk_tmpfs", trials=len(found), ran_full=failed, intact=sum(not differs for _, differs in found))
    assert failed >= 1
    assert [differs for _, differs in found if differs] == []
