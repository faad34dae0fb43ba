"""Two levels with sharded weights: a layer that runs forward again is gathered once more, and then freed.

The gradient is that of one process, each extra forward costs one gather, gradients are reduced as often as before, and
a rank holds the layer inputs that one holds which has the weights whole.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.communication.tables import count

from tests.precision_kit import ROUNDING

from .rank_group import run_ranks

DEEP: dict[str, Any] = {"num_hidden_layers": 7}
SEGMENTS = {"levels": 2, "segment_size": 3}
"""Of seven layers: the inputs of layers 1, 2, 4 and 5 are computed again, by four more forwards."""
AGAIN, BEGUN = 4, 2
"""Extra forwards; segments in which FSDP2 has begun to gather the last of them for its backward already."""
AWAY = {**SEGMENTS, "offload": "host", "stream_grads": True}

QUICK = [{"engine": "fsdp", "settings": DEEP, "schedule": SEGMENTS}]
MORE = [
    {"engine": engine, "finetuning": finetuning, "accumulation": accumulation, "settings": DEEP, "schedule": schedule}
    for engine in ("zero3", "zero3_offload", "fsdp")
    for finetuning, accumulation, schedule in (("full", 3, AWAY), ("lora", 1, {**SEGMENTS, "keep_kv": "host"}))
] + [
    {"engine": "zero3", "finetuning": "lora", "accumulation": 2, "settings": DEEP, "schedule": AWAY},
    {"engine": "zero3", "dropped": True, "settings": DEEP, "schedule": SEGMENTS},
    {"engine": "fsdp", "objective": "dpo", "family": "qwen3", "settings": DEEP, "schedule": AWAY},
    {"engine": "zero3", "objective": "dpo", "family": "qwen3", "settings": DEEP, "schedule": {"levels": 2}},
    {"engine": "zero3", "family": "gemma2", "settings": DEEP, "schedule": {**SEGMENTS, "keep_attention": "device"}},
    {"engine": "fsdp", "family": "gemma2", "settings": DEEP, "schedule": {**SEGMENTS, "keep_layers": 2}},
    {"engine": "zero3", "sequence": 2, "form": "ulysses", "settings": DEEP, "schedule": AWAY},
    {"engine": "fsdp", "sequence": 2, "form": "ring", "finetuning": "lora", "settings": DEEP, "schedule": SEGMENTS},
]


def check(size: int, cases: list[dict[str, Any]], patience: float = 300) -> None:
    found = run_ranks(size, "tests.distributed.equality_cases", cases, patience)
    assert len(found) == len(cases)
    assert {case: errors for case, errors in found.items() if not errors["excess"] <= ROUNDING} == {}


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["each", "more"])
def test_two_ranks_have_the_gradient_of_one(cases: list[dict[str, Any]]) -> None:
    check(2, cases, 600)


@pytest.mark.slow
def test_one_process_with_everything_on_the_host() -> None:
    check(1, [case for case in MORE if case["engine"] == "zero3_offload"])


OUTSIDE = 4 * (2 * 512 * 32 + 32)
"""Bytes of embedding, head and norm of the model that is counted."""


@pytest.mark.slow
def test_each_extra_forward_is_one_gather() -> None:
    settings = [{}, {"finetuning": "lora"}, {"accumulation": 2}]
    cases = [
        {"engine": engine, "mode": "streaming", "chunks": chunks, "size": "deep", **more, **levels}
        for engine in ("zero3", "fsdp")
        for more in settings
        for chunks, levels in ((8, {}), (8, {"schedule": SEGMENTS}), (2, {"schedule": SEGMENTS}))
    ]
    rows = count(cases)
    assert len(rows) == len(cases)
    for start in range(0, len(rows), 3):
        one, *two = rows[start : start + 3]
        each = one.case.get("accumulation", 1) * (AGAIN - (BEGUN if one.case["engine"] == "fsdp" else 0))
        assert two[0].traffic == two[1].traffic, "on any number of chunks"
        calls, size = two[0].traffic["backward"].pop("all_gather")
        before, size_before = one.traffic["backward"].pop("all_gather")
        assert calls - before == each, one.case
        assert size - size_before == each * (one.weight_bytes - OUTSIDE) / 7, "of the layer's weights"
        assert two[0].traffic == one.traffic, "nothing else is sent: gradients are reduced as often"


@pytest.mark.slow
def test_a_rank_holds_what_whole_weights_hold() -> None:
    """Two layers are gathered at a time: the one in its backward, and the one that runs forward again."""
    engines = [("fsdp", 2), ("zero3", 1), ("zero3_offload", 1)]
    cases = [
        {"engine": engine, "finetuning": finetuning, "schedule": AWAY}
        for engine, _ in engines
        for finetuning in ("full", "lora")
    ]
    found = run_ranks(2, "tests.distributed.levels_cases", cases)
    for case, of_rank in found.items():
        assert of_rank["shared"] == of_rank["whole"] > 0, case
        assert (of_rank["again"], of_rank["left"]) == (AGAIN, 0), case
        most = dict(engines)[json.loads(case)["engine"]]
        assert of_rank["gathered"] == {
            "forward: store": 1,
            "backward: store": 2,
            "backward: project": most,
            "backward: replay": most,
        }, case


AHEAD = {
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 30_000,
    "stage3_prefetch_bucket_size": 12_000,
}
"""A few layers stay gathered until they are used again, and those that are next are fetched: DeepSpeed's defaults, on a
tiny model."""


@pytest.mark.slow
def test_deepspeed_may_fetch_ahead() -> None:
    cases = [{"engine": "zero3", "finetuning": kind, "zero": AHEAD, "schedule": AWAY} for kind in ("full", "lora")]
    for case, of_rank in run_ranks(2, "tests.distributed.levels_cases", cases).items():
        assert of_rank["shared"] == of_rank["whole"], case
        assert (of_rank["again"], of_rank["left"]) == (AGAIN, 0), case
        assert of_rank["difference"] <= 1e-6, case
