"""Checkpoints are committed atomically, verified and rotated, inside a run directory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_kit import save_tensors

from streamtune.errors import ArgumentError, CheckpointError, RecipeError
from streamtune.optim import OptimChoice, build_optimizer
from streamtune.train import (
    RunDirectory,
    check_same_run,
    commit_directory,
    find_checkpoint,
    preserve_rng,
    set_aside_later_checkpoints,
)
from streamtune.train.backend import LocalBackend, load_optimizer_tensors, optimizer_tensors
from streamtune.train.checkpoint import newest_checkpoint, open_checkpoint, write_manifest
from streamtune.train.process import capture_rng, restore_rng, seed_everything
from streamtune.train.saver import KeepPolicy, ModelWriter, delete_old_checkpoints


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    tensors = tensors or {"w/exp_avg": torch.arange(6.0).reshape(2, 3), "w/step": torch.tensor(float(step))}
    return save_tensors(folder, tensors, ModelWriter(write_model, 2), {"step": step, "identity": {}})


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path.name == "step-000007"
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 7
    assert checkpoint.model_dir.joinpath("config.json").read_text() == "{}"
    tensors = checkpoint.optimizer_tensors()
    assert torch.equal(tensors["w/exp_avg"], torch.arange(6.0).reshape(2, 3))
    assert tensors["w/step"].shape == ()
    assert not any(path.suffix in (".pt", ".pkl", ".bin", ".pth") for path in path.rglob("*"))


STATE = {"step": 2, "identity": {"recipe": {}}, "progressed": {}, "stream": None, "rng": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"step": "2"},
        {"ranks": 0},
        {"ranks": "2"},
        {"identity": []},
        {"identity": {"recipe": 5}},
        {"identity": {"files": ["base"]}},
        {"identity": {"files": {"base": 3}}},
        {"identity": {"recipe": {"quantization": 5}}},
        {"identity": {"recipe": {"model_name_or_path": 5}}},
        {"identity": {"recipe": {"rope_scaling": "linear"}}},
        {"progressed": [1]},
        {"progressed": {"step": "2"}},
        {"progressed": {"ranked_by": 2}},
        {"stream": 3},
        {"rng": None},
    ],
    ids=str,
)
def test_a_state_of_another_form_is_a_damaged_checkpoint(tmp_path: Path, change: dict[str, Any]) -> None:
    """The file was edited, and its manifest matches."""
    path = save_tensors(tmp_path, {}, ModelWriter(write_model, 2), STATE)
    assert open_checkpoint(path).step == 2
    (path / "state.json").write_text(json.dumps({**STATE, **change}))
    (path / "manifest.json").unlink()
    write_manifest(path, run="mine", step=2, metric=None)
    with pytest.raises(CheckpointError, match=r"step-000002 is damaged: state\.json cannot be read \('\w"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg", torch.zeros(1)),
        ("exp_avg", torch.zeros(2, 2)),
        ("exp_avg_sq", torch.zeros(3, 2)),
        ("exp_avg_sq", torch.zeros(2, 3, dtype=torch.int32)),
        ("exp_avg", None),
        ("step", None),
    ],
    ids=["one value", "narrower", "turned", "whole numbers", "gone", "no count"],
)
@pytest.mark.parametrize("states", ["param", "bfloat16"])
def test_moments_of_another_form_are_refused(key: str, value: torch.Tensor | None, states: Any) -> None:
    """The fused step only checks the weight's size, and would read beyond the end of a smaller moment."""
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = build_optimizer(OptimChoice("adamw", 0.1, states=states), model.named_parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    load_optimizer_tensors(optimizer, model, tensors)
    changed = {name: x for name, x in tensors.items() if name != f"weight/{key}"}
    if value is not None:
        changed[f"weight/{key}"] = value
    with pytest.raises(CheckpointError, match="the checkpoint's optimizer state of weight has"):
        load_optimizer_tensors(optimizer, model, changed)


def test_large_state_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtune.train.slices.FILE_BYTES", 100)
    tensors = {f"p{index}/exp_avg": torch.full((10,), float(index)) for index in range(7)}
    path = save(tmp_path, 1, tensors)
    assert len(list(path.glob("optimizer-*.safetensors"))) == 4
    again = open_checkpoint(path).optimizer_tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_an_optimizer_without_state_has_a_checkpoint_too(tmp_path: Path) -> None:
    path = save_tensors(tmp_path, {}, ModelWriter(write_model, 2), {"step": 0, "identity": {}})
    assert open_checkpoint(path).optimizer_tensors() == {}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    file = bad / "optimizer-00001.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-1])
    else:
        (file if damage == "remove" else bad / "manifest.json").unlink()
    said: list[str] = []
    found = newest_checkpoint(tmp_path, said.append)
    assert found is not None
    assert found.path == good
    assert str(bad) in said[0]
    with pytest.raises(CheckpointError, match="step-000002"):
        open_checkpoint(bad)


def test_no_checkpoint_is_none_and_a_path_must_be_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert find_checkpoint(run, "auto", print) is None
    assert find_checkpoint(run, "never", print) is None
    with pytest.raises(ArgumentError) as caught:
        find_checkpoint(run, "nevr", print)
    assert "'never'" in caught.value.fix
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        find_checkpoint(run, str(tmp_path), print)


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (8, 9, 10, 999_999, 1_000_000)]
    assert delete_old_checkpoints(tmp_path, KeepPolicy(0)) == []
    assert delete_old_checkpoints(tmp_path, KeepPolicy(2)) == paths[:3]
    assert [path.exists() for path in paths] == [False] * 3 + [True] * 2


