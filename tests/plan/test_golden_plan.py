"""The screen and the JSON document of ``streamtune plan``, byte for byte; planning seconds and versions are masked.

As a process of its own it imports no quantiser, unless weights are quantised.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.base.libraries import QUANTISERS
from streamtune.cli import main
from tests.golden_kit import WIDTHS, check_golden, masked, of_pinned_torch, once, screen

GOLDEN = Path(__file__).parent / "golden"
RECIPE: dict[str, Any] = {
    "model": {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
        }
    },
    "tokenizer": {"train": {"vocab_size": 512}},
    "datasets": [{"path": "rows.jsonl"}],
    "max_length": 65536,
    "gradient_accumulation_steps": 2,
}
PAIRS = {**RECIPE, "objective": "dpo", "max_length": 8192, "datasets": [{"path": "rows.jsonl", "type": "preference"}]}
DEVICE = ["--device", "rtx-4090", "--host-memory", "8GiB"]
SHARDED = ["--set", "deepspeed=zero3", "--set", "sequence_parallel_size=2"]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "chosen": (RECIPE, [*DEVICE, "--set", "engine.device_memory=6GiB"]),
    "fixed": (RECIPE, [*DEVICE, "--set", "engine.chunk_size=2048", "--set", "engine.offload=host"]),
    "pairs": (PAIRS, DEVICE),
    "ranks": (RECIPE, [*DEVICE, "--ranks", "4", "--nodes", "2", *SHARDED]),
}


def run(*arguments: str) -> None:
    """Run a command in this process; it must succeed."""
    with contextlib.suppress(SystemExit):
        main(list(arguments))


@of_pinned_torch
@pytest.mark.quick("fixed")
@pytest.mark.parametrize("case", CASES)
def test_a_plan(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    once(monkeypatch, "streamtune.run.plan.plan_recipe")
    recipe, options = CASES[case]
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    run("plan", "tiny.yaml", *options, "--json")
    document = masked(json.loads(capsys.readouterr().out), {"planning_seconds"})
    check_golden(GOLDEN / f"{case}.json", json.dumps(document, indent=2) + "\n")
    for width in WIDTHS:
        shown = screen(width, lambda: run("plan", "tiny.yaml", *options), capsys)
        check_golden(GOLDEN / f"{case}-{width}.txt", shown)


ADAPTERS = {**RECIPE, "finetuning_type": "lora", "max_length": 4096}


def imported(recipe: dict[str, object], folder: Path) -> set[str]:
    """Plan in a new process; return the quantiser packages that it imported."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-X", "importtime", "-m", "streamtune", "plan", "tiny.yaml", *DEVICE, "--json"]
    there = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, check=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return {name.partition(".")[0] for name in names if "." in name} & set(QUANTISERS)


@pytest.mark.full
def test_a_plan_imports_no_quantiser_that_it_does_not_need(tmp_path: Path) -> None:
    assert imported(ADAPTERS, tmp_path) == set()


@pytest.mark.slow
def test_it_does_where_weights_are_quantised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    assert "bitsandbytes" in imported({**ADAPTERS, "finetuning_type": "qlora", "quantization": "nf4"}, tmp_path)
    assert "bitsandbytes" in imported({**ADAPTERS, "optim": "adamw_8bit"}, tmp_path)
