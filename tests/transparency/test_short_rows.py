"""``stream(model)`` itself takes short calls in one chunk and keeps their attention outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune import Schedule
from streamtune.engine.observe import with_observer
from tests.conformance.reducer import build
from tests.precision_kit import Float64, errors, in_float64


class Chunks:
    """The chunks that layers ran on, by walk, and how often attention outputs were kept."""

    def __init__(self) -> None:
        self.longest, self.kept = 0, 0

    def on_chunk(self, layer: nn.Module, chunk: slice, walk: str) -> None:
        self.longest = max(self.longest, chunk.stop - chunk.start)

    def on_new_tensors(self, kind: str, tensors: Any) -> None:
        self.kept += kind == "attention output"


def gradients(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], Chunks]:
    model.zero_grad()
    with with_observer(chunks := Chunks()):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}, chunks


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_next"])
def test_a_short_call_is_one_chunk_with_the_gradient_of_any(family: str) -> None:
    ids = torch.randint(3, 60, (1, 100), generator=torch.Generator().manual_seed(0))
    with Float64():
        model = in_float64(build(family))
        want, _ = gradients(model, ids)
        with streamtune.stream(model):
            got, chunks = gradients(model, ids)
    assert max(errors(got, want).values()) < 1e-9
    assert chunks.longest == 100
    assert chunks.kept > 0


@pytest.mark.parametrize(
    ("rows", "length", "chunk"), [(1, 4096, 4096), (1, 4097, 2048), (4, 1024, 1024), (3, 2100, 1050)]
)
def test_how_short(rows: int, length: int, chunk: int) -> None:
    """At most 4,096 tokens with all rows; beyond, chunks of at most 2,048 and nothing kept."""
    model = build("llama", num_hidden_layers=1, max_position_embeddings=8192)
    ids = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(0))
    with streamtune.stream(model) as handle:
        assert handle.schedule == Schedule()
        _, chunks = gradients(model, ids)
    assert chunks.longest == chunk
    assert bool(chunks.kept) == (rows * length <= 4096)


@pytest.mark.parametrize("given", [{"chunk_size": 2048}, {"schedule": Schedule()}])
def test_a_schedule_that_was_chosen_stays(given: dict[str, Any]) -> None:
    model = build("llama", num_hidden_layers=1, max_position_embeddings=8192)
    ids = torch.randint(3, 60, (1, 2500), generator=torch.Generator().manual_seed(0))
    with streamtune.stream(model, **given):
        _, chunks = gradients(model, ids)
    assert (chunks.longest, chunks.kept) == (1250, 0)
