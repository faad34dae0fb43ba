"""Leaves of a layer's graph: every trainable tensor that it uses has to be an input of its node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from streamtune.engine.sharded import FlatParametersError
from streamtune.errors import UnsupportedModelError


def check_leaves(layer: nn.Module, z_out: Tensor, known: Sequence[Tensor]) -> None:
    """Refuse a layer that uses a trainable tensor which is no input of the node: its gradient would be lost.

    Raises:
        UnsupportedModelError: There is one.
    """
    for leaf in strange_leaves(z_out, known):
        if getattr(leaf, "_is_flat_param", False):
            raise FlatParametersError(type(layer).__name__)
        raise UnsupportedModelError(
            f"{type(layer).__name__} uses a trainable tensor of shape {tuple(leaf.shape)} "
            "that is not its own parameter, so its gradient would be lost",
            mend="freeze that tensor, or train without streaming",
        )


def strange_leaves(z_out: Tensor, known: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves of ``z_out``'s graph that need a gradient and are not among the known ones."""
    known_ids = {id(tensor) for tensor in known}
    todo, seen = [z_out.grad_fn], {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known_ids:
            yield variable
        todo.extend(parent for parent, _ in node.next_functions)
