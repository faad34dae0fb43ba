"""A plan is kept whole where all that it depends on is known, and found again where none of it has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamtune.cli.app import app
from streamtune.recipe import load_recipe
from streamtune.run import kept_plan, plan
from streamtune.run.kept_plan import PlanOptions, plan_key

RECIPE = """\
model_name_or_path: model
datasets: [rows.jsonl]
max_length: 64
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "dtype": "bfloat16",
}
ELSEWHERE = PlanOptions(device="h100", host_memory="64GiB")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG), "utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', "utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, "utf-8")
    return path


def key_of(path: Path, *settings: str, options: PlanOptions = ELSEWHERE) -> str | None:
    return plan_key(load_recipe(path, settings), options)


def test_all_that_decides_a_plan_is_part_of_its_key(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        key_of(recipe),
        key_of(recipe, "max_length=128"),
        key_of(recipe, "engine.chunk_size=32"),
        key_of(recipe, "finetuning_type=lora"),
        key_of(recipe, options=PlanOptions(device="h100", host_memory="65GiB")),
        key_of(recipe, options=PlanOptions(device="h200", host_memory="64GiB")),
        key_of(recipe, options=PlanOptions(device="h100", host_memory="64GiB", length=128)),
    }
    (recipe.parent / "model/config.json").write_text(json.dumps({**CONFIG, "vocab_size": 65}), "utf-8")
    keys.add(key_of(recipe))
    monkeypatch.setattr(kept_plan, "versions", lambda: ["torch 1.0"])
    keys.add(key_of(recipe))
    assert len(keys) == 9
    assert None not in keys


def test_a_plan_that_depends_on_what_is_free_has_no_key(recipe: Path) -> None:
    assert key_of(recipe, options=PlanOptions(device="h100")) is None  # the host's free memory
    assert key_of(recipe, options=PlanOptions(host_memory="64GiB")) is None  # the device at hand
    assert key_of(recipe, "cache=false") is None
    assert key_of(recipe, "model_name_or_path=someone/model") is None  # a hub may have another tomorrow
    assert key_of(recipe, f"engine.offload_dir={recipe.parent}") is None  # free disk
    (recipe.parent / "model/adapter_config.json").write_text("{}", "utf-8")
    assert key_of(recipe) is None


def test_a_second_plan_is_read_and_shown_alike(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["plan", str(recipe), "--device", "h100", "--host-memory", "64GiB"]
    first = CliRunner().invoke(app, asked)
    document = CliRunner().invoke(app, [*asked, "--json"])
    assert first.exit_code == document.exit_code == 0, first.output
    monkeypatch.setattr(plan, "plan_recipe", None)
    assert CliRunner().invoke(app, asked).stdout == first.stdout
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout) == json.loads(document.stdout)
    for file in (recipe.parent / "cache/streamtune/plans").iterdir():
        file.write_text("{", "utf-8")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(recipe.parent / "cache"))
    assert CliRunner().invoke(app, asked).stdout == first.stdout
