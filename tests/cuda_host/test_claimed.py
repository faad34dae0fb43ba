"""Gradients on the claimed device: the paths that the engine takes on CUDA, with numbers that are right.

Needs a C++ compiler and a torch without CUDA.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_host import build_stub, claimed

ROOT = Path(__file__).parents[2]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {},
    "gemma3_text": {},
    "gpt2": {"pad_token_id": None},
    "mixtral": {},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
}
BASE = {"chunk_size": 8, "head_chunk_size": 16}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": BASE,
    "attention kept": {**BASE, "keep_attention": "device", "keep_kv": "device"},
    "host": {**BASE, "offload": "host", "stream_grads": True},
    "attention on the host": {**BASE, "offload": "host", "keep_attention": "host", "keep_kv": "host"},
    "two levels": {**BASE, "levels": 2},
    "a layer kept": {**BASE, "keep_layers": 1},
    "formulas": {**BASE, "fuse": "none"},
}
BATCHES = {"qwen3": ("multiturn", "left", "packed"), "gemma2": ("multiturn", "left", "packed")}
ONE = ("multiturn",)
PLAIN = ("qwen3", "llama")
"""Families whose attention has no window and no softcap."""
WAITS = {"gemma2": 5, "gemma3_text": 3}
"""Waits of a step where they are more than two: these models make two kinds of masks, each from tensors there."""
DTYPES = ("float32", "bfloat16")


def computed(
    family: str,
    kind: str = "cuda",
    schedules: dict[str, dict[str, Any]] = SCHEDULES,
    dtypes: tuple[str, ...] = DTYPES,
) -> dict[tuple[str, str], dict[str, Any]]:
    """All cases of a family, by one process, on a claimed device of a kind."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    keys = [(dtype, rows) for dtype in dtypes for rows in BATCHES.get(family, ONE)]
    cases = [
        {"family": family, "config": FAMILIES[family], "dtype": dtype, "batch": rows, "schedules": schedules}
        for dtype, rows in keys
    ]
    command = [sys.executable, "-m", "tests.cuda_host.claimed_steps"]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, cwd=ROOT, env=build_stub.claimed(kind)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(keys, json.loads(done.stdout), strict=True))


IN_FULL = ("mixtral",)
"""Family of `make test-all`, half a minute; `make cuda-host` tries all."""


@pytest.mark.full
@pytest.mark.parametrize(
    "family", [name if name in IN_FULL else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_gradients_are_as_precise_as_plain_autograds(family: str) -> None:
    """And they are computed by the device's kernels, with two waits in a step."""
    found = computed(family)
    wrong = {
        key: {name: case["wrong"] for name, case in cases.items() if case["wrong"]} for key, cases in found.items()
    }
    assert {key: cases for key, cases in wrong.items() if cases} == {}
    for (dtype, kind), cases in found.items():
        assert cases.keys() == SCHEDULES.keys()
        for schedule, case in cases.items():
            where = (dtype, kind, schedule)
            if family in PLAIN:
                # Only the efficient kernel takes a mask, and fp32.
                kernel = "efficient" if kind == "left" or dtype == "float32" else "flash"
                assert any(kernel in name and "attention" in name for name in case["called"]), where
            if family in PLAIN and dtype == "bfloat16":
                assert {"addmm.dtype_out", "mm.dtype"} <= case["called"].keys(), where
            assert sum(case["waited"].values()) <= WAITS.get(family, 2), (where, case["waited"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mps", pytest.param("xpu", marks=pytest.mark.slow)])
def test_other_accelerators_take_no_call_of_cuda(kind: str) -> None:
    """Nor float64; attention is computed by its formula, and copies to the host are synchronous."""
    schedules = {name: SCHEDULES[name] for name in ("plain chunks", "attention on the host")}
    for key, cases in computed("llama", kind, schedules, ("float32",)).items():
        for schedule, case in cases.items():
            assert case["wrong"] == {}, (key, schedule)
            assert not any("attention" in name or name == "addmm.dtype_out" for name in case["called"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_formulas_of_the_device_are_attention(kernel: str, causal: bool) -> None:
    dtype = torch.float32 if kernel == "efficient" else torch.bfloat16
    q, k, v, grad = (torch.randn(2, 2, length, 16).to(dtype) for length in (12, 20, 20, 12))
    if causal:
        k, v = k[:, :, :12], v[:, :, :12]
    options = {"flash": (0.0, causal), "efficient": (None, True, 0.0, causal), "cudnn": (None, True, 0.0, causal)}
    o, lse, *_ = getattr(claimed, kernel)(q, k, v, *options[kernel], scale=0.25)
    given = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal, scale=0.25)
    scores = torch.where(
        torch.ones(12, k.shape[2]).tril().bool() | (not causal), given[0] @ given[1].mT / 4, -torch.inf
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(o.double(), want, atol=4 * eps, rtol=0)
    torch.testing.assert_close(lse.flatten(2)[:, :, :12].double(), scores.logsumexp(-1), atol=1e-6, rtol=1e-6)
    rest = {
        "flash": (None, None, 12, k.shape[2], 0.0, causal, None, None),
        "efficient": (None, None, 0.0, [True, True, True, False], causal),
        "cudnn": (None, None, None, None, None, 12, k.shape[2], 0.0, causal),
    }
    backward = getattr(claimed, f"{kernel}_backward")
    if kernel == "efficient":
        found = backward(grad, q, k, v, None, o, lse, *rest[kernel], scale=0.25)
    else:
        found = backward(grad, q, k, v, o, lse, *rest[kernel], scale=0.25)
    expected = torch.autograd.grad(want, given, grad.double())
    for ours, truth in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=16 * eps, rtol=4 * eps)


def test_the_device_refuses_what_kernels_refuse() -> None:
    q = torch.zeros(1, 2, 8, 12)
    with pytest.raises(RuntimeError, match="dtype"):
        claimed.flash(q, q, q, scale=1.0)
    with pytest.raises(RuntimeError, match="head size"):
        claimed.flash(*[q.bfloat16()] * 3, scale=1.0)
    with pytest.raises(RuntimeError, match="stride of a bias"):
        claimed.efficient(q, q, q, torch.zeros(1, 2, 8, 8), True, scale=1.0)