def test_checkpoints_behind_which_a_run_goes_back_are_taken_out_of_use(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    set_aside_later_checkpoints(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000001", "step-000002.superseded", "step-000003.superseded"
    ]  # fmt: skip
    found = newest_checkpoint(tmp_path, print)
    assert found is not None
    assert found.step == 1


def test_a_failure_half_way_leaves_the_checkpoints_before_it(tmp_path: Path) -> None:
    good = save(tmp_path, 1)

    def fail(folder: Path) -> None:
        write_model(folder)
        raise OSError("the disk is on fire")

    with pytest.raises(CheckpointError, match="the disk is on fire") as caught:
        save_tensors(tmp_path, {}, ModelWriter(fail, 2), {"step": 2})
    assert str(good) in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_checkpoint_larger_than_the_disk_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1,024 TiB are needed, .* are free"):
        save_tensors(tmp_path, {}, ModelWriter(write_model, 1 << 50), {"step": 2})
    assert list(tmp_path.iterdir()) == []


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_file_the_system_cuts_off_is_reported_with_what_is_needed(tmp_path: Path) -> None:
    """A real error of the system while writing: the process may not write files above 64 KiB."""
    pytest.importorskip("resource")
    good = save(tmp_path, 1)
    result = run_python(
        """
        import resource, sys, torch
        from pathlib import Path
        from streamtune.errors import CheckpointError
        from streamtune.train.saver import ModelWriter
        from tests.train.train_kit import save_tensors
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        tensors = {"w/exp_avg": torch.zeros(100_000)}
        writer = ModelWriter(lambda folder: folder.mkdir(), 0)
        try:
            save_tensors(Path(sys.argv[1]), tensors, writer, {"step": 2})
        except CheckpointError as error:
            print(error)
        """,
        tmp_path,
    )
    assert "391 KiB are needed" in result.stdout, result.stderr
    assert f"{good} is intact" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    open_checkpoint(good)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["while writing", "before the rename", "between the renames"])
def test_killed_at_any_moment_the_directory_is_the_old_or_the_new_one(tmp_path: Path, moment: str) -> None:
    target = tmp_path / "final"
    with commit_directory(target) as staged:
        (staged / "a").write_text("old")
    result = run_python(
        """
        import os, signal, sys
        from pathlib import Path
        from streamtune.train import staging
        target, moment = Path(sys.argv[1]), sys.argv[2]
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if moment == "before the rename":
            staging.fsync_tree = die
        if moment == "between the renames":
            class Deadly(type(target)):
                def rename(self, other):
                    if self.name.startswith(".tmp-"):
                        die()
                    return super().rename(other)
            target = Deadly(target)
        with staging.commit_directory(target) as staged:
            (staged / "a").write_text("new")
            if moment == "while writing":
                die()
        """,
        target,
        moment,
    )
    assert result.returncode == -9, result.stderr
    from streamtune.train.staging import discard_leftovers

    discard_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (target / "a").read_text() == "old"


