"""The record of a step with one more period of layers, made from a shorter step, equals the record of the real step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune.models import add_lora
from streamtune.ops.devices import simulate_device_type
from streamtune.plan.simulate import Workload, simulate
from streamtune.plan.simulate.extrapolate import layer_kinds, make_step_layout, repeat_layer_period
from streamtune.plan.simulate.step import Step, fewer_layers, shorten_step, trace_step
from streamtune.plan.simulate.trace import Cell, CellPlace
from streamtune.schedule import Schedule

LENGTH = 64 * 9 + 33
SMALL: dict[str, Any] = {
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 14},
    "gemma2": {"num_hidden_layers": 14, "sliding_window": 100, "query_pre_attn_scalar": 16},
    "gemma3_text": {"num_hidden_layers": 36, "sliding_window": 100, "query_pre_attn_scalar": 16},
    "gpt_oss": {"num_hidden_layers": 14, "sliding_window": 100, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_hidden_layers": 9, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "bloom": {"n_layer": 9, "num_hidden_layers": 9},
    "mamba2": {"num_hidden_layers": 9, "num_heads": 8, "head_dim": 16, "expand": 2, "state_size": 16, "n_groups": 1},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain chunks": {},
    "inputs on host": {"offload": "host", "device_layers": 2, "stream_grads": True},
    "two levels": {"levels": 2, "segment_size": 2, "offload": "host"},
    "all on host": {"offload": "host", "keep_kv": "host", "keep_attention": "host"},
    "a layer whole": {"keep_layers": 1, "keep_kv": "device"},
    "weights on host": {"weights": "host", "offload": "host"},
}
STEPS: dict[str, dict[str, Any]] = {
    "first micro-batch": {},
    "later micro-batch": {"accumulating": True, "autocast": "bfloat16"},
    "gradients freed": {"frees_gradients": True, "device": "cpu"},
}


def build(family: str, adapted: bool = False) -> nn.Module:
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if adapted:
            model = add_lora(model, r=8, alpha=16, dropout=0.0, target="all-linear", seed=0)
    made: nn.Module = model.train()
    return made


def pairs(model: Any, schedule: Schedule, step: Step) -> list[tuple[dict[CellPlace, Cell], dict[CellPlace, Cell]]]:
    """Return the made and the real record of each longer step of a simulation."""
    streamed = step.mode == "stream"
    with simulate_device_type(step.device):
        layout = make_step_layout(model, schedule, LENGTH, streamed=streamed, layers=True, chunks=streamed)
    found, short = [], {}
    for shorter in layout.shorter_steps(schedule, layer_kinds(model, schedule if streamed else None)):
        whole = step if shorter.length == LENGTH else shorten_step(step, shorter.length, schedule.head_chunk_size)
        with fewer_layers(model, shorter.layers):
            cells = trace_step(model, shorter.schedule, whole).cells
        if shorter.longer is None:
            short = cells
            continue
        made = repeat_layer_period(short, layout.middle_period_layers(shorter.longer))
        assert made is not None
        found.append((made, cells))
    return found


def check(model: Any, schedule: Schedule, step: Step) -> None:
    records = pairs(model, schedule, step)
    assert records
    for made, run in records:
        assert list(made) == list(run)
        for place, cell in run.items():
            assert made[place].operators == cell.operators, place
            assert made[place].moments == cell.moments, place
            assert made[place].work == pytest.approx(cell.work, rel=1e-12), place


@pytest.mark.quick("later micro-batch-all on host")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", STEPS)
def test_a_longer_step_is_the_one_that_is_run(schedule: str, step: str) -> None:
    chosen = Schedule(chunk_size=64, head_chunk_size=32, **SCHEDULES[schedule])
    check(build("qwen3"), chosen, Step("stream", LENGTH, **STEPS[step]))


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule", ["plain chunks", "all on host", pytest.param("a layer whole", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_it_is_of_other_families(family: str, schedule: str) -> None:
    chosen = Schedule(chunk_size=64, head_chunk_size=32, **SCHEDULES[schedule])
    check(build(family), chosen, Step("stream", LENGTH, accumulating=True))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["plain chunks", "two levels", "all on host", "a layer whole"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_so_it_is_with_adapters(family: str, schedule: str) -> None:
    chosen = Schedule(chunk_size=64, head_chunk_size=32, **SCHEDULES[schedule])
    check(build(family, adapted=True), chosen, Step("stream", LENGTH, accumulating=True, autocast="bfloat16"))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["plain", "checkpoint"])
def test_so_it_is_without_chunks(mode: Any) -> None:
    check(
        build("qwen3"),
        Schedule(chunk_size=64, head_chunk_size=32),
        Step(mode, LENGTH, accumulating=True, autocast="bfloat16"),
    )


@pytest.mark.full
@pytest.mark.parametrize("levels", [1, 2])
def test_the_order_of_chunks_is_run(levels: Any) -> None:
    """With ``order: chunk`` the sums of all layers are cast in a cell of no layer, so the longer step is run."""
    schedule = replace(Schedule(chunk_size=64, head_chunk_size=32), order="chunk", levels=levels)
    long = Workload(partial(build, "qwen3"), LENGTH, device_type="cuda", micro_batches=2)
    assert simulate(long, schedule) == simulate(long, schedule, full=True)
