"""A layer that computes something else above a number of tokens is found before it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build

FAMILIES = ["qwen3", "gemma2", "gemma3n_text", "mixtral", "bloom", "mamba2", "qwen3_next", "zamba2", "gpt2", "phi3"]


class Switching(nn.Module):
    """An MLP that gives twice as much above a number of tokens."""

    def __init__(self, own: nn.Module, above: int, share: float = 2.0) -> None:
        super().__init__()
        self.own, self.above, self.share = own, above, share

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) * (self.share if x.shape[1] > self.above else 1.0)


def switching(above: int, family: str = "qwen3", **more: Any) -> Any:
    model: Any = build(family, **more)
    model.model.layers[1].mlp = Switching(model.model.layers[1].mlp, above)
    return model


@pytest.mark.parametrize(("chunk_size", "above"), [(9, 30), (40, 30), (300, 200), (300, 300)])
def test_a_layer_that_switches_is_found(chunk_size: int, above: int) -> None:
    """It switches above a chunk, so never in one; or below, so not in the chunks of a row that is just longer."""
    model = switching(above, max_position_embeddings=2048)
    with (
        streamtune.stream(model, chunk_size=chunk_size) as handle,
        pytest.raises(UnsupportedModelError, match="computes differently above some length") as caught,
    ):
        handle.check()
    assert caught.value.where == "layer 1 of 2 (Qwen3DecoderLayer)"
    assert f"in chunks of {chunk_size:,}" in caught.value.what


def test_the_length_that_is_trained_on_can_be_asked_for() -> None:
    model = switching(above=900, max_position_embeddings=2048)
    with streamtune.stream(model, chunk_size=300) as handle:
        handle.check()  # 301 tokens: nothing switches yet
        with pytest.raises(UnsupportedModelError, match="tokens 0 to 300 differ"):
            handle.check(length=1000)
        model.model.layers[1].mlp = model.model.layers[1].mlp.own
        handle.check(length=1000)


@pytest.mark.quick("qwen3", "mamba2", "gemma2", "gpt2")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_do_not_switch_pass(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype=dtype)
    with streamtune.stream(model, chunk_size=40) as handle:
        handle.check()
        assert all(not parameter.grad for parameter in model.parameters())


def test_a_layer_that_switches_below_half_a_chunk_is_exact() -> None:
    """No chunk of any row is that short, and a row that is has no chunks."""
    model = switching(above=100, max_position_embeddings=2048)
    ids = torch.randint(3, 60, (1, 301), generator=torch.Generator().manual_seed(0))
    want = [float(model(input_ids=ids[:, :n], labels=ids[:, :n]).loss.detach()) for n in (90, 110, 301)]
    with streamtune.stream(model, chunk_size=300) as handle:
        handle.check()
        got = [float(model(input_ids=ids[:, :n], labels=ids[:, :n]).loss.detach()) for n in (90, 110, 301)]
    assert got == pytest.approx(want, rel=1e-5)


def test_positions_above_those_the_model_has_are_not_tried() -> None:
    """GPT-2 has learnt a vector for each position: a longer row has none."""
    model = build("gpt2")
    with streamtune.stream(model, chunk_size=model.config.n_positions - 3) as handle:
        handle.check()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotations_that_switch_with_the_longest_position_are_those_of_the_whole_row(kind: str) -> None:
    """They are made outside of the layers, of all positions: chunks are given their part."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 2.0, 4.0],
            "original_max_position_embeddings": 30,
        }
    model = build("phi3", max_position_embeddings=120, rope_parameters=rope, head_dim=8, partial_rotary_factor=1.0)
    if kind == "longrope":
        model.config.original_max_position_embeddings = 30
    ids = torch.randint(3, 60, (1, 80), generator=torch.Generator().manual_seed(0))
    want = model(input_ids=ids, labels=ids, use_cache=False).loss
    short = model(input_ids=ids[:, :20], labels=ids[:, :20], use_cache=False).loss
    with streamtune.stream(model, chunk_size=9) as handle:
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(input_ids=ids[:, :20], labels=ids[:, :20]).loss, short, rtol=1e-5, atol=1e-5)
        handle.check()
