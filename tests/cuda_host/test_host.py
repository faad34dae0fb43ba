"""Launches, waits and allocated bytes of streamed steps on CUDA, counted without a device.

Needs torch's CUDA wheel and a C++ compiler. ``STREAMTUNE_CUDA_PYTHON`` names the interpreter of another environment
that has the wheel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_host.measure import COUNTERS

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("STREAMTUNE_CUDA_PYTHON", sys.executable)
WORKSPACE = 36 << 20
"""Bytes that cuBLAS keeps on the device beside the tensors of a step."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": {},
    "attention kept": {"keep_attention": "device", "keep_kv": "device"},
    "host": {"offload": "host"},
    "two levels": {"levels": 2},
    "gradients in place": {"stream_grads": True},
}
BUDGET = {"forward": 45, "backward": 160}
"""Launches of a layer and chunk of 2,048 tokens, Qwen3-8B's shape, at 16K tokens."""


def test_counters_are_read_at_their_places() -> None:
    source = (Path(__file__).parent / "stub" / "runtime.cpp").read_text(encoding="utf-8")
    places = re.search(r"long v\[\] = \{(.*?)\}", source)
    assert places is not None
    others = {"operations": "ops", "not_ready": "queries_not_ready"}
    variables = [name.strip().removeprefix("(long)") for name in places[1].split(",")]
    assert variables == [others.get(name, name) for name in COUNTERS]


def run(program: str, *arguments: str, given: str = "", environment: dict[str, str] | None = None) -> str:
    command = [PYTHON, "-m", program, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Any]]:
    """The steps of all cases, by one process."""
    found = subprocess.run(
        [PYTHON, "-c", "import torch; print(torch.version.cuda or '')"], capture_output=True, text=True, check=True
    )
    if not found.stdout.strip():
        pytest.skip("this torch is built without CUDA")
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    built = json.loads(run("tests.cuda_host.build_stub"))
    base = {"chunk_size": 2048, "head_chunk_size": 1024}
    cases = {
        name: {"layers": 4 if "levels" in more else 3, "length": 32768, "schedule": {**base, **more}, "simulated": True}
        for name, more in SCHEDULES.items()
    }
    cases |= {f"{layers} layers": {"layers": layers, "length": 16384, "schedule": base} for layers in (2, 3)}
    cases["one kept"] = {
        "layers": 3,
        "length": 32768,
        "schedule": {**base, "keep_layers": 1},
        "autocast": True,
        "simulated": True,
    }
    said = run("tests.cuda_host.measure", given=json.dumps(list(cases.values())), environment=built)
    return dict(zip(cases, json.loads(said), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("name", [*SCHEDULES, "one kept"])
def test_the_allocator_holds_what_was_simulated(measured: dict[str, Any], name: str) -> None:
    found = measured[name]
    assert found["simulated_bytes"] <= found["peak_bytes"] <= 1.01 * found["simulated_bytes"]
    assert found["peak_bytes"] - found["simulated_bytes"] <= WORKSPACE + (2 << 20)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_step_waits_for_the_device(measured: dict[str, Any], name: str) -> None:
    assert measured[name]["syncs"] == 0
    assert measured[name]["unpinned"] == 0


@pytest.mark.full
@pytest.mark.parametrize("phase", BUDGET)
def test_launches_of_a_layer_and_chunk(measured: dict[str, Any], phase: str) -> None:
    chunks = 16384 // 2048
    launches = (measured["3 layers"][phase] - measured["2 layers"][phase]) / chunks
    assert 0 < launches <= BUDGET[phase]
