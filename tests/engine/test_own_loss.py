"""A model that computes its cross entropy by its own hand on the promise of its logits: the same loss, streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamtune import Schedule
from streamtune.engine.head import StreamedHead
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import VOCAB, batch, build
from tests.precision_kit import Float64, assert_as_precise, widened

Loss = Callable[[Any, Tensor], Tensor]
IDS = batch("multiturn")
LABELS = IDS["labels"]

LOSSES: dict[str, Loss] = {
    "view": lambda z, y: nn.CrossEntropyLoss()(z.view(-1, VOCAB), y.view(-1)),
    "reshape, size": lambda z, y: nn.CrossEntropyLoss()(z.reshape(-1, z.size(-1)), y.reshape(-1)),
    "shape": lambda z, y: nn.functional.cross_entropy(z.view((-1, z.shape[-1])), y.flatten()),
    "shifted": lambda z, y: nn.CrossEntropyLoss()(z[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].flatten()),
    "shifted, two slices": lambda z, y: nn.functional.cross_entropy(z[:, :-1].reshape(-1, VOCAB), y[:, 1:].flatten()),
    "sum": lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.view(-1, VOCAB), y.view(-1)) / 7,
    "other ignored": lambda z, y: nn.CrossEntropyLoss(ignore_index=5)(
        z.float().view(-1, VOCAB), y.masked_fill(y == -100, 5).view(-1)
    ),
    "squashed": lambda z, y: nn.CrossEntropyLoss()(((z / 3).tanh() * 3)[:, 4:].reshape(-1, VOCAB), y[:, 4:].flatten()),
    "end of the vocabulary": lambda z, y: nn.functional.cross_entropy(
        (z[..., :-9].float() / 3).view(-1, VOCAB - 9), y.clamp(max=VOCAB - 10).view(-1)
    ),
    "part of tokens and vocabulary": lambda z, y: nn.functional.cross_entropy(
        (w := z[:, 1:, 3 : VOCAB - 5]).reshape(-1, w.shape[-1]), y[:, 1:].clamp(max=VOCAB - 9).flatten()
    ),
    "rows": lambda z, y: nn.CrossEntropyLoss()(z[1:2].view(-1, VOCAB), y[1:2].flatten()),
}


@pytest.fixture
def model() -> Any:
    return build("llama", tie_word_embeddings=False)


@pytest.fixture
def promise(model: Any) -> Any:
    head = StreamedHead(model, Schedule(head_chunk_size=5))
    hidden = torch.randn(3, 37, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    head.begin_call()
    yield model.lm_head(hidden)
    head.end_call()


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_same(name: str, model: Any, promise: LazyLogits) -> None:
    hidden, weight = promise.hidden, model.lm_head.weight

    def plain(hidden: Any, weight: Any) -> tuple[Any, ...]:
        value = LOSSES[name](nn.functional.linear(hidden, weight), LABELS)
        return value, *torch.autograd.grad(value, (hidden, weight))

    with Float64():
        truth = plain(widened(hidden), widened(weight))
    loss = LOSSES[name](promise, LABELS)
    got = loss, *torch.autograd.grad(loss, (hidden, weight))
    for found, own, want in zip(got, plain(hidden, weight), truth, strict=True):
        assert_as_precise(found, own, want)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z.view(-1, VOCAB), y.view(-1)),
        lambda z, y: nn.CrossEntropyLoss(weight=torch.ones(VOCAB))(z.view(-1, VOCAB), y.view(-1)),
        lambda z, y: nn.CrossEntropyLoss(reduction="none")(z.view(-1, VOCAB), y.view(-1)).mean(),
        lambda z, y: nn.CrossEntropyLoss()(z.view(-1, VOCAB), torch.rand(111, VOCAB)),
        lambda z, y: nn.CrossEntropyLoss()(z.view(-1, VOCAB), y[:, 1:].flatten()),
        lambda z, y: nn.CrossEntropyLoss()(z, y),
        lambda z, y: z.view(-1, VOCAB // 2),
        lambda z, y: z.view(-1),
        lambda z, y: z[..., 5],
        lambda z, y: z[..., 5:5],
        lambda z, y: z[0],
        lambda z, y: z[y != -100],
        lambda z, y: torch.log_softmax(z, -1),
    ],
)
def test_what_is_no_such_loss_is_refused(loss: Loss, promise: LazyLogits) -> None:
    with pytest.raises(UnsupportedModelError, match="before the loss"):
        loss(promise, LABELS)
