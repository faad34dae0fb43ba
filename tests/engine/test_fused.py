"""Linear modules, norms and rotary embeddings of a layer, computed in another way than the modules are written.

On a CPU nothing is gained by fused norms; here they run there all the same. A linear module that computes something
else (by replaced functions, function modes, hooks, or in checkpoints) keeps it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import MethodType
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
from torch.utils._python_dispatch import TorchDispatchMode

import streamtune
from streamtune import Schedule
from streamtune.engine import decoder_layers, fused
from streamtune.engine.fused import FusedLinears, FusedParts
from streamtune.engine.vjp import GradientSum
from streamtune.ops import fused as operators
from streamtune.ops.forward_state import Autocast
from tests.exactness.families import batch, build, gradients, worst
from tests.precision_kit import EXACT, Float64, in_float64, total_error

NORMS = {"llama": 2, "qwen3": 4, "gemma2": 4, "gemma3_text": 6, "gpt_neox": 0, "cohere": 0, "mistral": 2}
"""Root mean square norms of a layer."""
ROTATES = {"llama": True, "qwen3": True, "gemma2": True, "gemma3_text": True, "cohere": False, "mistral": True}
"""Families that rotate by halves; cohere rotates pairs."""
SCHEDULE = Schedule(chunk_size=8, head_chunk_size=16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Fused operators on the CPU, and how often each is called."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        own = getattr(fused, name)

        def call(*args: Any) -> Tensor:
            found[name] += 1
            return own(*args)

        return call

    monkeypatch.setattr(operators, "FUSION_DEVICES", {"cpu", "cuda"})
    for name in ("rms_norm", "apply_rotary"):
        monkeypatch.setattr(fused, name, counted(name))
    return found


@pytest.mark.parametrize("replaced", ["a module's forward", "a class's forward", "the function"])
def test_what_is_replaced_after_streaming_is_called_and_left(
    replaced: str, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that bring kernels of their own."""
    model, inputs = build("llama"), batch("plain")
    norm = decoder_layers(model)[0].input_layernorm
    names, seen = sys.modules[type(model).__module__].__dict__, []

    with streamtune.stream(model, schedule=SCHEDULE):
        own: Any = names[fused.ROTARY] if replaced == "the function" else type(norm).forward

        def mine(*args: Any) -> Any:
            seen.append(None)
            out = own(*args)
            return (2 * out[0], out[1]) if isinstance(out, tuple) else 2 * out

        if replaced == "the function":
            monkeypatch.setitem(names, fused.ROTARY, mine)
        elif replaced == "a class's forward":
            monkeypatch.setattr(type(norm), "forward", mine)
        else:
            norm.forward = MethodType(mine, norm)
        _, ours = gradients(model, inputs)
        assert seen
        assert (names[fused.ROTARY] is mine) == (replaced == "the function")
        assert ("forward" in norm.__dict__) == (replaced == "a module's forward")
    _, want = gradients(model, inputs)  # plain, and still replaced
    assert worst(ours, want) < 1e-5


@pytest.mark.parametrize("family", NORMS)
def test_a_part_is_known_by_what_it_computes(family: str) -> None:
    parts = FusedParts(decoder_layers(build(family))[0])
    assert len(parts._norms) == NORMS[family]
    if family in ROTATES:
        assert bool(parts._rotary) == ROTATES[family]


@pytest.mark.quick("llama", "gemma2")
@pytest.mark.parametrize("family", NORMS)
def test_exact_in_fp64(family: str, calls: Counter[str]) -> None:
    model, inputs = in_float64(build(family)), batch("multiturn")
    with Float64():
        _, want = gradients(model, inputs)
    with streamtune.stream(model, schedule=SCHEDULE), Float64():
        calls.clear()
        _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT
    assert bool(calls["rms_norm"]) == bool(NORMS[family])
    assert bool(calls["apply_rotary"]) == ROTATES.get(family, bool(calls["apply_rotary"]))


