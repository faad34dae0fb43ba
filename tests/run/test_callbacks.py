"""Callbacks of a recipe: their arguments, their isolation from the run, and the error of a failing callback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import ArgumentError
from streamtune.run.listeners import load_callbacks
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows

SOURCE = """
import json, os, random

class Audit:
    def __init__(self):
        self.told = []

    def on_start(self, run):
        self.told.append(["on_start", sorted(run), run["recipe"]["seed"]])

    def on_step(self, record):
        import torch
        torch.manual_seed(1), random.seed(1), os.chdir("/")
        self.told.append(["on_step", dict(record)])
        record["loss"] = record["step"] = 0

    def on_evaluate(self, record):
        self.told.append(["on_evaluate", dict(record)])

    def on_end(self, outcome):
        self.told.append(["on_end", outcome])
        with open("told.json", "w") as file:
            json.dump(self.told, file)


class Raising:
    def on_step(self, record):
        if record["step"] == 3:
            raise ValueError("enough")


class Slip:
    def on_steps(self, record): ...


class Nothing: ...


class Unmakeable:
    def __init__(self, path): ...
    def on_step(self, record): ...
"""
TINY: dict[str, Any] = {**RECIPE, "max_length": 256, "val_size": 4, "engine": FIXED, "max_steps": 4, "eval_steps": 2}
TIMINGS = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.py").write_text(SOURCE)
    write_rows(tmp_path, 12)
    write_recipe(tmp_path, TINY)
    return run


def lines(folder: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(folder, name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in found]


def test_a_callback_gets_every_event_and_changes_nothing(sft: Callable[..., int]) -> None:
    assert sft("--output-dir", "plain") == 0
    given = ("--allow-code", "--set", "callbacks=[audit.py:Audit]")
    assert sft("--output-dir", "told", *given) == 0
    assert lines("told") == lines("plain")
    assert Path("told/final/model.safetensors").read_bytes() == Path("plain/final/model.safetensors").read_bytes()
    told = json.loads(Path("told.json").read_text())
    assert told[0] == [
        "on_start", ["directory", "name", "plan", "recipe", "run", "step", "total_steps", "versions"], 42,
    ]  # fmt: skip
    records = [{k: v for k, v in what.items() if k not in TIMINGS} for event, what in told[1:-1]]
    assert records == lines("told")
    assert [event for event, *_ in told[1:-1]] == [
        "on_evaluate" if "eval_loss" in record else "on_step" for record in records
    ]
    assert told[-1] == ["on_end", {"status": "finished", "step": 4}]


@pytest.mark.full
def test_a_callback_that_fails_ends_the_run_with_a_checkpoint(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--output-dir", "whole") == 0
    failing = ("--allow-code", "--set", "callbacks=[audit.py:Raising, audit.py:Audit]")
    assert sft("--output-dir", "split", *failing) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "on_step of the callback" in said
    assert "audit.py:Raising raised ValueError: enough" in said
    number = 1 + next(index for index, line in enumerate(SOURCE.splitlines()) if "enough" in line)
    assert f"audit.py:{number}" in said
    assert [path.name for path in Path("split/checkpoints").iterdir()] == ["step-000003"]
    assert [each["event"] for each in lines("split", "events.jsonl")] == ["start", "checkpoint", "failure"]
    assert json.loads(Path("told.json").read_text())[-1][1]["status"] == "failed", "the others hear of the end"
    assert sft("--output-dir", "split") == 0
    assert lines("split") == lines("whole")


@pytest.mark.parametrize(
    ("spec", "what", "fix"),
    [
        ("audit.py:Audi", "has no class 'Audi'", "did you mean 'Audit'?"),
        ("audit.py:Slip", "has 'on_steps', which is never called", "on_step"),
        ("audit.py:Nothing", "has none of the methods of a callback", "on_start, on_step, on_evaluate, on_end"),
        ("nowhere.py:Audit", "there is no file", "paths are relative to"),
        ("audit.py", "the callback must be file.py:Name or module:Name, found 'audit.py'", "file.py:Name"),
        ("audit.py:Unmakeable", "creating the callback", ""),
    ],
)
def test_a_wrong_callback_is_refused_by_its_line(tmp_path: Path, spec: str, what: str, fix: str) -> None:
    (tmp_path / "audit.py").write_text(SOURCE)
    with pytest.raises(ArgumentError) as refused:
        load_callbacks([spec], allow_code=True, directory=tmp_path, is_main=True)
    assert what in refused.value.what
    assert fix in refused.value.fix
    assert refused.value.where == "callbacks.0" or "callbacks.py" in refused.value.where


def test_code_runs_only_where_it_is_allowed(sft: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with Path("tiny.yaml").open("a") as file:
        file.write("callbacks: [audit.py:Audit]\n")
    number = len(Path("tiny.yaml").read_text().splitlines())
    assert sft() == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is Python code, and code is not allowed to run" in said
    assert f"tiny.yaml:{number}" in said
    assert not Path("told.json").exists()
    assert not Path("runs").exists()
