"""The gradient of several ranks is that of one, whoever shares what: DDP, ZeRO 1 to 3, FSDP2 (``equality_cases``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .rank_group import run_ranks

BOUND = 5e-6
ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]

QUICK: list[dict[str, Any]] = [
    *({"engine": engine, "accumulation": 4 if engine in ("zero2", "ddp") else 1} for engine in ENGINES),
    {"engine": "zero3", "finetuning": "lora", "accumulation": 4, "family": "qwen3"},
    {"engine": "zero2", "objective": "dpo", "family": "qwen3", "settings": {"tie_word_embeddings": True}},
    {"engine": "zero3", "objective": "dpo", "accumulation": 2},
]
ALL: list[dict[str, Any]] = [
    {"engine": engine, "accumulation": accumulation, "finetuning": finetuning, "objective": objective, "family": family}
    for engine in ENGINES
    for accumulation in (1, 4)
    for finetuning in ("full", "lora")
    for objective, family in (("sft", "llama"), ("sft", "gemma2"), ("dpo", "qwen3"))
] + [{"engine": engine, "settings": {"tie_word_embeddings": True}, "family": "qwen3"} for engine in ENGINES]


def check(size: int, cases: list[dict[str, Any]], patience: float) -> dict[str, Any]:
    found = run_ranks(size, "tests.distributed.equality_cases", cases, patience)
    assert len(found) == len(cases)
    for case, errors in found.items():
        assert errors["gradient"] <= BOUND, (case, errors)
        assert errors["loss"] <= BOUND, (case, errors)
        assert errors["norm"] <= BOUND, (case, errors)
        assert errors["fillers"] >= 1, (case, errors)
    return found


def show(size: int, found: dict[str, Any]) -> None:
    for case, errors in found.items():
        print(size, " ".join(str(value) for value in json.loads(case).values()), f"{errors['gradient']:.1e}")


def test_two_ranks_have_the_gradient_of_one() -> None:
    show(2, check(2, QUICK, 300))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_engine_on_every_objective(size: int) -> None:
    show(size, check(size, ALL, 1800))
