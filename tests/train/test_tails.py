"""Records of long runs: the end is read and truncated, text files are rotated, and spike events are rare."""

from __future__ import annotations

import itertools
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.errors import ArgumentError
from streamtune.train import RunDirectory
from streamtune.train import records as records_module
from streamtune.train.guard import SPIKE_WINDOW, StepGuard
from streamtune.train.records import (
    append_event,
    append_record,
    append_records,
    check_records,
    delete_records_after_step,
    delete_rotated_records_after_step,
    read_records,
    read_records_backwards,
    rotate_file,
    rotated_paths,
)
from streamtune.train.step import TrainSettings


def settings() -> TrainSettings:
    rest = {"max_grad_norm": 1.0, "eval_steps": 0, "save_steps": 0, "save_total_limit": 0, "autocast_dtype": None}
    return TrainSettings(total_steps=1000, steps_per_epoch=1000, seed=0, out_of_memory_fix="", **rest)  # type: ignore[arg-type]


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.0 / step, "grad_norm": 1.0, **more} for step in range(1, count + 1)]


@pytest.mark.parametrize("text", ["", "x" * 10, "ü" * 70_000])
def test_records_from_the_end_are_those_from_the_beginning(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    append_records(path, lines(7, text=text))
    assert list(read_records_backwards(path)) == read_records(path)[::-1]
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    assert [record["step"] for record in read_records_backwards(path)] == [7, 6, 5, 4, 3, 2, 1]
    assert list(read_records_backwards(tmp_path / "none")) == []


def test_a_strange_line_is_named_by_its_number_from_the_end_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n')
    for read in (
        read_records,
        lambda path: list(read_records_backwards(path)),
        lambda path: delete_records_after_step(path, 0),
    ):
        with pytest.raises(ArgumentError, match=r"line 2 of metrics\.jsonl is not JSON"):
            read(path)


def test_cuts_are_those_of_a_file_read_whole(tmp_path: Path) -> None:
    """At each step of random files with evaluations, truncated last lines, and lines longer than a block."""
    drawn = random.Random(0)
    for case in range(60):
        path, kept_path = tmp_path / f"{case}.jsonl", tmp_path / "kept.jsonl"
        found: list[dict[str, Any]] = []
        for step in range(1, drawn.randint(2, 12)):
            found += [{"step": step, "loss": 0.1 + 0.2, "text": "y" * drawn.choice([0, 5, 90_000])}]
            found += [{"step": step, "eval_loss": 1.0}] * drawn.randint(0, 1)
        cut, evaluated = drawn.randint(0, 13), drawn.random() < 0.5
        append_records(path, found)
        if drawn.random() < 0.5:
            with path.open("ab") as file:
                file.write(drawn.choice([b'{"step": 5, "lo', b"\0\0\0", b"\0\0\n"]))
        delete_records_after_step(path, cut, keep_evaluation=evaluated)
        kept = [
            r for r in found if r["step"] < cut or (r["step"] == cut and (evaluated or "eval_loss" not in r))
        ]  # fmt: skip
        kept_path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        assert path.read_bytes() == kept_path.read_bytes()


def test_a_start_reads_the_end_of_a_long_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    text = "".join(json.dumps(line) + "\n" for line in lines(100_000, **{f"metric_{n}": 0.123456789 for n in range(8)}))
    run.metrics.write_text(text)
    append_event(run.events, "start")
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    check_records([run.metrics], run.events)
    delete_records_after_step(run.metrics, 99_990)
    StepGuard(settings(), run, torch.device("cpu"))
    assert time.process_time() - began < 1, "reading all of it takes several"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert run.metrics.read_text() == "".join(text.splitlines(keepends=True)[:99_990])


def test_a_torn_line_at_the_end_of_a_long_file_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_records(path, lines(5))
    with path.open("a") as file:
        file.write('{"step": 6, "text": "' + "z" * 200_000)
    append_record(path, {"step": 6})
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4, 5, 6]


def test_texts_are_moved_aside_and_cut_across_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "ROTATE_BYTES", 300)
    path = tmp_path / "completions.jsonl"
    for step in range(1, 41):
        rotate_file(path)
        append_records(path, [{"step": step, "completion": "x" * 40}])
    names = [file.name for file in rotated_paths(path)]
    assert names == ["completions.jsonl", "completions.1.jsonl", "completions.2.jsonl", "completions.3.jsonl"]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names), "the oldest are gone"
    steps = [record["step"] for file in reversed(rotated_paths(path)) for record in read_records(file)]
    assert steps == list(range(steps[0], 41))
    last = read_records(rotated_paths(path)[1])[-2]["step"]
    delete_rotated_records_after_step(path, last)
    left = [record["step"] for file in reversed(rotated_paths(path)) for record in read_records(file)]
    assert left == list(range(steps[0], last + 1))


def guard_of(folder: Path) -> StepGuard:
    return StepGuard(settings(), RunDirectory(folder), torch.device("cpu"))


def spikes(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read_records(RunDirectory(folder).events) if e["event"] == "spike"]


def test_jumps_of_a_restless_curve_are_rare_events(tmp_path: Path) -> None:
    """A policy's loss is near zero, and each step is far from the median of the others."""
    guard, drawn = guard_of(tmp_path), random.Random(0)
    for step in range(1, 501):
        guard.record_spikes(step, drawn.gauss(0, 1e-3) ** 3, abs(drawn.gauss(0, 1)) ** 5, [])
    found = spikes(tmp_path)
    for metric in ("loss", "grad_norm"):
        steps = [event["step"] for event in found if event["metric"] == metric]
        assert 2 <= len(steps) <= 500 / SPIKE_WINDOW
        assert all(b - a >= SPIKE_WINDOW for a, b in itertools.pairwise(steps))
    assert any(event.get("more", 0) > 2 for event in found), "the next event tells how many there were"


def test_a_resume_remembers_the_last_jump(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    append_records(run.metrics, lines(60))
    append_event(run.events, "spike", step=50, metric="loss", value=9.0, usual=1.0, rows="")
    guard = guard_of(tmp_path)
    guard.record_spikes(61, 99.0, 1.0, [])
    assert len(spikes(tmp_path)) == 1
    guard.record_spikes(50 + SPIKE_WINDOW, 99.0, 1.0, [])
    assert [event["step"] for event in spikes(tmp_path)] == [50, 50 + SPIKE_WINDOW]
