"""Changes to a model between its forward and its backward, which runs the layers again."""

from __future__ import annotations

import copy

import pytest
import torch

import streamtune
from streamtune.errors import ArgumentError
from tests.exactness.families import build
from tests.precision_kit import Float64

PLACES = ["model.layers.0.mlp.up_proj", "model.layers.1.input_layernorm"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trained", [True, False])
def test_weights_that_were_changed_in_place_are_named(place: str, trained: bool) -> None:
    """Plain autograd refuses it as well, where it has saved the weight."""
    model = build("qwen3")
    weight = model.get_submodule(place).weight.requires_grad_(trained)
    ids = torch.randint(1, 60, (1, 27))
    with streamtune.stream(model, chunk_size=8):
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            weight.mul_(1.5)
        with pytest.raises(ArgumentError, match=f"{place.rpartition('.')[2]}.weight was changed in place") as caught:
            loss.backward()
        assert caught.value.where == "Qwen3DecoderLayer"
        model(input_ids=ids, labels=ids).loss.backward()


def test_a_step_after_the_backward_is_no_such_change() -> None:
    model = build("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(1, 60, (1, 27))
    with streamtune.stream(model, chunk_size=8):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("chunk_size", [9, 27])
def test_eval_after_the_forward_changes_no_dropout(chunk_size: int) -> None:
    """Of the plain model the masks are drawn by then."""
    ids = torch.randint(1, 60, (1, 27), generator=torch.Generator().manual_seed(0))
    found = []
    for between in (False, True):
        with Float64(), torch.random.fork_rng():
            model = build("qwen3", attention_dropout=0.3).double().train()
            torch.manual_seed(5)
            with streamtune.stream(model, chunk_size=chunk_size):
                loss = model(input_ids=ids, labels=ids).loss
                if between:
                    model.eval()
                loss.backward()
                assert model.training is not between
                assert model.model.layers[0].training is not between
            found.append({name: copy.deepcopy(p.grad) for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name
