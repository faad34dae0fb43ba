"""The chain rule of a layer, split along the sequence (StreamBP, arXiv 2506.03077, eq. 5).

For a layer ``z_out = f_W(z_in)`` and chunks i = 1..D of the sequence,

    dL/dW = sum_i (d z_out(i) / dW)' dL/dz_out(i)

The terms are coupled in one way: chunk i reads tensors that earlier chunks computed. These are the keys and values that
it attends to, or a recurrent state. They are leaves of chunk i's graph, and chunks are processed from the last to the
first. When chunk i is processed, every later chunk has already added its term to dK(i), dV(i) or to the gradient of the
state. K(i), V(i) and the state are outputs of chunk i, so these gradients enter its backward together with
dL/dz_out(i). Each chunk's graph is built, used once and freed. The result is the exact gradient.

A tensor argument either has a sequence dimension, and is cut into chunks, or belongs to the whole sequence. Every chunk
reads an input of the whole sequence, and the gradient of this input is the sum over the chunks. An output of the whole
sequence is a sum over the chunks, and every chunk receives the same gradient for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from streamtune.engine.memory.tiers import Source, StoredTensor
from streamtune.ops import suspend_tensor_hooks
from streamtune.ops.fused import add_weight_gradient, weight_gradient

Along = int | None
"""Sequence dimension of a tensor; None for a tensor that belongs to the whole sequence."""


class Boundary(Protocol):
    """Interface to the tensors that a chunk reads from earlier chunks, and that later chunks read from it."""

    @property
    def read_leaves(self) -> list[Tensor]:
        """Autograd leaves with the tensors that the chunk read from earlier chunks."""

    def tensors_for_later_chunks(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the pair (tensor, its gradient) for each tensor that later chunks read from this chunk."""

    def add_leaf_grads(self, grads: Iterator[Tensor | None]) -> None:
        """Add the gradients of ``read_leaves`` to the gradient sums of the earlier chunks."""


RunChunk = Callable[[slice, list[Tensor]], tuple[list[Tensor], Boundary]]
"""``(chunk, x(i)) -> (z(i), boundary)``: function that runs the layer on one chunk and builds its graph."""


class LayerInput(NamedTuple):
    """A tensor argument of a layer, on the device or in a storage tier."""

    x: Source
    along: Along
    needs_grad: bool
    into: Source | None = None
    """Memory to which the gradient is written chunk by chunk, such as the memory of an output's gradient. None
    allocates it.
    """


