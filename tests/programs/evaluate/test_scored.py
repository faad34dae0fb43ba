"""``streamtune eval`` of dpo and grpo recipes agrees with the last evaluation of the run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.cli import main
from tests.run.test_dpo_cli import RECIPE as DPO
from tests.run.test_dpo_cli import add
from tests.run.test_grpo_cli import RECIPE as GRPO
from tests.run.test_grpo_cli import REWARDS
from tests.sft_kit import run, write_recipe


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and stderr of ``streamtune eval``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", *arguments, "--json"])
    captured = capsys.readouterr()
    return int(left.value.code or 0), json.loads(captured.out or "{}"), captured.err


def last_evaluation(folder: str) -> dict[str, float]:
    """The figures of the last line of ``metrics.jsonl`` that has any of held-out rows, without ``eval_``."""
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if any(name.startswith("eval_") for name in line)][-1]
    return {name.removeprefix("eval_"): value for name, value in found.items() if name.startswith("eval_")}


def check_same(part: dict[str, Any], expected: dict[str, float]) -> None:
    means = {name: figure["mean"] for name, figure in part["metrics"].items()}
    assert means.keys() == expected.keys()
    assert means == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.full
def test_sets_are_apart_and_together_the_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs()
    for number in range(6):
        add("more.jsonl", prompt=f"Name {number}.", chosen="Ann.", rejected=f"It is {number}, or not.")
    datasets = [{"path": "pairs.jsonl"}, {"path": "more.jsonl"}]
    write_recipe(folder, {**DPO, "datasets": datasets, "val_size": 8, "max_steps": 1, "eval_steps": 1})
    assert run(command="dpo") == 0
    code, found, _ = evaluated(capsys, "runs/tiny")
    assert code == 0
    part = found["splits"]["held-out"]
    check_same(part, last_evaluation("runs/tiny"))
    assert [Path(each["name"]).name for each in part["sets"]] == ["pairs.jsonl", "more.jsonl"]
    total = sum(each["rows"] * each["metrics"]["loss"]["mean"] for each in part["sets"])
    assert part["metrics"]["loss"]["mean"] == pytest.approx(total / 8)


def write_pairs() -> None:
    for number in range(10):
        prompt = f"Add {number}." * (1 + number % 3)
        chosen, rejected = f"It is {number + 1}.", "No idea." * (1 + number % 2)
        add("pairs.jsonl", prompt=prompt, chosen=chosen, rejected=rejected)
        add("judged.jsonl", prompt=prompt, completion=chosen, label=bool(number % 3))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"finetuning_type": "lora", "lora_r": 4}, marks=pytest.mark.full),
        pytest.param({"loss_type": "simpo"}, marks=pytest.mark.full),
        pytest.param({"precompute_ref_log_probs": True}, marks=pytest.mark.full),
        pytest.param({"loss_type": "kto", "datasets": [{"path": "judged.jsonl"}]}, marks=pytest.mark.full),
    ],
    ids=["full", "lora", "simpo", "precomputed", "kto"],
)
def test_preferences_equal_the_last_evaluation_of_the_run(
    changes: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs()
    write_recipe(folder, {**DPO, "max_steps": 2, "eval_steps": 2, **changes})
    assert run(command="dpo") == 0
    code, found, _ = evaluated(capsys, "runs/tiny")
    assert code == 0
    part = found["splits"]["held-out"]
    assert part["rows"] == 4
    check_same(part, last_evaluation("runs/tiny"))
    assert "rewards/accuracies" in part["metrics"]
    assert part["metrics"]["loss"]["standard_error"] > 0
    assert json.loads(Path("runs/tiny/eval/eval.json").read_text()) == found


@pytest.mark.full
def test_a_merged_model_is_compared_with_the_model_it_was_made_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe of adapters has the model without them as reference; a whole model has none inside."""
    write_pairs()
    write_recipe(folder, {**DPO, "finetuning_type": "lora", "lora_r": 4, "max_steps": 2, "eval_steps": 2})
    assert run(command="dpo") == 0
    with pytest.raises(SystemExit):
        main(["export", "runs/tiny", "merged"])
    code, found, _ = evaluated(capsys, "merged", "runs/tiny/recipe.yaml")
    assert code == 0
    expected, means = last_evaluation("runs/tiny"), found["splits"]["held-out"]["metrics"]
    assert means["rewards/margins"]["mean"] == pytest.approx(expected["rewards/margins"], rel=1e-3)
    assert not Path("merged/eval").exists()


def test_rewards_equal_the_last_evaluation_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "rewards.py").write_text(REWARDS)
    write_recipe(
        folder, {**GRPO, "val_size": 5, "eval_steps": 2, "reward_funcs": ["rewards.py:low_tokens", "exact_match"]}
    )
    assert run(command="grpo") == 0
    kept = Path("runs/tiny/completions.jsonl").read_text()
    code, found, _ = evaluated(capsys, "runs/tiny")
    assert code == 0
    check_same(found["splits"]["held-out"], last_evaluation("runs/tiny"))
    assert Path("runs/tiny/completions.jsonl").read_text() == kept

    code, _, shown = evaluated(capsys, "runs/tiny", "--set", "allow_code=false")
    assert code == 2
    assert "allow-code" in shown
    code, again, _ = evaluated(capsys, "runs/tiny", "--set", "allow_code=false", "--allow-code", "--split", "train")
    assert code == 0
    assert again["splits"]["train"]["rows"] == 35