@pytest.mark.quick("qwen3-bf16", "gemma2-autocast")
@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_as_precise_as_torch(family: str, how: str, calls: Counter[str]) -> None:
    """Over four draws of the tokens: a single one is chance, and may be 1.1 times torch's error or 0.9 of it."""
    rounded = build(family).to(torch.bfloat16)
    model = copy.deepcopy(rounded) if how == "bf16" else copy.deepcopy(rounded).float()

    def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            return model(**inputs).loss

    errors = []
    for seed in range(4):
        ids = torch.randint(1, 64, (3, 37), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": ids, "labels": ids}
        with Float64():
            _, truth = gradients(in_float64(rounded), inputs)
        _, plain = gradients(model, inputs, loss)
        with streamtune.stream(model, schedule=SCHEDULE):
            _, ours = gradients(model, inputs, loss)
        errors.append((total_error(ours, truth) ** 2, total_error(plain, truth) ** 2))
        assert all(ours[name].dtype == p.dtype for name, p in model.named_parameters())
    squares, plain_squares = map(sum, zip(*errors, strict=True))
    assert squares**0.5 <= 1.1 * plain_squares**0.5 + 1e-6
    assert calls["rms_norm"]


def test_none_leaves_norms_and_rotations_as_they_are_written(calls: Counter[str]) -> None:
    model = build("llama")
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, fuse="none")):
        gradients(model, batch("plain"))
    assert not calls


def test_a_layer_is_left_as_it_was(calls: Counter[str]) -> None:
    model = build("llama")
    rotation = vars(__import__(type(model).__module__, fromlist=["x"]))["apply_rotary_pos_emb"]
    with streamtune.stream(model, schedule=SCHEDULE):
        gradients(model, batch("plain"))
        inside = [m for layer in decoder_layers(model) for m in layer.modules() if m is not layer]
        assert not any("forward" in module.__dict__ for module in inside)
    assert vars(__import__(type(model).__module__, fromlist=["x"]))["apply_rotary_pos_emb"] is rotation


def test_a_norm_of_another_formula_is_left_alone() -> None:
    class HalfNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (0.5 + self.weight)

    assert fused._norm_formula(HalfNorm()) is None
    assert fused._norm_formula(nn.LayerNorm(8)) is None


# Linear modules.


class Casts(TorchDispatchMode):
    """Counts casts to bf16 by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.found[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_autocast_casts_a_weight_once_for_a_walk_over_the_chunks() -> None:
    model, inputs = build("llama"), batch("plain")
    shape = tuple(decoder_layers(model)[0].mlp.down_proj.weight.shape)
    count = sum(tuple(p.shape) == shape for layer in decoder_layers(model) for p in layer.parameters())
    with streamtune.stream(model, schedule=SCHEDULE), Casts() as casts:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            loss = model(**inputs).loss
        loss.backward()
    assert inputs["input_ids"].shape[1] > 4 * SCHEDULE.chunk_size
    assert casts.found[shape] == 2 * count  # one in the forward, one in the backward


def test_autocast_that_the_model_switches_off_is_off() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linears = FusedLinears(linear, Autocast.capture(x.device))
        with linears.replacing_forwards():
            assert linear(x).dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(linear(x), x @ linear.weight.T + linear.bias)
    assert "forward" not in linear.__dict__


@pytest.mark.parametrize("trained", ["weight", "bias", "both", "neither"])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_of_what_is_trained(trained: str, autocast: bool) -> None:
    linear, x = nn.Linear(8, 6), torch.randn(2, 5, 8, requires_grad=True)
    linear.weight.requires_grad_(trained in ("weight", "both"))
    linear.bias.requires_grad_(trained in ("bias", "both"))
    parameters = [p for p in linear.parameters() if p.requires_grad]
    grad = torch.randn(2, 5, 6).to(torch.bfloat16 if autocast else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        want = torch.autograd.grad(linear(x), [x, *parameters], grad)
        sums = [GradientSum(p, sum_in_fp32=True) for p in parameters]
        with FusedLinears(linear, Autocast.capture(x.device), sums).replacing_forwards():
            got = torch.autograd.grad(linear(x), [x, *parameters], grad, allow_unused=True)
    results = [got[0], *(total.result() for total in sums)] if sums or autocast else got
    bound = 2e-2 if autocast else 1e-6
    for a, b in zip(results, want, strict=True):
        assert a is not None
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_a_model_of_which_only_biases_or_weights_are_trained(trained: str) -> None:
    model, inputs = in_float64(build("gpt_neox")), batch("plain")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    with Float64():
        _, want = gradients(model, inputs)
        with streamtune.stream(model, schedule=SCHEDULE):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


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
