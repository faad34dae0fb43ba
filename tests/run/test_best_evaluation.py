"""The weights of the best evaluation are saved, whatever ``save_steps`` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {
    **RECIPE, "max_length": 160, "engine": FIXED, "output_dir": "out", "val_size": 3, "eval_steps": 2, "save_steps": 5,
    "save_total_limit": 1, "max_steps": 7, "lr_scheduler_type": "constant", "learning_rate": 3.0,
}  # fmt: skip
"""At this rate the loss grows."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    return tmp_path


def evaluations(name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    return {each["step"]: each["eval_loss"] for each in lines if "eval_loss" in each}


def kept(name: str) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in Path(name, "checkpoints").iterdir()}


@pytest.mark.full
def test_the_best_evaluation_is_saved_between_two_saves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, "metric_for_best_model": "eval_loss"})
    assert run() == 0
    found = evaluations("out")
    best = min(found, key=lambda step: found[step])
    assert best < 7
    assert best % 5, "it is no multiple of save_steps"
    assert kept("out") == {best, 7}
    assert "not kept" not in capsys.readouterr().out
    write_recipe(folder, {**COMMON, "max_steps": best, "save_steps": 0})
    assert run("--output-dir", "short") == 0  # the weights are those of that step
    short, saved = (
        load_file(path / "model.safetensors")
        for path in (folder / "short" / "final", folder / "out" / "checkpoints" / f"step-{best:06d}" / "model")
    )
    assert all(torch.equal(short[key], saved[key]) for key in short)


@pytest.mark.full
def test_a_run_that_goes_on_knows_the_best_one_so_far(folder: Path) -> None:
    write_recipe(folder, {**COMMON, "metric_for_best_model": "eval_loss", "save_total_limit": 9})
    assert run() == 0
    assert 5 in kept("out")
    found = evaluations("out")
    assert run("--output-dir", "other", "--resume", "out/checkpoints/step-000005") == 0
    assert kept("other") <= {6, 7}
    assert (6 in kept("other")) == (found[6] < min(found[2], found[4]))


@pytest.mark.full
def test_several_best_ones_are_saved(folder: Path) -> None:
    write_recipe(folder, {**COMMON, "metric_for_best_model": "eval_loss", "save_best_limit": 2})
    assert run() == 0
    found = evaluations("out")
    ranked = sorted(found, key=lambda step: found[step])
    assert kept("out") == {*ranked[:2], 7}


def test_the_end_says_that_better_weights_are_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, COMMON)
    assert run() == 0
    assert kept("out") == {7}
    said = " ".join(capsys.readouterr().out.split())
    found = evaluations("out")
    best = min(found, key=lambda step: found[step])
    assert f"eval_loss was best at step {best} ({found[best]:.4g}, now {found[7]:.4g}), but no checkpoint has" in said
    assert "metric_for_best_model: eval_loss" in said


STOP_IN_EVALUATION = """import os, signal
class Stop:
    def on_step(self, record):
        if record["step"] == 2 and not os.path.exists("stopped"):
            open("stopped", "w").close()
            signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.full
def test_a_stop_in_the_last_evaluation_leaves_the_run_unfinished(folder: Path) -> None:
    (folder / "stop.py").write_text(STOP_IN_EVALUATION)
    write_recipe(folder, {**COMMON, "max_steps": 2, "callbacks": ["stop.py:Stop"], "allow_code": True})
    assert run() == 130
    events = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("stop", "SIGINT")
    assert evaluations("out") == {}
    assert not (folder / "out/final").exists()
    assert run() == 0
    assert set(evaluations("out")) == {2}
    assert (folder / "out/final/model.safetensors").exists()


@pytest.mark.full
def test_the_note_on_a_changed_patience_says_its_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = {**COMMON, "max_steps": 3, "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    write_recipe(folder, {**best, "early_stopping_patience": 1, "early_stopping_threshold": 100.0})
    assert run() == 0
    capsys.readouterr()
    write_recipe(folder, best)
    assert run() == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "early_stopping_patience was 1, is now 0" in said
    assert set(evaluations("out")) == {1, 2, 3}


@pytest.mark.full
def test_early_stopping_leaves_the_best_weights(folder: Path) -> None:
    """The final model is the model of the last step, and no periodic checkpoint saves the best weights."""
    recipe = {**COMMON, "save_steps": 0, "eval_steps": 1, "early_stopping_patience": 2, "max_steps": 9}
    write_recipe(folder, {**recipe, "metric_for_best_model": "eval_loss"})
    assert run() == 0
    found = evaluations("out")
    best = min(found, key=lambda step: found[step])
    assert best < max(found)
    assert best in kept("out")
