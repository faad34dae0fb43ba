"""Backwards without a graph of their own: a second derivative is refused, a second backward is not.

``torch.autograd.grad`` runs the hooks of its inputs (``Tensor.register_hook``). A gradient that is a sum over chunks is
asked for once a chunk; the sum then arrives at the parameter, where those hooks run again, as they should. Hooks of the
accumulating node and post-accumulate hooks run only there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError

P = ParamSpec("P")
R = TypeVar("R")


def graph_is_kept() -> bool:
    """Return True inside a backward with ``retain_graph=True``, which another may follow."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is not None and bool(asked())


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """Wrap the ``backward`` of an ``autograd.Function`` that gives a gradient without a graph of its own.

    ``torch.autograd.function.once_differentiable`` refuses a second derivative where the incoming gradient requires
    one. A loss's gradient does not, and the result would be taken for a constant: a penalty on it would be lost.

    Raises:
        UnsupportedModelError: The backward is called with ``create_graph=True`` or ``is_grads_batched=True``.
    """

    @functools.wraps(backward)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        if any(isinstance(arg, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(arg) for arg in args):
            raise UnsupportedModelError(
                "several gradients were asked for at once (is_grads_batched=True), and the backward of "
                "a streamed model is no function that can be mapped",
                fix="ask for one after the other, with retain_graph=True",
            )
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "a backward with create_graph=True was asked for, and the gradient of a streamed model has no graph: "
                "its layers are run again chunk by chunk, and freed",
                fix="call backward() or torch.autograd.grad() without create_graph; for a second derivative, or a "
                "penalty on a gradient, call the model outside of stream()",
            )
        return backward(*args, **kwargs)

    return wrapped


@contextmanager
def hooks_held_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context in which no hook of these tensors runs (``Tensor.register_hook``).

    Hooks are taken out of the tensors' own tables, which autograd reads when it runs, and put back in their order.
    """
    tables = [table for tensor in tensors if (table := tensor._backward_hooks)]
    held = [(table, list(table.items())) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)
