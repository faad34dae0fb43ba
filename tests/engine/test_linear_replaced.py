"""Linear modules that compute something else: by replaced functions, function modes, hooks, or in checkpoints.

The engine computes linear modules of a layer by a function of its own (``engine/fused.py``); there it must not.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import streamtune
from streamtune import Schedule
from streamtune.engine import decoder_layers
from tests.exactness.families import batch, build, gradients, worst
from tests.precision_kit import EXACT, Float64, in_float64

SCHEDULE = Schedule(chunk_size=8, head_chunk_size=16)


class Wider(TorchFunctionMode):
    """Multiplies the input of every linear function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            args = (args[0] * 1.1, *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["functional.linear", "nn.Linear.forward", "a function mode"])
def other_linear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    own = functional.linear

    def wider(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return own(x, 1.1 * weight, bias)

    if request.param == "functional.linear":
        monkeypatch.setattr(functional, "linear", wider)
    elif request.param == "nn.Linear.forward":
        monkeypatch.setattr(nn.Linear, "forward", lambda module, x: wider(x, module.weight, module.bias))
    return Wider if request.param == "a function mode" else nullcontext


def test_the_gradient_of_what_linear_modules_compute_now(other_linear: Any) -> None:
    model, inputs = in_float64(build("llama")), batch("plain")

    def computed() -> dict[str, Tensor]:
        model.zero_grad()
        with other_linear():
            loss = model(**inputs).loss
        loss.backward()  # outside of the mode
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with Float64():
        plain = gradients(model, inputs)[1]
        want = computed()
        with streamtune.stream(model, schedule=SCHEDULE):
            got = computed()
        with streamtune.stream(model, schedule=SCHEDULE, head=False):
            without_head = computed()
    if other_linear is Wider:
        assert worst(want, plain) > 1e-2
    assert worst(got, want) <= EXACT
    assert worst(without_head, want) <= EXACT


def test_a_checkpoint_inside_of_a_layer() -> None:
    model, inputs = in_float64(build("llama")), batch("plain")
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda part: type(part).__name__.endswith("MLP")
    )
    with Float64():
        _, want = gradients(model, inputs)
        with streamtune.stream(model, schedule=SCHEDULE):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


def test_a_hook_that_writes_a_weight_under_autocast() -> None:
    """Before each chunk a hook sets the weight: a cast that was made before the hook would be of another weight."""
    model, inputs = build("llama"), batch("plain")

    def write(module: nn.Linear, args: Any, weight: Tensor) -> None:
        module.weight.data.copy_(weight)

    def computed() -> tuple[float, dict[str, Tensor]]:
        for layer in decoder_layers(model):
            layer.mlp.up_proj.weight.data.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, found = gradients(model, inputs)
        return float(loss), found

    for layer in decoder_layers(model):
        weight = layer.mlp.up_proj.weight.detach().clone()
        layer.mlp.up_proj.register_forward_pre_hook(streamtune.chunkwise(functools.partial(write, weight=weight)))
    loss, want = computed()
    with streamtune.stream(model, schedule=SCHEDULE):
        streamed, got = computed()
    assert streamed == pytest.approx(loss, rel=1e-3)
    assert worst(got, want) <= 0.1  # bf16; with the weight before the hook, 0, it is 1
