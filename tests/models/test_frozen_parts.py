"""Choice of trained parameters: layers, patterns, tied weights, their dtypes, and every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import build
from tests.exactness.vision import build as build_vision

from streamtune.errors import ArgumentError
from streamtune.models import (
    ModelOptions,
    TrainedParts,
    build_meta_model,
    freeze_parts,
    frozen_parts_note,
    load_model,
    load_model_deferred,
    trained_dtype,
)

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
}  # fmt: skip


def meta(parts: TrainedParts, **settings: Any) -> Any:
    return build_meta_model({**CONFIG, **settings}, ModelOptions(trained=parts))


def trained(model: Any) -> set[str]:
    """Return names of trained parameters, with one name for all parameters of a layer or module."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {".".join(name.split(".")[: 3 if ".layers." in name else -1]) for name in names}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (TrainedParts("last 2"), {"model.layers.10", "model.layers.11"}),
        (TrainedParts("first 1"), {"model.layers.0"}),
        (TrainedParts("3-4", train=("lm_head",)), {"model.layers.3", "model.layers.4", "lm_head"}),
        (TrainedParts(train=("model.layers.1.", "model.norm")), {"model.layers.1", "model.norm"}),  # not layer 10
        (TrainedParts("last 2", ("model.layers.10",)), {"model.layers.11"}),
        (TrainedParts(None, (".+",), ("lm_head",)), {"lm_head"}),  # `train` is applied last
    ],
)
def test_parts_are_chosen_in_order(parts: TrainedParts, expected: set[str]) -> None:
    assert trained(meta(parts)) == expected


def test_tied_weights_are_one_parameter() -> None:
    parts = TrainedParts("last 1", train=("lm_head",))
    model = meta(parts, tie_word_embeddings=True)
    assert trained(model) == {"model.layers.11", "model.embed_tokens"}
    note = frozen_parts_note(model, parts)
    assert note is not None
    assert "the embedding is trained, so the backward runs through all 12 layers" in note
    note = frozen_parts_note(meta(TrainedParts("10-11")), TrainedParts("10-11"))
    assert note == "trained: layers 10-11; the backward ends at layer 10 (of 0 to 11)"


@pytest.mark.parametrize(
    ("parts", "what", "fix"),
    [
        (TrainedParts("last 13"), "needs 13 layers, and the model has 12", "N up to 12"),
        (TrainedParts("8-12"), "needs 13 layers", "numbers 0 to 11"),
        (TrainedParts(train=("layers.3",)), "matches the beginning of no parameter name", r"write '.*layers.3'"),
        (TrainedParts(train=("model.layer.3",)), "matches the beginning", "did you mean 'model.layers.3'"),
        (TrainedParts(freeze=("lm_hed",)), "matches the beginning", "did you mean 'lm_head'"),
        (TrainedParts("last 1", ("model",)), "all parameters are frozen, so nothing is trained", "add train"),
        (TrainedParts(freeze=("(a",)), "is not a regular expression", ""),
        pytest.param(TrainedParts(freeze=(r"(\w+\.?)+!",)), "catastrophic backtracking", "", marks=pytest.mark.full),
    ],
)
def test_mistakes_are_named(parts: TrainedParts, what: str, fix: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        meta(parts)
    assert what in caught.value.what
    assert fix in str(caught.value.fix)


def test_a_vision_tower_stays_frozen() -> None:
    model = build_vision("qwen3_vl")
    with pytest.raises(ArgumentError, match=r"matches only frozen modules \(model.visual\)"):
        freeze_parts(model, TrainedParts(train=("model.visual",)))


@pytest.mark.parametrize("deferred", [False, True])
def test_frozen_weights_stay_in_bfloat16(tmp_path: Path, deferred: bool) -> None:
    saved: Any = build("qwen3", num_hidden_layers=3, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    options = ModelOptions("float32", trained=TrainedParts("last 1", frozen_dtype=torch.bfloat16))
    model: Any = (load_model_deferred if deferred else load_model)(str(tmp_path), options)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".layers.2." in name else torch.bfloat16), name
        assert deferred or torch.equal(parameter, saved.get_parameter(name).to(parameter.dtype)), name
    assert model.dtype == torch.bfloat16  # of the embedding
    assert trained_dtype(model) == torch.float32
