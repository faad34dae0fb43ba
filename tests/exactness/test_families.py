"""Streaming equals plain autograd, per parameter, on every tested family, for every kind of batch and chunk size."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import streamtune
from streamtune import Schedule
from streamtune.engine import vjp
from tests.precision_kit import EXACT, Float64, in_float64

from .families import BATCHES, FAMILIES, batch, build, gradients, reference, worst

SCHEDULES = (
    Schedule(chunk_size=37, head_chunk_size=200),  # one chunk
    Schedule(chunk_size=16, head_chunk_size=11),  # ragged: 13 + 12 + 12
    Schedule(chunk_size=5, head_chunk_size=1, keep_kv=True),
    Schedule(chunk_size=1, head_chunk_size=7),
)


@pytest.mark.quick("llama", "gemma2", "gpt_oss")
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_gradients_equal_plain_autograd(family: str, error_table: dict[str, dict[str, float]]) -> None:
    model = build(family)
    row = error_table.setdefault(family, {})
    for kind in BATCHES:
        inputs = batch(kind)
        want = reference(model, inputs)
        for schedule in SCHEDULES:
            with streamtune.stream(model, schedule=schedule):
                error = want.check(gradients(model, inputs), (family, kind, schedule))
            row[kind] = max(row.get(kind, 0.0), error)


@pytest.mark.quick("llama", "gemma2", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_leaves_no_doubt(family: str) -> None:
    model, inputs = in_float64(build(family)), batch("multiturn")
    with Float64():
        _, want = gradients(model, inputs)
        with streamtune.stream(model, chunk_size=8):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


@pytest.mark.parametrize("part", ["add_term", "add_weight_gradient"])
@pytest.mark.parametrize("size", [1e-3, 3e-5])
def test_a_small_mistake_is_found(size: float, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one chunk's term of each sum a part is left out; a bare bound of 2e-5 let 3e-5 of a term pass."""
    model, inputs = build("llama"), batch("plain")
    add, add_outer = vjp.GradientSum.add_term, vjp.GradientSum.add_weight_gradient

    def less(total: Any, term: Tensor | None) -> None:
        add(total, term if term is None or total.total is not None else term * (1 - size))

    def less_outer(total: Any, grad: Tensor, hidden: Tensor) -> None:
        add_outer(total, grad if total.total is not None else grad * (1 - size), hidden)

    want = reference(model, inputs)
    monkeypatch.setattr(vjp.GradientSum, part, less if part == "add_term" else less_outer)
    with streamtune.stream(model, chunk_size=8), pytest.raises(AssertionError, match="off by"):
        want.check(gradients(model, inputs))
