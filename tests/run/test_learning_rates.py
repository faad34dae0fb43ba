"""Schedules, scaling with the batch, early stopping and presets, from a recipe to a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe import load_recipe
from streamtune.recipe.keys.preset import describe_preset
from streamtune.run.build import build_run
from streamtune.run.ranks import resolve_setup
from streamtune.tasks.steps import peak_learning_rate
from streamtune.train import World
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

COMMON: dict[str, Any] = {**RECIPE, "max_length": 160, "engine": FIXED, "output_dir": "out"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    return tmp_path


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]


def test_the_schedule_of_a_run_has_its_options(folder: Path) -> None:
    keys = {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 0.5, "decay_type": "linear"}}
    built = build_run(load_recipe(write_recipe(folder, {**COMMON, **keys}), []))
    rate = built.start.task.make_training(built).learning_rate_at
    assert [rate(step) for step in (0, 5, 6, 9)] == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])


def test_a_warmup_longer_than_the_run_is_told(folder: Path) -> None:
    """The learning rate would never reach the value of the recipe, and nothing else would show it."""
    for warmup, told in ((500, True), (9, True), (8, False)):
        said: list[str] = []
        path = write_recipe(folder, {**COMMON, "warmup_steps": warmup, "max_steps": 9})
        built = build_run(load_recipe(path, []), dry_run=True, notify=said.append)
        notes = [each for each in said if "warm-up takes" in each]
        assert bool(notes) is told
        rate = built.start.task.make_training(built).learning_rate_at
        if told:
            ends = f"the learning rate ends at {rate(8) / 1e-2:.0%} of learning_rate"
            assert f"warm-up takes {warmup:,} steps, but the run has 9: {ends}" in notes[0]
        else:
            assert max(map(rate, range(9))) == 1e-2


@pytest.mark.parametrize(
    ("keys", "ranks", "want"),
    [
        ({"lr_scaling": "sqrt", "gradient_accumulation_steps": 8}, 1, 2.0),
        ({"lr_scaling": "linear", "train_batch_size": 16}, 4, 8.0),
        ({"lr_scaling": "linear", "per_device_train_batch_size": 2}, 2, 2.0),
        ({"lr_scaling": "sqrt", "batching": "tokens", "tokens_per_batch": 800, "lr_scaling_base": 200}, 1, 2.0),
    ],
)
def test_the_rate_is_scaled_by_the_size_of_a_step(folder: Path, keys: dict[str, Any], ranks: int, want: float) -> None:
    recipe = load_recipe(write_recipe(folder, {**COMMON, "lr_scaling_base": 2, **keys}), []).recipe
    assert peak_learning_rate(recipe, World(0, ranks)) == pytest.approx(want * 1e-2)


@pytest.mark.parametrize(
    ("name", "option"), [("cosine_with_min_lr", "min_lr"), ("polynomial", "lr_end")], ids=lambda word: str(word)
)
def test_a_scaled_rate_does_not_end_above_its_peak(folder: Path, name: str, option: str) -> None:
    """The peak is 1e-2 * 2 / lr_scaling_base."""
    keys = {"lr_scheduler_type": name, "lr_scaling": "linear", "gradient_accumulation_steps": 2}
    for base, final, refused in ((8, 5e-3, True), (8, 2e-3, False), (1, 1.5e-2, False), (1, 2.5e-2, True)):
        recipe = {**COMMON, **keys, "lr_scaling_base": base, "lr_scheduler_kwargs": {option: final}}
        loaded = load_recipe(write_recipe(folder, recipe), [])
        if refused:
            with pytest.raises(ArgumentError, match=f"rise to {option} {final:g}: .* a peak of") as caught:
                resolve_setup(loaded, print)
            assert caught.value.where == "lr_scheduler_kwargs"
        else:
            resolve_setup(loaded, print)


EARLY = {"val_size": 3, "eval_steps": 1, "metric_for_best_model": "eval_loss", "early_stopping_patience": 2}


@pytest.mark.full
def test_a_run_ends_where_the_metric_gets_no_better(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is so small that the first evaluation is the best; a resumed run continues to count."""
    write_recipe(folder, {**COMMON, **EARLY, "learning_rate": 0.0})
    settings = ("--output-dir", "early", "--set", "save_steps=1", "--set", "save_total_limit=9")
    for more in ((), ("--resume", "early/checkpoints/step-000002")):
        assert run(*settings, *more) == 0
        assert "Done early, after step 3 of 9" in capsys.readouterr().out
        assert [each["step"] for each in records("early") if "loss" in each] == [1, 2, 3]
        assert (folder / "early" / "final" / "model.safetensors").exists()
    events = [json.loads(line) for line in (folder / "early" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "finish"
    assert events[-1]["early"]
    assert run(*settings, "--set", "early_stopping_patience=4") == 0
    assert "Done early, after step 5 of 9" in capsys.readouterr().out
    assert [each["step"] for each in records("early") if "loss" in each] == [1, 2, 3, 4, 5]


@pytest.mark.full
def test_a_metric_that_no_evaluation_has_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, **EARLY, "metric_for_best_model": "eval_los", "max_steps": 2})
    assert run("--output-dir", "told") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unknown metric 'eval_los' to stop early by; did you mean 'eval_loss'?" in said


def test_a_preset_sets_what_the_recipe_does_not(folder: Path) -> None:
    recipe = load_recipe(write_recipe(folder, {**RECIPE, "preset": "small_sft"}), []).recipe
    assert (recipe.train_batch_size, recipe.lr_scheduler_type, recipe.warmup_steps) == (3840, "constant", 0)
    assert recipe.learning_rate == 1e-2, "the recipe's own"
    shown = describe_preset(recipe)
    assert shown is not None
    assert shown.startswith("small_sft sets train_batch_size 3840, lr_scheduler_type constant")
    assert shown.endswith("; the recipe has its own learning_rate")
    given = {key: value for key, value in RECIPE.items() if key != "learning_rate"}
    path = write_recipe(folder, {**given, "preset": "small_sft", "gradient_accumulation_steps": 4, "warmup_ratio": 0.1})
    recipe = load_recipe(path, []).recipe
    assert (recipe.train_batch_size, recipe.learning_rate, recipe.warmup_ratio) == (None, 2e-5, 0.1)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "add lr_scheduler_kwargs: {min_lr_rate: 0.1}"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 2}}, "did you mean 'power'"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_cycles": 2}}, "this schedule has no options"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "2"}}, "must be a number; found '2'"),
        ({"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_type": "sqrt"}}, "must be one of linear, cosine"),
        ({"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_type": "Cosine"}}, "did you mean 'cosine'?"),
        ({"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_ratio": 1.5}}, "from 0 to 1"),
        ({"lr_scheduler_type": "power"}, "needs 'batch_size'"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.5}}, "is above 'learning_rate'"),
        ({"lr_scaling": "sqrt"}, "write both"),
        ({"lr_scaling_base": 8}, "write both"),
        ({"early_stopping_patience": 2}, "add metric_for_best_model: eval_loss"),
        ({**EARLY, "eval_steps": 0}, "add eval_steps"),
        ({"early_stopping_threshold": 0.1}, "add early_stopping_patience"),
        ({"preset": "small"}, "small_sft"),
        ({"preset": "small_sft", "objective": "dpo"}, "is only for sft"),
    ],
    ids=str,
)
def test_refused(folder: Path, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_recipe(folder, {**COMMON, **keys}), [])
    assert what in f"{caught.value.what} {caught.value.fix}"
