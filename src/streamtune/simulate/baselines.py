"""Training without streaming: checkpointing of every layer, and log-probabilities by a model's ordinary logits.

Streamed steps are compared with these, in memory and in value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamtune.engine import Branches, TokenScores
from streamtune.errors import ArgumentError
from streamtune.labels import IGNORE_INDEX

__all__ = ["PlainScores", "checkpointing", "recompute", "use_checkpointing"]


class PlainScores:
    """A model that is not streamed, asked as ``StreamHandle.logprobs`` is: objectives take one for the other.

    All logits of a batch exist at once, and are kept for the backward. Losses on routers are no part of it.

    Args:
        model: With or without adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.routers = self

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """There is nothing to silence."""
        yield

    def logprobs(
        self,
        input_ids: Tensor,
        targets: Tensor,
        *,
        branches: Branches | None = None,
        entropy: bool = False,
        temperature: float = 1.0,
        model: nn.Module | None = None,
        **arguments: Any,
    ) -> TokenScores:
        """See ``StreamHandle.logprobs``.

        Raises:
            ArgumentError: The rows share their prompts, which an ordinary call knows nothing of.
        """
        if branches is not None:
            raise ArgumentError("a model that is not streamed takes a row for each completion")
        called: Any = self.model if model is None else model
        logits = called(input_ids=input_ids, **{"use_cache": False, **arguments}).logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1.0:
            wide = wide / temperature
        flat = nn.functional.cross_entropy(
            wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
        )
        entropies = None
        if entropy:
            with torch.no_grad():  # it is shown, and no loss reads it
                entropies = torch.where(targets == IGNORE_INDEX, 0.0, _entropy(wide))
        return TokenScores(-flat.view(targets.shape), entropies, None)


def _entropy(logits_BTV: Tensor) -> Tensor:
    """``[B, T]``, a row at a time."""
    return torch.stack([_entropy_of(row) for row in logits_BTV])


def _entropy_of(logits_TV: Tensor) -> Tensor:
    logprobs = logits_TV.log_softmax(-1)
    return -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(-1)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer, keep its inputs only, and run it again in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


def use_checkpointing(model: Any, function: Callable[..., Any] = recompute) -> None:
    """Make every layer of a model run through ``function``."""
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


@contextmanager
def checkpointing(model: Any, function: Callable[..., Any] = recompute) -> Iterator[None]:
    """Make every layer of a model run through ``function`` while inside."""
    use_checkpointing(model, function)
    try:
        yield
    finally:
        model._set_gradient_checkpointing(enable=False, gradient_checkpointing_func=function)
