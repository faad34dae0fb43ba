"""Streaming equals plain autograd, per parameter, on every tested family, for every kind of batch and chunk size."""

from __future__ import annotations

import pytest
import torch

import streamtune
from streamtune import Schedule

from .families import BATCHES, BOUND, FAMILIES, batch, build, gradients, worst

SCHEDULES = (
    Schedule(chunk_size=37, head_chunk_size=200),  # one chunk
    Schedule(chunk_size=16, head_chunk_size=11),  # ragged: 13 + 12 + 12
    Schedule(chunk_size=5, head_chunk_size=1, keep_kv=True),
    Schedule(chunk_size=1, head_chunk_size=7),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_gradients_equal_plain_autograd(family: str, error_table: dict[str, dict[str, float]]) -> None:
    model = build(family)
    row = error_table.setdefault(family, {})
    for kind in BATCHES:
        inputs = batch(kind)
        loss_ref, want = gradients(model, inputs)
        for schedule in SCHEDULES:
            with streamtune.stream(model, schedule=schedule):
                loss, got = gradients(model, inputs)
            torch.testing.assert_close(loss, loss_ref, rtol=2e-6, atol=0)
            error = worst(got, want)
            assert error <= BOUND, (family, kind, schedule, error)
            row[kind] = max(row.get(kind, 0.0), error)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])  # its experts are fp32 only
def test_fp64_leaves_no_doubt(family: str) -> None:
    model = build(family, dtype=torch.float64)
    if family == "mixtral":
        model.set_experts_implementation("eager")  # the grouped matmul has no fp64
    inputs = batch("multiturn")
    _, want = gradients(model, inputs)
    with streamtune.stream(model, chunk_size=8):
        _, got = gradients(model, inputs)
    # What remains are the places where a family computes in fp32 whatever its weights are (norms, rotary, router).
    assert worst(got, want) <= 2e-6
