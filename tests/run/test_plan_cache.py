"""A plan is cached if everything that it depends on is known, and reused if nothing of it has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamtune.cli.app import app
from streamtune.recipe import load_recipe
from streamtune.run import plan, plan_cache
from streamtune.run.plan_cache import PlanOptions, plan_key

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
    monkeypatch.setattr(plan_cache, "code_versions", lambda: ["torch 1.0"])
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


def test_starting_adapters_are_part_of_the_key(recipe: Path) -> None:
    """The rank of the adapters decides the plan: other adapters in the same folder give another key."""
    folder = recipe.parent / "ad"
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "model"}
    adapted = ("finetuning_type=lora", f"adapter_name_or_path={folder}")
    keys = set()
    for rank in (4, 512):
        (folder / "adapter_config.json").write_text(json.dumps({**settings, "r": rank}), "utf-8")
        keys.add(key_of(recipe, *adapted))
    (folder / "adapter_model.safetensors").write_bytes(b"0" * 100)
    keys.add(key_of(recipe, *adapted))
    assert len(keys) == 3
    assert None not in keys
    assert key_of(recipe, "finetuning_type=lora", "adapter_name_or_path=someone/adapters") is None


def test_code_that_comes_with_a_model_has_no_key(recipe: Path) -> None:
    assert key_of(recipe, "trust_remote_code=true") is None  # it may read anything


def test_a_file_of_deepspeed_is_part_of_the_key(recipe: Path) -> None:
    keys = set()
    for stage in (1, 2):
        (recipe.parent / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}), "utf-8")
        keys.add(key_of(recipe, f"deepspeed={recipe.parent / 'ds.json'}"))
    assert len(keys) == 2


@pytest.mark.parametrize("odd", ["dangling.txt", "folder.txt", "pipe.txt"])
def test_what_is_no_file_in_the_folder_of_a_model_stops_no_plan(recipe: Path, odd: str) -> None:
    path = recipe.parent / "model" / odd
    if odd == "dangling.txt":
        path.symlink_to("nowhere")
    elif odd == "folder.txt":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert key_of(recipe) is not None
    found = CliRunner().invoke(app, ["plan", str(recipe), "--device", "h100", "--host-memory", "64GiB"])
    assert found.exit_code == 0, found.output


def test_a_plan_of_files_that_change_meanwhile_is_not_kept(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, config = plan.plan_recipe, recipe.parent / "model/config.json"

    def changed(*arguments: Any, **options: Any) -> Any:
        config.write_text(json.dumps({**CONFIG, "hidden_size": 32}), "utf-8")
        found = real(*arguments, **options)
        config.write_text(json.dumps({**CONFIG, "hidden_size": 64}), "utf-8")
        return found

    monkeypatch.setattr(plan, "plan_recipe", changed)
    result = CliRunner().invoke(app, ["plan", str(recipe), "--device", "h100", "--host-memory", "64GiB"])
    assert result.exit_code == 0, result.output
    assert not (recipe.parent / "cache/streamtune/plans").exists()


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
