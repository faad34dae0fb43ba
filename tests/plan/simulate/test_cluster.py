"""A rank's share of a step (computed, held, sent), compared with one device and with real ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from streamtune.cli import main
from streamtune.errors import ArgumentError
from streamtune.models import ModelOptions, build_meta_model
from streamtune.plan import Limits, Rates, choose
from streamtune.plan.refusal import make_nothing_fits_error
from streamtune.plan.simulate import Simulation, Workload, simulate
from streamtune.plan.simulate.cluster import ENGINES, Buckets, Cluster, Engine, HeadCounts, Links, choose_sequence_split
from streamtune.plan.simulate.shard import count_heads
from streamtune.plan.traffic import Flow, StepTimeModel
from streamtune.recipe import Recipe
from streamtune.run.cluster import RequestedRanks, cluster_of
from streamtune.schedule import Schedule
from tests.distributed.rank_group import run_ranks
from tests.plan.simulate.cluster_kit import CONFIG

LENGTH, LONG = 4096, 16384
CHUNKS = Schedule(chunk_size=128, head_chunk_size=64)
RATES = Rates("a device", 1e13, 1e13, 1e13, 1e12, 1e11, launch_seconds=1e-8)
MIB = 1 << 20
FREE = Links(1e30, 1e30, launch_seconds=0.0)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


@cache
def model() -> Any:
    return build_meta_model(CONFIG, ModelOptions("bfloat16"))


def workload(cluster: Cluster | None = None, **changes: Any) -> Workload:
    given = {"length": LENGTH, "make_optimizer": adamw, **changes}
    return Workload(model, cluster=cluster or Cluster(), **given)


def told(cluster: Cluster | None = None, schedule: Schedule = CHUNKS, **changes: Any) -> Simulation:
    return simulate(workload(cluster, **changes), schedule)


def flows(cluster: Cluster, schedule: Schedule = CHUNKS, **changes: Any) -> dict[str, Flow]:
    found = StepTimeModel(workload(cluster, **changes), RATES).traffic(schedule).flows
    return {flow.what: flow for flow in found}


# --- what a rank computes and holds -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("form", ["ulysses", "ring"])
def test_the_work_of_all_strips_is_that_of_the_whole(form: Any) -> None:
    # Four ranks run chunks of 1,024 of their own tokens; one runs the same chunks, of 4,096.
    one = told(schedule=replace(CHUNKS, chunk_size=4096), length=LONG).work
    ranks = Cluster(4, engine="zero1", sequence_size=4, form=form)
    rank = told(ranks, replace(CHUNKS, chunk_size=1024), length=LONG).work
    assert 4 * rank.attention_flops == pytest.approx(one.attention_flops, rel=0.01)
    assert 4 * rank.matmul_flops == pytest.approx(one.matmul_flops, rel=0.01)


def test_a_strip_holds_what_a_row_of_its_length_does() -> None:
    short = told(length=LENGTH // 4, make_optimizer=None)
    rank = told(Cluster(4, sequence_size=4), make_optimizer=None)
    ids = 4 * 8 * (LENGTH - LENGTH // 4)
    keys = short.terms["keys and values"]
    more = rank.terms["keys and values"] - keys
    assert more == pytest.approx(keys, rel=0.01)  # 2 heads for 4 ranks: each is held twice
    exchanged = rank.terms.get("kernel workspace", 0) - short.terms.get("kernel workspace", 0)
    assert rank.peak_bytes - short.peak_bytes == pytest.approx(more + ids + exchanged, rel=0.02)


@pytest.mark.full
def test_keys_pass_by_in_a_ring() -> None:
    ulysses, ring = (told(Cluster(2, sequence_size=2, form=form), make_optimizer=None) for form in ("ulysses", "ring"))
    own = LENGTH // 2 * 2 * 2 * 16  # tokens, keys and values, heads, numbers of a head
    assert ring.phases["backward"] - ulysses.phases["backward"] == pytest.approx(2 * own * (2 + 4), rel=0.3)
    assert ring.work == ulysses.work


@pytest.mark.full
def test_windows_are_as_much_work_for_all_ranks_together() -> None:
    settings = {**CONFIG, "model_type": "mistral", "sliding_window": 6144}
    windowed = build_meta_model(settings, ModelOptions("bfloat16"))
    one, rank = (
        simulate(Workload(lambda: windowed, LONG, cluster=cluster), replace(CHUNKS, chunk_size=chunk)).work
        for cluster, chunk in ((Cluster(), 4096), (Cluster(4, sequence_size=4), 1024))
    )
    assert 4 * rank.attention_flops == pytest.approx(one.attention_flops, rel=0.05)
    assert windowed.config.sliding_window == 6144


@pytest.mark.full
def test_several_ranks_of_a_node_share_its_memory() -> None:
    away = replace(CHUNKS, offload="host")
    plain, offloaded = (told(Cluster(4, engine=engine), away) for engine in ("zero3", "zero3_offload"))
    count = sum(p.numel() for p in model().parameters())
    assert set(plain.host_terms) == {"layer inputs"}
    assert offloaded.host_terms["optimizer"] == pytest.approx(8 * count / 4, rel=0.01)
    assert offloaded.host_terms["fp32 weights"] == count
    assert offloaded.host_bytes == sum(offloaded.host_terms.values())
    assert "optimizer" not in offloaded.terms
    assert "fp32 weights" not in offloaded.terms
    assert offloaded.work.host_touched_bytes > 0 == plain.work.host_touched_bytes


@pytest.mark.full
def test_completions_are_shared_as_well() -> None:
    from streamtune.plan.simulate.scored import Scored

    def pair(length: int, size: int) -> Scored:
        return Scored(((length // 2, (length // 2, length // 2)),), forwards=1.0)

    ranks = Cluster(4, engine="zero2", sequence_size=4)
    one = told(None, replace(CHUNKS, chunk_size=4096), completions=pair, length=LONG)
    rank = told(ranks, replace(CHUNKS, chunk_size=1024), completions=pair, length=LONG)
    assert 4 * rank.work.attention_flops == pytest.approx(one.work.attention_flops, rel=0.1)
    gathered = flows(Cluster(4, engine="zero3"), completions=pair)["gathering of weights, forward"]
    assert gathered.node_bytes == pytest.approx(1.5 * sum(p.nbytes for p in model().parameters()), rel=0.01)


@pytest.mark.full
def test_ranks_hold_what_a_plan_says() -> None:
    """Weights, gradients, optimizer and gathered layers of two CPU ranks, with every engine."""
    cases: list[dict[str, Any]] = [{"engine": engine} for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp")]
    cases += [{"engine": engine, "schedule": {"levels": 2, "segment_size": 3}} for engine in ("zero3", "fsdp")]
    cases = [{**case, "dtype": "bfloat16"} for case in cases]
    cases += [{"engine": engine, "finetuning": "qlora", "dtype": "float32"} for engine in ("zero3", "fsdp")]
    for case, found in run_ranks(2, "tests.plan.simulate.partition_cases", cases).items():
        assert found["planned"] == pytest.approx(found["held"], rel=1e-3), case


# --- what ranks send --------------------------------------------------------------------------------------------------


def test_partitions_send_what_zero_does() -> None:
    size = sum(p.nbytes for p in model().parameters())
    for engine, times in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "zero3_offload": 3, "fsdp": 3}.items():
        cluster = Cluster(8, 1, engine)  # type: ignore[arg-type]
        assert sum(f.node_bytes for f in flows(cluster).values()) == pytest.approx(times * size * 7 / 8, rel=1e-3)
        chunks = [flows(cluster, replace(CHUNKS, chunk_size=chunk)) for chunk in (64, 4096)]
        assert chunks[0] == chunks[1]  # whatever the number of chunks
    zero3 = flows(Cluster(8, 1, "zero3"), micro_batches=3)
    assert [zero3[f"gathering of weights, {way}"].count for way in ("forward", "backward")] == [3 * (6 + 3)] * 2


def test_a_fourth_of_a_nodes_devices_carries_what_leaves_it() -> None:
    flow = flows(Cluster(8, 2, "zero3"))["reduction of gradients"]
    size = sum(p.nbytes for p in model().parameters())
    assert flow.network_bytes == pytest.approx(size / 2 / 4, rel=1e-3)
    assert flow.node_bytes + flow.network_bytes == pytest.approx(size * 7 / 8, rel=1e-3)


@pytest.mark.parametrize(("form", "forth", "back"), [("ulysses", 17_920, 39_424), ("ring", 28_672, 122_880)])
def test_a_sequence_sends_what_docs_decisions_015_counts(form: Any, forth: int, back: int) -> None:
    """Bytes for Qwen3-8B on 8 ranks, per own token and layer."""
    changes = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    wide = build_meta_model({**CONFIG, **changes}, ModelOptions("bfloat16"))
    cluster = Cluster(8, sequence_size=8, form=form)
    own, chunks = LENGTH // 8, 4
    time_model = StepTimeModel(Workload(lambda: wide, LENGTH, cluster=cluster), RATES)
    sent = [f for f in time_model.traffic(Schedule(chunk_size=own // chunks)).flows if "of gradients" not in f.what[:9]]
    sent = [f for f in sent if f.what != "all-reduce of gradients"]
    # Of the last chunk keys are not projected again.
    times, less = ((chunks + 1) / 2, 0.0) if form == "ring" else (1.0, 2 * 2 * 8 * 128 * 7 / 8 / chunks)
    assert sum(f.node_bytes for f in sent) == pytest.approx(own * ((forth + back) * times - less), rel=1e-6)


@pytest.mark.parametrize("levels", [1, 2])
def test_states_are_passed_on_with_every_chunk(levels: Any) -> None:
    """LFM2: the last inputs of a convolution, three per channel."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    config = {**CONFIG, "model_type": "lfm2", "layer_types": kinds, "num_hidden_layers": 4, "conv_L_cache": 3}
    del config["head_dim"]
    model = build_meta_model(config, ModelOptions("bfloat16"))
    changes = {"cluster": Cluster(4, sequence_size=4), "batch_size": 2, "micro_batches": 3}
    time_model = StepTimeModel(Workload(lambda: model, LENGTH, **changes), RATES)  # type: ignore[arg-type]
    sent = {flow.what: flow for flow in time_model.traffic(Schedule(chunk_size=128, levels=levels)).flows}
    chunks = LENGTH // 4 // 128
    state = 3 * 3 * config["hidden_size"] * 2
    assert sent["gradients of states passed back"].node_bytes == 2 * 3 * chunks * state
    # Of two levels every second input is computed again.
    assert sent["states passed on"].node_bytes == 2 * 3 * chunks * state * (1 if levels == 1 else 1.5)
    assert sent["states passed on"].count == 3 * chunks * 3 * (1 if levels == 1 else 1.5)
    attending = sent["all-to-all of gradients"].count
    assert attending == 3 * chunks * 4  # of the one layer that attends


