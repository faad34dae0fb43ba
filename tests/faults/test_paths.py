"""Names in files that a stranger wrote: none leads out of its folder, and a run follows no link of its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamtune.base.paths import unsafe_name_reason
from streamtune.errors import ArgumentError, CheckpointError, StreamTuneError
from streamtune.models import ModelOptions, init_model, load_model
from streamtune.train.checkpoint import (
    MANIFEST,
    REQUIRED_FILES,
    Manifest,
    _manifest_text,
    open_checkpoint,
    set_aside_later_checkpoints,
    write_manifest,
)
from streamtune.train.rundir import RunDirectory
from streamtune.train.saver import KeepPolicy, delete_old_checkpoints
from tests.faults.figures import tell
from tests.sft_kit import QWEN3

PAYLOADS = [
    *("../secret", "../../secret", "a/../../secret", "./../secret", "a/..", "..", ".", "a//b", "/etc/passwd"),
    *("//server/share", "/dev/zero", "/proc/self/environ", "~/.ssh/id_rsa", "~root/x", "..\\secret", "a\\..\\..\\b"),
    *("C:\\Windows\\win.ini", "C:secret", "\\\\server\\share", "file:///etc/passwd", "https://evil.example/x"),
    *("hf://evil/x", "a\0b", "a\nb", "\x7f", "", "a/ ", "a/...", "x" * 2000, "..%2f..%2f/../secret", "\ud800"),
    *(".. /secret", "a/./b", None, 7, ["x"], {"a": 1}),
]
PLAIN = ["model.safetensors", "a/b.safetensors", "model-00001-of-00002.safetensors", "ünï.bin", "..a", "a..b", ".x"]


def test_thirty_names_lead_nowhere(tmp_path: Path) -> None:
    """As the shards of a model and as the files of a checkpoint; beside the names that are fine."""
    folder, confined = tmp_path / "inside" / "model", 0
    model = init_model(QWEN3, ModelOptions("float32"), vocab_size=300, token_ids={}, seed=0)
    model.save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "secret")  # sound weights, outside
    checkpoint = tmp_path / "inside" / "step-000001"
    checkpoint.mkdir()
    for name in REQUIRED_FILES:
        (checkpoint / name).write_text("{}")
    state = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    for payload in PAYLOADS:
        assert unsafe_name_reason(payload), payload
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), payload)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ArgumentError, match="names a file that"):
            load_model(str(folder))
        confined += 1
        if isinstance(payload, str):
            outside = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
            # Sound but for the name: sealed as one of ours is.
            text = _manifest_text(Manifest("run", 1, None, {**dict.fromkeys(REQUIRED_FILES, state), payload: outside}))
            (checkpoint / MANIFEST).write_text(text)
            with pytest.raises(CheckpointError, match=r"which is not a valid path in a checkpoint|is missing"):
                open_checkpoint(checkpoint)
    assert [name for name in PLAIN if unsafe_name_reason(name)] == []
    tell("path_payloads", confined, len(PAYLOADS))


def test_an_index_that_is_none(tmp_path: Path) -> None:
    init_model(QWEN3, ModelOptions("float32"), vocab_size=300, token_ids={}, seed=0).save_pretrained(tmp_path)
    for text in ("", "[]", "{", '{"weight_map": 7}', '{"weight_map": []}', "[" * 100_000, "\xff"):
        (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
        with pytest.raises(StreamTuneError):
            load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["run.json", "recipe.yaml", "metrics.jsonl", "events.jsonl", "loss.png", "checkpoints",
                                  "final", "checkpoints/step-000001"])  # fmt: skip
def test_a_run_does_not_follow_a_link_in_its_directory(name: str, tmp_path: Path) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    if "." in name:
        elsewhere.write_text("{}")
    else:
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(ArgumentError, match="is a symbolic link"):
        RunDirectory(run).read_identity()
    (tmp_path / "linked").symlink_to(tmp_path / "new")  # output_dir itself may be one
    (tmp_path / "new").mkdir()
    assert RunDirectory(tmp_path / "linked").read_identity() is None


def test_rotation_follows_no_link(tmp_path: Path) -> None:
    """Neither one that stands where a checkpoint would, nor one in a checkpoint that is deleted."""
    outside, checkpoints = tmp_path / "outside", tmp_path / "run" / "checkpoints"
    outside.mkdir()
    save_file({"x": torch.zeros(1)}, outside / "kept.safetensors")
    write_manifest(outside, run="mine", step=1, metric=None)
    checkpoints.mkdir(parents=True)
    for step in (1, 2):
        (checkpoints / f"step-{step:06d}").symlink_to(outside)
    for step in (3, 4):
        (checkpoints / f"step-{step:06d}").mkdir()
        write_manifest(checkpoints / f"step-{step:06d}", run="mine", step=step, metric=None)
        (checkpoints / f"step-{step:06d}" / "inner").symlink_to(outside)
    assert delete_old_checkpoints(checkpoints, KeepPolicy(newest=1), run="mine") == [checkpoints / "step-000003"]
    set_aside_later_checkpoints(checkpoints, step=0)
    shutil.rmtree(tmp_path / "run")
    assert (outside / "kept.safetensors").is_file()
