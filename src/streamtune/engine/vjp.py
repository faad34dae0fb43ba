"""The chain rule of a layer, split along the sequence (StreamBP, arXiv 2506.03077, eq. 5).

For a layer ``z_out = f_W(z_in)`` and chunks i = 1..D of the sequence,

    dL/dW = sum_i (d z_out(i) / dW)' dL/dz_out(i)

The terms are independent but for one thing: chunk i reads tensors that earlier chunks made, the keys and values it
attends to or the state of a recurrence. So those are leaves of chunk i's graph, and the chunks are processed from the
last to the first. When chunk i is processed, every later chunk has already added its share to dK(i), dV(i) or to the
gradient of the state. These are gradients of outputs of chunk i, and enter its backward together with dL/dz_out(i).
Each chunk's graph is built, used once and freed. The result is the exact gradient.

An input or output either follows the sequence along a dimension and is cut, or belongs to the whole sequence. Every
chunk reads such an input, and its gradient is the sum over the chunks. Such an output is a sum over the chunks, and its
gradient is the same for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from streamtune.engine.memory.tiers import Source, StoredTensor
from streamtune.ops import hooks_held_back
from streamtune.ops.fused import add_outer, outer

Along = int | None
"""The dimension along which a tensor follows the sequence; None for a tensor of the whole sequence."""


class Boundary(Protocol):
    """The tensors that a chunk read of earlier chunks, and the tensors that later chunks read of it."""

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors it read of earlier chunks."""

    def handed_on(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the tensors that later chunks read of it, each with its gradient."""

    def hand_back(self, grads: Iterator[Tensor | None]) -> None:
        """Add the gradients of ``leaves`` to those kept for the chunks that made them."""


RunChunk = Callable[[slice, list[Tensor]], tuple[list[Tensor], Boundary]]
"""``(chunk, x(i)) -> (z(i), cache)``: the layer on one chunk, in ``replay``."""


class LayerInput(NamedTuple):
    """A tensor argument of a layer, wherever it is."""

    x: Source
    along: Along
    needs_grad: bool
    into: Source | None = None
    """Memory for its gradient, written chunk by chunk; it may be an output's gradient. None makes a tensor."""


def streamed_vjp(
    run_chunk: RunChunk,
    chunks: Sequence[slice],
    inputs: Sequence[LayerInput],
    grad_outputs: Sequence[tuple[Source | None, Along]],
    sums: Sequence[GradientSum],
    widen: bool = True,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the vector-Jacobian product of a layer, computed one chunk at a time.

    Equal to ``torch.autograd.grad(f(*inputs), [*inputs, *parameters], grad_outputs)``. A gradient is None where there
    is none, or where its ``into`` is not a tensor.

    Args:
        run_chunk: The layer on one chunk.
        chunks: Positions, in order, covering the sequence.
        inputs: Arguments of the layer; the first is ``z_in`` ``[B, T, C]``.
        grad_outputs: (dL/dz, sequence dimension of z) for each output z, the first ``[B, T, C]``; dL/dz is None where
            nothing used z.
        sums: Gradient accumulators of the layer's trainable parameters; fused linears add to them directly.
        widen: Sum the gradients of inputs over chunks in fp32 where the tensors are narrower.
    """
    parameters = [cast(Tensor, total.owner) for total in sums]
    wholes = [_whole_gradient(each) for each in inputs]
    input_sums = [GradientSum(each.x, widen) for each in inputs]
    for chunk in reversed(chunks):
        with torch.enable_grad():
            x_i = [part(x, along, chunk).detach().requires_grad_(needed) for x, along, needed, _ in inputs]
            z_i, cache = run_chunk(chunk, x_i)
        given = [
            (z, part(grad, along, chunk))
            for z, (grad, along) in zip(z_i, grad_outputs, strict=True)
            if grad is not None
        ]
        grads = chunk_vjp([x for x in x_i if x.requires_grad], given, cache, parameters)
        for x, whole, total, each in zip(x_i, wholes, input_sums, inputs, strict=True):
            if not x.requires_grad:
                continue
            grad = next(grads)
            if whole is None:
                total.add(grad)
            else:
                _put(whole, each.along, chunk, torch.zeros_like(x) if grad is None else grad)
        cache.hand_back(grads)
        for total, grad in zip(sums, grads, strict=True):
            total.add(grad)
    for whole in wholes:
        if isinstance(whole, StoredTensor):
            whole.tier.settle()
    grad_inputs = [
        whole if isinstance(whole, Tensor) else total.result() for whole, total in zip(wholes, input_sums, strict=True)
    ]
    return grad_inputs, [total.result() for total in sums]


def _whole_gradient(each: LayerInput) -> Source | None:
    """Return memory for the gradient of an input that follows the sequence; None for one that is summed."""
    if each.into is None and each.needs_grad and each.along is not None:
        return torch.empty(each.x.shape, dtype=each.x.dtype, device=each.x.device)
    return each.into


def chunk_vjp(
    x_i: Sequence[Tensor],
    given: Sequence[tuple[Tensor, Tensor]],
    cache: Boundary,
    parameters: Sequence[Tensor],
) -> Iterator[Tensor | None]:
    """Return gradients for the chunk's inputs, for the K/V it read, and for the parameters (this chunk's term).

    ``given`` are the chunk's outputs, each with its gradient.
    """
    pairs = [(out, grad) for out, grad in (*given, *cache.handed_on()) if out.requires_grad]
    wanted = [*x_i, *cache.leaves, *parameters]
    if not pairs:  # nothing trainable took part in the chunk
        return repeat(None, len(wanted))
    outputs, incoming = zip(*pairs, strict=True)
    with hooks_held_back(parameters):
        return iter(torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))


def cut(x: Tensor, along: Along, chunk: slice) -> Tensor:
    """Return a chunk's part of a tensor, as a view; the whole tensor if it does not follow the sequence."""
    return x if along is None else x.narrow(along, chunk.start, chunk.stop - chunk.start)


def part(x: Source, along: Along, chunk: slice) -> Tensor:
    """Return a chunk's part of a tensor, which may be in memory or in a storage tier."""
    return x.cut(chunk) if isinstance(x, StoredTensor) else cut(x, along, chunk)


def _put(whole: Source, along: Along, chunk: slice, x: Tensor) -> None:
    if isinstance(whole, StoredTensor):
        whole.put(chunk, x)
    else:
        cut(whole, along, chunk).copy_(x)


class GradientSum:
    """A sum over chunks, cast once at the end; in fp32 with ``widen``, if the tensor is narrower.

    The first term is kept as it is: one chunk costs no extra memory.
    """

    def __init__(self, owner: Source, widen: bool) -> None:
        self.owner, self.dtype = owner, owner.dtype
        self.sum_dtype = sum_dtype(owner.dtype, widen)
        self.total: Tensor | None = None
        self.owned = False  # autograd may hand out one tensor twice: add in place only to what was made here

    def add(self, part: Tensor | None) -> None:
        """Add a chunk's term."""
        if part is None:
            return
        if self.total is None:
            self.total = part
        elif self.owned:
            self.total.add_(part)
        else:
            self.total, self.owned = self.total.to(self.sum_dtype).add(part), True

    def add_outer(self, grad_nV: Tensor, hidden_nC: Tensor) -> None:
        """Add ``grad.T @ hidden``, a chunk's term of the gradient ``[V, C]`` of a linear map's weight."""
        if self.total is None:
            self.total, self.owned = outer(grad_nV, hidden_nC, self.sum_dtype), True
            return
        if not self.owned:
            self.total, self.owned = self.total.to(self.sum_dtype, copy=True), True
        add_outer(self.total, grad_nV, hidden_nC)

    def result(self) -> Tensor | None:
        """Return the sum in the owner's dtype; None if nothing was added."""
        return None if self.total is None else self.total.to(self.dtype)


def sum_dtype(dtype: torch.dtype, widen: bool) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32) if widen else dtype
