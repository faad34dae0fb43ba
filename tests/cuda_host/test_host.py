"""Launches, waits, allocated bytes and races of streamed steps on CUDA, found without a device.

Needs torch's CUDA wheel and a C++ compiler. ``STREAMTUNE_CUDA_PYTHON`` names the interpreter of another environment
that has the wheel; ``make cuda-host`` makes one.
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
PYTHON = os.environ.get("STREAMTUNE_CUDA_PYTHON") or sys.executable
WORKSPACE = 36 << 20
"""Bytes that cuBLAS keeps on the device beside the tensors of a step."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": {},
    "attention kept": {"keep_attention": "device", "keep_kv": "device"},
    "host": {"offload": "host"},
    "disk": {"offload": "disk"},
    "two levels": {"levels": 2},
    "gradients in place": {"stream_grads": True},
    "order of chunks": {"order": "chunk", "keep_kv": "host", "offload": "host", "stream_grads": True},
    "weights on the host": {"weights": "host"},
    "weights and inputs on the host": {"weights": "host", "levels": 2, "offload": "host"},
}
LAUNCHES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "qwen3, bf16": ({"length": 16384}, (34, 120)),
    "qwen3, autocast": ({"length": 16384, "dtype": "float32", "autocast": True}, (44, 145)),
    "qwen3, 32K": ({"length": 32768}, (35, 138)),
    "qwen3, rows of 100": ({"length": 16384, "row": 100}, (30, 102)),
    "window of 1,024": ({"length": 16384, "family": "mistral"}, (28, 92)),
    "gemma2": ({"length": 8192, "family": "gemma2"}, (46, 138)),
}
"""Launches of a layer and chunk of 2,048 tokens, forward and backward, at most; what is reached today, rounded up."""
AIMS = {"qwen3": (45, 160), "mistral": (45, 160), "gemma2": (100, 300)}


def test_what_is_reached_is_what_was_aimed_at() -> None:
    for name, (case, reached) in LAUNCHES.items():
        aims = AIMS[case.get("family", "qwen3")]
        assert all(launches <= aim for launches, aim in zip(reached, aims, strict=True)), name


def test_counters_are_read_at_their_places() -> None:
    source = (Path(__file__).parent / "stub" / "runtime.cpp").read_text(encoding="utf-8")
    places = re.search(r"long v\[\] = \{(.*?)\}", source)
    assert places is not None
    others = {"operations": "ops", "not_ready": "queries_not_ready"}
    variables = [name.strip().removeprefix("(long)") for name in places[1].split(",")]
    assert variables == [others.get(name, name) for name in COUNTERS]


def run(*arguments: str, given: str = "", environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [PYTHON, *arguments], input=given, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def runtime() -> dict[str, str]:
    """The environment of a process that uses the runtime without a device."""
    found = run("-c", "import torch; print(torch.version.cuda or '')")
    if not found.strip():
        pytest.skip("this torch is built without CUDA (make cuda-host installs another)")
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    built: dict[str, str] = json.loads(run("-m", "tests.cuda_host.build_stub"))
    return built


@pytest.fixture(scope="module")
def measured(runtime: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The steps of all cases, by one process."""
    base = {"chunk_size": 2048, "head_chunk_size": 1024}
    cases = {
        name: {"layers": 4 if "levels" in more else 3, "length": 32768, "schedule": {**base, **more}, "simulated": True}
        for name, more in SCHEDULES.items()
    }
    for name, (case, _) in LAUNCHES.items():  # gemma2's layers are of two kinds in turn
        step = 2 if "family" in case else 1
        cases |= {f"{name}, {n}": {**case, "layers": n * step, "schedule": base} for n in (1, 2)}
    cases["one kept"] = {
        "layers": 3,
        "length": 32768,
        "schedule": {**base, "keep_layers": 1},
        "autocast": True,
        "simulated": True,
    }
    has_triton = "import importlib.util as u; print(u.find_spec('triton') is not None)"
    triton = run("-c", has_triton) == "True\n"
    if not triton:
        cases = {name: case for name, case in cases.items() if "family" not in case}
    said = run("-m", "tests.cuda_host.measure", given=json.dumps(list(cases.values())), environment=runtime)
    return {**dict(zip(cases, json.loads(said), strict=True)), "triton": {"found": triton}}


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
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer_and_chunk(measured: dict[str, Any], name: str) -> None:
    case, most = LAUNCHES[name]
    if "family" in case and not measured["triton"]["found"]:
        pytest.skip("there is no triton")
    layers_and_chunks = (2 if "family" in case else 1) * case["length"] // 2048
    for phase, budget in zip(("forward", "backward"), most, strict=True):
        launches = (measured[f"{name}, 2"][phase] - measured[f"{name}, 1"][phase]) / layers_and_chunks
        assert 0 < launches <= budget, (phase, launches)


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_a_step_runs_on_every_generation_of_devices(runtime: dict[str, str], capability: int) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 512, "vocab_size": 512}
    cases = [
        {"layers": 2, "length": 4096, "schedule": {"chunk_size": 1024, **more}, "config": small, "autocast": autocast}
        for more in SCHEDULES.values()
        if "levels" not in more
        for autocast in (False, True)
    ]
    environment = {**runtime, "STUB_CC": str(capability)}
    for case, found in zip(
        cases,
        json.loads(run("-m", "tests.cuda_host.measure", given=json.dumps(cases), environment=environment)),
        strict=True,
    ):
        assert found["backward"] > found["forward"] > 0, case
        assert found["syncs"] == 0, case


@pytest.mark.full
def test_no_memory_is_used_by_two_streams_at_once(runtime: dict[str, str]) -> None:
    races = json.loads(run("-m", "tests.cuda_host.races", environment=runtime))
    assert set(races.values()) == {None}, races


@pytest.mark.full
def test_an_optimizer_on_the_host_waits_for_gradients(runtime: dict[str, str]) -> None:
    races = json.loads(run("-m", "tests.cuda_host.optimizer_races", environment=runtime))
    assert set(races.values()) == {None}, races
    without = json.loads(run("-m", "tests.cuda_host.optimizer_races", "beside", environment=runtime))
    beside = {kind for kind, race in without.items() if race is not None}
    assert beside == {kind for kind in races if not kind.startswith("after")}


ON_DEVICE = (
    "plain chunks", "host", "attention on the host", "two levels", "gradients in place", "disk", "order of chunks",
    "states",
)  # fmt: skip
"""Schedules whose weights are on the device."""
UNTOUCHED = {
    "get": ("plain chunks", "weights on the host"),
    "settle": ("plain chunks", "disk", "weights on the host"),
    "to_host": ("plain chunks", "disk"),
    "fetched": ON_DEVICE,
}
"""Schedules in which a mutant does no harm: a thread waits for a disk's writes, and a layer's node for its gradients,
before memory is used again."""


@pytest.mark.full
@pytest.mark.parametrize("mutant", list(UNTOUCHED))
def test_a_missing_wait_is_found(runtime: dict[str, str], mutant: str) -> None:
    races = json.loads(run("-m", "tests.cuda_host.races", mutant, environment=runtime))
    assert races["plain chunks"] is None
    assert all(race is not None for name, race in races.items() if name not in UNTOUCHED[mutant]), races
