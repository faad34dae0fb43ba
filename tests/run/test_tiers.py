"""Weights and optimizer go to the host only if no schedule fits with everything on the device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamtune import train
from streamtune.recipe import load_recipe
from streamtune.run.data import make_shared_tokenizer, make_sources, prepare_on_all_ranks
from streamtune.run.engine import with_chosen_placement
from streamtune.run.plan import choose_placement
from streamtune.run.start import Start, start_run
from tests.sft_kit import RECIPE, run, write_recipe, write_rows

CUDA = torch.device("cuda")
MODEL = {
    "init": {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    }
}  # fmt: skip
"""In fp32 its weights are 116 MiB, its gradients as many and its moments twice as many."""
FULL = {**RECIPE, "model": MODEL, "max_length": 256, "max_steps": 2}
ROOMS = {"640MiB": None, "330MiB": "optimizer", "128MiB": "weights"}
"""Memory of the device, and what goes to the host then."""


def sized(device: str, **more: Any) -> dict[str, Any]:
    return {**FULL, "engine": {"device_memory": device, "host_memory": "4GiB"}, **more}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    return tmp_path


def placed(folder: Path, recipe: dict[str, Any], length: int = 256) -> tuple[str, str]:
    write_recipe(folder, recipe)
    chosen = choose_placement(load_recipe("tiny.yaml").recipe, length, CUDA)
    return chosen.engine.weights, chosen.engine.optimizer


def planned(capsys: pytest.CaptureFixture[str], device: str, *more: str) -> dict[str, Any]:
    arguments = ("--device", "h100", "--device-memory", device, "--host-memory", "4GiB", "--json")
    assert run(*arguments, *more, command="plan") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("device", ROOMS)
def test_a_plan_takes_the_first_place_that_fits(folder: Path, capsys: pytest.CaptureFixture[str], device: str):
    write_recipe(folder, FULL)
    found = planned(capsys, device)
    moved = ROOMS[device]
    assert found["fits"]
    assert found["schedule"]["weights"] == ("host" if moved == "weights" else "device")
    assert ("optimizer" in found["terms"]) == (moved != "optimizer")
    if moved is not None:  # and it is the plan of the recipe that says so
        assert found["peak_bytes"] == planned(capsys, device, "--set", f"engine.{moved}=host")["peak_bytes"]


@pytest.mark.slow
def test_the_longest_row_of_a_probe_is_one_that_a_plan_fits(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe(folder, FULL)
    arguments = ("--method", "simulate", "--device-memory", "200MiB", "--host-memory", "4GiB", "--json")
    assert run(*arguments, command="probe-max-len") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_length"] > 256
    assert found["schedule"]["weights"] == "host"
    assert planned(capsys, "200MiB", "--length", str(found["max_length"]))["schedule"]["weights"] == "host"


@pytest.mark.parametrize("device", ROOMS)
def test_a_run_is_placed_before_its_model_is_loaded(folder: Path, device: str):
    moved = ROOMS[device]
    want = {"optimizer": ("auto", "host"), "weights": ("host", "auto"), None: ("auto", "auto")}[moved]
    assert placed(folder, sized(device)) == want


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({"finetuning_type": "qlora"}, ("auto", "auto")),  # quantised weights stay on the device
        ({"optim": "badam"}, ("auto", "auto")),  # its blocks change places
        ({"deepspeed": "zero2"}, ("auto", "auto")),
        ({"engine": {"device_memory": "128MiB", "host_memory": "4GiB", "weights": "device"}}, ("device", "host")),
        ({"engine": {"device_memory": "128MiB", "host_memory": "4GiB", "schedule": "fixed"}}, ("auto", "auto")),
        ({"engine": {"device_memory": "330MiB", "host_memory": "4GiB", "optimizer": "device"}}, ("auto", "device")),
    ],
)
def test_what_is_written_stays(folder: Path, more: dict[str, Any], want: tuple[str, str]):
    assert placed(folder, sized("128MiB", **more)) == want


def test_the_memory_of_a_cpu_is_the_hosts(folder: Path):
    write_recipe(folder, sized("128MiB"))
    recipe = load_recipe("tiny.yaml").recipe
    assert choose_placement(recipe, 256, torch.device("cpu")) is recipe


def begun(recipe: dict[str, Any], folder: Path, tiers: dict[str, str] | None = None) -> tuple[Start, list[str]]:
    """Return the placed start of a run on an accelerator; ``tiers`` is the placement of the resumed run."""
    write_recipe(folder, recipe)
    said: list[str] = []
    with start_run(load_recipe("tiny.yaml"), "never", said.append, dry_run=True) as start:
        start = replace(start, device=CUDA)
        if tiers is not None:
            start = replace(start, checkpoint=train.Checkpoint(folder, {"identity": {"tiers": tiers}}))
        sources = make_sources(start.loaded)
        tokenizer = make_shared_tokenizer(start.world, start.recipe, sources, None, said.append)
        prepared = prepare_on_all_ranks(start.task, start.world, sources, tokenizer, said.append)
        return with_chosen_placement(start, prepared, start.task.longest_row_tokens(prepared), said.append), said


def test_a_run_that_goes_on_keeps_its_place(folder: Path):
    first, said = begun(sized("330MiB"), folder)
    assert first.recipe.engine.optimizer == first.task.recipe.engine.optimizer == "host"
    assert first.identity["tiers"] == {"weights": "auto", "optimizer": "host"}
    assert any("engine: {optimizer: host}" in each for each in said)
    assert begun(sized("640MiB"), folder, first.identity["tiers"])[0].recipe.engine.optimizer == "host"
    assert begun(sized("640MiB"), folder)[0].recipe.engine.optimizer == "auto"


def test_a_model_that_cannot_be_made_is_left_to_what_loads_it(folder: Path):
    (folder / "unknown").mkdir()
    (folder / "unknown" / "config.json").write_text('{"model_type": "of_tomorrow"}')
    recipe = {key: value for key, value in sized("128MiB").items() if key != "model"}
    start, said = begun({**recipe, "model_name_or_path": "unknown"}, folder)
    assert start.recipe.engine.weights == "auto"
    assert not any("engine:" in each for each in said)
