"""Gradient checkpointing with Liger's fused loss as a simulated baseline: its bytes on device and host."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from streamtune.engine import decoder_layers
from streamtune.engine.memory.placement import Tiers
from streamtune.plan.simulate import LiveBytes, Mode, simulate
from streamtune.plan.simulate.memory import model_bytes
from streamtune.plan.simulate.scored import checkpointing, fused_loss, recompute
from streamtune.schedule import Schedule
from tests.plan.simulate.test_simulate import BASE, LENGTH, build, build_adapted, workload

WIDE = {"vocab_size": 20_011}


def measured(model: Any, mode: Mode) -> int:
    """Return weight bytes and live bytes of a real CPU step with the same chunks and buffers."""
    tiers = Tiers(Schedule(offload="host"))
    host = tiers.get_tier("host", torch.device("cpu"))

    def kept(function: Any, *args: Any) -> Any:
        with ExitStack() as stack:
            if mode == "liger-loss-offload":
                stack.enter_context(saved_tensors_hooks(host.put, lambda block: block.get()))
            return recompute(function, *args)

    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH))
    with checkpointing(model, kept):
        fused_loss(model, ids).backward()
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(model, decoder_layers(model)) as live:
            fused_loss(model, ids).backward()
    return model_bytes(model) + live.peak


@pytest.mark.parametrize("mode", ["liger-loss", "liger-loss-offload"])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_the_simulated_peak_is_the_one_measured(mode: Mode, adapted: bool) -> None:
    make = partial(build_adapted, dtype=torch.float32) if adapted else partial(build, "qwen3", **WIDE)
    found = simulate(workload(make, mode), BASE)
    assert found.peak_bytes == pytest.approx(measured(make("cpu").train(), mode), rel=0.01)
    assert (found.host_bytes > 0) == (mode == "liger-loss-offload")


def test_logits_of_all_tokens_are_never_there() -> None:
    """With 20,011 classes and width 64, Liger's chunk has 1 / 313 of the tokens, rounded up to a power of two."""
    make = partial(build, "qwen3", **WIDE)
    whole, fused, on_host = (
        simulate(workload(make, mode), BASE) for mode in ("checkpoint", "liger-loss", "liger-loss-offload")
    )
    assert whole.peak_bytes - fused.peak_bytes > 4 * LENGTH * WIDE["vocab_size"]
    layers = make("meta").config.num_hidden_layers
    assert on_host.host_bytes == layers * LENGTH * 64 * 4
