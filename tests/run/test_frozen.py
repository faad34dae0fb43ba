"""``trainable_layers``, ``freeze`` and ``train`` from a recipe to a trained model."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

TRAIN: dict[str, Any] = {
    "model_name_or_path": "base", "datasets": [{"path": "rows.jsonl"}], "learning_rate": 1.0e-4, "max_steps": 4,
    "save_steps": 2, "trainable_layers": "last 2", "engine": FIXED, "output_dir": "out",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a bfloat16 checkpoint of 4 layers with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    model = {"init": {**QWEN3, "num_hidden_layers": 4}}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows(folder, 24)
        write_recipe(
            folder, {**RECIPE, "model": model, "dtype": "bfloat16", "max_steps": 1, "engine": FIXED, "output_dir": "o"}
        )
        assert run() == 0
    return folder / "o" / "final"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 24)
    (tmp_path / "base").symlink_to(base)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def changed(name: str = "out") -> set[str]:
    """Return the layers and other parameters that a run changed."""
    before, after = weights(Path("base")), weights(Path(name) / "final")
    found = {key for key in before if not torch.equal(before[key].float(), after[key].float())}
    return {key.split(".")[2] if ".layers." in key else key for key in found}


def records(name: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_the_last_layers_are_trained_and_a_resume_repeats_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(folder, TRAIN)
    assert run() == 0
    text = said(capsys)
    assert "note: trained: layers 2-3; the backward ends at layer 2 (of 0 to 3)" in text
    assert "trained, layers 2-3; fp32, frozen weights bf16, computed in bf16" in text
    assert changed() == {"2", "3"}
    final, losses = weights(Path("out/final")), [each["loss"] for each in records()]
    assert {final[key].dtype for key in final if ".layers.2." in key} == {torch.float32}
    assert final["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads(Path("out/final/config.json").read_text())["dtype"] == "float32"
    assert all(each["moved"] > 0.99 for each in records())
    shutil.rmtree("out/final")
    shutil.rmtree("out/checkpoints/step-000004")
    assert run() == 0
    assert [each["loss"] for each in records()] == losses
    again = weights(Path("out/final"))
    assert all(torch.equal(final[key], again[key]) and final[key].dtype == again[key].dtype for key in final)
    capsys.readouterr()
    write_recipe(folder, {**TRAIN, "max_steps": 6, "trainable_layers": "last 1"})
    assert run() == 2
    text = said(capsys)
    assert 'trainable_layers was "last 2", is now "last 1"' in text
    assert "--allow-change" not in text


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"optim": "muon"}, {"2", "3"}),
        ({"optim": "badam", "optim_args": {"switch_block_every": 2}}, {"2", "3"}),
        ({"optim": "mezo", "learning_rate": 1.0e-2}, {"2", "3"}),
        ({"engine": {**FIXED, "weights": "host"}}, {"2", "3"}),
        ({"engine": {**FIXED, "optimizer": "host"}}, {"2", "3"}),
        ({"optim_in_backward": True, "trainable_layers": "first 1", "train": ["lm_head"]}, {"0", "lm_head.weight"}),
        ({"trainable_layers": None, "train": ["model.norm", "lm_head"]}, {"model.norm.weight", "lm_head.weight"}),
        ({"trainable_layers": None, "freeze": ["model.layers.[0-2]", "model.embed_tokens", "lm_head"]},
         {"3", "model.norm.weight"}),
        ({"val_size": 4, "eval_steps": 2, "sample": {"prompt": "Add 3.", "max_new_tokens": 3}}, {"2", "3"}),
        ({"dtype": "float32"}, {"2", "3"}),
        ({"dtype": "bfloat16", "weight_rounding": "stochastic"}, {"2", "3"}),
    ],
)  # fmt: skip
def test_other_keys_train_the_same_weights(folder: Path, keys: dict[str, Any], expected: set[str]) -> None:
    write_recipe(folder, {**TRAIN, **keys})
    assert run() == 0
    assert changed() == expected


@pytest.mark.full
def test_the_reference_of_dpo_is_the_initial_model(folder: Path) -> None:
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(8):
            row = {"prompt": f"Add {number}.", "chosen": f" a{number}", "rejected": f" b{number} b"}
            file.write(json.dumps(row) + "\n")
    write_recipe(folder, {**TRAIN, "objective": "dpo", "datasets": [{"path": "pairs.jsonl"}], "max_steps": 1})
    assert run(command="dpo") == 0
    assert records()[0]["loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert changed() == {"2", "3"}


@pytest.mark.full
def test_plan_verify_and_probe_know_of_frozen_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**TRAIN, "max_length": 256})
    assert run("--device", "h100", "--json", command="plan") == 0
    some = json.loads(capsys.readouterr().out)
    assert run("--device", "h100", "--json", "--set", "trainable_layers=null", command="plan") == 0
    everything = json.loads(capsys.readouterr().out)
    assert some["flops"]["model"] < 0.8 * everything["flops"]["model"]
    assert some["terms"]["optimizer"] < 0.4 * everything["terms"]["optimizer"]
    assert run(command="verify") == 0
    assert "exact: streamed loss and gradients equal plain autograd's" in said(capsys)
    assert run("--method", "simulate", "--device", "h100", "--to", "256", command="probe-max-len") == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"train": ["lm_hed"]}, "the pattern 'lm_hed' matches the beginning of no parameter", "did you mean 'lm_head'"),
        ({"trainable_layers": "last 5"}, "needs 5 layers, and the model has 4", "N up to 4"),
        ({"freeze": ["model", "lm_head"]}, "all parameters are frozen, so nothing is trained", "add train"),
        (
            {"added_tokens": ["<q>"]},
            "the embedding is frozen, so the vectors of these tokens",
            "add model.embed_tokens",
        ),
        ({"finetuning_type": "lora"}, "'trainable_layers' chooses weights of the model", "finetuning_type: full"),
        ({"trainable_layers": "3-2"}, "'trainable_layers: 3-2' ends before it begins", "trainable_layers: 2-3"),
        ({"trainable_layers": "some"}, "must be text such as last 8", ""),
    ],
)
def test_mistakes_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], what: str, fix: str
) -> None:
    write_recipe(folder, {**TRAIN, **keys})
    assert run("--dry-run") == 2
    text = said(capsys)
    assert what in text
    assert fix in text