def test_what_leaves_a_node_takes_the_network() -> None:
    links = Links(1e9, 1e8, launch_seconds=0.0)
    within, across = (flows(Cluster(8, nodes, sequence_size=4, links=links)) for nodes in (1, 4))
    for what in ("all-to-all, forward and recomputed", "all-to-all of gradients"):
        assert within[what].network_bytes == 0
        assert across[what].network_bytes == 2 * across[what].node_bytes  # of 3 others one is near
        assert across[what].seconds == pytest.approx(across[what].network_bytes / 1e8)


def test_where_nothing_fits_sequences_may_be_shared() -> None:
    step, limits = workload(Cluster(4, engine="zero3"), length=256), Limits(MIB // 2, 0)
    error = make_nothing_fits_error(step, {}, {CHUNKS: simulate(step, CHUNKS)}, limits, simulate)
    assert "sequence_parallel_size: 4 divides each row among all 4 ranks" in error.fix


SEGMENTS = replace(CHUNKS, levels=2, segment_size=3)
"""Of six layers: four run forward once more."""


@pytest.mark.parametrize(("engine", "again"), [("zero3", 4), ("zero3_offload", 4), ("fsdp", 2)])
def test_a_layer_that_runs_again_is_gathered_again(engine: Any, again: int) -> None:
    cluster, layers = Cluster(8, 1, engine), model().model.layers
    layer = sum(p.nbytes for p in layers[0].parameters())
    one, two = flows(cluster, micro_batches=3), flows(cluster, SEGMENTS, micro_batches=3)
    more = {what: (two[what].count - one[what].count, two[what].node_bytes - one[what].node_bytes) for what in one}
    assert more.pop("gathering of weights, backward") == (3 * again, pytest.approx(3 * again * layer * 7 / 8, rel=1e-3))
    assert set(more.values()) == {(0, 0)}


@pytest.mark.full
def test_weights_that_wait_on_the_host_are_copied_again() -> None:
    away = replace(CHUNKS, offload="host")
    layer = sum(p.nbytes for p in model().model.layers[0].parameters())
    moved = [
        [told(Cluster(1, engine=engine), schedule).work.moved_bytes for schedule in (away, replace(away, **levels))]
        for engine in ("none", "zero3_offload")
        for levels in [{"levels": 2, "segment_size": 3}]
    ]
    (whole, whole_again), (shared, shared_again) = moved
    assert (shared_again - shared) - (whole_again - whole) == 4 * layer


@pytest.mark.full
def test_two_levels_are_chosen_for_weights_in_parts() -> None:
    """The device cannot hold every layer input, and the host has no memory."""
    cluster = Cluster(4, engine="zero3", buckets=Buckets(reduce=1000))
    asked = workload(cluster, length=LONG)
    least = simulate(asked, replace(SEGMENTS, stream_grads=True)).peak_bytes
    sizes = {"chunk_size": CHUNKS.chunk_size, "head_chunk_size": CHUNKS.head_chunk_size}
    plan = choose(asked, Limits(round(1.1 * least), 0), RATES, fixed=sizes)
    assert plan.schedule.levels == 2
    assert plan.fits


# --- what cannot be laid out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ranks": 8, "nodes": 3}, "8 ranks cannot be divided evenly among 3 nodes"),
        ({"ranks": 6, "sequence_size": 4}, "6 ranks cannot be divided into groups of sequence_parallel_size = 4"),
        ({"ranks": 12, "nodes": 3, "sequence_size": 6}, "groups of 6 ranks do not fill whole nodes of 4 ranks"),
        ({"ranks": 0}, "ranks must be 1 or more"),
        ({"engine": "zero4"}, "unknown engine 'zero4'"),
    ],
)
def test_what_no_cluster_is(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        Cluster(**values)
    assert caught.value.fix or "must be" in said


def test_which_form() -> None:
    heads = HeadCounts(8, 2, 16, 16)
    assert [choose_sequence_split("auto", size, heads) for size in (2, 4, 8, 3, 16)] == [
        *["ulysses"] * 3,
        *["ring"] * 2,
    ]
    assert choose_sequence_split("ring", 4, heads) == "ring"
    with pytest.raises(ArgumentError, match="8 attention heads cannot be divided among 16 ranks") as caught:
        choose_sequence_split("ulysses", 16, heads)
    assert "sequence_parallel: ring" in caught.value.fix
    assert [heads.kv_copies(Cluster(size, sequence_size=size)) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert math.isclose(heads.kv_copies(Cluster(16, sequence_size=16, form="ring")), 1)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GEMMA = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
VISION = {"hidden_size": 36, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 48}
HEADS: dict[str, tuple[dict[str, Any], HeadCounts]] = {
    "qwen3": ({**GEMMA, "vocab_size": 64}, HeadCounts(4, 2, 8, 8)),
    "falcon": ({**SIZES, "multi_query": True}, HeadCounts(4, 1, 8, 8)),
    "falcon, a group each": ({**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}, HeadCounts(4, 4, 8, 8)),
    "gpt_bigcode": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, HeadCounts(4, 1, 8, 8)),
    "gemma3": ({"text_config": GEMMA, "vision_config": VISION}, HeadCounts(4, 2, 8, 8)),
    "gemma4_text": (
        {
            **{key: size for key, size in GEMMA.items() if key != "num_hidden_layers"},
            **{"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "global_head_dim": 16},
            **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
        },
        HeadCounts(4, 2, 16, 16),
    ),
}
"""One key head for all queries; keys repeated for all; images beside text; heads of two widths."""


@pytest.mark.parametrize("family", HEADS)
def test_heads_are_counted_in_the_keys_of_each_family(family: str) -> None:
    keys, heads = HEADS[family]
    config = CONFIG_MAPPING[family.split(",")[0]](**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert count_heads(model) == heads


@pytest.mark.parametrize(
    ("keys", "asked", "said"),
    [
        ({}, RequestedRanks(None, 2), "--nodes 2 without --ranks"),
        ({}, RequestedRanks(0), "--ranks must be at least 1, found 0"),
        ({"sequence_parallel_size": 3}, RequestedRanks(8), "8 ranks cannot be divided into groups"),
        ({"train_batch_size": 6}, RequestedRanks(4), "found 6: 4 ranks with"),
        ({"deepspeed": "zero9"}, RequestedRanks(4), "no DeepSpeed configuration zero9"),
    ],
)
def test_what_no_recipe_trains_on(keys: dict[str, Any], asked: RequestedRanks, said: str) -> None:
    recipe = Recipe(model_name_or_path="none", datasets=[{"path": "none"}], max_length=64, **keys)
    with pytest.raises(ArgumentError, match=said) as caught:
        cluster_of(recipe, model(), asked, FREE)
    assert caught.value.where


def test_engines_of_recipes(tmp_path: Path) -> None:
    def of(asked: RequestedRanks = RequestedRanks(16), **keys: Any) -> Cluster:
        recipe = Recipe(model_name_or_path="none", datasets=[{"path": "none"}], max_length=64, **keys)
        return cluster_of(recipe, model(), asked, FREE)

    assert of(RequestedRanks()) == Cluster(links=FREE)
    assert (of().engine, of().nodes, of().ranks_per_node) == ("ddp", 2, 8)
    assert of(fsdp=True).zero_stage == 3
    assert of(RequestedRanks(), sequence_parallel_size=4).ranks == 4
    assert of(sequence_parallel_size=16).form == "ring"
    named: list[Engine] = [engine for engine in ENGINES if engine.startswith("zero")]
    assert [of(deepspeed=name).engine for name in named] == named
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"zero_optimization": {**zero, "stage3_max_reuse_distance": 5}}))
    own = of(deepspeed=str(path))
    assert own.optimizer_on_host
    assert not own.weights_on_host
    assert own.buckets.reuse == 5


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    document = {"model": {"init": CONFIG}, "tokenizer": {"train": {"vocab_size": 300}}, "datasets": [{"path": "rows"}]}
    path.write_text(json.dumps({**document, "max_length": 4096, "dtype": "bfloat16", "deepspeed": "zero3"}))
    return path


