"""The gradient of several ranks equals that of one rank: DDP, ZeRO 1 to 3, FSDP2 (``equality_cases``)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.precision_kit import ROUNDING

from .curve_cases import run as curve
from .equality_page import note
from .rank_group import run_ranks

ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]

QUICK: list[dict[str, Any]] = [
    {"engine": "ddp", "accumulation": 4},
    {"engine": "zero1", "sequence": 2, "form": "ring", "objective": "dpo", "accumulation": 2},
    {"engine": "zero2", "objective": "dpo", "family": "qwen3", "settings": {"tie_word_embeddings": True}},
    {"engine": "zero3", "finetuning": "lora", "accumulation": 4, "family": "qwen3"},
    {"engine": "zero3_offload", "accumulation": 2, "dropped": True},
    {"engine": "fsdp", "sequence": 2, "form": "ulysses", "finetuning": "lora"},
]
"""Every engine, objective and form once."""
MORE: list[dict[str, Any]] = [
    *({"engine": engine, "accumulation": 4 if engine == "zero2" else 1} for engine in ENGINES if engine != "ddp"),
    {"engine": "zero3", "objective": "dpo", "accumulation": 2},
    *({"engine": engine, "accumulation": 2, "dropped": True} for engine in [*ENGINES, "zero2_offload"]),
    {"engine": "zero3", "sequence": 2, "form": "ulysses"},
]
FROZEN: list[dict[str, Any]] = [
    {"engine": engine, "trained": trained, "settings": {"num_hidden_layers": 3}, "accumulation": accumulation, **more}
    for engine in [*ENGINES, "zero3_offload"]
    for trained, accumulation, more in (
        (["last 1"], 2, {}),
        (["0-1", ["model.layers.1.mlp"], ["lm_head"]], 1, {"schedule": {"levels": 2, "segment_size": 2}}),
        ([None, [], ["model.norm"]], 1, {"family": "qwen3"}),
    )
] + [
    {"engine": engine, "sequence": 2, "form": form, "trained": ["last 1"], "settings": {"num_hidden_layers": 3}}
    for engine, form in (("ddp", "ring"), ("zero3", "ulysses"))
]
"""Frozen layers below and above the trained layers; no trained layer."""
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
STATES: list[dict[str, Any]] = [
    {"engine": engine, "sequence": 2, "family": "lfm2", "settings": CONVOLUTIONS, **more}
    for engine, more in (
        ("ddp", {"accumulation": 4}),
        ("zero2", {"finetuning": "lora"}),
        ("zero3", {"objective": "dpo", "accumulation": 2}),
        ("fsdp", {"form": "ring"}),
    )
]
"""Layers with a state on ranks that share sequences."""
SEQUENCES: list[dict[str, Any]] = [
    {"engine": engine, "sequence": sequence, "form": form, "objective": objective, "accumulation": accumulation}
    for engine in ENGINES
    for sequence in (2, 4)
    for form in ("ulysses", "ring")
    for objective, accumulation in (("sft", 1), ("sft", 4), ("dpo", 2))
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
    wrong = {}
    for case, errors in found.items():
        filled = errors["fillers"] >= 1 or size == json.loads(case).get("sequence")
        if not errors["excess"] <= ROUNDING or not filled:
            wrong[case] = errors
    assert wrong == {}
    return found


def show(size: int, found: dict[str, Any]) -> None:
    for text, errors in found.items():
        case = json.loads(text)
        print(
            size,
            " ".join(str(value) for value in case.values()),
            f"{errors['gradient']:.1e}, plain fp32 {errors['torch']:.1e}",
        )
        note({"ranks": size, "case": case, "gradient": errors["gradient"], "torch": errors["torch"]})


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)], ids=["each", "more"])
def test_two_ranks_have_the_gradient_of_one(cases: list[dict[str, Any]]) -> None:
    show(2, check(2, cases, 300))


@pytest.mark.full
def test_ranks_that_train_some_of_the_layers() -> None:
    show(2, check(2, FROZEN, 300))


@pytest.mark.full
def test_ranks_that_share_sequences_of_layers_with_a_state() -> None:
    show(2, check(2, STATES, 300))


@pytest.mark.full
def test_ranks_whose_rows_have_other_rotary_frequencies() -> None:
    """Frequencies are buffers, which each rank sets for the lengths of its own rows."""
    for engine, found in run_ranks(2, "tests.distributed.lengths_cases", ["ddp", "zero2", "fsdp"]).items():
        assert found["norms"] == pytest.approx(found["wanted"], rel=1e-5), engine


@pytest.mark.full
def test_ranks_of_which_one_has_images() -> None:
    """Or none: all weights, adapters in both parts, the projector alone, and with a frozen tower."""
    cases = [
        {"engine": engine, "kind": kind, "trains": trains}
        for engine, kind, trains in (
            *((engine, "qwen3_vl", "all") for engine in ("ddp", "fsdp")),
            *((engine, "gemma3", "adapters") for engine in ("ddp", "fsdp")),
            *((engine, "qwen3_vl", "projector") for engine in ("ddp", "fsdp")),
            *((engine, "llava_next", "all") for engine in ("ddp", "fsdp")),
            *((engine, "qwen3_vl", "language") for engine in ("zero1", "zero2", "fsdp")),
        )
    ]
    for case, errors in run_ranks(2, "tests.distributed.image_cases", cases).items():
        assert max(errors) < 1e-5, case


@pytest.mark.full
def test_experts_that_a_rank_did_not_use_have_the_gradient_of_the_others() -> None:
    """Each rank uses another expert, and no rank the last one: ranks reduce the gradients of a layer together.

    In layers that are streamed, and in layers that keep their activations.
    """
    cases = [*([engine, 0] for engine in ENGINES), *([engine, 1] for engine in ("ddp", "fsdp"))]
    for case, found in run_ranks(2, "tests.distributed.experts_cases", cases).items():
        assert found["norms"] == pytest.approx(found["wanted"], rel=1e-5), case
        assert found["apart"] < 1e-4, case


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_sequences(size: int) -> None:
    """Two or four ranks per sequence, and two sequences with two ranks each."""
    show(size, check(size, [case for case in SEQUENCES if case["sequence"] <= size], 1800))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_engine_on_every_objective(size: int) -> None:
    show(size, check(size, ALL, 1800))


CURVES: list[dict[str, Any]] = [
    {"objective": objective, "settings": {**engine, "finetuning_type": finetuning, "packing": packing}}
    for engine in ({}, {"deepspeed": "zero1"}, {"deepspeed": "zero2"}, {"deepspeed": "zero3"}, {"fsdp": True})
    for objective, finetuning, packing in (("sft", "full", False), ("sft", "lora", True), ("dpo", "full", False))
]


def same_curves(size: int, cases: list[dict[str, Any]], patience: float) -> None:
    found = run_ranks(size, "tests.distributed.curve_cases", cases, patience)
    for case in cases:
        shared = ("deepspeed", "fsdp", "sequence_parallel_size")
        alone = {key: value for key, value in case["settings"].items() if key not in shared}
        want, got = curve({**case, "settings": alone}), found[json.dumps(case)]
        assert len(want["loss"]) == 20
        assert len(want["eval_loss"]) == 2
        for name, values in want.items():
            assert got[name] == pytest.approx(values, abs=1e-4), (size, case)
        worst = max(abs(a - b) for name in want for a, b in zip(want[name], got[name], strict=True))
        print(size, case, f"{worst:.1e}")
        note({"ranks": size, "case": case, "curve": worst})


RECURRENT = {
    "model_type": "lfm2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
def test_a_run_that_shares_sequences_of_a_recurrent_model_has_the_losses_of_one_rank() -> None:
    settings = {"model.init": RECURRENT, "sequence_parallel_size": 2}
    sft = {"objective": "sft", "settings": {**settings, "packing": True}}
    same_curves(2, [sft, {"objective": "dpo", "settings": {**settings, "share_prefix": "always"}}], 300)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_engine_has_the_losses_of_one_rank(size: int) -> None:
    same_curves(size, CURVES, 1800)
