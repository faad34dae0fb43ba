"""A user's own engine: hooks run as often streamed as plain and see the same values; trainers give equal losses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .hook_cases import KINDS, OF_PARAMETERS
from .rank_group import run_ranks
from .trainer_cases import STEPS

PLACES = {
    "parameters": ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"],
    "modules": ["model.embed_tokens", "model.layers.0", "model.norm"],
}
WITHOUT_GRADIENTS = {"accumulator_hook", "post_accumulate_hook"}
"""Hooks that read ``.grad``, which ZeRO-3 does not fill."""


def cases(engine: str) -> list[dict[str, Any]]:
    left_out = WITHOUT_GRADIENTS if engine == "zero3" else {"accumulator_hook"} if engine == "fsdp" else set()
    return [
        {"engine": engine, "hook": hook, "place": place, "chunk_size": 9}
        for hook in KINDS
        if hook not in left_out
        for place in PLACES["parameters" if hook in OF_PARAMETERS else "modules"]
    ]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_hooks(engine: str) -> None:
    """In fp32, as these engines compute; values agree to 1e-5."""
    compare(cases(engine), 400)


def few(engine: str) -> list[dict[str, Any]]:
    """Return one hook of a parameter and one of a layer."""
    return [case for case in cases(engine) if case["hook"] in ("tensor_hook", "forward_hook")][1:5:3]


def test_a_few() -> None:
    compare(few("fsdp"), 200)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_hooks_of_layers_see_gradients_that_are_streamed(engine: str) -> None:
    """A gradient is not left for the layer before if a hook between the two layers waits for it."""
    names = ("full_backward_hook", "backward_pre_hook")
    asked = [case for case in cases(engine) if case["hook"] in names and case["place"] == "model.layers.0"]
    assert len(asked) == 2
    compare([{**case, "stream_grads": True} for case in asked], 200)


@pytest.mark.full
def test_a_model_that_deepspeed_has_taken_apart_is_refused() -> None:
    late = {"engine": "zero3", "late": True}
    refused = compare(few("zero3"), 200, late)[json.dumps(late)]["refused"]
    assert "gathers the modules of a layer one by one" in refused
    assert "before deepspeed.initialize()" in refused


def compare(asked: list[dict[str, Any]], patience: float, *others: dict[str, Any]) -> dict[str, Any]:
    """Check that the hooks of these cases saw the same; return other findings."""
    found = run_ranks(2, "tests.distributed.hook_cases", [*asked, *others], patience)
    apart = {text: found.pop(text) for text in map(json.dumps, others)}
    wrong = {}
    for case, result in found.items():
        for rank in result["ranks"]:
            if rank["plain"] != rank["ours"] or not rank["apart"] <= 1e-5:
                wrong[case] = rank
    assert not wrong, json.dumps(wrong, indent=1)
    called = [any("model" not in name for name in result["ranks"][0]["plain"]) for result in found.values()]
    assert sum(called) >= len(called) // 2, "of the plain model too"
    return apart


@pytest.mark.full
@pytest.mark.parametrize(("stage", "adapters"), [(3, True), (2, False), (3, False), (0, False), (0, True)])
def test_transformers_trainer(stage: int, adapters: bool) -> None:
    """The model is streamed before the Trainer hands it to DeepSpeed, which then gathers layers whole.

    Under DDP (stage 0) the callback streams it when training begins.
    """
    case = {"stage": stage, "adapters": adapters}
    (found,) = run_ranks(2, "tests.distributed.trainer_cases", [case], 200).values()
    assert len(found["plain"]) == STEPS
    assert found["plain"][-1] != pytest.approx(found["plain"][0], rel=1e-3), "it learns"
    assert found["streamed"] == pytest.approx(found["plain"], rel=1e-5)