def call(*arguments: str) -> int:
    try:
        main(arguments)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


MEMORY = ("--device", "h100", "--device-memory", "32MiB", "--host-memory", "1GiB")
FIXED = ("--set", "engine.schedule=fixed", "--set", "engine.offload=host")


def test_a_plan_of_two_nodes(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ("plan", "tiny.yaml", *MEMORY, "--ranks", "8", "--nodes", "2", "--set", "sequence_parallel_size=4")
    assert call(*asked, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    cluster, traffic = found["cluster"], found["traffic"]
    assert (cluster["ranks"], cluster["nodes"], cluster["data_parallel_size"]) == (8, 2, 2)
    assert (cluster["engine"], cluster["sequence_parallel"]) == ("zero3", "ulysses")
    assert found["tokens"] == cluster["tokens_per_step"] == 2 * 4096
    assert cluster["host_memory_bytes_per_node"] == 1 << 30
    assert cluster["host_bytes_per_node"] == 4 * found["host_bytes"]
    assert traffic["node_link"] == "NVLink"
    assert traffic["network_bytes"] > 0
    assert cluster["communication_seconds"] == pytest.approx(sum(flow["seconds"] for flow in traffic["flows"]))
    assert found["step_seconds"] == pytest.approx(cluster["compute_seconds"] + cluster["communication_seconds"])
    assert call(*asked, *FIXED) == 0
    out = capfd.readouterr().out
    for said in (
        "8 ranks, 2 nodes of 4; zero3; 4 share a sequence (ulysses); 2 share the batch",
        "memory of each rank",
    ):
        assert said in out, said
    assert "all-to-all of gradients" in out


@pytest.mark.full
def test_what_more_ranks_to_a_sequence_would_allow(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "tiny.yaml", *MEMORY, "--ranks", "2", *FIXED, "--json") == 0
    (longer,) = json.loads(capfd.readouterr().out)["cluster"]["longer"]
    assert (longer["sequence_size"], longer["form"]) == (2, "ulysses")
    assert longer["max_length"] > 4096


def test_the_longest_row_of_several_ranks(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = ("--set", "sequence_parallel_size=4", "--from", "16384", "--to", "32768", "--json", *FIXED)
    assert call("probe-max-len", "tiny.yaml", "--method", "simulate", *MEMORY, "--ranks", "4", *keys) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["max_length"] >= 16384
    assert found["cluster"]["sequence_size"] == 4
    assert found["traffic"]["node_bytes"] > 0
    assert call("probe-max-len", "tiny.yaml", "--ranks", "4") == 2
    assert "add --method simulate" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--ranks", "6", "--nodes", "4"), "6 ranks cannot be divided evenly among 4 nodes"),
        (("--ranks", "6", "--set", "sequence_parallel_size=4"), "cannot be divided into groups"),
        (
            ("--ranks", "3", "--set", "sequence_parallel_size=3", "--set", "sequence_parallel=ulysses"),
            "8 attention heads cannot be divided among 3 ranks",
        ),
    ],
)
def test_what_is_refused(recipe: Path, capfd: pytest.CaptureFixture[str], asked: tuple[str, ...], said: str) -> None:
    assert call("plan", "tiny.yaml", *MEMORY, *asked) == 2
    assert said in " ".join(capfd.readouterr().err.split())


def test_the_link_and_the_memory_of_the_host_are_part_of_an_offloaded_step() -> None:
    """Gradients: out and back per micro-batch, and once in fp32. Weights: in twice. Adam: 34 bytes."""
    count = sum(p.numel() for p in model().parameters())
    once, twice = (told(Cluster(engine="zero3_offload"), length=256, micro_batches=n).work for n in (1, 2))
    assert once.moved_bytes == pytest.approx((2 * 2 + 4 + 2 * 2) * count, rel=1e-3)  # and buffers of positions
    assert twice.moved_bytes == 2 * once.moved_bytes - 4 * count
    assert (
        once.host_touched_bytes == twice.host_touched_bytes == pytest.approx(34 * count, rel=1e-3)
    )  # and its counters
