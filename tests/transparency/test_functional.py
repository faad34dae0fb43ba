"""``torch.func`` on a streamed model, and models without weights: computed as plainly, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import streamtune
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.exactness.families import build
from tests.precision_kit import Float64, errors

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "labels": IDS, "use_cache": False}


def other_weights(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights that are computed from others, as an inner step of meta-learning computes them."""
    scale = torch.tensor(1.1, dtype=torch.float64, requires_grad=True)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return scale, {name: p * scale for name, p in leaves.items()} | {"model.norm.weight": leaves["model.norm.weight"]}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("chunk_size", [9, 27])
def test_functional_call(family: str, chunk_size: int) -> None:
    found = []
    for streamed in (False, True):
        with Float64():
            model = build(family).double()
            before = dict(model.named_parameters())
            if streamed:
                streamtune.stream(model, chunk_size=chunk_size)
            scale, weights = other_weights(model)
            loss = functional_call(model, weights, (), CALL).loss
            names = [name for name in weights if weights[name].grad_fn is not None]
            grads = torch.autograd.grad(loss, [scale, *(weights[name] for name in names)])
            assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
            assert all(p.grad is None for p in model.parameters())
            found.append({"loss": loss.detach(), **dict(zip(["scale", *names], grads, strict=True))})
    assert max(errors(found[1], found[0]).values()) < 1e-9


def test_transforms_are_refused_by_name() -> None:
    model = build("qwen3")
    with streamtune.stream(model, chunk_size=9):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        with pytest.raises(UnsupportedModelError, match=r"transform of torch\.func") as caught:
            torch.func.grad(lambda w: functional_call(model, w, (), CALL).loss)(weights)
        assert "of torch.func, only functional_call is supported" in caught.value.fix
        model(**CALL).loss.backward()


def test_a_model_on_meta_is_told_as_that() -> None:
    plain = build("qwen3")
    with torch.device("meta"):
        model: Any = type(plain)(plain.config)
    with streamtune.stream(model, chunk_size=9):
        with pytest.raises(ArgumentError, match="on the meta device: it has no weights"):
            model(**CALL)
        model.to_empty(device="cpu").load_state_dict(plain.state_dict())
        model.model.rotary_emb.inv_freq.copy_(plain.model.rotary_emb.inv_freq)
        torch.testing.assert_close(model(**CALL).loss, plain(**CALL).loss)


def test_adapters_frozen_in_between_are_named() -> None:
    """``disable_adapter()`` around a backward: the plain model gives no gradient there, and no word."""
    from streamtune.models import add_lora

    model: Any = add_lora(build("qwen3"), r=4)
    with streamtune.stream(model, chunk_size=9):
        loss = model(**CALL).loss
        with model.disable_adapter(), pytest.raises(ArgumentError, match=r"lora_A.* was frozen between") as caught:
            loss.backward()
        assert "disable_adapter" in caught.value.fix
        with model.disable_adapter():
            reference = model(**CALL).loss.detach()
        (model(**CALL).loss - reference).backward()
        assert any(p.grad is not None for p in model.parameters())


def test_other_numbers_under_the_same_weight_are_named() -> None:
    model = build("qwen3")
    with streamtune.stream(model, chunk_size=9):
        loss = model(**CALL).loss
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * 2
        with pytest.raises(ArgumentError, match=r"up_proj\.weight was changed"):
            loss.backward()
