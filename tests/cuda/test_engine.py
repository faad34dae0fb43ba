"""The engine on the device: the gradient of plain autograd, from every tier, and the memory that was simulated."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import streamtune
from streamtune import Schedule
from tests.exactness.families import batch, build, gradients, reference, worst

from .conftest import LARGE, needs

FAMILIES = ("qwen3", "mistral", "gemma2", "gpt_oss")
LARGER: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 512}
SCHEDULES = {
    "device": Schedule(chunk_size=100, head_chunk_size=70),
    "host": Schedule(chunk_size=100, head_chunk_size=70, offload="host"),
    "host, attention kept there": Schedule(chunk_size=64, offload="host", keep_attention="host", keep_kv="host"),
    "two levels": Schedule(chunk_size=100, levels=2, offload="host", device_layers=1),
    "kept": Schedule(chunk_size=100, keep_attention="device", keep_kv="device", keep_layers=1),
    "gradients streamed": Schedule(chunk_size=100, offload="host", stream_grads=True),
}


def on(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize("kind", ["plain", "left", "multiturn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_plain_autograd(device: torch.device, family: str, kind: str) -> None:
    model = build(family, **LARGER).to(device)
    inputs = on(device, batch(kind, rows=2, length=300))
    want = reference(model, inputs)
    for name, schedule in SCHEDULES.items():
        with streamtune.stream(model, schedule=schedule):
            want.check(gradients(model, inputs), name)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])  # its experts are fp32 only
def test_bf16_is_as_precise_as_plain_autograd(device: torch.device, family: str) -> None:
    """Three ways: fp32 of the rounded weights, plain autograd in bf16, ours."""
    model = build(family, dtype=torch.bfloat16, **LARGER).to(device)
    inputs = on(device, batch("multiturn", rows=2, length=300))
    _, plain = gradients(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULES["host"]):
        _, ours = gradients(model, inputs)
    _, truth = gradients(model.float(), inputs)
    assert worst(ours, truth) <= 1.5 * worst(plain, truth) + 1e-3


def test_ten_steps_from_the_host_are_ten_steps_from_the_device(device: torch.device) -> None:
    """A copy that is read too early, or memory that is given away too soon, shows in some step or other."""
    model = build("qwen3", dtype=torch.bfloat16, **LARGER, num_hidden_layers=6).to(device)
    schedules = [SCHEDULES["device"], SCHEDULES["host"], SCHEDULES["gradients streamed"]]
    for step in range(10):
        inputs = on(device, batch("plain", rows=2 + step % 2, length=480 - 16 * step))
        found = []
        for schedule in schedules:
            with streamtune.stream(model, schedule=schedule):
                found.append(gradients(model, inputs)[1])
        for other in found[1:]:
            assert worst(other, found[0]) <= 2e-2


def medium(device: torch.device | str) -> Any:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=32_000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=1 << 18,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


@LARGE
@pytest.mark.parametrize("name", ["device", "host", "kept", "two levels"])
def test_the_simulated_peak_is_the_allocators(device: torch.device, name: str) -> None:
    needs(12)
    simulating = pytest.importorskip(
        "streamtune.plan.simulate.simulate", reason="there is no simulation in this version"
    )
    length = 32_768
    schedule = Schedule(**{**vars(SCHEDULES[name]), "chunk_size": 2048, "head_chunk_size": 1024})
    workload = simulating.Workload(make_model=lambda: medium("meta"), length=length)
    simulated = simulating.simulate(workload, schedule).peak_bytes
    model = medium(device)
    ids = torch.randint(0, 32_000, (1, length), device=device)
    before = 0
    with streamtune.stream(model, schedule=schedule):
        for step in range(2):  # the first one also tries kernels
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            if step == 0:
                before = torch.cuda.memory_allocated() - sum(p.numel() * p.element_size() for p in model.parameters())
            model(input_ids=ids, labels=ids).loss.backward()
    measured = torch.cuda.max_memory_allocated() - before
    print(f"{name}: simulated {simulated / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert abs(simulated - measured) <= 0.05 * measured


def test_segments_grow_where_the_command_line_starts(tmp_path: Path) -> None:
    """What the command line sets is what the allocator follows."""
    code = (
        "from streamtune.cli.machine import use_expandable_segments; use_expandable_segments(); import torch; "
        "torch.zeros(1, device='cuda'); "
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "True", done.stderr
