"""Families, tiers and orders on the device: the gradient of plain autograd, also where weights wait on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, batch, build, gradients, reference
from tests.exactness.test_packed_experts import FAMILIES as EXPERTS
from tests.exactness.test_packed_experts import adapted
from tests.exactness.test_packed_experts import reference as reference_of_packed
from tests.exactness.test_packing import apart, rows, targets
from tests.exactness.test_packing import packed as packed_rows
from tests.exactness.test_schedules import SOFTCAPS_AND_SINKS
from tests.exactness.test_states import inputs_of
from tests.precision_kit import Found, Reference

from .test_engine import on

ATTENTION = (
    "llama",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "gpt2",
    "mixtral",
    "deepseek_v3",
    "qwen3_moe",
    "phi3",
    "olmo2",
)
RECURRENT = ("qwen3_next", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2", "mamba2", "zamba2", "rwkv")
SCHEDULES = {
    "chunks": Schedule(chunk_size=8, head_chunk_size=11),
    "inputs on host, two levels": Schedule(chunk_size=8, head_chunk_size=11, levels=2, offload="host"),
    "order of chunks": Schedule(chunk_size=8, head_chunk_size=11, order="chunk"),
    "order of chunks, states on host": Schedule(chunk_size=8, head_chunk_size=11, order="chunk", keep_kv="host"),
    "weights on host": Schedule(chunk_size=8, head_chunk_size=11, weights="host", offload="host", stream_grads=True),
}


@pytest.fixture(autouse=True)
def fp32_is_fp32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Convolutions round to TF32 by default: another kernel for another length then is off by 1e-3, in torch too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.cuda.synchronize()


def on_device(found: Found, device: torch.device) -> Found:
    """Gradients of weights that wait on the host are there too."""
    return found[0], on(device, dict(found[1]))


@pytest.mark.parametrize("family", [*ATTENTION, *RECURRENT])
def test_every_order_and_tier_is_plain_autograd(device: torch.device, family: str) -> None:
    model = build(family) if family in {*FAMILIES, *SOFTCAPS_AND_SINKS} else build_any(family)
    inputs = on(device, inputs_of(family, "left" if family == "gemma2" else "masked"))
    want = reference(model.to(device), inputs)
    for name, schedule in SCHEDULES.items():
        with streamtune.stream(model, schedule=schedule) as handle:
            want.check(on_device(gradients(model, inputs), device), name)
            assert handle.tiers.host.live_bytes == 0
        model.to(device)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_next"])
def test_packed_rows_are_rows_apart(device: torch.device, family: str) -> None:
    model = (build(family) if family in FAMILIES else build_any(family)).to(device)
    pieces = [row.to(device) for row in rows()]
    want = apart(model, pieces)
    inputs = on(device, packed_rows(rows()))
    for schedule in SCHEDULES.values():
        with streamtune.stream(model, schedule=schedule):
            found = gradients(model, {**inputs, "num_items_in_batch": targets(pieces)})
            want.check(on_device(found, device), schedule)
        model.to(device)


@pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")  # of bitsandbytes: such small weights go slower
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", EXPERTS)
def test_quantised_experts(device: torch.device, family: str, kind: str) -> None:
    pytest.importorskip({"nf4": "bitsandbytes", "int8": "torchao"}[kind])
    model: Any = adapted(kind, family)
    loss, truth = reference_of_packed(model, batch("multiturn"), family).truth
    model.to(device)
    inputs = on(device, batch("multiturn"))
    want = Reference((loss, on(device, dict(truth))), gradients(model, inputs))
    for name in ("chunks", "order of chunks", "inputs on host, two levels"):
        with streamtune.stream(model, schedule=SCHEDULES[name]):
            want.check(gradients(model, inputs), name)
