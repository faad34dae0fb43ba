"""DeepSpeed presets and files: the recipe fills in values, and contradictions are refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtune.distributed.deepspeed import check_deepspeed
from streamtune.distributed.deepspeed_config import PRESETS, filled_auto_values, resolve_config, zero_stage
from streamtune.errors import ArgumentError

VALUES = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "torch_autocast.enabled": True,
    "zero_optimization.reduce_bucket_size": 1000,
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_param.pin_memory": False,
}


def leaves(document: Any) -> Iterator[Any]:
    if isinstance(document, dict):
        for value in document.values():
            yield from leaves(value)
    else:
        yield document


def write(folder: Path, **changes: Any) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **changes}, indent=1))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"comet": {"enabled": True, "api_key": "sk-proj-" + "a1" * 20}}, "comet.api_key"),
        ({"comet": {"api_key": "x7Kq" * 6}}, "comet.api_key"),  # of a form that nobody knows
        ({"wandb": {"team": "hf_" + "Ab1" * 10}}, "wandb.team"),
        ({"hooks": [{"url": "https://someone:pass1234@host/x"}]}, "hooks.0.url"),
        ({"x": {"hf_" + "Cd2" * 10: 1}}, "x.[a Hugging Face token]"),
    ],
)
def test_a_file_that_holds_a_secret_is_refused_without_repeating_it(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """A run keeps a copy of the configuration, and people share runs."""
    name = write(tmp_path, **changes)
    with pytest.raises(ArgumentError, match=re.escape(f"'{key}' contains ")) as caught:
        resolve_config(name, VALUES)
    said = f"{caught.value.what} {caught.value.where} {caught.value.fix}"
    assert not any(secret in said for secret in ("a1a1", "x7Kq", "Ab1Ab1", "pass1234", "Cd2Cd2"))


def test_settings_of_trackers_without_a_secret_are_taken(tmp_path: Path) -> None:
    given = {"wandb": {"enabled": False, "team": "us"}, "comet": {"api_key": "", "mode": "offline"}}
    assert resolve_config(write(tmp_path, **given), VALUES)["comet"]["mode"] == "offline"


def test_files_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("pipe.json", "deep.json"):
        with pytest.raises(ArgumentError, match=name):
            resolve_config(str(tmp_path / name), VALUES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_filled_from_the_recipe(name: str) -> None:
    before = json.dumps(PRESETS[name])
    config = resolve_config(name, VALUES)
    assert "auto" not in list(leaves(config))
    assert config["train_batch_size"] == 16
    assert config["torch_autocast"]["enabled"] is True
    assert zero_stage(config) == int(name.removesuffix("_offload")[-1])
    told = filled_auto_values(name, config)
    assert told["train_batch_size"] == 16
    assert set(told) <= set(VALUES)
    assert ("zero_optimization.offload_param.pin_memory" in told) == name.endswith("_offload")
    assert json.dumps(PRESETS[name]) == before


def test_a_file_of_the_users_own_may_say_what_the_recipe_says(tmp_path: Path) -> None:
    path = write(tmp_path, train_batch_size=16, gradient_clipping="auto")
    config = resolve_config(path, VALUES)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (16, 1.0)
    assert filled_auto_values(path, config) == {"gradient_clipping": 1.0}


def test_a_file_without_sections_of_precision_computes_in_that_of_the_recipe(tmp_path: Path) -> None:
    """Without the section torch_autocast, DeepSpeed would disable the autocast of ``bf16: true`` on a GPU."""
    config = resolve_config(write(tmp_path, fp16={"enabled": "auto"}), VALUES)
    assert config["torch_autocast"] == {**PRESETS["zero2"]["torch_autocast"], "enabled": True}
    assert (config["bf16"], config["fp16"]) == ({"enabled": False}, {"enabled": False})
    assert resolve_config(write(tmp_path), {**VALUES, "bf16.enabled": True})["bf16"] == {"enabled": True}
    with pytest.raises(ArgumentError, match=r"has fp16\.enabled: true, but the recipe gives false"):
        resolve_config(write(tmp_path, fp16={"enabled": True}), VALUES)
    with pytest.raises(ArgumentError, match=r"has torch_autocast\.enabled: false, but the recipe gives true"):
        resolve_config(write(tmp_path, torch_autocast={"enabled": False}), VALUES)


def test_a_contradiction_names_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path, gradient_accumulation_steps=8)
    with pytest.raises(ArgumentError) as caught:
        resolve_config(path, VALUES, where="recipe.yaml:7")
    said = str(caught.value)
    assert f"{path} has gradient_accumulation_steps: 8, but the recipe gives 4" in said
    assert "recipe.yaml:7" in said
    assert '"gradient_accumulation_steps": "auto"' in said
    nested = write(tmp_path, bf16={"enabled": True})
    with pytest.raises(ArgumentError, match=r"has bf16\.enabled: true, but the recipe gives false"):
        resolve_config(nested, VALUES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": {"type": "Adam"}}, r"has an optimizer, but the recipe chooses it \(optim\)"),
        ({"scheduler": {"type": "WarmupLR"}}, r"has a scheduler, but the recipe chooses it \(lr_scheduler_type\)"),
        ({"zero_optimization": {"stage": 0}}, "has ZeRO stage 0, expected"),
        (
            {"fp16": {"initial_scale_power": "auto"}},
            'has fp16.initial_scale_power: "auto", for which the recipe has no value',
        ),
    ],
)
def test_what_a_recipe_says_is_not_said_twice(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        resolve_config(write(tmp_path, **changes), VALUES)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"there is no DeepSpeed configuration zero4") as caught:
        resolve_config("zero4", VALUES)
    assert "zero" in str(caught.value.fix)
    broken = tmp_path / "ds.json"
    broken.write_text('{\n "zero_optimization": {"stage": 2},\n}')
    with pytest.raises(ArgumentError) as caught:
        resolve_config(str(broken), VALUES)
    assert f"{broken}:3" in str(caught.value)
    broken.write_text("[]")
    with pytest.raises(ArgumentError, match="must be a JSON object"):
        resolve_config(str(broken), VALUES)


def test_without_deepspeed_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ArgumentError, match=r"DeepSpeed is not installed") as caught:
        check_deepspeed()
    assert "pip install 'deepspeed" in str(caught.value)
