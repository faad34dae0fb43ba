"""Custom backwards that build no graph: they refuse a second derivative, but allow a second backward.

``torch.autograd.grad`` runs the hooks of its inputs (``Tensor.register_hook``). If a gradient is a sum over chunks,
``grad`` is called once per chunk. Hooks must see only the sum, so :func:`suspend_tensor_hooks` removes them for these
calls.
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


def is_graph_retained() -> bool:
    """Return True inside a backward that was called with ``retain_graph=True``, so that another backward may follow."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is not None and bool(keeps_graph())


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """Make the ``backward`` of an ``autograd.Function`` refuse second derivatives (decorator).

    ``torch.autograd.function.once_differentiable`` raises an error only if the incoming gradient requires a gradient.
    The gradient of a loss does not. So a gradient penalty would have no effect, without an error.

    Raises:
        UnsupportedModelError: The backward is called with ``create_graph=True`` or ``is_grads_batched=True``.
    """

    @functools.wraps(backward)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        if any(isinstance(arg, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(arg) for arg in args):
            raise UnsupportedModelError(
                "is_grads_batched=True is not supported: the backward of a streamed model computes one gradient at a "
                "time",
                fix="compute the gradients one by one, with retain_graph=True",
            )
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "create_graph=True is not supported: the gradient of a streamed model has no graph, because each "
                "chunk's graph is freed",
                fix="call backward() or torch.autograd.grad() without create_graph; for a second derivative, or a "
                "penalty on a gradient, call the model outside stream()",
            )
        return backward(*args, **kwargs)

    return wrapped


@contextmanager
def suspend_tensor_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: disable the hooks of ``Tensor.register_hook`` on these tensors; restore them on exit."""
    tables = [table for tensor in tensors if (table := tensor._backward_hooks)]
    held = [(table, list(table.items())) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in held:
            table.update(hooks)
