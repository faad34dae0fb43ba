"""Trackers that fail, hang or do not keep up: the run goes on, and it is said once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import ArgumentError
from streamtune.programs.trackers import reporter
from streamtune.programs.trackers.reporter import Reporter, Reporters
from streamtune.programs.trackers.services import CLASSES, PACKAGES, Tracker, check_installed
from streamtune.train import RunFacts


@dataclass
class Recorder(Tracker):
    """A tracker in memory."""

    name = "recorder"
    got: list[Any] = field(default_factory=list)
    on_log: Callable[[int], None] = lambda step: None

    def start(self) -> dict[str, Any]:
        self.got.append(("start", dict(self.ids)))
        return {"id": "first"}

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.on_log(step)
        self.got.append((step, dict(values)))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self.got.append((step, samples))

    def log_image(self, step: int, path: Path) -> None:
        self.got.append((step, path.name))

    def log_event(self, name: str, details: Mapping[str, Any]) -> None:
        self.got.append((name, dict(details)))

    def close(self, status: str) -> None:
        self.got.append(status)


def facts(folder: Path, step: int = 0) -> RunFacts:
    folder.mkdir(exist_ok=True)
    return RunFacts("0123456789abcdef", folder.name, folder, step, 9, {"seed": 1}, {"torch": "2"}, {"peak_bytes": 5})


def report(folder: Path, seconds: float = 20.0, **more: Any) -> tuple[list[Any], list[str]]:
    """What a tracker got of three steps, and what the user was told."""
    got, notes = list[Any](), list[str]()
    each = Reporter(
        lambda facts, ids, offline: Recorder(facts, ids, offline, got, **more),
        "recorder",
        offline=True,
        notify=notes.append,
    )
    group = Reporters([each], seconds=seconds)
    group.started(facts(folder))
    for step in (1, 2, 3):
        group.step({"step": step, "loss": 1.0 / step, "skipped": True, "words": "no number"})
    group.sampled([{"step": 3, "prompt": "hf_" + "a" * 30, "completion": "b"}])
    group.event("finish", {"step": 3})
    group.finished({"status": "finished", "step": 3})
    assert group.error is None
    return got, notes


def test_everything_arrives_in_order_and_ids_are_kept(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_bytes(b"png")
    got, notes = report(tmp_path)
    sample = {"step": 3, "prompt": "[a Hugging Face token]", "completion": "b"}
    assert got == [
        ("start", {}),
        *((step, {"loss": 1.0 / step, "skipped": 1.0}) for step in (1, 2, 3)),
        (3, [sample]),
        ("finish", {"step": 3}),
        (3, "loss.png"),
        "finished",
    ]
    assert notes == []
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"recorder": {"id": "first"}}
    assert report(tmp_path)[0][0] == ("start", {"id": "first"}), "the second time it is the same run"


def test_a_tracker_that_fails_is_dropped_and_told_once(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step >= 2:
            raise ConnectionError("no route; key hf_" + "a" * 30)

    got, notes = report(tmp_path, on_log=fail)
    assert [each[0] for each in got] == ["start", 1]
    assert len(notes) == 1
    assert "recorder gets no more records of this run" in notes[0]
    assert "ConnectionError: no route; key [a Hugging Face token]" in notes[0]
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["tracker"]) == ("tracker_failed", "recorder")


def test_a_tracker_that_hangs_holds_the_run_up_for_so_long_at_most(tmp_path: Path) -> None:
    leave = threading.Event()
    began = time.monotonic()
    _, notes = report(tmp_path, seconds=0.3, on_log=lambda step: leave.wait(20) and None)
    assert time.monotonic() - began < 5
    assert len(notes) == 1
    assert "did not accept all records in time" in notes[0]
    leave.set()


def test_a_tracker_that_does_not_keep_up_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "QUEUED", 1)
    leave = threading.Event()
    _, notes = report(tmp_path, seconds=0.3, on_log=lambda step: leave.wait(20) and None)
    leave.set()
    assert len(notes) == 1
    assert "its queue is full (1 records)" in notes[0]


def test_damaged_ids_begin_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text('{"recorder": 5')
    assert report(tmp_path)[0][0] == ("start", {})


def test_a_tracker_that_is_not_installed_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PACKAGES.keys() == CLASSES.keys()
    monkeypatch.setitem(PACKAGES, "wandb", ("no_such_module", "wandb"))
    with pytest.raises(ArgumentError, match="names 'wandb', which is not installed") as refused:
        check_installed(["tensorboard", "wandb"])
    assert "pip install 'streamtune[trackers]'" in refused.value.fix
