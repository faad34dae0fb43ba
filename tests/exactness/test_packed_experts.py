"""Experts of one tensor a layer in 8 or 4 bits: the gradient of the adapters is that of the same model, unstreamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import streamtune
from streamtune.models import AdapterSpec, PackedExperts, add_adapters
from streamtune.models.quantize import PACKAGES, dequantize_weight, is_quantized, quantize, unquantized_experts_note
from streamtune.schedule import Schedule
from tests.precision_kit import Float64, Reference, in_float64, total_error

from .families import batch, build, gradients

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {},
    "gpt_oss": {},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    },
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1},
}  # fmt: skip
"""Experts as outputs by inputs; as inputs by outputs with biases (gpt_oss); in a class of their own (llama4_text)."""
EXPERTS: dict[str, list[str]] = {"gpt_oss": ["q_proj", "v_proj", "gate_up_proj", "down_proj"]}
"""Targets where ``all-linear`` has none of the experts."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two levels": {"levels": 2, "segment_size": 1},
    "chunk order": {"order": "chunk"},
    "keys and attention kept": {"keep_kv": "device", "keep_attention": "device"},
}


@pytest.fixture(params=["int8", "nf4"])
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return str(request.param)


def adapted(
    kind: str | None,
    family: str,
    target: Any = "all-linear",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    implementation: str | None = None,
    **overrides: Any,
) -> Any:
    """A model of a family with a quantised base and adapters away from their initial zeros."""
    base = build(family, **FAMILIES[family], **overrides)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    base = base.to(dtype)
    if kind is not None:
        quantize(base, kind, CPU)
    if implementation is not None:
        base.set_experts_implementation(implementation)
    model = add_adapters(base, AdapterSpec(r=2, target=target))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def reference(model: Any, inputs: dict[str, Any], *args: Any, **settings: Any) -> Reference:
    """Loss and gradients of the quantised model, and of the very weights it computes with in fp64."""
    wide = in_float64(adapted(None, *args, **settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_quantized(weight):
                wide.get_parameter(name).copy_(dequantize_weight(weight, model.dtype).double())
    with Float64():
        truth = gradients(wide, inputs)
    return Reference(truth, gradients(model, inputs))


def packed(model: Any) -> dict[str, PackedExperts]:
    return {name: x for name, x in model.named_parameters() if isinstance(x, PackedExperts)}


@pytest.mark.quick("gpt_oss-on experts", "qwen3_moe-on experts", "mixtral-beside experts")
@pytest.mark.parametrize("where", ["beside experts", "on experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(kind: str, family: str, where: str) -> None:
    on = EXPERTS.get(family, "all-linear")
    attention = ["q_b_proj", "o_proj"] if family == "deepseek_v3" else ["q_proj", "v_proj"]
    target = on if where == "on experts" else attention
    model = adapted(kind, family, target)
    routers = [name for name, _ in model.named_parameters() if name.endswith((".router.weight", ".gate.weight"))]
    assert len(packed(model)) == 2 * len(routers) > 0
    assert unquantized_experts_note(model) is None
    for name in ("masked", "left"):
        inputs = batch(name, rows=2, length=29)
        want = reference(model, inputs, family, target)
        trained = any(".experts." in name for name in want.truth[1])
        assert trained == (where == "on experts" and family != "llama4_text")
        assert all(bool(x.any()) for x in want.truth[1].values())
        with streamtune.stream(model, chunk_size=8):
            want.check(gradients(model, inputs))


@pytest.mark.quick("eager")
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_implementations_of_experts(kind: str, implementation: str) -> None:
    model = adapted(kind, "qwen3_moe", implementation=implementation)
    inputs = batch("plain", rows=2, length=29)
    want = reference(model, inputs, "qwen3_moe")
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(kind: str, schedule: str) -> None:
    model = adapted(kind, "mixtral")
    inputs = batch("plain", rows=1, length=29)
    want = reference(model, inputs, "mixtral")
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, **SCHEDULES[schedule])):
        want.check(gradients(model, inputs))


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_three_ways_in_bfloat16(kind: str, family: str) -> None:
    """Against the rounded weights in fp64 ours is as near as torch itself, in the mean of 16 draws.

    Each token goes to all experts: which are chosen hangs on the rounding of the router's input in bf16.
    """
    inputs = batch("masked")
    target = EXPERTS.get(family, "all-linear")
    torchs = ours = 0.0
    for seed in range(16):
        settings: Any = {"target": target, "dtype": torch.bfloat16, "seed": seed, "num_experts_per_tok": 4}
        model = adapted(kind, family, **settings)
        found = reference(model, inputs, family, **settings)
        torchs += total_error(found.plain[1], found.truth[1]) / 16
        with streamtune.stream(model, chunk_size=8):
            ours += total_error(gradients(model, inputs)[1], found.truth[1]) / 16
    assert ours <= 1.1 * torchs + 1e-6


def test_adapters_of_both_tensors_have_an_effect(kind: str) -> None:
    """In one module with two tensors, each with adapters, the logits follow all four factors."""
    model = adapted(kind, "mixtral")
    inputs = batch("plain", rows=1, length=12)
    with torch.no_grad():
        before = model(**inputs).logits
        for end in ("experts.lora_B.default.weight", "experts.base_layer.lora_B.default.weight"):
            factor = model.get_parameter(f"base_model.model.model.layers.0.mlp.{end}")
            factor.mul_(2)
            after = model(**inputs).logits
            assert (after - before).norm() > 1e-3 * before.norm()
            before = after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_preflight_passes(kind: str, dtype: torch.dtype) -> None:
    with streamtune.stream(adapted(kind, "mixtral", dtype=dtype)) as handle:
        handle.check()