def test_a_commit_replaces_what_was_there(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with commit_directory(tmp_path / "final") as staged:
            (staged / text).write_text(text)
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["two"]


# --- random state ---------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_random_state_survives_json_and_is_preserved() -> None:
    with preserve_rng():
        seed_everything(5)
        random.gauss(0, 1)  # leaves a second number in store
        state = capture_rng()
        expected = [draw(), random.gauss(0, 1)]
        restore_rng(type(state)(state.tensors, json.loads(json.dumps(state.json_states))))
        assert [draw(), random.gauss(0, 1)] == expected
        restore_rng(state)
        with preserve_rng():
            draw()
        assert draw() == expected[0]


# --- the run directory ----------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(ArgumentError, match="has no run"):
        RunDirectory(tmp_path).read_identity()
    assert RunDirectory(tmp_path / "new").read_identity() is None


def test_a_run_keeps_its_identity_and_is_moved_aside(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for number in (1, 2):
        with run.claim({"recipe": {"seed": number}}, "seed: 1\n"):
            pass
        assert run.read_identity() == {"recipe": {"seed": number}}
        assert run.move_aside() == tmp_path / f"run.old-{number}"
        assert not run.path.exists()


@pytest.mark.full
def test_two_processes_do_not_train_in_one_place(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    run = RunDirectory(tmp_path / "run")
    code = """
        import sys
        from pathlib import Path
        from streamtune.train import RunDirectory
        with RunDirectory(Path(sys.argv[1])).claim({"recipe": {}}, ""):
            print("in")
        """
    with run.claim({"recipe": {}}, ""):
        result = run_python(code, run.path)
        assert "another process is training" in result.stderr
    assert run_python(code, run.path).stdout == "in\n"


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"recipe": {"seed": 2, "lora_r": 8}}, "seed was 1, is now 2"),
        ({"recipe": {"seed": 1, "lora_r": 8}, "data": "b"}, "the data changed"),
        ({"recipe": {"seed": 1}}, "lora_r was 8, is now null"),
    ],
)
def test_another_run_is_refused_by_what_differs(now: dict[str, Any], named: str) -> None:
    before = {"recipe": {"seed": 1, "lora_r": 8}, "data": "a"}
    check_same_run(before, before, where=Path("runs/x"))
    check_same_run(before, {"recipe": before["recipe"]}, where=Path("runs/x"))
    with pytest.raises(RecipeError) as caught:
        check_same_run(before, now, where=Path("runs/x"))
    assert named in caught.value.what
    assert "--resume never" in caught.value.fix


def test_a_run_of_another_objective_is_refused_by_one_line() -> None:
    """The error does not list the keys of both recipes, and no flag allows the change."""
    now = {"recipe": {"objective": "dpo", "seed": 1, "beta": 0.1, "loss_type": "sigmoid"}, "data": "b"}
    with pytest.raises(RecipeError) as caught:
        check_same_run({"recipe": {"seed": 1}, "data": "a"}, now, where=Path("runs/x"), allowed_keys={"objective"})
    assert caught.value.what == "runs/x already has a run of sft, which cannot resume as dpo"
    assert "--output-dir" in caught.value.fix
    assert "--allow-change" not in caught.value.fix


def test_every_changed_key_is_named_where_the_change_may_be_allowed() -> None:
    before = {"recipe": {"learning_rate": 1e-4, "max_steps": 3}, "data": "a"}
    now = {"recipe": {"learning_rate": 1e-3, "max_steps": 5}, "data": "b"}
    with pytest.raises(RecipeError) as caught:
        check_same_run(before, now, where=Path("runs/x"), allowed_keys={"data"})
    assert caught.value.fix.endswith("--allow-change learning_rate --allow-change max_steps")
    assert (
        len(check_same_run(before, now, where=Path("runs/x"), allowed_keys={"data", "learning_rate", "max_steps"})) == 3
    )
    with pytest.raises(RecipeError) as caught:
        check_same_run(before, now, where=Path("runs/x"), never_allowed_keys={"max_steps"})
    assert "--allow-change" not in caught.value.fix


def test_only_one_device_writes_whole_tensors() -> None:
    """If one of several ranks wrote whole tensors, it would overwrite the others' files."""
    from streamtune.distributed.deepspeed import DeepSpeedBackend
    from streamtune.distributed.pytorch import DdpBackend, FsdpBackend

    assert [kind.has_whole_state for kind in (LocalBackend, DdpBackend, DeepSpeedBackend, FsdpBackend)] == [
        True,
        *[False] * 3,
    ]
