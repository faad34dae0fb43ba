"""``streamtune plan``: screen, JSON document, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main
from streamtune.cli import plan as plan_screen
from streamtune.cli.plan import ProgressPrinter
from streamtune.cli.plan_screen import draw_bar, show_seconds
from streamtune.recipe import load_recipe, shipped_recipes
from streamtune.run.plan import PlanOptions, plan_recipe

RECIPE: dict[str, Any] = {
    "model": {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        }
    },
    "tokenizer": {"train": {"vocab_size": 512}},
    "datasets": [{"path": "rows.jsonl"}],
    "max_length": 4096,
    "gradient_accumulation_steps": 2,
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    return path


def plan(*arguments: str) -> int:
    try:
        main(["plan", "tiny.yaml", *arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_document(recipe: Path, capfd: pytest.CaptureFixture[str]):
    assert plan("--device", "rtx-4090", "--host-memory", "8GiB", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"] is True
    assert found["peak_bytes"] == sum(found["terms"].values()) == max(found["phases"].values())
    assert found["host_bytes"] == found["disk_bytes"] == 0
    assert found["step_seconds"] > 0
    assert found["schedule"]["keep_layers"] == 4
    assert found["device"] == "NVIDIA RTX 4090"
    assert found["here"] is False
    assert (found["length"], found["tokens"]) == (4096, 8192)
    assert found["limits"]["host_bytes"] == 8 << 30


def test_rows_beyond_the_positions_of_the_model_are_told_with_the_scaling_to_write(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    init = {**RECIPE["model"]["init"], "max_position_embeddings": 1500}
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": {"init": init}}))
    beyond = ("--device", "rtx-4090", "--host-memory", "8GiB")
    assert plan(*beyond) == 0
    line = " ".join(capfd.readouterr().out.split())
    assert "the longest row has 4,096 tokens; the model supports 1,500" in line
    assert "a run refuses such rows" in line
    assert "rope_scaling: {rope_type: yarn, factor: 3}" in line
    assert plan(*beyond, "--json") == 0
    assert "factor: 3}" in json.loads(capfd.readouterr().out)["positions"]
    assert plan(*beyond, "--set", "rope_scaling={rope_type: yarn, factor: 3}", "--json") == 0
    assert json.loads(capfd.readouterr().out)["positions"] is None


@pytest.mark.full
def test_the_screen(recipe: Path, capfd: pytest.CaptureFixture[str]):
    assert plan("--device-memory", "60MiB", "--host-memory", "1GiB", "--length", "8192") == 0
    out = capfd.readouterr().out
    for said in (
        "FITS  8,192 tokens on ",
        "recipe    tiny.yaml",
        "Qwen3ForCausalLM",
        "2 rows of 8,192 tokens, 1 at a time; adamw",
        "60.0 MiB; host 1.00 GiB; 5% of each stays free",
        "data sheet of",
        "predicted memory at the peak of the step, in the",
        "layer inputs",
        "device, total",
        "of 60.0 MiB",
        "other schedules (estimated)",
        "change from chosen",
        "█",
    ):
        assert said in out, said
    assert all(len(line) <= 80 for line in out.splitlines() if "schedule  " not in line and "rates  " not in line)


def test_a_setting_changes_the_model(recipe: Path, capfd: pytest.CaptureFixture[str]):
    assert plan("--device", "l4", "--json", "--set", "num_hidden_layers=2", "--set", "hidden_size=64") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["schedule"]["keep_layers"] == 2
    assert plan("--device", "l4", "--json", "--set", "finetuning_type=lora") == 0
    adapters = json.loads(capfd.readouterr().out)
    assert adapters["trainable_parameters"] < adapters["parameters"] / 5
    assert "gradients" not in adapters["terms"] or adapters["terms"]["gradients"] < adapters["terms"]["weights"]


@pytest.mark.full
def test_a_fixed_schedule_is_shown_whether_it_fits_or_not(recipe: Path, capfd: pytest.CaptureFixture[str]):
    fixed = ("--set", "engine.schedule=fixed", "--set", "chunk_size=512", "--json")
    assert plan("--device", "l4", *fixed) == 0
    assert json.loads(capfd.readouterr().out)["fits"] is True
    assert plan("--device-memory", "20MiB", *fixed) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["fits"] is False
    assert found["schedule"]["chunk_size"] == 512


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "h10"), "no device is called 'h10'"),
        (("--device-memory", "lots"), "expected a size; found 'lots'"),
        (("--device-memory", "60MiB", "--host-memory", "1"), "expected a size; found '1'"),
        (("--device-memory", "1MiB"), "no schedule fits a row of 4,096 tokens"),
        pytest.param(
            ("--device", "l4", "--host-memory", "1MiB", "--set", "deepspeed=zero3_offload"),
            "no row length fits: the step needs",
            marks=pytest.mark.full,
        ),
        (("--set", "model.init.hidden_siz=3", "--device", "l4"), "no key 'hidden_siz'"),
        pytest.param(
            ("--set", "per_device_train_batch_size=10000", "--device", "l4"),
            "the micro-batch is too large to simulate",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_is_refused(recipe: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str):
    assert plan(*arguments) == 2
    assert said in capfd.readouterr().err


def test_help_says_how_to_change_the_model(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--set hidden_size=5120" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12 s"), (4.56, "4.6 s"), (59.6, "60 s"), (1800, "30 min"), (9000, "2.5 h")]
)
def test_seconds(seconds: float, text: str):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "▏"), (0.5, "█████"), (1, "██████████"), (2, "██████████"), (0.31, "███▏")]
)
def test_a_bar(share: float, text: str):
    assert draw_bar(share, 10) == text


@pytest.mark.full
@pytest.mark.parametrize(
    "shipped", [s for s in shipped_recipes() if "init:" in s.text], ids=lambda shipped: shipped.name
)
def test_every_shipped_recipe_that_needs_no_hub_plans(shipped: Any):
    loaded = load_recipe(shipped.path)
    planned = plan_recipe(loaded, PlanOptions(device="h100", host_memory="1TiB", length=2048))
    assert planned.plan.fits
    assert planned.plan.step_seconds > 0


def test_progress_without_a_terminal_comes_every_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    clock = iter([10.0, 10.1, 11.9, 12.2, 12.3])
    monkeypatch.setattr(plan_screen.time, "monotonic", lambda: next(clock))
    tell = ProgressPrinter()
    for message in ("measuring", "planning", "planning: 1 of 6", "planning: 2 of 6", "planning: 3 of 6"):
        tell(message)
    assert capfd.readouterr().err.splitlines() == ["measuring", "planning", "planning: 2 of 6"]
