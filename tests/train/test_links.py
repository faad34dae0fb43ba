"""Names in a run directory that another user made: links are not followed, and their targets do not change."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamtune.errors import ArgumentError, CheckpointError
from streamtune.train import RunDirectory, commit_directory, draw_loss
from streamtune.train.records import (
    append_event,
    append_record,
    delete_events_after_step,
    delete_records_after_step,
    read_records,
)
from streamtune.train.staging import remove_directory, write_text_durably


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    with made.claim({"recipe": {}}, "seed: 1\n", {"stage": 1}):
        for step in (1, 2):
            append_record(made.metrics, {"step": step, "loss": 1.0})
    append_event(made.events, "start", step=0)
    return made


def claim(run: RunDirectory) -> None:
    with run.claim({"recipe": {"seed": 2}}, "seed: 2\n", {"stage": 2}):
        pass


def draw(run: RunDirectory) -> None:
    draw_loss(read_records(run.metrics), run.loss_plot, title="run")


def cut(run: RunDirectory) -> None:
    """Delete a line before another line, so that the file is rewritten."""
    for record in ({"step": 5, "eval_loss": 1.0}, {"step": 5, "loss": 1.0}):
        append_record(run.metrics, record)
    delete_records_after_step(run.metrics, 5, keep_evaluation=False)


STAGED: dict[str, Callable[[RunDirectory], None]] = {
    ".tmp-run.json": claim,
    ".tmp-recipe.yaml": claim,
    ".tmp-deepspeed.json": claim,
    ".tmp-metrics.jsonl": cut,
    ".tmp-events.jsonl": lambda run: delete_events_after_step(run.events, 1),
    ".tmp-completions.jsonl": lambda run: write_text_durably(run.path / "completions.jsonl", ""),
    ".tmp-loss.png": draw,
}
"""A staged file, and what writes it."""


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link", "folder", "pipe"])
@pytest.mark.parametrize("name", STAGED)
def test_a_staged_file_is_made_anew(run: RunDirectory, victim: Path, name: str, kind: str) -> None:
    planted = run.path / name
    match kind:
        case "link":
            planted.symlink_to(victim)
        case "dangling":
            planted.symlink_to(victim.with_name("new"))
        case "hard link":
            planted.hardlink_to(victim)
        case "folder":
            planted.symlink_to(victim.parent)
        case "pipe":
            os.mkfifo(planted)
    STAGED[name](run)
    assert victim.read_text() == "precious"
    assert not victim.with_name("new").exists()
    made = run.path / name.removeprefix(".tmp-")
    assert made.is_file()
    assert not made.is_symlink()
    assert not os.path.lexists(planted)


@pytest.mark.parametrize("name", [".tmp-final", ".old-final", "final"])
def test_a_staged_directory_is_made_anew(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    with commit_directory(tmp_path / "run" / "final") as staged:
        (staged / "config.json").write_text("new")
    assert (outside / "config.json").read_text() == "precious"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["final"]
    assert not (tmp_path / "run/final").is_symlink()


def test_a_directory_that_is_exchanged_while_it_is_written_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()

    def write() -> None:
        with commit_directory(tmp_path / "final") as staged:
            shutil.rmtree(staged)
            staged.symlink_to(tmp_path / "outside")

    with pytest.raises(OSError, match="another process"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["outside"]


def test_a_deleted_checkpoint_is_moved_over_no_link(tmp_path: Path) -> None:
    outside, checkpoint = tmp_path / "outside", tmp_path / "run" / "step-000001"
    outside.mkdir()
    (outside / "kept").touch()
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / ".tmp-deleted-step-000001").symlink_to(outside)
    remove_directory(checkpoint)
    assert list((tmp_path / "run").iterdir()) == []
    assert (outside / "kept").is_file()


def test_records_are_added_to_plain_files_only(run: RunDirectory, victim: Path) -> None:
    for make in (lambda path: path.symlink_to(victim), os.mkfifo):
        run.metrics.unlink()
        make(run.metrics)
        with pytest.raises(CheckpointError, match=r"symbolic link|not a regular file|No such device"):
            append_record(run.metrics, {"step": 3})
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "change",
    [lambda path: append_record(path, {"step": 3, "loss": 1.0}), lambda path: delete_records_after_step(path, 1)],
    ids=["append", "cut"],
)
def test_records_are_not_written_through_a_hard_link(run: RunDirectory, change: Callable[[Path], None]) -> None:
    other = run.path.parent / "other"
    os.link(run.metrics, other)
    text = other.read_text()
    change(run.metrics)
    assert other.read_text() == text
    assert run.metrics.read_text() != text


def test_links_among_the_records_that_lead_nowhere_stop_no_checkpoint(run: RunDirectory) -> None:
    for name in (".tmp-metrics.jsonl", "theirs.jsonl"):
        (run.path / name).symlink_to(run.path.parent / "nowhere")
    run.fsync_records()
    assert not (run.path.parent / "nowhere").exists()


@pytest.mark.parametrize("name", [".lock", "logs", "vllm", "completions.jsonl", "checkpoints", "run.json", "loss.png"])
def test_a_link_in_the_place_of_a_run_s_own_file_is_refused(run: RunDirectory, victim: Path, name: str) -> None:
    place = run.path / name
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    with pytest.raises(ArgumentError, match="is a symbolic link"):
        run.lock()
    assert victim.read_text() == "precious"


def test_a_lock_that_is_a_hard_link_is_locked_and_not_written_to(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/.lock").hardlink_to(victim)
    with RunDirectory(tmp_path / "new").lock(), pytest.raises(ArgumentError, match="another process is training"):
        RunDirectory(tmp_path / "new").lock()
    assert victim.read_text() == "precious"


def test_a_torn_line_is_cut_off_and_a_damaged_one_is_named(run: RunDirectory) -> None:
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    append_record(run.metrics, {"step": 3, "loss": 0.5})
    assert [record["step"] for record in read_records(run.metrics)] == [1, 2, 3]
    for damaged in (b"\xff\xfe", b"[1]", b"{", b'{"step": "two"}', b'{"loss": 1.0}'):
        lines = run.metrics.read_bytes().splitlines()
        lines[1] = damaged
        run.metrics.write_bytes(b"\n".join(lines) + b"\n")
        with pytest.raises(ArgumentError, match=r"line 2 of metrics\.jsonl") as caught:
            delete_records_after_step(run.metrics, 1)
        assert caught.value.where == f"{run.metrics}:2"
        assert run.metrics.read_bytes() == b"\n".join(lines) + b"\n"


def test_an_identity_of_another_type_is_no_run(run: RunDirectory) -> None:
    for text in ("[]", "7", "null", '{"recipe": 3}'):
        run.identity.write_text(text)
        with pytest.raises(ArgumentError, match="cannot be read"):
            run.read_identity()
