"""``streamtune plan`` as a process of its own imports no quantiser, unless weights are quantised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamtune.base.libraries import QUANTISERS
from tests.plan.test_golden_plan import DEVICE, RECIPE

ADAPTERS = {**RECIPE, "finetuning_type": "lora", "max_length": 4096}


def imported(recipe: dict[str, object], folder: Path) -> set[str]:
    """Plan in a new process; return the packages of quantisers that ran while they were imported."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-X", "importtime", "-m", "streamtune", "plan", "tiny.yaml", *DEVICE, "--json"]
    there = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True, check=True)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return {name.partition(".")[0] for name in names if "." in name} & set(QUANTISERS)


def test_a_plan_imports_no_quantiser_that_it_does_not_need(tmp_path: Path) -> None:
    assert imported(ADAPTERS, tmp_path) == set()


@pytest.mark.slow
def test_it_does_where_weights_are_quantised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    assert "bitsandbytes" in imported({**ADAPTERS, "finetuning_type": "qlora", "quantization": "nf4"}, tmp_path)
    assert "bitsandbytes" in imported({**ADAPTERS, "optim": "adamw_8bit"}, tmp_path)
