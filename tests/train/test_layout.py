"""The files of a checkpoint and of ``final/``, byte for byte: old checkpoints and other programs rely on them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from train_kit import State, Trainer, make_model, save_tensors

from streamtune.train.process import RngState
from streamtune.train.saver import CheckpointSaver, KeepPolicy, ModelWriter, write_final_model

MODEL = {"model/config.json": "ca3d163bab055381", "model/model.safetensors": "9a129038d9a00aed"}
RANDOM = {"rng.safetensors": "6976b25ad89af027"}
WHOLE = {
    **MODEL,
    **RANDOM,
    "manifest.json": "915647bcafe999a0",
    "optimizer-00001.safetensors": "a362aa184ce73af9",
    "state.json": "acebc15478e311fa",
}
"""Of one device: file and the first digits of its SHA-256."""
SLICED = {
    **MODEL,
    **RANDOM,
    "manifest.json": "e2aad6a9ba1153dc",
    "optimizer-00001.safetensors": "5c0fe629fed0d699",
    "slices.json": "22a3d653e7e2f948",
    "state.json": "f62c61e346bfa341",
}
"""Of ranks that share the state."""
SHAPES = {"model.embed.weight": (6, 4), "model.norm.weight": (4,), "empty": (0, 3)}
STATE = {"step": 3, "progressed": {"step": 3, "tokens": 12}, "stream": {"row": 5}, "identity": {"run": "mine"}}
RNG = RngState({"torch": torch.arange(16, dtype=torch.uint8)}, {"python": [3, [1, 2], None]})


def tensors() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape) + index
        found[f"{name}/step"] = torch.tensor(3.0)
    return found


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}\n")
    (folder / "model.safetensors").write_bytes(b"weights")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(("whole", "files"), [(True, WHOLE), (False, SLICED)], ids=["one device", "sliced"])
def test_a_checkpoint_has_these_files(tmp_path: Path, whole: bool, files: dict[str, str]) -> None:
    path = save_tensors(
        tmp_path, tensors(), ModelWriter(write_model, 9), STATE, whole=whole, rng=RNG, run="mine", metric=0.5
    )
    assert path.name == "step-000003"
    assert digests(path) == files


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("whole", "files"), [(True, WHOLE), (False, SLICED)], ids=["one device", "sliced"])
def test_so_it_is_from_a_worker(tmp_path: Path, whole: bool, files: dict[str, str], asynchronous: bool) -> None:
    writer = ModelWriter(write_model, 9, lambda: write_model)
    with CheckpointSaver(tmp_path, writer, KeepPolicy(0), run="mine", asynchronous=asynchronous) as saver:
        saver.save(State(tensors(), whole=whole), state=STATE, rng=RNG, metric=0.5)  # type: ignore[arg-type]
        [path] = saver.wait_and_pop_committed()
    assert digests(path) == files


def test_the_final_model_has_the_files_of_a_model(tmp_path: Path) -> None:
    write_final_model(tmp_path / "final", ModelWriter(write_model, 9))
    assert digests(tmp_path / "final") == {name.removeprefix("model/"): digest for name, digest in MODEL.items()}


def test_a_trained_run_has_these_files(trainer: Trainer) -> None:
    trainer(make_model(), steps=2, save_steps=2)
    [path] = (trainer.folder / "checkpoints").iterdir()
    own = {"manifest.json", "optimizer-00001.safetensors", "rng.safetensors", "state.json"}
    model = {"model/config.json", "model/generation_config.json", "model/model.safetensors"}
    assert digests(path).keys() == own | model
