"""kill -9 at any moment: the run goes on, and ends as one that was left alone, to the last bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.kit import (
    ALL,
    COUNT,
    KILL,
    TEAR,
    WRITE,
    Done,
    Zygotes,
    complete_checkpoints,
    differences,
    kill_after,
    report,
    size,
    state_of,
    write_sft,
)

Whole = tuple[Path, dict[str, Any], float]


def finish(zygotes: Zygotes, folder: Path, whole: Whole) -> list[str]:
    """Go on to the end; what differs from the run that was left alone."""
    done = zygotes.run(folder)
    assert done.status == 0, done.output
    found = differences(state_of(folder / "runs/tiny"), whole[1])
    shutil.rmtree(folder)
    return found


def run_killed_within(zygotes: Zygotes, folder: Path, seconds: float, **changes: Any) -> Done:
    """Start a run and kill it after `seconds`; where it was over by then (it ran faster than the run that was
    timed), start it again from nothing and kill it at half that time."""
    write_sft(folder, **changes)
    done = zygotes.run(folder, after=kill_after(seconds))
    while done.status == 0:
        shutil.rmtree(folder)
        write_sft(folder, **changes)
        seconds /= 2
        done = zygotes.run(folder, after=kill_after(seconds))
    return done


def test_killed_at_random_instants(zygotes: Zygotes, whole: Whole, tmp_path: Path) -> None:
    """Half of them inside a save, some in the middle of a write; a third of the runs are killed more than once."""
    trials = size(200, 4)
    write_sft(tmp_path / "counted")
    prefix = "runs/tiny/checkpoints"
    counted = zygotes.run(
        tmp_path / "counted", arm=(str(tmp_path / "counted" / prefix), ALL, 0, COUNT, 0, "", "")
    ).counted
    assert counted > 50

    def trial(number: int) -> tuple[int, list[str]]:
        draw = random.Random(number)
        folder = tmp_path / f"kill-{number}"
        if number % 2 == 0:
            write_sft(folder)
        kills = 0
        for _ in range(draw.choice((1, 1, 2))):
            if number % 2:
                seconds = draw.uniform(0.0, whole[2])
                if kills:
                    done = zygotes.run(folder, after=kill_after(seconds))
                else:
                    done = run_killed_within(zygotes, folder, seconds)
            else:
                place = (str(folder / prefix), ALL, draw.randint(1, counted), draw.choice((KILL, TEAR)), 0, "", "")
                done = zygotes.run(folder, arm=place)
            assert done.status in (0, -9), done.output
            kills += done.status == -9
        return kills, finish(zygotes, folder, whole)

    found = zygotes.each(trial, range(trials))
    identical = sum(not differs for _, differs in found)
    report("kill_random", trials=trials, identical=identical, kills=sum(kills for kills, _ in found))
    assert [differs for _, differs in found if differs] == []
    assert sum(kills for kills, _ in found) > trials // 2


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"finetuning_type": "lora"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "optim_args": {"eps": 1e-2}}, marks=pytest.mark.slow),
    ],
)
def test_killed_while_weights_are_perturbed(zygotes: Zygotes, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Steps by losses alone: killed between two forwards of a step, most of the time."""
    changes = {"optim": "mezo", "learning_rate": 1e-4, "save_steps": 2, **changes}
    write_sft(tmp_path / "whole", **changes)
    done = zygotes.run(tmp_path / "whole")
    assert done.status == 0, done.output
    want = state_of(tmp_path / "whole/runs/tiny")
    draw = random.Random(0)
    for number in range(size(20, 2)):
        folder = tmp_path / f"kill-{number}"
        killed = run_killed_within(zygotes, folder, draw.uniform(0.5, 1.0) * done.seconds, **changes)
        assert killed.status == -9, killed.output
        assert finish(zygotes, folder, (folder, want, 0.0)) == []


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"finetuning_type": "lora"}])
def test_killed_while_rows_are_chosen(zygotes: Zygotes, tmp_path: Path, changes: dict[str, Any]) -> None:
    """The rows of a step are chosen again, by the same weights and moments: the same rows."""
    changes = {"select_rows": "colm", "select_from": 3, "max_steps": 8, "num_train_epochs": 1.0, **changes}
    write_sft(tmp_path / "whole", **changes)
    done = zygotes.run(tmp_path / "whole")
    assert done.status == 0, done.output
    want = state_of(tmp_path / "whole/runs/tiny")
    assert [line["step"] for line in want["selected"]] == list(range(1, 9))
    draw = random.Random(1)
    for number in range(size(20, 2)):
        folder = tmp_path / f"kill-{number}"
        killed = run_killed_within(zygotes, folder, draw.uniform(0.4, 1.0) * done.seconds, **changes)
        assert killed.status == -9, killed.output
        assert finish(zygotes, folder, (folder, want, 0.0)) == []


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_at_every_call_of_a_save(zygotes: Zygotes, tmp_path: Path, asynchronous: bool, whole: Whole) -> None:
    """At every open, mkdir, fsync, rename and unlink of a run that saves twice and deletes the first checkpoint."""
    changes = {"save_steps": 5, "save_total_limit": 1, "save_async": asynchronous}
    write_sft(tmp_path / "counted", **changes)
    which = ALL & ~WRITE
    counted = zygotes.run(
        tmp_path / "counted", arm=(str(tmp_path / "counted/runs"), which, 0, COUNT, 0, "", "")
    ).counted
    theirs = state_of(tmp_path / "counted/runs/tiny")
    assert differences(theirs, whole[1]) == []

    def trial(place: int) -> list[str]:
        folder = tmp_path / f"call-{place}"
        write_sft(folder, **changes)
        done = zygotes.run(folder, arm=(str(folder / "runs"), which, place, KILL, 0, "", ""))
        assert done.status == -9, done.output
        return finish(zygotes, folder, (folder, theirs, 0.0))

    places = range(1, counted + 1) if size(1, 0) else random.Random(7).sample(range(1, counted + 1), 4)
    found = zygotes.each(trial, places)
    name = "asynchronous" if asynchronous else "synchronous"
    report(f"kill_calls_{name}", trials=len(found), identical=sum(not differs for differs in found))
    assert [differs for differs in found if differs] == []


@pytest.mark.full
def test_a_kill_never_leaves_fewer_than_one_complete_checkpoint(zygotes: Zygotes, tmp_path: Path) -> None:
    """Asked right after the kill, before anything is fixed; once the first save was over."""
    changes = {"save_steps": 2, "save_total_limit": 1}
    write_sft(tmp_path / "counted", **changes)
    run = tmp_path / "counted/runs/tiny/checkpoints"
    counted = zygotes.run(tmp_path / "counted", arm=(str(run), ALL, 0, COUNT, 0, "", "")).counted
    trials = size(100, 3)

    def trial(number: int) -> bool:
        folder = tmp_path / f"left-{number}"
        write_sft(folder, **changes)
        at = random.Random(number).randint(counted // 4, counted)  # of five saves
        zygotes.run(folder, arm=(str(folder / "runs/tiny/checkpoints"), ALL, at, TEAR, 0, "", ""))
        left = complete_checkpoints(folder / "runs/tiny")
        shutil.rmtree(folder)
        return len(left) >= 1

    kept = zygotes.each(trial, range(trials))
    report("kill_left", trials=trials, with_a_checkpoint=sum(kept))
    assert all(kept)
