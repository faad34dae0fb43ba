"""Which ranks save, which checkpoints are kept, and how a guard reports spikes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit import RowStream, State, Trainer, make_batch, make_model

from streamtune.errors import CheckpointError
from streamtune.models import load_model
from streamtune.train import read_records
from streamtune.train.checkpoint import open_checkpoint
from streamtune.train.process import capture_rng
from streamtune.train.saver import CheckpointSaver, KeepPolicy, ModelWriter, delete_old_checkpoints


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def saver(
    folder: Path, keep: KeepPolicy = KeepPolicy(0), *, run: str = "mine", write: Any = write_model
) -> CheckpointSaver:
    return CheckpointSaver(folder, ModelWriter(write, 2, lambda: write), keep, run=run)


def save(made: CheckpointSaver, step: int, metric: float | None = None) -> None:
    tensors = {"w/exp_avg": torch.full((4,), float(step))}
    made.save(State(tensors), state={"step": step, "identity": {}}, rng=capture_rng(), metric=metric)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize(("greater", "kept"), [(False, [2, 6, 7]), (True, [5, 6, 7])])
def test_the_best_are_kept_besides_the_newest(tmp_path: Path, greater: bool, kept: list[int]) -> None:
    """On a tie the newer one is kept; a checkpoint without a metric is never the best."""
    with saver(tmp_path, KeepPolicy(2, best=1, greater_is_better=greater)) as made:
        for step, metric in enumerate((0.5, 0.1, None, 0.7, 0.7, 0.3, 0.4), start=1):
            save(made, step, metric)
    assert steps(tmp_path) == kept


def test_only_checkpoints_of_this_very_run_are_deleted(tmp_path: Path) -> None:
    with saver(tmp_path, run="theirs") as made:
        save(made, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000002/notes.txt").write_text("mine")
    with saver(tmp_path, run="mine") as made:
        for step in (3, 4, 5):
            save(made, step)
    assert [path.name for path in delete_old_checkpoints(tmp_path, KeepPolicy(1), run="mine")] == [
        "step-000003",
        "step-000004",
    ]
    assert steps(tmp_path) == [1, 2, 5]
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_save_is_written_while_training_goes_on_and_holds_what_was_there(tmp_path: Path) -> None:
    going, go_on = threading.Event(), threading.Event()
    weights = torch.zeros(3)

    def write(folder: Path) -> None:
        write_model(folder)
        going.set()
        assert go_on.wait(30)

    with saver(tmp_path, write=write) as made:
        made.save(State({"w/exp_avg": weights}), state={"step": 1, "identity": {}}, rng=capture_rng())
        assert going.wait(30)
        weights += 1
        assert made.pop_committed() == []
        go_on.set()
        assert [path.name for path in made.wait_and_pop_committed()] == ["step-000001"]
    assert torch.equal(open_checkpoint(tmp_path / "step-000001").optimizer_tensors()["w/exp_avg"], torch.zeros(3))


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    running: list[int] = []
    most: list[int] = []

    def write(folder: Path) -> None:
        write_model(folder)
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        running.pop()

    with saver(tmp_path, write=write) as made:
        for step in (1, 2, 3):
            save(made, step)
    assert max(most) == 1
    assert steps(tmp_path) == [1, 2, 3]


def test_what_goes_wrong_off_the_thread_is_raised_at_the_next_boundary(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise OSError("the disk is on fire")

    with saver(tmp_path, write=write) as made:
        save(made, 1)
        with pytest.raises(CheckpointError, match="the disk is on fire"):
            made.wait_and_pop_committed()
        assert made.pop_committed() == []
    assert steps(tmp_path) == []


def test_the_loop_ends_where_a_save_failed(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "streamtune.train.saver.write_slices", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(CheckpointError, match="step-000002"):
        trainer(make_model(), steps=6, save_steps=2)


def test_checkpoints_ranked_by_another_metric_are_not_the_best(tmp_path: Path) -> None:
    with saver(tmp_path, KeepPolicy(1, best=1, metric="eval_easy_loss")) as made:
        save(made, 1, metric=0.1)
    with saver(tmp_path, KeepPolicy(1, best=1, metric="eval_hard_loss")) as made:
        for step, metric in ((2, 0.5), (3, 0.6), (4, 0.7)):
            save(made, step, metric=metric)
    assert steps(tmp_path) == [2, 4]


def test_a_checkpoint_without_the_name_of_its_metric_is_ranked(tmp_path: Path) -> None:
    """Older versions did not write it."""
    with saver(tmp_path, KeepPolicy(1, best=1)) as made:
        save(made, 1, metric=0.1)
    assert "metric_name" not in (tmp_path / "step-000001/manifest.json").read_text()
    with saver(tmp_path, KeepPolicy(1, best=1, metric="eval_loss")) as made:
        for step in (2, 3):
            save(made, step, metric=0.5)
    assert steps(tmp_path) == [1, 3]


def test_without_the_memory_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has enough memory, but the container's limit leaves 10 bytes."""
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("1010")
    used.write_text("1000")
    monkeypatch.setattr("streamtune.engine.memory.host.CGROUP_FILES", ((str(limit), str(used)),))
    with saver(tmp_path / "saved") as made:
        save(made, 1)
        assert [path.name for path in made.pop_committed()] == ["step-000001"]


def test_a_disk_too_small_for_a_checkpoint_is_told_after_the_first_step(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamtune.train.saver.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match="are needed"):
        trainer(make_model(), steps=6, save_steps=5)
    assert read_records(trainer.folder / "metrics.jsonl") == []


def test_a_jump_is_written_down_with_its_rows(trainer: Trainer) -> None:
    """Rows 0 to 23 are memorised; row 24 is new, so its loss is a spike."""
    same, other = make_batch(0), make_batch(9)
    rows = dict.fromkeys(range(24), same) | {24: other}
    trainer(make_model(), stream=RowStream(num_rows=25, accumulation=1, rows=rows), steps=25, learning_rate=3e-2)
    events = [json.loads(line) for line in (trainer.folder / "events.jsonl").read_text().splitlines()]
    [found] = [event for event in events if event["event"] == "spike" and event["metric"] == "loss"]
    assert (found["step"], found["rows"]) == (25, "rows.jsonl:10")
    assert found["value"] > 1.5 * found["usual"]


def test_events_of_steps_that_are_taken_again_are_written_again(trainer: Trainer) -> None:
    trainer(make_model(), steps=4, save_steps=2, save_total_limit=0)
    events = trainer.folder / "events.jsonl"
    with events.open("a") as file:
        for step in (1, 4):
            file.write(json.dumps({"event": "spike", "step": step}) + "\n")
        file.write(json.dumps({"event": "failure", "what": "x"}) + "\n" + '{"event": "to')
    checkpoint = open_checkpoint(trainer.folder / "checkpoints/step-000002")
    trainer(load_model(str(checkpoint.model_dir)), steps=4, resume_from=checkpoint)
    kept = [(event["event"], event.get("step")) for event in read_records(events)]
    assert kept == [("checkpoint", 2), ("checkpoint", 4), ("spike", 1), ("failure", None), ("checkpoint", 4)]
