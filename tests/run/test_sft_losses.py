"""Losses of sft and row weights from a recipe to a trained model, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune.errors import ArgumentError, DataError, RecipeError
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.sft import Batches
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe

COMMON: dict[str, Any] = {**RECIPE, "max_length": 160, "engine": FIXED, "num_train_epochs": 2, "output_dir": "out"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_weighed(tmp_path, lambda number: {"loss_weight": 0.5 + number % 3})
    return tmp_path


def write_weighed(folder: Path, more: Callable[[int], dict[str, Any]]) -> None:
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(12):
            answer = f"return a + b + {number}\n" * (1 + number % 4)
            messages = [{"role": "user", "content": f"Add {number}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages, **more(number)}) + "\n")


def records(folder: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", [{}, {"packing": True}, {"batching": "buckets", "tokens_per_batch": 320}], ids=str)
def test_weights_reach_each_position_of_their_row(folder: Path, layout: dict[str, Any]) -> None:
    path = write_recipe(folder, {**COMMON, **layout, "val_size": 2})
    notes: list[str] = []
    built = build_run(load_recipe(path, []), notify=notes.append)
    assert not any("loss_weight" in note for note in notes), "the column is read"
    batches = Batches(built.prepared, built.tokenizer)
    weights = {example.origin: example.weight for example in built.prepared.training}
    assert set(weights.values()) == {0.5, 1.5, 2.5}
    seen = set()
    for unit in range(batches.num_training_units):
        batch = batches.training_batch([unit])
        assert batch.weights is not None
        found = set(batch.weights[batch.shift_labels != -100].tolist())
        assert found == {weights[origin] for origin in batch.origins}
        seen |= found
    assert seen == {0.5, 1.5, 2.5}


def test_equal_weights_are_none(folder: Path) -> None:
    """Weights of 1 change neither the batch nor the fingerprint of the data."""
    write_weighed(folder, lambda number: {"loss_weight": 1})
    with_ones = build_run(load_recipe(write_recipe(folder, COMMON), []))
    write_weighed(folder, lambda number: {})
    without = build_run(load_recipe(write_recipe(folder, {**COMMON, "output_dir": "other"}), []))
    assert Batches(with_ones.prepared, with_ones.tokenizer).training_batch([0]).weights is None
    assert with_ones.prepared.fingerprint == without.prepared.fingerprint


@pytest.mark.parametrize("value", [0, -1.0, True, "two"])
def test_a_weight_that_is_none_is_refused(folder: Path, value: Any) -> None:
    write_weighed(folder, lambda number: {"loss_weight": value} if number == 3 else {})
    with pytest.raises(DataError, match="'loss_weight' must be a number above 0") as caught:
        build_run(load_recipe(write_recipe(folder, COMMON), []))
    assert "rows.jsonl:4" in str(caught.value)


def resumed(keys: tuple[str, ...]) -> bool:
    """Train into ``split``, resume from the second checkpoint, and return True if the curve is the same."""
    settings = ("--set", "save_steps=1", "--set", "save_total_limit=9", "--output-dir", "split")
    curves = []
    for more in ((), ("--resume", "split/checkpoints/step-000002")):
        assert run(*settings, *more) == 0
        curves.append([tuple(each.get(key) for key in keys) for each in records("split")])
    return len(curves[0]) > 3 and curves[0] == curves[1]


@pytest.mark.full
def test_trains_and_resumes_to_the_same_curve(folder: Path) -> None:
    keys = {"loss_type": "dft", "val_size": 2, "gradient_accumulation_steps": 2, "packing": True}
    write_recipe(folder, {**COMMON, **keys})
    assert resumed(("step", "loss", "nll", "eval_loss", "grad_norm"))
    first = records("split")[0]
    assert first["nll"] > 1.5 * first["loss"]
    assert run("--output-dir", "split", "--resume", "auto", "--set", "loss_type=focal") == 2


@pytest.mark.full
def test_verify_compares_the_loss_that_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, {**COMMON, "loss_type": "dft", "z_loss_coef": 1e-3, "packing": True})
    assert run("--json", "--dtype", "float32", command="verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"]


TEACHER: dict[str, Any] = {"teacher": "taught/final", "kd_divergence": "jsd", "kd_hard_share": 0.25}


def make_teacher(folder: Path, **init: Any) -> None:
    """Train a teacher of another width with the tokenizer of the rows, into ``taught/final``."""
    model = {"init": {**QWEN3, "hidden_size": 48, **init}}
    write_recipe(folder, {**COMMON, "model": model, "num_train_epochs": 1, "output_dir": "taught"})
    assert run() == 0


@pytest.mark.full
def test_learns_from_a_teacher_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_teacher(folder)
    write_recipe(folder, {**COMMON, **TEACHER, "val_size": 2, "packing": True, "gradient_accumulation_steps": 2})
    assert resumed(("step", "loss", "kl", "nll", "eval_loss", "grad_norm"))
    steps = [each for each in records("split") if "loss" in each]
    assert 0 < steps[-1]["kl"] < steps[0]["kl"]
    capsys.readouterr()
    assert run("--json", "--dtype", "float32", "--length", "48", command="verify") == 0
    assert json.loads(capsys.readouterr().out)["exact"]


@pytest.mark.full
def test_a_teacher_of_another_vocabulary_is_refused(folder: Path) -> None:
    make_teacher(folder)
    write_weighed(folder, lambda number: {"more": "another text for the tokens"})
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().replace("return", "yield from"))
    with pytest.raises(ArgumentError, match=r"the teacher '.*' has (another vocabulary|an embedding of)") as caught:
        build_run(load_recipe(write_recipe(folder, {**COMMON, **TEACHER, "output_dir": "out"}), []))
    assert "tiny.yaml" in caught.value.where


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ({"kd_temperature": 2.0}, "add teacher: NAME"),
        ({"teacher": "x", "kd_beta": 0.3}, "write kd_divergence: jsd"),
        ({"teacher": "x", "loss_type": "dft"}, "add kd_hard_share: 0.5"),
        ({"teacher": "x", "deepspeed": "zero3"}, "gather one at a time"),
        ({"teacher": "x", "objective": "dpo"}, "'teacher' belongs to the loss of sft"),
        ({"teacher": "x", "kd_divergence": "revers"}, "reverse"),
        ({"loss_type": "dtf"}, "dft"),
        ({"loss_type": "sigmoid"}, "sigmoid"),
        ({"focal_gamma": 1.0}, "'focal_gamma' is read only with 'loss_type: focal'"),
        (
            {"loss_type": "dft", "label_smoothing_factor": 0.1},
            "'label_smoothing_factor' works only with 'loss_type: nll'",
        ),
        ({"label_smoothing_factor": 1.0}, "label_smoothing_factor"),
        ({"objective": "dpo", "z_loss_coef": 0.1}, "'z_loss_coef' belongs to the loss of sft"),
    ],
)
def test_refused(folder: Path, lines: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_recipe(folder, {**COMMON, **lines}), [])
    assert what in f"{caught.value.what} {caught.value.fix}"


def test_random_tokens_are_in_the_vocabulary_of_the_teacher_too(folder: Path) -> None:
    recipe = load_recipe(write_recipe(folder, COMMON), []).recipe
    model, teacher = (torch.nn.Embedding(rows, 4) for rows in (300, 40))
    for each in (model, teacher):
        each.get_input_embeddings = lambda each=each: each
    assert RandomTokens(recipe, model, teacher).draw_row_batch(2, 200).input_ids.max() < 40
    assert RandomTokens(recipe, model).draw_row_batch(2, 200).input_ids.max() >= 40


@pytest.mark.parametrize("packing", [False, True])
def test_a_random_row_is_one_row_of_its_length(packing: bool, folder: Path) -> None:
    """This also holds with packing: two rows of half the length would need half the work of attention."""
    recipe = load_recipe(write_recipe(folder, {**COMMON, "packing": packing}), []).recipe
    model = torch.nn.Embedding(300, 4)
    model.get_input_embeddings = lambda: model  # type: ignore[method-assign]
    batch = RandomTokens(recipe, model).draw_row_batch(2, 200)
    assert batch.input_ids.shape == (2, 200)
    positions = batch.position_ids
    assert (positions is not None) == packing
    if positions is not None:
        assert positions.tolist() == [list(range(200))] * 2
