"""Training in float16 with a scaled loss: equal steps, skipped steps, resume, and recipes that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe
from streamtune.run.model import make_meta_model
from streamtune.run.weight_choices import with_best_precision
from streamtune.train import LossScale, loss_scale
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

FP16: dict[str, Any] = {**RECIPE, "fp16": True, "engine": FIXED, "max_steps": 6, "output_dir": "out", "seed": 3}
OVERFLOWS = 2.0**20
"""A loss scale at which gradients of these steps overflow; they do not at an eighth of it."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 32)
    return tmp_path


def records(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "final" / "model.safetensors")


def test_the_scale_changes_as_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=3), LossScale()
    theirs.scale(weight.sum())
    for step in "..!.....!!...!":
        weight.grad = torch.tensor(float("inf") if step == "!" else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflowed=step == "!")
        assert ours.value == theirs.get_scale()


def test_overflows_are_skipped_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", OVERFLOWS)
    write_recipe(folder, FP16)
    assert run() == 0
    said = " ".join(capsys.readouterr().out.split())
    steps = records("out")
    skipped = [each for each in steps if each.get("overflow")]
    assert 1 <= len(skipped) <= 3
    assert f"{len(skipped)} of 6 steps, skipped: the gradient overflowed float16" in said
    assert "NaN" not in said
    assert all(each["skipped"] and "loss" not in each for each in skipped)
    assert steps[0]["loss_scale"] == OVERFLOWS
    assert steps[-1]["loss_scale"] == OVERFLOWS / 2 ** len(skipped)
    assert {x.dtype for x in weights("out").values()} == {torch.float32}


@pytest.mark.full
def test_a_resumed_run_has_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", OVERFLOWS)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    write_recipe(folder, {**FP16, "max_steps": 9, "save_steps": 3, "save_total_limit": 9})
    assert run("--output-dir", "whole") == 0
    assert run("--output-dir", "part") == 0
    for name in ("checkpoints/step-000006", "checkpoints/step-000009", "final"):
        shutil.rmtree(folder / "part" / name)
    assert run("--output-dir", "part") == 0
    whole, part = weights("whole"), weights("part")
    assert all(torch.equal(whole[key], part[key]) for key in whole)
    compared = ("loss", "loss_scale", "overflow", "grad_norm")
    assert [[each.get(key) for key in compared] for each in records("whole")] == [
        [each.get(key) for key in compared] for each in records("part")
    ]
    assert len({each["loss_scale"] for each in records("whole")}) > 2


@pytest.mark.full
def test_steps_in_the_backward_are_the_same_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", OVERFLOWS)
    write_recipe(folder, FP16)
    for name, keys in {"plain": (), "inside": ("optim_in_backward=true",), "host": ("engine.weights=host",)}.items():
        assert run("--output-dir", name, *(part for key in keys for part in ("--set", key))) == 0
    want = weights("plain")
    assert all(torch.equal(want[key], x) for key, x in weights("inside").items())
    assert all(torch.allclose(want[key], x, atol=1e-5) for key, x in weights("host").items())


def test_a_gradient_that_is_never_finite_is_no_overflow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below a scale of 1 nothing is left to halve: ``on_nan`` decides."""
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0)
    monkeypatch.setattr("streamtune.train.backend.total_gradient_norm", lambda grads: torch.tensor(float("nan")))
    write_recipe(folder, FP16)
    assert run() == 1
    said = capsys.readouterr().err
    assert "the gradient norm of step 2 is nan" in said
    assert [each.get("overflow") for each in records("out")] == [True]


@pytest.mark.full
def test_adapters_are_float32_on_a_base_in_float16(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**RECIPE, "dtype": "bfloat16", "max_steps": 1, "engine": FIXED, "output_dir": "base"})
    assert run() == 0
    lora = {"finetuning_type": "lora", "lora_r": 4}
    recipe = {key: value for key, value in FP16.items() if key not in ("model", "tokenizer")}
    path = write_recipe(folder, {**recipe, **lora, "model_name_or_path": "base/final"})
    model = make_meta_model(with_best_precision(load_recipe(path).recipe), torch.device("cpu"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.float16}
    assert run() == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the frozen weights are loaded in float16" in said
    losses = [each["loss"] for each in records("out")]
    assert losses[-1] < losses[0]


@pytest.mark.full
@pytest.mark.parametrize("keys", [(), ("finetuning_type=lora",)], ids=["full", "lora"])
def test_verify_compares_scaled_gradients(
    folder: Path, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, FP16)
    assert run("--length", "64", *(part for key in keys for part in ("--set", key)), command="verify") == 0
    assert "float16 autocast" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "what", "fix"),
    [
        ({"bf16": True}, "'fp16' and 'bf16' exclude each other", "keep one of them"),
        ({"fp16": False, "dtype": "float16"}, "'dtype: float16' needs 'fp16: true'", "add fp16: true"),
        ({"dtype": "float16"}, "'dtype: float16' is for frozen weights", "write dtype: mixed"),
        ({"dtype": "bfloat16"}, "would round each weight to both dtypes", "delete the line of 'dtype'"),
        ({"deepspeed": "zero2"}, "DeepSpeed would scale and skip by its own rules", "write fsdp: true"),
        ({"optim_in_backward": True, "max_grad_norm": 0}, "has updated weights by then", "write max_grad_norm: 1.0"),
        ({"optim_in_backward": True, "clip_norm": "lagged"}, "has updated weights by then", "clip_norm: exact"),
        ({"select_rows": "colm"}, "become zero without a scaled loss", "delete the line of 'select_rows'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_refused(folder: Path, more: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(write_recipe(folder, {**FP16, **more}))
    assert what in str(error.value)
    assert fix in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(
    "key",
    [
        "seed=3",
        pytest.param("fsdp=true", marks=pytest.mark.slow),
        pytest.param("sequence_parallel_size=2", marks=pytest.mark.slow),
    ],
)
def test_ranks_skip_together(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Two ranks resume after the first overflow of one rank, and have its other overflows."""
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 4 * OVERFLOWS)
    write_recipe(folder, {**FP16, "train_batch_size": 4, "save_steps": 1, "save_total_limit": 9, "max_steps": 9})
    assert run("--output-dir", "one") == 0
    shutil.copytree(folder / "one", folder / "ranks")
    for name in (*(f"checkpoints/step-{step:06}" for step in range(2, 10)), "final"):
        shutil.rmtree(folder / "ranks" / name)
    assert run("--output-dir", "ranks", "--nproc", "2", "--set", key) == 0
    one, ranks = records("one"), records("ranks")
    assert [each.get("overflow") for each in ranks] == [each.get("overflow") for each in one]
    assert [each["loss_scale"] for each in ranks] == [each["loss_scale"] for each in one]
    assert one[1].get("overflow")
    assert not one[-1].get("overflow")
    losses = [[each["loss"] for each in steps if "loss" in each] for steps in (one, ranks)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
