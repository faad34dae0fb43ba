"""``streamtune sft`` with the planner: the schedule is shown, kept on resume, and an error if none fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.recipe import load_recipe
from streamtune.run.build import build_run
from streamtune.run.train import train_settings
from tests.sft_kit import RECIPE, run, write_recipe, write_rows

PLANNED: dict[str, Any] = {**RECIPE, "max_length": 256, "max_steps": 4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache folder of the rates, which the first test measures."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, PLANNED)
    return tmp_path


@pytest.mark.full
def test_a_dry_run_shows_the_plan(folder: Path, capfd: pytest.CaptureFixture[str]):
    assert run("--dry-run") == 0
    out = capfd.readouterr().out
    assert "keeps every layer's activations, recomputes nothing" in out  # it all fits
    assert "; simulated)" in out
    assert "longest step " in out


@pytest.mark.full
def test_a_fixed_schedule_is_planned_in_a_dry_run_alone(folder: Path):
    loaded = load_recipe("tiny.yaml", ["engine.schedule=fixed", "chunk_size=64"])
    assert build_run(loaded).streamed.memory is None
    dry = build_run(loaded, dry_run=True)
    assert dry.streamed.memory is not None
    assert dry.streamed.memory.schedule == dry.handle.schedule
    assert dry.streamed.memory.schedule.chunk_size == 64


def test_a_run_that_goes_on_keeps_its_schedule(folder: Path):
    assert run("--set", "engine.keep_layers=1", "--set", "max_steps=2") == 0
    checkpoint = json.loads(next((folder / "runs/tiny/checkpoints").glob("*/state.json")).read_text())
    assert checkpoint["identity"]["schedule"]["keep_layers"] == 1
    loaded = load_recipe("tiny.yaml", ["max_steps=2"])
    assert build_run(loaded).handle.schedule.keep_layers == 1
    loaded = load_recipe("tiny.yaml", ["max_steps=2", "engine.keep_layers=2"])
    assert build_run(loaded).handle.schedule.keep_layers == 2


def test_what_is_written_is_kept_to(folder: Path):
    handle = build_run(load_recipe("tiny.yaml", ["chunk_size=50", "keep_layers=0", "keep_kv=false"])).handle
    assert (handle.schedule.chunk_size, handle.schedule.keep_layers, handle.schedule.keep_kv) == (50, 0, "no")


def test_a_budget_nothing_fits_is_told_with_its_line(folder: Path, capfd: pytest.CaptureFixture[str]):
    assert run("--set", "engine.device_memory=100KiB") == 2
    err = " ".join(capfd.readouterr().err.split())
    assert "no schedule fits a row of" in err
    assert "tiny.yaml:" in err
    assert "larger chunks do not help" in err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "lower engine.device_memory or raise engine.margin"),
        (["engine.schedule=fixed"], "write engine.schedule: auto"),
    ],
)
def test_out_of_memory_speaks_of_the_planner(folder: Path, settings: list[str], said: str):
    sft = build_run(load_recipe("tiny.yaml", settings))
    assert said in train_settings(sft.recipe, sft.plan, sft.handle.schedule).out_of_memory_fix
