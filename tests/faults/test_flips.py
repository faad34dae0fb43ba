"""A checkpoint that was damaged, or made to look like one, is never loaded."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import CheckpointError
from streamtune.train.checkpoint import newest_checkpoint, open_checkpoint
from tests.faults.kit import report, size

Whole = tuple[Path, dict[str, Any], float]


@pytest.fixture
def checkpoint(whole: Whole, tmp_path: Path) -> Path:
    """A copy of a real one."""
    source = whole[0] / "runs/tiny/checkpoints/step-000010"
    return Path(shutil.copytree(source, tmp_path / "checkpoints/step-000010"))


def refused(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return path.name in error.what
    return False


def test_no_flipped_byte_and_no_truncation_is_loaded(checkpoint: Path) -> None:
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    flips, cuts = size(1000, 200), size(100, 40)
    draw = random.Random(0)
    loaded = []
    for number in range(flips + cuts):
        file = draw.choice(files)  # each file as often as any other, however small
        before = file.read_bytes()
        place = draw.randrange(len(before))
        damaged = bytearray(before)
        if number < flips:
            damaged[place] ^= draw.randrange(1, 256)
        else:
            del damaged[place:]
        file.write_bytes(damaged)
        if not refused(checkpoint):
            loaded.append((file.name, place))
        file.write_bytes(before)
    assert not refused(checkpoint)
    report("flips", flips=flips, truncations=cuts, loaded=len(loaded))
    assert loaded == []


def rewrite(path: Path, **changes: Any) -> None:
    """A manifest that agrees with itself and says something else."""
    found = json.loads((path / "manifest.json").read_text())
    del found["digest"]
    found |= changes
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**found, "digest": digest}, indent=1, sort_keys=True) + "\n")


def listed(path: Path) -> dict[str, Any]:
    return json.loads((path / "manifest.json").read_text())["files"]


def added(path: Path) -> None:
    (path / "model/pytorch_model.bin").write_bytes(b"\x80\x04.")


def linked(path: Path) -> None:
    file = path / "rng.safetensors"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def folder_linked(path: Path) -> None:
    (path / "model").rename(path.parent / "elsewhere")
    (path / "model").symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    os.mkfifo(path / "model/pipe")


def climbs(path: Path) -> None:
    secret = path.parent / "secret"
    secret.write_text("x")
    entry = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    rewrite(path, files={**listed(path), "../secret": entry})


def absolute(path: Path) -> None:
    rewrite(path, files={**listed(path), str(path / "state.json"): listed(path)["state.json"]})


def nothing_listed(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name != "manifest.json":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    rewrite(path, files={})


def huge(path: Path) -> None:
    with (path / "manifest.json").open("a") as file:
        file.truncate(64 << 20)


def deep(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 200_000)


def renamed(path: Path) -> None:
    rewrite(path, step=11)


def other_types(path: Path) -> None:
    rewrite(path, metric="0.5")


def not_a_mapping(path: Path) -> None:
    rewrite(path, files=[["state.json"]])


DAMAGE = [
    added, linked, folder_linked, pipe, climbs, absolute, nothing_listed, huge, deep, renamed, other_types,
    not_a_mapping,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_only_looks_like_a_checkpoint_is_refused(checkpoint: Path, damage: Any) -> None:
    damage(checkpoint)
    assert refused(checkpoint)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="the only checkpoint") as caught:
        newest_checkpoint(checkpoint.parent, said.append)
    said += [caught.value.what]
    assert checkpoint.name in said[0]


def test_a_checkpoint_behind_a_link_is_passed_over_where_it_is_searched(checkpoint: Path) -> None:
    aside = checkpoint.rename(checkpoint.parent.parent / "step-000010")
    checkpoint.symlink_to(aside)
    with pytest.raises(CheckpointError, match="it is a symbolic link"):
        newest_checkpoint(checkpoint.parent, lambda text: None)
    assert open_checkpoint(aside).step == 10


FIRED: list[str] = []


def test_no_pickle_is_read(whole: Whole, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from a checkpoint that lists one, nor from a model's folder that has nothing else."""
    import pickle

    class Canary:
        def __reduce__(self) -> Any:
            return exec, ("import tests.faults.test_flips as t; t.FIRED.append('fired')",)

    pickled = pickle.dumps(Canary())
    (checkpoint / "model/model.safetensors").unlink()
    (checkpoint / "model/pytorch_model.bin").write_bytes(pickled)
    (checkpoint / "optimizer-00002.pt").write_bytes(pickled)
    files = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    rewrite(checkpoint, files=files)
    opened = open_checkpoint(checkpoint)  # consistent with itself: whoever made it made the manifest too
    opened.optimizer_tensors(), opened.random_state()
    from streamtune.models import load_model

    with warnings.catch_warnings(action="ignore"), pytest.raises(Exception, match=r".") as caught:
        load_model(str(opened.model_dir))
    assert not isinstance(caught.value, AssertionError)
    assert FIRED == []
    pickle.loads(pickled)
    assert FIRED.pop() == "fired"  # it would have
    report("canary", fired=0)
