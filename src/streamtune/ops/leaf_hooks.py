"""Gradients of parameters, taken part by part, without the hooks that are for the whole gradient.

``torch.autograd.grad`` runs the hooks of the tensors it is asked about (``Tensor.register_hook``). A gradient that is a
sum over chunks is asked for once a chunk; the sum then arrives at the parameter, where those hooks run again, as they
should. Hooks of the accumulating node and post-accumulate hooks run there only, whatever is done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

__all__ = ["hooks_held_back"]


@contextmanager
def hooks_held_back(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run no hook of these tensors within (``Tensor.register_hook``).

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
