"""Pairs of conversations that share their first turns, from a recipe to a trained model: the same steps, cheaper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main
from streamtune.recipe import load_recipe
from streamtune.run.build import build_run

from .test_dpo_cli import INIT, RECIPE, records

TEMPLATE = Path(__file__).parents[1] / "data/templates/qwen3.jinja"
RECURRENT: dict[str, Any] = {
    **INIT,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write pairs of one to three turns that share all turns but the last."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for number in range(12):
            common = []
            for turn in range(number % 3):
                common += [_said("assistant", f"It is {number + turn}."), _said("user", f"And {turn} more?")]
            answers = {
                "chosen": [*common, _said("assistant", f"It is {2 * number}.")],
                "rejected": [*common, _said("assistant", "No idea.")],
            }
            file.write(json.dumps({"prompt": [_said("user", f"Add {number}.")], **answers}) + "\n")
    return tmp_path


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write(**keys: Any) -> Path:
    recipe = {**RECIPE, "max_length": 512, "chat_template": str(TEMPLATE), "val_size": 0, "eval_steps": None, **keys}
    recipe["model"] = {"init": {**keys.get("model", {"init": INIT})["init"], "attention_dropout": 0.0}}
    path = Path("tiny.yaml")
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    return path


def run(*arguments: str, command: str = "dpo") -> int:
    with pytest.raises(SystemExit) as left:
        main([command, "tiny.yaml", *arguments])
    return int(left.value.code or 0)


def test_common_turns_are_computed_once() -> None:
    built = build_run(load_recipe(write(), []))
    trees = list(built.prepared.training)
    longest = max(trees, key=lambda tree: tree.num_common_tokens)
    assert longest.num_common_tokens > 40
    batch = built.batches.make_single_batch(longest)
    assert batch.num_tokens == longest.num_tokens < 0.8 * longest.num_tokens_separate
    assert batch.num_targets == longest.num_targets
    assert built.prepared.report.tree_tokens == sum(tree.num_tokens for tree in trees)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"loss_type": "orpo", "beta": 0.2},
        {"rpo_alpha": 0.5},
        {"rpo_alpha": 0.5, "precompute_ref_log_probs": True},
        {"loss_type": "ipo", "finetuning_type": "lora", "lora_r": 4},
        {"loss_type": "kto"},
        {"loss_type": "dpop", "model": {"init": RECURRENT}},
    ],
    ids=["orpo", "rpo", "kept", "adapters", "kto", "states"],
)
def test_steps_are_those_of_rows_apart(keys: dict[str, Any]) -> None:
    write(max_steps=3, **keys)
    found: Callable[[str], list[float]] = lambda name: [record["loss"] for record in records(name)]  # noqa: E731
    assert run("--output-dir", "together") == 0
    assert run("--output-dir", "apart", "--set", "share_prefix=never") == 0
    assert found("together") == pytest.approx(found("apart"), rel=2e-5)
    for together, apart in zip(records("together"), records("apart"), strict=True):
        assert together["supervised_tokens"] == apart["supervised_tokens"]
        assert together["tokens"] < apart["tokens"]


@pytest.mark.full
def test_it_is_verified_planned_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    write(per_device_train_batch_size=1)
    assert run(command="verify") == 0
    assert "prompts shared" in " ".join(capsys.readouterr().out.split())
    assert run("--dry-run", "--set", "engine.schedule=auto") == 0
    assert "with shared beginnings" in " ".join(capsys.readouterr().out.split())
