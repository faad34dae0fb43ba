"""``streamtune grpo`` with ``loss_type: gkd``: resumed, evaluated, planned, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.cli import main
from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe
from tests.run.test_grpo_cli import RECIPE as REWARDED
from tests.run.test_grpo_cli import REWARDS, lines, same_model
from tests.sft_kit import run, write_recipe

INIT: dict[str, Any] = REWARDED["model"]["init"]
UNREWARDED = {key: value for key, value in REWARDED.items() if key not in ("reward_funcs", "allow_code")}
RECIPE: dict[str, Any] = {**UNREWARDED, "loss_type": "gkd", "teacher": "taught/final", "kd_divergence": "reverse"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def make_teacher(folder: Path, **changes: Any) -> None:
    """Train a teacher of another width with the tokenizer of the prompts, into ``taught/final``."""
    model = {"init": {**INIT, "hidden_size": 48}}
    more = {"max_steps": 6, "learning_rate": 3e-2, "output_dir": "taught"}
    write_recipe(folder, {**REWARDED, "model": model, **more, **changes})
    assert run(command="grpo") == 0


@pytest.mark.full
def test_learns_from_a_teacher_without_a_reward(folder: Path) -> None:
    make_teacher(folder)
    more = {"max_steps": 12, "learning_rate": 3e-2, "lr_scheduler_type": "constant", "val_size": 6, "eval_steps": 6}
    write_recipe(folder, {**RECIPE, **more})
    assert run("--output-dir", "out", command="grpo") == 0
    records = lines("out")
    train = [record for record in records if "loss" in record]
    assert len(train) == 12
    assert {"kl", "nll", "completions/mean_length", "completions/clipped_ratio"} <= train[0].keys()
    assert not any("reward" in key or "clip_ratio/" in key for key in train[0])
    assert sum(record["loss"] for record in train[-3:]) < 0.7 * sum(record["loss"] for record in train[:3])
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert len(held_out) == 2
    assert 0 < held_out[1] < train[0]["loss"]
    assert lines("out", "completions.jsonl")[0]["reward"] is None


@pytest.mark.full
def test_rewards_are_reported_and_change_nothing(folder: Path) -> None:
    make_teacher(folder)
    write_recipe(folder, RECIPE)
    assert run("--output-dir", "without", command="grpo") == 0
    scored = {**RECIPE, "reward_funcs": ["rewards.py:low_tokens"], "allow_code": True, "val_size": 6}
    write_recipe(folder, {**scored, "val_size": 0})
    assert run("--output-dir", "with", command="grpo") == 0
    assert same_model("with", "without")
    record = lines("with")[0]
    assert record["reward"] > 0
    assert record["reward_std"] > 0
    assert record["loss"] == lines("without")[0]["loss"]
    write_recipe(folder, {**scored, "metric_for_best_model": "eval_reward", "save_steps": 1})
    assert run("--output-dir", "held", command="grpo") == 0
    assert {"eval_loss", "eval_reward"} <= lines("held")[-1].keys()


@pytest.mark.full
def test_a_run_goes_on_in_the_middle_of_a_rollout_bit_for_bit(folder: Path) -> None:
    """A rollout is used for four steps: 1 to 4, then 5 to 8."""
    make_teacher(folder)
    inner = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 6, "save_steps": 1, "save_total_limit": 9}
    write_recipe(folder, {**RECIPE, **inner, "kd_divergence": "jsd", "kd_beta": 0.3, "kd_temperature": 2.0})
    assert run("--output-dir", "whole", command="grpo") == 0
    for step in (3, 5):
        checkpoint = f"whole/checkpoints/step-{step:06d}"
        assert run("--output-dir", f"from-{step}", "--resume", checkpoint, command="grpo") == 0
        assert lines(f"from-{step}") == lines("whole")[step:]
        assert same_model(f"from-{step}", "whole")
    refused = ("--output-dir", "whole", "--resume", "auto", "--set", "kd_temperature=1.0")
    assert run(*refused, command="grpo") == 2


@pytest.mark.full
def test_shared_and_separate_prompts_take_the_same_steps(folder: Path) -> None:
    make_teacher(folder)
    for share in ("always", "never"):
        write_recipe(folder, {**RECIPE, "share_prefix": share})
        assert run("--output-dir", share, command="grpo") == 0
    for first, second in zip(lines("always"), lines("never"), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-3)


@pytest.mark.full
def test_supervised_steps_may_come_first(folder: Path) -> None:
    make_teacher(folder)
    write_recipe(folder, {**RECIPE, "sft_steps": 2, "sft_batch_size": 4, "finetuning_type": "lora", "lora_r": 4})
    assert run("--output-dir", "out", command="grpo") == 0
    assert ["kl" in record for record in lines("out")] == [False, False, True, True]


@pytest.mark.full
def test_verified_planned_and_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_teacher(folder)
    write_recipe(folder, {**RECIPE, "val_size": 6, "output_dir": "out"})
    capsys.readouterr()
    assert run("--json", "--dtype", "float32", "--length", "64", command="verify") == 0
    assert json.loads(capsys.readouterr().out)["exact"]
    assert run("--json", command="plan") == 0
    plan = json.loads(capsys.readouterr().out)
    weights = sum(file.stat().st_size for file in Path("taught/final").glob("*.safetensors"))
    assert plan["terms"]["reference"] == pytest.approx(weights, rel=0.05)
    assert run(command="grpo") == 0
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", "out", "--json"])
    assert not left.value.code
    found = json.loads(capsys.readouterr().out)["splits"]["held-out"]["metrics"]
    assert found["loss"]["mean"] == pytest.approx(lines("out")[-1]["eval_loss"], rel=1e-4)


@pytest.mark.full
def test_a_teacher_of_another_vocabulary_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_teacher(folder, tokenizer={"train": {"vocab_size": 260}})
    write_recipe(folder, RECIPE)
    assert run(command="grpo") == 2
    assert "the teacher 'taught/final' has" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ({"teacher": None}, "add teacher: NAME"),
        ({"loss_type": "dapo", "reward_funcs": "exact_match"}, "write loss_type: gkd"),
        ({"loss_type": "dapo", "teacher": None, "kd_divergence": "forward"}, "'reward_funcs' is missing"),
        ({"kd_hard_share": 0.5}, "grpo trains on tokens that the model writes"),
        ({"kd_beta": 0.3}, "write kd_divergence: jsd"),
        ({"beta": 0.1}, "gkd uses only its teacher"),
        ({"ref_model_name_or_path": "x", "beta": 0.1}, "gkd uses only its teacher"),
        ({"epsilon_high": 0.3}, "clips ratios of probabilities"),
        ({"delta": 4.0}, "clips ratios of probabilities"),
        ({"scale_rewards": "batch"}, "gkd has none: its rewards are only reported"),
        ({"importance_sampling_level": "token"}, "ratios of probabilities"),
        ({"prompts": "middle"}, "'reward_funcs' is missing"),
        ({"reward_weights": [1.0]}, "'reward_funcs' is missing"),
        ({"label_smoothing_factor": 0.1}, "'label_smoothing_factor' belongs to the loss of sft"),
        ({"deepspeed": "zero3"}, "gather one at a time"),
    ],
    ids=str,
)
def test_refused(folder: Path, lines: dict[str, Any], what: str) -> None:
    recipe = {key: value for key, value in {**RECIPE, **lines}.items() if value is not None}
    with pytest.raises(RecipeError) as caught:
        load_recipe(write_recipe(folder, recipe), [])
    assert what in f"{caught.value.what} {caught.value.fix}"


def test_one_completion_of_a_prompt_is_enough(folder: Path) -> None:
    recipe = {**RECIPE, "num_generations": 1}
    assert load_recipe(write_recipe(folder, recipe), []).recipe.loss_type == "gkd"
