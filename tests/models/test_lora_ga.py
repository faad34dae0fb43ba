"""LoRA-GA: factors of the whole gradient, computed under streaming, one weight after another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exactness.families import batch, build, gradients
from tests.exactness.test_adapters import Nothing, moved
from tests.precision_kit import Float64
from torch import Tensor

import streamtune
from streamtune.errors import ArgumentError, NonFiniteError
from streamtune.models import (
    AdapterSpec,
    add_adapters,
    factors_from_gradients,
    load_peft_adapters,
    load_run_adapters,
    save_pretrained,
)
from streamtune.models import initialize_from_factors as start
from streamtune.models.adapters.targets import lora_layers
from streamtune.schedule import Schedule

GAMMA = 16.0
SPEC = AdapterSpec(kind="lora_ga", r=8, alpha=8.0)
"""Four times the rank is all singular vectors of these matrices: the random projection loses nothing."""
BATCHES = ("plain", "masked")
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two levels": {"levels": 2, "segment_size": 2},
    "weights on host": {"weights": "host", "offload": "host"},
    "last layer whole": {"keep_layers": 1},
}


def losses(model: Any, names: tuple[str, ...] = BATCHES) -> list[Callable[[], Tensor]]:
    """The loss of each batch."""
    return [lambda name=name: model(**batch(name)).loss for name in names]  # type: ignore[misc]


def whole_gradients(family: str, **more: Any) -> dict[str, Tensor]:
    """Gradients of the weights of linear layers, of all batches together, ``[out, in]`` in fp64, by plain autograd."""
    model = build(family, **more).double()
    with Float64():
        found = [gradients(model, batch(name))[1] for name in BATCHES]
    summed = {name.removesuffix(".weight"): found[0][name] + found[1][name] for name in found[0]}
    return {name: grad.T if family == "gpt2" else grad for name, grad in summed.items() if grad.dim() == 2}


def projections(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``A' A`` and ``B B'``, which do not depend on the signs of singular vectors."""
    return a.T @ a, b @ b.T


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_factors_are_those_of_the_paper(family: str) -> None:
    """Algorithm 1, by a whole SVD in fp64: ``A0 = c V[1..r]'``, ``B0 = c U[r+1..2r]``."""
    model: Any = add_adapters(build(family), SPEC).double()
    with Float64():
        found = factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0)
    want = whole_gradients(family)
    assert found.keys() == dict(lora_layers(model)).keys()
    for name, (a, b) in found.items():
        u, _, v = torch.linalg.svd(want[name], full_matrices=False)
        scale = len(want[name]) ** 0.25 / GAMMA**0.5
        for ours, theirs in zip(projections(a, b), projections(scale * v[:8], scale * u[:, 8:16]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_first_step_moves_weights_along_their_gradient(family: str) -> None:
    """Theorem 3.1: the movement is ``(s c)^2`` times the best approximation of the gradient by rank 2r."""
    model: Any = add_adapters(build(family), SPEC).double()
    ordinary: Any = add_adapters(build(family), AdapterSpec(kind="rslora", r=8, alpha=8.0)).double()
    want = whole_gradients(family)
    with Float64():
        start(model, factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0))
        moves = [movement(each) for each in (model, ordinary)]
    angles = []
    for name, layer in lora_layers(model):
        u, s, v = torch.linalg.svd(want[name], full_matrices=False)
        best = u[:, :16] * s[:16] @ v[:16]
        factor = layer.scaling["default"] ** 2 * len(want[name]) ** 0.5 / GAMMA
        torch.testing.assert_close(moves[0][name], factor * best, rtol=1e-6, atol=1e-9)
        angles.append([cosine(move[name], want[name]) for move in moves])
    assert all(ours > theirs for ours, theirs in angles)
    assert min(ours for ours, _ in angles) > 0.9


def movement(model: Any) -> dict[str, Tensor]:
    """``s (dB A + B dA)`` of a step against the gradient, to first order in its rate."""
    found = [gradients(model, batch(name))[1] for name in BATCHES]
    moves = {}
    for name, layer in lora_layers(model):
        prefix = f"base_model.model.{name}.lora_"
        down, up = (sum(each[f"{prefix}{part}.default.weight"] for each in found) for part in "AB")
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        moves[name] = (layer.scaling["default"] * (up @ a + b @ down)).detach()
    return moves


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.mark.quick("plain", "weights on host")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_streamed_factors_are_those_of_plain_autograd(family: str, schedule: str) -> None:
    model: Any = add_adapters(build(family, num_hidden_layers=4), SPEC).double()
    with Float64():
        want = factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0)
        with streamtune.stream(model, schedule=Schedule(chunk_size=8, **SCHEDULES[schedule])):
            found = factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0)
    assert want.keys() == found.keys()
    for name, factors in want.items():
        for ours, theirs in zip(projections(*found[name]), projections(*factors), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("streamed", [False, True])
def test_one_gradient_at_a_time(streamed: bool) -> None:
    model: Any = add_adapters(build("llama", num_hidden_layers=4), AdapterSpec(kind="lora_ga", r=4))
    weights = [layer.get_base_layer().weight for _, layer in lora_layers(model)]
    alive: list[int] = []

    def count(_: Tensor) -> None:
        alive.append(sum(weight.grad is not None for weight in weights))

    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    random = torch.get_rng_state()
    for weight in weights:
        weight.requires_grad_(True)
        weight.register_post_accumulate_grad_hook(count)
        weight.requires_grad_(False)
    handle = streamtune.stream(model, chunk_size=8) if streamed else None
    factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0)
    if handle is not None:
        handle.remove()
    assert alive == [1] * 2 * len(weights)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == trained
    assert all(x.grad is None for x in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_model_that_starts_is_the_base_and_its_gradients_stream() -> None:
    base = build("qwen3").double()
    with Float64(), torch.no_grad():
        before = base(**batch("plain")).logits
    model: Any = add_adapters(base, SPEC).double()
    with Float64():
        start(model, factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0))
        with torch.no_grad():
            torch.testing.assert_close(model(**batch("plain")).logits, before, rtol=1e-10, atol=1e-11)
            with model.disable_adapter():
                assert torch.equal(model(**batch("plain")).logits, before)
        want = gradients(model, batch("masked"))[1]
        with streamtune.stream(model, chunk_size=8):
            found = gradients(model, batch("masked"))[1]
    assert all(want[name].norm() > 0 for name in want)
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ranks", [{}, {"o_proj": 2}])
def test_saved_and_loaded_to_the_same_bits_and_read_by_peft(ranks: dict[str, int], tmp_path: Path) -> None:
    spec = AdapterSpec(kind="lora_ga", r=4, ranks=ranks)
    model: Any = add_adapters(build("llama"), spec)
    start(model, factors_from_gradients(model, losses(model), gamma=GAMMA, seed=0))
    moved(model).eval()
    save_pretrained(model, Nothing(), tmp_path)
    again: Any = load_run_adapters(build("llama"), tmp_path, spec)
    want, found = model.state_dict(), again.state_dict()
    assert want.keys() == found.keys()
    assert all(torch.equal(want[name], found[name]) for name in want)
    theirs: Any = load_peft_adapters(build("llama"), tmp_path).eval()
    with torch.no_grad():
        logits = model(**batch("plain")).logits
        assert (theirs(**batch("plain")).logits - logits).norm() <= 1e-5 * logits.norm()


def test_the_seed_decides() -> None:
    def found(seed: int) -> Any:
        model = add_adapters(build("llama"), AdapterSpec(kind="lora_ga", r=2))
        return factors_from_gradients(model, losses(model), gamma=GAMMA, seed=seed)

    first, second = found(1), found(1)
    assert all(torch.equal(x, y) for name in first for x, y in zip(first[name], second[name], strict=True))


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="larger than half of the matrix"):
        add_adapters(build("llama"), AdapterSpec(kind="lora_ga", r=16))
    model: Any = add_adapters(build("llama"), AdapterSpec(kind="lora_ga", r=2))
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_base_model().lm_head.weight[3, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="is not finite"):
        factors_from_gradients(broken, losses(broken), gamma=GAMMA, seed=0)
