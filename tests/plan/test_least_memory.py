"""The lower bound of a step's memory is one, and the longest row that fits is found with few simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from streamtune import Schedule
from streamtune.engine import decoder_layers
from streamtune.errors import UnsupportedModelError
from streamtune.models import ModelOptions, add_lora, build_meta_model
from streamtune.plan import Limits, Rates, choose
from streamtune.plan.choices import chunk_order_schedules, excess_bytes, find_least_memory_chunk_order
from streamtune.plan.least_memory import (
    least_excess_bound,
    longest_row_up_to,
    simulate_least_memory_step,
    simulate_one_level_step,
)
from streamtune.plan.lower_bound import LowerBound
from streamtune.plan.simulate import Simulation, Workload, simulate
from streamtune.plan.simulate.cluster import Cluster

LENGTH = 8192
RATES = Rates("a device", 1e13, 1e13, 1e13, 1e12, 1e11, launch_seconds=1e-8)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "gemma3_text": {**SIZES, "sliding_window": 512},
    "gpt_oss": {**SIZES, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "num_hidden_layers": 6,
               "vocab_size": 256, "n_groups": 1},
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH},
    "cohere": SIZES,
    "falcon": {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 256, "alibi": False,
               "multi_query": True, "new_decoder_architecture": False},
}  # fmt: skip
SCHEDULES = {
    "plain": Schedule(1024, 256),
    "two levels": Schedule(1024, 256, levels=2),
    "two levels on the host": Schedule(1024, 256, levels=2, segment_size=4, stream_grads=True, offload="host"),
    "some on the device": Schedule(1024, 256, offload="host", device_layers=2),
    "two levels, mixed": Schedule(1024, 256, offload="host", levels=2, device_layers=3, stream_grads=True),
    "layers kept": Schedule(512, 256, keep_layers=2),
    "disk": Schedule(1024, 256, offload="disk", offload_dir="scratch"),
    "weights on the host": Schedule(1024, 256, weights="host", offload="host"),
    "order chunk": Schedule(1024, 256, order="chunk"),
    "order chunk, only keys on the host": Schedule(1024, 256, order="chunk", keep_kv="host"),
    "order chunk, keys on the host": Schedule(
        1024, 256, order="chunk", levels=2, offload="host", keep_kv="host", stream_grads=True
    ),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def decoder_parameters(model: Any, count: int) -> list[nn.Parameter]:
    return [parameter for layer in decoder_layers(model)[:count] for parameter in layer.parameters()]


def make_workload(
    family: str, dtype: str = "bfloat16", *, adapted: bool = False, frozen: int = 0, **changes: Any
) -> Workload:
    """``frozen``: number of the lowest layers that are not trained, with the embedding."""
    model: Any = build_meta_model({"model_type": family, **FAMILIES[family]}, ModelOptions(dtype))
    if adapted:
        model = add_lora(model, r=8, alpha=16, dropout=0.0, target="all-linear", seed=0)
    if frozen:
        for parameter in [*model.get_input_embeddings().parameters(), *decoder_parameters(model, frozen)]:
            parameter.requires_grad_(False)
    return Workload(lambda: model, LENGTH, **{"make_optimizer": adamw, **changes})


@pytest.fixture
def counted() -> tuple[Callable[[Workload, Schedule], Simulation], list[tuple[int, Schedule]]]:
    """``simulate``, and what was simulated with it."""
    found: list[tuple[int, Schedule]] = []

    def count(workload: Workload, schedule: Schedule) -> Simulation:
        found.append((workload.length, schedule))
        return simulate(workload, schedule)

    return count, found


STEPS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, later micro-batch": {"dtype": "float32", "micro_batches": 3, "autocast": True},
    "adapters": {"adapted": True},
    "last layer": {"frozen": 5},
    "head alone": {"frozen": 6},
    "no optimizer": {"make_optimizer": None},
    "zero2": {"cluster": Cluster(4, 4, engine="zero2")},
    "sequence": {"cluster": Cluster(4, 4, sequence_size=4, form="ulysses")},
    "zero3 offload": {"cluster": Cluster(4, 4, engine="zero3_offload")},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "step"),
    [
        ("qwen3", "bf16"),
        *(pytest.param(family, "bf16", marks=pytest.mark.slow) for family in FAMILIES if family != "qwen3"),
        *(
            pytest.param("qwen3", step, marks=pytest.mark.slow)
            for step in STEPS
            if step not in ("bf16", "zero3 offload")
        ),
        ("qwen3", "zero3 offload"),
        ("gemma3_text", "fp32, later micro-batch"),
    ],
)
def test_no_step_needs_less_than_the_bound(family: str, step: str) -> None:
    workload = make_workload(family, **STEPS[step])
    bound, compared = LowerBound(workload), 0
    for name, schedule in SCHEDULES.items():
        if schedule.weights == "host" and (workload.make_optimizer is None or workload.cluster.ranks > 1):
            continue
        try:
            simulated = simulate(workload, schedule)
        except UnsupportedModelError:
            continue
        least = bound.least_bytes(schedule, LENGTH)
        assert least.peak_bytes <= simulated.peak_bytes, name
        assert least.host_bytes <= simulated.host_bytes, name
        assert least.disk_bytes <= simulated.disk_bytes, name
        compared += 1
    assert compared >= 6
    if (family, step) == ("qwen3", "bf16"):  # of most of the memory that grows with the length
        least = bound.least_bytes(SCHEDULES["plain"], LENGTH)
        assert least.terms["layer inputs"] == simulate(workload, SCHEDULES["plain"]).terms["layer inputs"]


@pytest.mark.parametrize("frozen", [0, 5])
def test_what_fits_is_not_refused_by_the_bound(frozen: int) -> None:
    workload = make_workload("qwen3", frozen=frozen)
    schedule = Schedule(1024, 256, stream_grads=True)
    limits = Limits(int(1.06 * simulate(workload, schedule).peak_bytes / 0.95), 0)
    assert least_excess_bound(workload, limits, {}).excess_bytes(limits) <= 0
    assert least_excess_bound(workload, limits, {"levels": 1, "order": "layer"}).excess_bytes(limits) <= 0


def test_a_small_disk_does_not_hide_the_host() -> None:
    """Sequences that ranks share exclude ``order: chunk``, which could also fit."""
    workload = make_workload("qwen3", cluster=Cluster(4, 4, sequence_size=4, form="ulysses"))
    step = simulate(workload, Schedule(1024, 256, levels=2, offload="host", stream_grads=True))
    limits = Limits(int(1.1 * step.peak_bytes), int(1.3 * step.host_bytes), disk_bytes=1 << 20)
    assert choose(workload, limits, RATES, fixed={"offload_dir": "scratch"}).schedule.offload == "host"


@pytest.mark.full
def test_a_refusal_needs_no_simulation_of_what_cannot_fit(counted: Any) -> None:
    """At any length but the longest ones that could fit, the bound is enough."""
    count, simulated = counted
    workload = make_workload("qwen3")
    near = simulate(workload, Schedule(1024, 256, levels=2, stream_grads=True))
    limits = Limits(int(near.peak_bytes / 0.95) + 1, 0)
    far = replace(workload, length=64 * LENGTH)
    assert least_excess_bound(far, limits, {}).excess_bytes(limits) > 0
    longest = longest_row_up_to(far, limits, {}, count)
    assert LENGTH * 0.98 <= longest < 2 * LENGTH
    assert len(simulated) <= 6
    assert max(length for length, _ in simulated) < 4 * LENGTH
    assert excess_bytes(simulate_least_memory_step(replace(far, length=longest), limits, {}, simulate)[1], limits) <= 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("host", "offload"), [(1 << 16, "device"), pytest.param(1 << 20, "host", marks=pytest.mark.full)]
)
def test_the_longest_row_of_ranks_is_accepted(host: int, offload: str) -> None:
    """The search may find it on another tier than the first, which is the host."""
    workload = make_workload("qwen3", cluster=Cluster(4, 4, sequence_size=4, form="ulysses"))
    step = simulate(workload, Schedule(1024, 256, levels=2, stream_grads=True))
    limits = Limits(int(1.2 * step.peak_bytes / 0.95), host)
    longest = longest_row_up_to(replace(workload, length=64 * LENGTH), limits, {}, simulate)
    assert longest > LENGTH
    schedule, step = simulate_least_memory_step(replace(workload, length=longest), limits, {}, simulate)
    assert excess_bytes(step, limits) <= 0
    assert schedule.offload == offload


@pytest.mark.full
@pytest.mark.parametrize("host", [0, pytest.param(1 << 22, marks=pytest.mark.slow), 1 << 34])
@pytest.mark.parametrize(
    "fixed",
    [
        {},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in ({"levels": 1}, {"order": "layer", "offload": "device"}, {"keep_kv": "device"})
        ),
    ],
)
def test_the_longest_row_is_the_one_of_a_plain_search(host: int, fixed: dict[str, Any]) -> None:
    """Compared with all multiples of 512 tokens, each simulated with every schedule of least memory."""
    workload = make_workload("qwen3")
    limits = Limits(int(simulate(workload, Schedule(1024, 256)).peak_bytes / 0.95) + 1, host)
    far = replace(workload, length=1 << 20)
    longest = longest_row_up_to(far, limits, fixed, simulate)

    def fits(length: int) -> bool:
        step = replace(far, length=length)
        if excess_bytes(simulate_least_memory_step(step, limits, fixed, simulate)[1], limits) <= 0:
            return True
        return simulate_one_level_step(step, limits, fixed, simulate) is not None

    assert longest
    assert longest == far.length or not fits(int(longest * 1.03))
    if longest != far.length:
        assert fits(int(longest * 0.99))


@pytest.mark.slow
def test_variants_that_cannot_be_better_are_not_simulated(counted: Any) -> None:
    """The same variant is found as by simulating each of them."""
    count, simulated = counted
    workload = make_workload("qwen3")
    for host in (0, 1 << 24, 1 << 34):
        for device in (1 << 21, 1 << 24, 1 << 26, 1 << 34):
            limits = Limits(device, host)
            schedules = list(chunk_order_schedules(limits, {}))
            steps = {schedule: simulate(workload, schedule) for schedule in schedules}
            fitting = [schedule for schedule in schedules if excess_bytes(steps[schedule], limits) <= 0]
            want = fitting[0] if fitting else min(schedules, key=lambda one: excess_bytes(steps[one], limits))
            simulated.clear()
            found = find_least_memory_chunk_order(workload, limits, {}, count)
            assert found is not None
            assert found[0] == want
            assert len(simulated) <= len(schedules)
            smaller = find_least_memory_chunk_order(
                workload, limits, {}, simulate, smallest_excess=excess_bytes(steps[want], limits)
            )
            assert smaller is None or excess_bytes(smaller[1], limits) <= 0