def streamed_vjp(
    run_chunk: RunChunk,
    chunks: Sequence[slice],
    inputs: Sequence[LayerInput],
    grad_outputs: Sequence[tuple[Source | None, Along]],
    sums: Sequence[GradientSum],
    sum_in_fp32: bool = True,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of a layer's inputs and parameters, computed one chunk at a time.

    Equal to ``torch.autograd.grad(f(*inputs), [*inputs, *parameters], grad_outputs)`` for the layer f. A gradient is
    None if no chunk contributes to it, or if it was written to a :class:`StoredTensor` (``LayerInput.into``).

    Args:
        run_chunk: Function that runs the layer on one chunk.
        chunks: Positions of the chunks, in order; together they cover the sequence.
        inputs: Arguments of the layer; the first is ``z_in`` ``[B, T, C]``.
        grad_outputs: Pair (dL/dz, sequence dimension of z) for each output z, the first ``[B, T, C]``. dL/dz is None if
            the loss does not depend on z.
        sums: Gradient accumulators of the layer's trainable parameters. Fused linear modules add to them directly.
        sum_in_fp32: True sums the gradients of inputs in fp32 if the inputs have a narrower dtype.
    """
    parameters = [cast(Tensor, total.owner) for total in sums]
    full_grads = [_allocate_gradient(layer_input) for layer_input in inputs]
    input_sums = [GradientSum(layer_input.x, sum_in_fp32) for layer_input in inputs]
    for chunk in reversed(chunks):
        with torch.enable_grad():
            x_i = [read_chunk(x, along, chunk).detach().requires_grad_(needed) for x, along, needed, _ in inputs]
            z_i, cache = run_chunk(chunk, x_i)
        output_grads = [
            (z, read_chunk(grad, along, chunk))
            for z, (grad, along) in zip(z_i, grad_outputs, strict=True)
            if grad is not None
        ]
        grads = chunk_vjp([x for x in x_i if x.requires_grad], output_grads, cache, parameters)
        for x, full_grad, total, layer_input in zip(x_i, full_grads, input_sums, inputs, strict=True):
            if not x.requires_grad:
                continue
            grad = next(grads)
            if full_grad is None:
                total.add_term(grad)
            else:
                _write_chunk(full_grad, layer_input.along, chunk, torch.zeros_like(x) if grad is None else grad)
        cache.add_leaf_grads(grads)
        for total, grad in zip(sums, grads, strict=True):
            total.add_term(grad)
    for full_grad in full_grads:
        if isinstance(full_grad, StoredTensor):
            full_grad.tier.wait_for_copies()
    grad_inputs = [
        full_grad if isinstance(full_grad, Tensor) else total.result()
        for full_grad, total in zip(full_grads, input_sums, strict=True)
    ]
    return grad_inputs, [total.result() for total in sums]


def _allocate_gradient(layer_input: LayerInput) -> Source | None:
    if layer_input.into is None and layer_input.needs_grad and layer_input.along is not None:
        return torch.empty(layer_input.x.shape, dtype=layer_input.x.dtype, device=layer_input.x.device)
    return layer_input.into


def chunk_vjp(
    x_i: Sequence[Tensor],
    output_grads: Sequence[tuple[Tensor, Tensor]],
    cache: Boundary,
    parameters: Sequence[Tensor],
) -> Iterator[Tensor | None]:
    """Return one chunk's gradients: of its inputs, of the keys, values or states that it read, and of the parameters.

    Equal to ``torch.autograd.grad(outputs, [*x_i, *cache.read_leaves, *parameters], grad_outputs)``. The outputs are
    z(i), and the keys, values or states that later chunks read from this chunk.

    Args:
        x_i: Inputs of the chunk that need a gradient.
        output_grads: Pairs (z(i), dL/dz(i)) of the chunk's outputs.
        cache: Tensors that the chunk read from earlier chunks, and tensors that later chunks read from it.
        parameters: Trainable parameters of the layer.
    """
    pairs = [(out, grad) for out, grad in (*output_grads, *cache.tensors_for_later_chunks()) if out.requires_grad]
    wanted = [*x_i, *cache.read_leaves, *parameters]
    if not pairs:  # nothing trainable took part in the chunk
        return repeat(None, len(wanted))
    outputs, incoming = zip(*pairs, strict=True)
    with suspend_tensor_hooks(parameters):
        return iter(torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))


def chunk_view(x: Tensor, sequence_dim: Along, chunk: slice) -> Tensor:
    """Return a view of one chunk of a tensor; the tensor itself if ``sequence_dim`` is None."""
    return x if sequence_dim is None else x.narrow(sequence_dim, chunk.start, chunk.stop - chunk.start)


def read_chunk(x: Source, sequence_dim: Along, chunk: slice) -> Tensor:
    """Return one chunk of a tensor, on the device; the tensor itself may be in a storage tier."""
    return x.read_chunk(chunk) if isinstance(x, StoredTensor) else chunk_view(x, sequence_dim, chunk)


def _write_chunk(full: Source, sequence_dim: Along, chunk: slice, x: Tensor) -> None:
    if isinstance(full, StoredTensor):
        full.put(chunk, x)
    else:
        chunk_view(full, sequence_dim, chunk).copy_(x)


class GradientSum:
    """Sums a gradient's terms over the chunks; :meth:`result` casts the sum to the dtype of ``tensor``.

    With ``sum_in_fp32`` the sum is in fp32 if ``tensor`` has a narrower dtype. The first term is stored without a copy,
    so a sequence of one chunk costs no extra memory.
    """

    def __init__(self, tensor: Source, sum_in_fp32: bool) -> None:
        self.owner, self.dtype = tensor, tensor.dtype
        self.sum_dtype = dtype_of_sum(tensor.dtype, sum_in_fp32)
        self.total: Tensor | None = None
        self.owns_total = False  # autograd may return one tensor twice: add in place only to a sum allocated here

    def add_term(self, part: Tensor | None) -> None:
        """Add one chunk's term; None adds nothing."""
        if part is None:
            return
        if self.total is None:
            self.total = part
        elif self.owns_total:
            self.total.add_(part)
        else:
            self.total, self.owns_total = self.total.to(self.sum_dtype).add(part), True

    def add_weight_gradient(self, grad_nV: Tensor, hidden_nC: Tensor) -> None:
        """Add ``grad.T @ hidden``: one chunk's term of the gradient ``[V, C]`` of a linear module's weight."""
        if self.total is None:
            self.total, self.owns_total = weight_gradient(grad_nV, hidden_nC, self.sum_dtype), True
            return
        if not self.owns_total:
            self.total, self.owns_total = self.total.to(self.sum_dtype, copy=True), True
        add_weight_gradient(self.total, grad_nV, hidden_nC)

    def result(self) -> Tensor | None:
        """Return the sum in the tensor's dtype; None if nothing was added."""
        return None if self.total is None else self.total.to(self.dtype)


def dtype_of_sum(dtype: torch.dtype, sum_in_fp32: bool) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed; with ``sum_in_fp32`` it is at least fp32."""
    return torch.promote_types(dtype, torch.float32) if sum_in_fp32 else dtype
