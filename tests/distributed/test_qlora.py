"""Adapters on a sharded 4-bit base: the gradient of one process, the same bits, and one shard per rank."""

from __future__ import annotations

from typing import Any

import pytest

from .rank_group import run_ranks
from .test_equality import check, same_curves

pytest.importorskip("bitsandbytes")

DEEP: dict[str, Any] = {"num_hidden_layers": 5}
AWAY = {"levels": 2, "segment_size": 2, "offload": "host", "stream_grads": True}
QUICK = [{"engine": "fsdp", "finetuning": "qlora", "accumulation": 2}]
MORE: list[dict[str, Any]] = [
    {"engine": "zero3", "finetuning": "qlora", "accumulation": 2},
    {"engine": "zero3_offload", "finetuning": "qlora", "family": "qwen3"},
    {"engine": "zero3", "finetuning": "qlora", "objective": "dpo", "family": "qwen3"},
    {"engine": "fsdp", "finetuning": "qlora", "settings": DEEP, "schedule": AWAY},
    {"engine": "zero3", "finetuning": "qlora", "settings": DEEP, "schedule": AWAY},
    {"engine": "zero3", "finetuning": "qlora", "sequence": 2, "form": "ulysses"},
    {"engine": "fsdp", "finetuning": "qlora", "family": "mixtral", "accumulation": 2},
    {"engine": "zero3", "finetuning": "qlora", "family": "mixtral"},
    {"engine": "ddp", "finetuning": "qlora", "family": "mixtral"},
    {"engine": "zero2", "finetuning": "qlora", "family": "mixtral"},
]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["each", "more"])
def test_two_ranks_have_the_gradient_of_one(cases: list[dict[str, Any]]) -> None:
    check(2, cases, 600)


@pytest.mark.full
def test_a_rank_holds_a_part_and_gathers_the_same_bits() -> None:
    cases = [{"engine": engine, "dtype": dtype} for engine in ("fsdp", "zero3") for dtype in ("float32", "bfloat16")]
    cases += [{"engine": engine, "dtype": "bfloat16", "family": "mixtral"} for engine in ("fsdp", "zero3")]
    for case, found in run_ranks(2, "tests.distributed.packed_cases", cases).items():
        assert len(found["same"]) == len(found["written"]) > 11, case
        assert all(found["same"]), case
        assert all(found["written"]), case
        assert found["part"] == pytest.approx(0.5, abs=0.01), case
        assert found["scales"] < 0.05, case


@pytest.mark.slow
def test_runs_have_the_losses_of_one_rank() -> None:
    settings = {"finetuning_type": "qlora", "quantization": "nf4"}
    engines: list[dict[str, Any]] = [{"fsdp": True}, {"deepspeed": "zero3"}]
    same_curves(2, [{"objective": "sft", "settings": {**settings, **engine}} for engine in engines], 300)
