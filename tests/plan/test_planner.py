"""The planner's choice fits, no known schedule that fits is faster, and given fields are kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from streamtune import Schedule
from streamtune.engine import keep_on_host
from streamtune.errors import ArgumentError
from streamtune.models import ModelOptions, TrainedParts, build_meta_model
from streamtune.plan import Limits, Rates, as_fixed_fields, choose, evaluate_schedule
from streamtune.plan.choices import SearchSpace, enumerate_candidates, excess_bytes
from streamtune.plan.estimate import Estimator, StepCost
from streamtune.plan.least_memory import least_memory_schedule, longest_row_up_to, simulate_least_memory_step
from streamtune.plan.lower_bound import LowerBound
from streamtune.plan.planner import add_offloaded_weights
from streamtune.plan.simulate import Simulation, Workload, simulate
from streamtune.plan.simulate.memory import device_model_bytes, host_model_bytes, model_bytes
from streamtune.plan.simulate.meta_operators import meta_copy

MIB = 1 << 20
LAYERS, LENGTH = 6, 4096
RATES = Rates("a device", 1e13, 1e13, 1e13, 1e12, 1e11, launch_seconds=1e-8)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def trained_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


@pytest.fixture(scope="module")
def workload() -> Workload:
    model = build_meta_model(CONFIG, ModelOptions("bfloat16"))
    return Workload(lambda: model, LENGTH, make_optimizer=adamw)


@pytest.fixture(scope="module")
def known(workload: Workload) -> Any:
    """A ``simulate`` with a cache, because many tests simulate the same steps."""
    found: dict[tuple[int, Schedule], Simulation] = {}

    def remembered(asked: Workload, schedule: Schedule) -> Simulation:
        key = (asked.length, schedule)
        if key not in found:
            found[key] = simulate(asked, schedule)
        return found[key]

    return remembered


def estimator(workload: Workload, known: Any, chunks: tuple[int, ...] = (512, 1024, 2048)) -> Estimator:
    return Estimator(workload, LAYERS, known, chunks=chunks, head_chunk=256)


# --- estimates --------------------------------------------------------------------------------------------------------


@pytest.mark.quick(Schedule(1024, 256).describe(), Schedule(1024, 256, offload="host").describe())
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(1024, 256),
        Schedule(2048, 256),
        Schedule(1024, 256, keep_kv="device", keep_attention="device"),
        Schedule(1024, 256, keep_layers=2),
        Schedule(1024, 256, keep_layers=2, keep_attention="device"),
        Schedule(1024, 256, offload="host"),
        Schedule(1024, 256, offload="host", device_layers=2),
        Schedule(1024, 256, levels=2),
        Schedule(1024, 256, keep_attention="host"),
    ],
    ids=Schedule.describe,
)
def test_an_estimate_is_near_the_simulation(workload: Workload, known: Any, schedule: Schedule):
    estimated = estimator(workload, known).estimate(schedule)
    truth = StepCost.from_simulation(known(workload, schedule))
    assert estimated.device_bytes == pytest.approx(truth.device_bytes, rel=0.12)
    assert estimated.host_bytes == pytest.approx(truth.host_bytes, rel=0.12, abs=MIB / 4)
    assert estimated.work.matmul_flops == pytest.approx(truth.work.matmul_flops, rel=0.08)
    assert estimated.work.attention_flops == pytest.approx(truth.work.attention_flops, rel=0.08)
    assert estimated.work.moved_bytes == pytest.approx(truth.work.moved_bytes, rel=0.2, abs=MIB / 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "fields", [{}, {"levels": 2}, {"keep_layers": 1}, {"keep_kv": "device"}, {"offload": "host", "device_layers": 1}]
)
def test_an_estimate_counts_no_frozen_layers_below_the_trained_ones(fields: dict[str, Any]):
    settings = {**CONFIG, "num_hidden_layers": 12}
    model = build_meta_model(settings, ModelOptions("bfloat16", trained=TrainedParts("last 3")))
    some = Workload(lambda: model, LENGTH, make_optimizer=trained_adamw)
    schedule = Schedule(1024, 256, **fields)
    estimated = Estimator(some, 12, simulate, chunks=(512, 1024, 2048), head_chunk=256).estimate(schedule)
    found = simulate(some, schedule)
    truth = StepCost.from_simulation(found)
    assert estimated.device_bytes == pytest.approx(truth.device_bytes, rel=0.12)
    assert estimated.work.matmul_flops == pytest.approx(truth.work.matmul_flops, rel=0.1)
    assert estimated.work.attention_flops == pytest.approx(truth.work.attention_flops, rel=0.1)
    assert LowerBound(some).least_bytes(schedule, LENGTH).peak_bytes <= found.peak_bytes


# --- choices ----------------------------------------------------------------------------------------------------------


def test_with_room_for_everything_nothing_is_recomputed(workload: Workload, known: Any):
    plan = choose(workload, Limits(1 << 40, 1 << 40), RATES, simulate=known)
    assert plan.schedule.keep_layers == LAYERS
    assert plan.simulations == 1
    assert plan.fits


def budgets(workload: Workload, known: Any) -> list[int]:
    """Return memory sizes in bytes between the smallest step and one that keeps everything."""
    least = known(workload, Schedule(1024, 256, offload="host", levels=2, stream_grads=True)).peak_bytes
    most = known(workload, Schedule(2048, 256, keep_layers=LAYERS)).peak_bytes
    return [int(least * 1.15 + part * (most - least)) for part in (0.02, 0.15, 0.4, 0.8)]


@pytest.mark.full
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("host", [0, 1 << 30], ids=["no host", "host"])
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster(workload: Workload, known: Any, index: int, host: int):
    budget = budgets(workload, known)[index]
    limits = Limits(budget, host)
    if not host:  # what cannot be moved away needs a larger device
        limits = replace(limits, device_bytes=budgets(workload, known)[index + 1])
    plan = choose(workload, limits, RATES, simulate=known)
    assert plan.fits
    assert plan.simulation.peak_bytes <= limits.device_limit
    assert plan.simulation.host_bytes <= limits.host_limit
    for other in (
        Schedule(1024, 1024),
        Schedule(2048, 1024, keep_attention="device"),
        Schedule(1024, 1024, keep_kv="device"),
        Schedule(1024, 256, keep_layers=1),
        Schedule(1024, 256, levels=2),
    ):
        step = evaluate_schedule(workload, other, limits, RATES, simulate=known)
        assert not step.fits or step.step_seconds >= 0.98 * plan.step_seconds, other.describe()


@pytest.mark.full
def test_an_estimate_that_errs_for_long_chunks_leaves_shorter_ones_as_they_are(workload: Workload, known: Any):
    long = replace(workload, length=16 * LENGTH)
    sampled = {2048, 8192}  # what the estimator simulates; longer chunks are extrapolated

    def erring(asked: Workload, schedule: Schedule) -> Simulation:
        found = known(asked, schedule)
        if schedule.chunk_size in sampled or schedule.chunk_size < max(sampled):
            return found
        more = {name: size + (1 << 30) for name, size in found.phases.items()}
        return replace(found, peak_bytes=found.peak_bytes + (1 << 30), phases=more)

    limits = Limits(int(1.5 * known(long, Schedule(8192, 256, offload="host")).peak_bytes), 1 << 34, margin=0.0)
    fixed = {"keep_layers": 0, "offload": "host"}
    plan = choose(long, limits, RATES, fixed=fixed, simulate=erring)
    assert plan.schedule.chunk_size == max(sampled)
    assert plan.step_seconds < evaluate_schedule(long, least_memory_schedule(limits, fixed), limits, RATES).step_seconds


@pytest.mark.full
def test_more_memory_is_never_slower(workload: Workload, known: Any):
    plans = [choose(workload, Limits(size, 1 << 30), RATES, simulate=known) for size in budgets(workload, known)]
    seconds = [plan.step_seconds for plan in plans]
    assert all(later <= 1.01 * before for before, later in pairwise(seconds)), seconds
    assert any(plan.alternatives for plan in plans)
    for plan in plans:
        for other in plan.alternatives:
            assert other.why_not
            assert other.fits == (
                other.peak_bytes <= plan.limits.device_limit and other.host_bytes <= plan.limits.host_limit
            )


@pytest.mark.quick("keep_attention", "offload device_layers")
@pytest.mark.parametrize(
    "fixed",
    [
        {"chunk_size": 700, "head_chunk_size": 100},
        {"keep_attention": "device"},
        {"keep_kv": "no", "keep_attention": "no", "keep_layers": 0},
        {"levels": 2, "segment_size": 3},
        {"offload": "host", "device_layers": 2},
        {"device_layers": 2},
        {"stream_grads": True, "grad_dtype": "param"},
        as_fixed_fields(Schedule(512, 128, keep_attention="host")),
    ],
    ids=" ".join,
)
def test_what_is_given_stays(workload: Workload, known: Any, fixed: dict[str, Any]):
    plan = choose(workload, Limits(1 << 33, 1 << 33), RATES, fixed=fixed, simulate=known)
    assert {name: getattr(plan.schedule, name) for name in fixed} == fixed


@pytest.mark.full
def test_on_the_cpu_nothing_is_moved_to_the_memory_it_is_in(workload: Workload, known: Any):
    cpu = replace(workload, device_type="cpu")
    size = budgets(workload, known)[1]
    plan = choose(cpu, Limits(size, size, shared=True), replace(RATES, overlaps=False))
    assert plan.schedule.offload == "device"
    assert "host" not in (plan.schedule.keep_kv, plan.schedule.keep_attention)
    assert plan.simulation.host_bytes == 0


def test_a_disk_is_used_where_a_directory_is_named(workload: Workload, known: Any, tmp_path: Any):
    size = int(1.1 * budgets(workload, known)[0])
    limits = Limits(size, 0, disk_bytes=1 << 40)
    search_space = SearchSpace(LAYERS, LENGTH, limits, {})
    assert search_space.candidate_values("offload") == ("device",)
    search_space = SearchSpace(LAYERS, LENGTH, limits, {"offload_dir": str(tmp_path)})
    assert search_space.candidate_values("offload") == ("device", "disk")
    found = [
        c
        for c in enumerate_candidates(search_space, estimator(workload, known), limits)
        if c.schedule.offload == "disk"
    ]
    assert found
    assert all(c.schedule.offload_dir == str(tmp_path) and c.cost.disk_bytes > 0 for c in found)
    assert list(tmp_path.iterdir()) == []


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_length_nothing_fits_names_the_longest_that_does(workload: Workload, known: Any):
    fits = known(workload, Schedule(1024, 256, levels=2, stream_grads=True)).peak_bytes
    limits = Limits(int(fits / 0.95), 0)
    with pytest.raises(ArgumentError) as caught:
        choose(replace(workload, length=8 * LENGTH), limits, RATES, simulate=known)
    error = caught.value
    assert error.where == "max_length"
    assert f"no schedule fits a row of {8 * LENGTH:,} tokens" in error.what
    assert "of device memory in the" in error.what
    assert "larger chunks do not help" in error.fix
    longest = int(error.fix.partition("set max_length: ")[2].partition(",")[0])
    assert LENGTH / 2 <= longest < 8 * LENGTH
    assert choose(replace(workload, length=longest), limits, RATES, simulate=known).fits


@pytest.mark.full
@pytest.mark.parametrize(
    "host", [0, pytest.param(1 << 34, marks=pytest.mark.slow)]
)  # a tier that is not there has nothing left, whatever the length
def test_the_longest_that_fits_is_found_to_a_percent(workload: Workload, known: Any, host: int):
    given = {
        "chunk_size": 256,
        "head_chunk_size": 256,
        "levels": 2,
        "order": "layer",
        "stream_grads": True,
        "offload": "device",
    }
    schedule = Schedule(**given)
    limits = Limits(int(known(workload, schedule).peak_bytes / 0.95) + 1, host)
    far = replace(workload, length=7 * LENGTH)
    longest = longest_row_up_to(far, limits, given, known)
    assert 0.98 * LENGTH <= longest <= 1.03 * LENGTH
    assert excess_bytes(known(replace(far, length=longest), schedule), limits) <= 0


@pytest.mark.full
def test_what_finds_no_room_on_the_host_may_be_on_the_device(workload: Workload, known: Any):
    """If no estimate fits, the smallest schedule is simulated."""
    thrifty = known(workload, Schedule(1024, 256, levels=2, stream_grads=True, offload="host"))
    limits = Limits(2 * thrifty.peak_bytes, thrifty.host_bytes)  # 5% of it stay free
    schedule, step = simulate_least_memory_step(workload, limits, {}, known)
    assert schedule.device_layers > 0
    assert excess_bytes(step, limits) <= 0
    none = replace(limits, host_bytes=thrifty.host_bytes // 8, device_bytes=thrifty.peak_bytes // 2)
    assert simulate_least_memory_step(workload, none, {}, known)[0].device_layers == 0, "it does not fit so either"


@pytest.mark.parametrize("shared", [False, True], ids=["accelerator", "cpu"])
@pytest.mark.parametrize(
    "written",
    [
        {"device_layers": 2},
        {"device_layers": 2, "offload_dir": "scratch"},
        {"offload": "disk", "offload_dir": "scratch"},
        {"chunk_size": 8192, "keep_kv": "device", "stream_grads": False},
        {"levels": 1, "offload": "device"},
    ],
    ids=lambda written: "-".join(written),
)
def test_the_thriftiest_keeps_what_is_written(written: dict[str, Any], shared: bool) -> None:
    """On any device, with or without host memory and disk."""
    for host_bytes in (0, 1 << 40):
        schedule = least_memory_schedule(Limits(1 << 30, host_bytes, shared=shared), written)
        kept = {name: getattr(schedule, name) for name in written if name != "offload_dir"}
        assert kept == {name: value for name, value in written.items() if name != "offload_dir"}
    with pytest.raises(ArgumentError, match="segment_size"):
        least_memory_schedule(Limits(1 << 30, 0), {"segment_size": 2, "levels": 1})


@pytest.mark.full
def test_weights_that_do_not_fit_are_named(workload: Workload, known: Any):
    with pytest.raises(ArgumentError) as caught:
        choose(workload, Limits(MIB // 2, 1 << 30), RATES, simulate=known)
    assert "weights, gradients and optimizer state alone take" in caught.value.fix
    assert "finetuning_type: lora" in caught.value.fix
    assert "weights: host" in caught.value.fix
    assert "optimizer: host" not in caught.value.fix  # what is left does not fit either
    fixed = known(workload, least_memory_schedule(Limits(MIB, 1 << 30), {})).terms
    enough = int((fixed["weights"] + fixed["gradients"] + fixed["optimizer"] // 2) / 0.95)
    with pytest.raises(ArgumentError) as caught:
        choose(workload, Limits(enough, 1 << 30), RATES, simulate=known)
    assert "engine: {optimizer: host} offloads" in caught.value.fix


@pytest.mark.full
def test_a_given_choice_in_the_way_is_named(workload: Workload, known: Any):
    size = budgets(workload, known)[0]
    with pytest.raises(ArgumentError, match="no schedule fits") as caught:
        choose(workload, Limits(size, 0), RATES, fixed={"levels": 1, "keep_layers": LAYERS}, simulate=known)
    assert "leave levels, keep_layers to the planner" in caught.value.fix


# --- a model in hand --------------------------------------------------------------------------------------------------


def test_a_schedule_for_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build_meta_model(CONFIG, ModelOptions("bfloat16"))
    planned = partial(Schedule.plan, model, max_length=LENGTH, host_memory=0)
    assert planned(device_memory="80GiB").keep_layers == LAYERS
    assert planned(device_memory="80GiB", keep_layers=0, chunk_size=777).chunk_size == 777
    with pytest.raises(ArgumentError, match="unknown schedule field 'chunk'"):
        planned(device_memory="80GiB", chunk=3)
    with pytest.raises(ArgumentError, match="has no device"):
        planned()
    with pytest.raises(ArgumentError, match="expected a size"):
        planned(device_memory="80")


def test_a_copy_of_a_model_has_its_shape_and_no_bytes():
    from streamtune.models import init_model

    keys = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    model = init_model(keys, ModelOptions("float32"), vocab_size=256, token_ids={}, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    copy = meta_copy(model)
    assert model_bytes(copy) == model_bytes(model)
    assert {p.device.type for p in copy.parameters()} == {"meta"}
    assert [n for n, p in copy.named_parameters()] == list(before)
    assert all(torch.equal(p, before[n]) and p.device.type == "cpu" for n, p in model.named_parameters())


def test_weights_on_the_host_are_besides_what_is_free() -> None:
    """A model with weights on the host is planned with the device's free bytes, not with the weights' bytes too."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, "num_hidden_layers": 2}))
    weights = sum(p.nbytes for p in model.parameters())
    limits = Limits(1 << 30, 1 << 31)
    assert add_offloaded_weights(limits, model, device_given=False, host_given=False) == limits
    keep_on_host(model, torch.device("cpu"))
    norm = model.model.norm.weight.nbytes
    assert 0 <= host_model_bytes(model) - (weights - norm) < 4096 * 32  # whole pages
    assert device_model_bytes(model) == model_bytes(model) - host_model_bytes(model)
    found = add_offloaded_weights(limits, model, device_given=False, host_given=False)
    assert (found.device_bytes, found.host_bytes) == (1 << 30, (1 << 31) + host_model_bytes(model))
    assert add_offloaded_weights(limits, model, device_given=False, host_given=True) == limits
    cpu = add_offloaded_weights(replace(limits, shared=True), model, device_given=False, host_given=False)
    assert (cpu.device_bytes, cpu.host_bytes) == ((1 << 30) + host_model_bytes(model), 1 << 31)
