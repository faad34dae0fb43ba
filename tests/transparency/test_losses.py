"""The loss of a call with labels is the model's own, or the call is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

import streamtune
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import build


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Cross entropy with label smoothing."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1), label_smoothing=0.2)


def ids() -> Tensor:
    return torch.randint(1, 60, (2, 27), generator=torch.Generator().manual_seed(0))


def test_a_loss_of_the_users_own_is_refused() -> None:
    model = build("qwen3")
    model.loss_function = smoothed
    with pytest.raises(UnsupportedModelError, match="is 'smoothed'") as caught:
        streamtune.stream(model, chunk_size=8)
    assert caught.value.where == "model.loss_function"
    assert "head=False" in caught.value.fix
    want = model(input_ids=ids(), labels=ids()).loss
    with streamtune.stream(model, chunk_size=8, head=False):  # as the error advises
        assert model(input_ids=ids(), labels=ids()).loss.item() == pytest.approx(want.item(), rel=1e-6)


def test_one_that_is_set_later_as_well() -> None:
    model = build("qwen3")
    with streamtune.stream(model, chunk_size=8):
        model.loss_function = smoothed
        with pytest.raises(UnsupportedModelError, match="is 'smoothed'"):
            model(input_ids=ids(), labels=ids())
        assert model.loss_function is smoothed


def test_and_one_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSS_MAPPING, "Smoothed", smoothed)
    model = build("qwen3")
    model.loss_type = "Smoothed"
    with streamtune.stream(model, chunk_size=8), pytest.raises(UnsupportedModelError, match="is 'smoothed'"):
        model(input_ids=ids(), labels=ids())


def test_no_labels_no_loss() -> None:
    """A row of which nothing is trained has the loss 0: plain cross entropy divides 0 by 0 there."""
    model = build("qwen3")
    nothing = torch.full_like(ids(), -100)
    assert model(input_ids=ids(), labels=nothing).loss.isnan()
    with streamtune.stream(model, chunk_size=8):
        assert model(input_ids=ids(), labels=nothing).loss == 0
