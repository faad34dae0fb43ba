"""The gate of an MLP by one kernel: exact, found by what it computes, and never read after its backward wrote over it.

Liger's kernel runs in tests/ops/test_triton_interpreter.py. Here operators of torch write over the same tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import streamtune
from streamtune import Schedule
from streamtune.engine import decoder_layers, fused
from streamtune.engine.fused import FusedParts
from streamtune.models import ModelOptions, add_lora, build_meta_model
from streamtune.ops import fused as operators
from streamtune.ops import gate as kernel
from streamtune.plan.simulate import Workload, simulate
from tests.engine.test_fused import batch, build, gradients, worst

SCHEDULES = {
    "layers": Schedule(chunk_size=8, head_chunk_size=16),
    "a layer whole": Schedule(chunk_size=8, head_chunk_size=16, keep_layers=1),
    "two levels on the host": Schedule(chunk_size=8, head_chunk_size=16, levels=2, offload="host", stream_grads=True),
    "chunks": Schedule(chunk_size=8, order="chunk"),
}
GATED = {"llama": True, "qwen3": True, "mistral": True, "gemma2": False, "gpt_neox": False, "cohere": True}
"""Families whose MLP is ``down(silu(gate(x)) * up(x))``; gemma2's activation is gelu."""


def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gate, up, silu(gate) * up


def backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradients over ``gate`` and ``up``, as Liger's kernel does."""
    sigmoid = gate.sigmoid()
    of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    up.copy_(grad * gate * sigmoid)
    gate.copy_(of_gate)
    return gate, up


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """A kernel on the CPU, and how often it is called."""
    found: Counter[str] = Counter()

    def counted(gate: Tensor, up: Tensor) -> Tensor:
        found["silu_mul"] += 1
        return kernel.silu_mul(gate, up)

    monkeypatch.setattr(operators, "FUSION_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(kernel, "_kernels", lambda: (forward, backward))
    for module in (kernel, fused):
        monkeypatch.setattr(module, "is_liger_installed", lambda: True)
    monkeypatch.setattr(fused, "silu_mul", counted)
    kernel.is_gate_kernel_correct.cache_clear()
    yield found
    kernel.is_gate_kernel_correct.cache_clear()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_exact(schedule: str, calls: Counter[str]) -> None:
    model, inputs = build("llama"), batch("multiturn")
    _, want = gradients(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        _, got = gradients(model, inputs)
    assert worst(got, want) < 1e-5
    assert calls["silu_mul"]


def test_with_adapters_on_the_projections(calls: Counter[str]) -> None:
    model: Any = add_lora(build("qwen3"), r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    inputs = batch("plain")
    _, want = gradients(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULES["layers"]):
        _, got = gradients(model, inputs)
    assert worst(got, want) < 1e-5
    assert calls["silu_mul"]


@pytest.mark.parametrize("schedule", ["layers", "a layer whole"])
def test_a_graph_that_is_kept_gives_the_same_gradient_twice(schedule: str, calls: Counter[str]) -> None:
    model, inputs, found = build("llama"), batch("plain"), []
    with streamtune.stream(model, schedule=SCHEDULES[schedule]):
        loss = model(**inputs).loss
        for keep in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=keep)
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert calls["silu_mul"]
    assert worst(found[1], found[0]) < 1e-6


@pytest.mark.parametrize("family", GATED)
def test_a_gate_is_known_by_what_it_computes(family: str, calls: Counter[str]) -> None:
    parts = FusedParts(decoder_layers(build(family))[0])
    assert len(parts._gates) == GATED[family]


def test_random_numbers_are_left_alone(calls: Counter[str]) -> None:
    layer = decoder_layers(build("llama"))[0]
    before = torch.random.get_rng_state()
    FusedParts(layer)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_mlp_of_another_formula_is_left_alone(calls: Counter[str]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x) * 0.5)

    assert not fused._is_gated(Scaled())


@pytest.mark.parametrize("hook", ["of a part", "global"])
def test_what_a_hook_keeps_is_not_written_over(hook: str, calls: Counter[str]) -> None:
    """In the layer as it is called alone: streaming refuses hooks within a layer that are not called by chunks."""
    mlp = decoder_layers(build("llama"))[0].mlp
    parts, kept = FusedParts(mlp), []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if module is mlp.gate_proj:
            kept.append(output)

    added: Any
    if hook == "global":
        added = nn.modules.module.register_module_forward_hook(keep)
    else:
        added = mlp.gate_proj.register_forward_hook(keep)
    try:
        x = torch.randn(3, mlp.gate_proj.in_features, requires_grad=True)
        with parts.replacing_functions():
            y = mlp(x)
    finally:
        added.remove()
    (output,) = kept
    before = output.detach().clone()
    y.sum().backward()
    assert torch.equal(output, before)
    assert not calls


def test_a_kernel_that_is_wrong_is_not_used(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert kernel.is_gate_kernel_correct(device, torch.float32)
    assert kernel.is_gate_kernel_correct(device, torch.bfloat16)
    assert not kernel.is_gate_kernel_correct(device, torch.float64)  # Liger computes in fp32
    kernel.is_gate_kernel_correct.cache_clear()
    monkeypatch.setattr(kernel, "_kernels", lambda: (forward, lambda gate, up, grad: (grad * up, grad * gate)))
    assert not kernel.is_gate_kernel_correct(device, torch.float32)
    kernel.is_gate_kernel_correct.cache_clear()
    model, inputs = build("llama"), batch("plain")
    _, want = gradients(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULES["layers"]):
        _, got = gradients(model, inputs)
    assert worst(got, want) < 1e-5
    assert not calls


def test_simulated_steps_know_its_bytes(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each chunk of a layer: three tensors less in each of two forwards, four less in the backward."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}  # fmt: skip
    found = []
    for installed in (True, False):
        monkeypatch.setattr(fused, "is_liger_installed", lambda installed=installed: installed)
        model = build_meta_model({"model_type": "qwen3", **sizes}, ModelOptions("bfloat16"))
        found.append(simulate(Workload(lambda model=model: model, 1024), Schedule(chunk_size=256, head_chunk_size=64)))
    fewer = found[1].work.touched_bytes - found[0].work.touched_bytes
    activation = 2 * 1024 * 256
    assert fewer == pytest.approx(4 * activation * (2 * 2 + 4), rel=0.01)
    assert found[0].peak_bytes <= found[1].peak_bytes
