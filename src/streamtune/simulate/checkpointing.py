"""Gradient checkpointing of ``transformers`` with ``torch.utils.checkpoint``: the baseline, measured or simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointing", "recompute", "use_checkpointing"]


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
