"""Frozen parameters: the gradients of the others are exact, and layers below the lowest of them have no backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import streamtune
from streamtune import Schedule
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.engine.observe import with_observer
from streamtune.models import TrainedParts, freeze_parts
from streamtune.models.frozen_parts import narrow_frozen_weights
from tests.conformance.reducer import build as build_any

from .families import batch, build, gradients, reference
from .test_routers import routed
from .test_states import SHARING, sharing

SCHEDULES: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "two levels": {"levels": 2, "segment_size": 2},
    "chunk order": {"order": "chunk"},
    "chunk order, two levels": {"order": "chunk", "levels": 2},
    "all kept": {"keep_layers": 1, "keep_kv": "device", "keep_attention": "device"},
    "host": {"offload": "host", "device_layers": 1, "keep_kv": "host", "keep_attention": "host"},
    "gradients by chunk": {"stream_grads": True, "offload": "host"},
    "weights on host": {"weights": "host", "levels": 2},
}
PARTS: dict[str, TrainedParts] = {
    "last": TrainedParts("last 1"),
    "first": TrainedParts("first 1"),
    "middle, some modules, the head": TrainedParts("1-1", (r".*norm",), ("lm_head",)),
    "norms": TrainedParts(train=(r".*norm",)),
    "without the embedding": TrainedParts(freeze=(r".*(embed|wte)",)),
}
FAMILIES = ("qwen3", "gpt2", "mixtral", "phi", "falcon_h1", "mamba2", "gemma3_text")
"""Norms of queries and keys; learnt positions; experts; parallel attention; hybrid of scan and attention; scan."""


class Passes:
    """Counts the passes of each layer over a chunk."""

    def __init__(self) -> None:
        self.found: dict[int, Counter[str]] = {}

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        self.found.setdefault(id(layer), Counter())[pass_name] += 1

    def on_new_tensors(self, *_: Any) -> None: ...

    def on_resize(self, *_: Any) -> None: ...


def make(family: str, parts: TrainedParts) -> Any:
    settings = {"num_hidden_layers": 3} if family == "qwen3" else {}
    model: Any = build(family, **settings) if family in ("qwen3", "gpt2", "mixtral") else build_any(family)
    freeze_parts(model, parts)
    return model


def check(model: Any, what: str, inputs: dict[str, Any], **schedule: Any) -> None:
    want = reference(model, inputs)
    if schedule.get("weights") == "host" and not usable_host_bytes():
        pytest.skip("no host memory")
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, head_chunk_size=11, **schedule)):
        want.check(gradients(model, inputs), what)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.quick("recomputed")
@pytest.mark.parametrize("schedule", ["recomputed", "two levels", "chunk order"])
def test_gradients_are_exact(schedule: str) -> None:
    model = make("qwen3", PARTS["middle, some modules, the head"])
    check(model, schedule, batch("left"), **SCHEDULES[schedule])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_other_families_are_exact(family: str) -> None:
    inputs = batch("masked")
    for name, parts in PARTS.items():
        try:
            model = make(family, parts)
        except streamtune.errors.ArgumentError:  # the family has another number of layers, or other names
            assert name in ("middle, some modules, the head", "norms", "without the embedding")
            continue
        for schedule, fields in SCHEDULES.items():
            check(model, f"{family}, {name}, {schedule}", inputs, **fields)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3n_text", "zamba2", "mixtral", "gpt_oss"])
def test_frozen_layers_that_share_keys_or_weights_or_count_in_a_router_loss(family: str) -> None:
    make_model = sharing if family in SHARING else routed if family in ("mixtral", "gpt_oss") else build_any
    for parts in (TrainedParts("last 1"), TrainedParts("first 1"), TrainedParts(train=(r".*norm",))):
        model = make_model(family)
        freeze_parts(model, parts)
        for schedule, fields in SCHEDULES.items():
            if family not in SHARING or fields.get("order") != "chunk":  # refused
                check(model, f"{family}, {parts}, {schedule}", batch("right"), **fields)


@pytest.mark.full
def test_a_tied_head_is_trained_as_the_embedding() -> None:
    model: Any = build("qwen3", num_hidden_layers=3, tie_word_embeddings=True)
    freeze_parts(model, TrainedParts("last 1", train=("lm_head",)))
    assert model.model.embed_tokens.weight.requires_grad
    for schedule, fields in SCHEDULES.items():
        check(model, schedule, batch("right"), **fields)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "falcon_h1"])
def test_frozen_weights_in_bfloat16_are_as_precise_as_with_autograd(family: str) -> None:
    """Trained weights are fp32, frozen ones bf16, and the model computes in autocast; the truth has the same values."""
    parts = TrainedParts("last 1", train=("model.norm",) if family == "qwen3" else (), frozen_dtype=torch.bfloat16)
    model = make(family, parts)
    narrow_frozen_weights(model, parts)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}

    def in_autocast(each: Any, inputs: dict[str, Any]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=next(each.parameters()).dtype != torch.float64):
            return each(**inputs).loss

    inputs = batch("masked")
    want = reference(model, inputs, in_autocast)
    for schedule, fields in SCHEDULES.items():
        with streamtune.stream(model, schedule=Schedule(chunk_size=16, head_chunk_size=11, **fields)):
            want.check(gradients(model, inputs, in_autocast), schedule, constant=2e-3)


@pytest.mark.quick("two levels")
@pytest.mark.parametrize("schedule", ["recomputed", "two levels", "chunk order"])
def test_layers_below_the_lowest_trained_weight_run_only_forward(schedule: str) -> None:
    model: Any = build("qwen3", num_hidden_layers=4)
    freeze_parts(model, TrainedParts("2-2"))
    passes, layers = Passes(), model.model.layers
    settings = Schedule(chunk_size=16, head_chunk_size=11, **SCHEDULES[schedule])
    with streamtune.stream(model, schedule=settings) as handle, with_observer(passes):
        loss = model(**batch("plain")).loss
        kept = handle.tiers.host.live_bytes
        loss.backward()
    assert kept == 0
    for layer in layers[:2]:
        assert set(passes.found[id(layer)]) == {"store"}  # 3 chunks, once
        assert passes.found[id(layer)]["store"] == 3
    for layer in layers[2:]:
        assert passes.found[id(layer)]["replay"] == 3
    assert [any(p.grad is not None for p in layer.parameters()) for layer in layers] == [False, False, True, False]
