"""Simulated steps with frozen layers: no byte and no FLOP but of their weights and their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamtune.engine.memory.placement import best_segment_size, place_differentiated_layers
from streamtune.models import ModelOptions, TrainedParts, build_meta_model
from streamtune.plan.simulate import Workload
from streamtune.plan.simulate.simulate import Simulation, simulate
from streamtune.plan.simulate.workload import FlopCount
from streamtune.schedule import Schedule

SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
LENGTH = 512
SCHEDULES: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "kept": {"keep_kv": "device", "keep_attention": "device"},
    "whole layers": {"keep_layers": 1},
    "host": {"offload": "host", "keep_kv": "host", "stream_grads": True},
    "chunk order": {"order": "chunk"},
    "weights on host": {"weights": "host"},
}


def model_of(layers: int, parts: TrainedParts) -> Any:
    return build_meta_model({**SHAPE, "num_hidden_layers": layers}, ModelOptions(trained=parts))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def step(model: Any, *, full: bool = False, **fields: Any) -> Simulation:
    workload = Workload(lambda: model, LENGTH, make_optimizer=adamw)
    return simulate(workload, Schedule(chunk_size=64, head_chunk_size=32, **fields), full=full)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_frozen_layers_below_take_the_bytes_of_their_weights(name: str) -> None:
    """12 layers, of which 3 are trained, against a model of the last 3 layers alone."""
    whole, alone = (model_of(layers, TrainedParts("last 3")) for layers in (12, 3))
    fields = SCHEDULES[name]
    large, small = step(whole, **fields), step(alone, **fields)
    weights = sum(p.nbytes for p in whole.parameters()) - sum(p.nbytes for p in alone.parameters())
    on_host = fields.get("weights") == "host"
    for phase, size in large.phases.items():
        assert size - small.phases[phase] == (0 if on_host else weights), phase
    assert large.host_bytes - small.host_bytes == (weights if on_host else 0)
    if on_host:  # the backward fetches no weights of frozen layers
        assert large.work.moved_bytes - small.work.moved_bytes == weights


@pytest.mark.full
@pytest.mark.parametrize("name", [*SCHEDULES, "two levels"])
def test_layers_left_out_of_a_simulation_change_nothing(name: str) -> None:
    model, fields = model_of(12, TrainedParts("last 3")), SCHEDULES.get(name, {"levels": 2})
    assert step(model, full=True, **fields).phases == step(model, **fields).phases


def test_frozen_layers_compute_no_gradients_of_weights() -> None:
    """Above the lowest trained layer 2 FLOPs are saved for each token and frozen weight; below, also 4 more."""
    model = model_of(12, TrainedParts(freeze=("lm_head", "model.embed_tokens")))
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    everything = step(model).work.matmul_flops
    above = step(model_of(12, TrainedParts("first 1"))).work.matmul_flops
    assert everything - above == 2 * LENGTH * 11 * layer
    below = step(model_of(12, TrainedParts("last 1")), keep_kv="device").work.matmul_flops
    assert step(model, keep_kv="device").work.matmul_flops - below == (2 + 4) * LENGTH * 11 * layer


def test_model_flops_count_only_layers_with_a_backward() -> None:
    everything, last = (FlopCount.from_model(model_of(12, TrainedParts(n))) for n in ("first 12", "last 3"))
    layer = sum(p.numel() for p in model_of(1, TrainedParts("last 1")).model.layers[0].parameters() if p.dim() == 2)
    saved = everything.step_flops([(0, LENGTH)]) - last.step_flops([(0, LENGTH)])
    pairs = LENGTH * (LENGTH + 1) // 2
    assert saved == 9 * (4 * LENGTH * layer + 4 * last.width * pairs)


def test_segments_are_sized_for_the_layers_with_a_backward() -> None:
    assert [best_segment_size(36), best_segment_size(36, 28), best_segment_size(36, 35)] == [6, 2, 1]
    for first in range(36):
        sizes = [_stored_inputs(size, first) for size in range(1, 37)]
        assert _stored_inputs(best_segment_size(36, first), first) == min(sizes), first


def _stored_inputs(size: int, first: int) -> int:
    """Return the most inputs of 36 layers that are stored at once, if the backward ends at layer ``first``."""
    places = place_differentiated_layers(Schedule(levels=2, segment_size=size), 36, first)
    return sum(place.begins_segment for place in places) + min(size, 36) - 1
