"""The reference of an objective: the model whose log-probs the trained one's are compared with.

It is always streamed and never differentiated, and computes as in evaluation, so dropout does not blur what is
compared with. The model that is trained is its own reference where its adapters are switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from streamtune.engine import StreamHandle
from streamtune.train.batch import TreeBatch

__all__ = ["ModelReference", "Reference", "evaluating"]


class Reference(Protocol):
    """A source of the reference's log-probs."""

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """Return the log-probs of the batch's targets: fp32 ``[K]``, no gradient, in the order of ``batch.row_K``."""
        ...


class ModelReference:
    """A streamed model as reference, without its adapters if it has any.

    Args:
        model: What is called; the trained model itself where adapters are trained, else another one.
        handle: What streams it.
        temperature: What logits are divided by.
        adapters: Leave its adapters on: the model as it is.
    """

    def __init__(self, model: Any, handle: StreamHandle, *, temperature: float = 1.0, adapters: bool = False) -> None:
        self.model, self.handle, self.temperature, self.adapters = model, handle, temperature, adapters

    def logprobs(self, batch: TreeBatch) -> Tensor:
        """See :meth:`Reference.logprobs`; under the caller's autocast."""
        without = nullcontext() if self.adapters else _without_adapters(self.model)
        with torch.no_grad(), evaluating(self.model), without, self.handle.routers.silenced():
            scores = self.handle.logprobs(
                targets=batch.shift_labels, temperature=self.temperature, model=self.model, **batch.arguments
            )
        return batch.ragged(scores.logprobs)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model in evaluation mode within, and back in its mode afterwards; a whole model is in one mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    if not hasattr(model, "disable_adapter"):
        yield
        return
    with model.disable_adapter():
        yield
