"""Gradient checkpointing of ``transformers`` with ``torch.utils.checkpoint``: the baseline, measured or simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointing", "recompute", "use_checkpointing"]


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a layer, keep what it is given, and run it again in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


def use_checkpointing(model: Any, function: Callable[..., Any] = recompute) -> None:
    """Have every layer of a model run by ``function``."""
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


@contextmanager
def checkpointing(model: Any, function: Callable[..., Any] = recompute) -> Iterator[None]:
    """The same for the while."""
    use_checkpointing(model, function)
    try:
        yield
    finally:
        model._set_gradient_checkpointing(enable=False, gradient_checkpointing_func=function)
