"""A gradient of a streamed model has no graph of its own, and nobody is given one that seems to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import build

CASES: dict[str, dict[str, Any]] = {
    "default": {"chunk_size": 8},
    "own head": {"chunk_size": 8, "head": False},
    "layers kept": {"schedule": Schedule(8, 8, keep_layers=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_penalty_on_a_gradient_is_refused(case: str) -> None:
    model = build("qwen3")
    ids = torch.randint(1, 60, (2, 27))
    with streamtune.stream(model, **CASES[case]):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=ids).loss
        with pytest.raises(UnsupportedModelError, match="create_graph=True"):
            torch.autograd.grad(loss, embedded, create_graph=True)
        model(input_ids=ids, labels=ids).loss.backward()  # and training goes on


def test_log_probs_too() -> None:
    model = build("qwen3")
    ids = torch.randint(1, 60, (1, 27))
    with streamtune.stream(model, chunk_size=8) as handle:
        logprobs = handle.logprobs(ids, ids).logprobs
        with pytest.raises(UnsupportedModelError, match="create_graph=True"):
            logprobs.sum().backward(create_graph=True)
