"""Kernels of Triton without an accelerator: its interpreter runs them, where Triton and Liger are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from streamtune.ops.head.kernels import head_candidates

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    """What the kernels compute, by one process."""
    if missing := [package for package in ("triton", "liger_kernel") if find_spec(package) is None]:
        pytest.skip(f"{missing[0]} is not installed (make test-versions installs it)")
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 fails with NumPy 2.4")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_cases"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_a_head_in_triton_agrees_with_the_sweep(computed: dict[str, Any]) -> None:
    assert len(computed["head"]) == 4
    assert all(agrees and not wrong for agrees, wrong in computed["head"].values()), computed


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["norm", "rotation", "gate", "streamed gate"])
def test_a_kernel_of_a_layer_agrees_with_the_formula(computed: dict[str, Any], kernel: str) -> None:
    """Its values and gradients: what is used, and what a peer that is compared with uses."""
    distances = computed["layers"][kernel]
    assert len(distances) >= 3
    assert max(distances) < 1e-6, distances


def test_it_is_a_candidate_where_it_is_installed() -> None:
    """Without Liger the heads of torch are what there is."""
    names = [kernel.name for kernel in head_candidates()]
    assert ("liger" in names) == all(find_spec(package) for package in ("triton", "liger_kernel"))
