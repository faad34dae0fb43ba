"""The paper in one function: the chain rule of a layer, split along the sequence (StreamBP, arXiv 2506.03077, eq. 5).

For a layer ``z_out = f_W(z_in)`` and chunks i = 1..D of the sequence,

    dL/dW = sum_i (d z_out(i) / dW)' dL/dz_out(i)

The terms are independent but for one thing: chunk i reads what the chunks before it left, the keys and values it attends
to or the state a recurrence carries on. So those are leaves of chunk i's graph, and the walk goes from the last chunk to
the first: when chunk i's turn comes, every later chunk has already given its share of dK(i), dV(i) or of the state's
gradient, and these go in beside dL/dz_out(i) as gradients of what chunk i itself left. Each chunk's graph is built, used
once and freed. The result is the exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from streamtune.engine.cache import ChunkCache

__all__ = ["streamed_vjp", "sum_dtype"]

RunChunk = Callable[[slice, list[Tensor], list[Tensor]], tuple[Tensor, ChunkCache]]
"""``(chunk, streamed, shared) -> (z_out(i), cache)``: the layer on one chunk, in ``replay``."""


def streamed_vjp(
    run_chunk: RunChunk,
    chunks: Sequence[slice],
    streamed: Sequence[Tensor],
    shared: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grad_z_out: Tensor,
    *,
    needs_grad: Sequence[bool],
    widen: bool = True,
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Vector-Jacobian product of a layer, one chunk at a time.

    Equal to ``torch.autograd.grad(f(*streamed), [*streamed, *shared, *parameters], grad_z_out)``.

    Args:
        run_chunk: The layer on one chunk.
        chunks: Positions, in order, covering the sequence.
        streamed: Inputs that follow the sequence along dim 1; the first is ``z_in`` ``[B, T, C]``.
        shared: Other inputs that need a gradient, the same for every chunk.
        parameters: The layer's trainable parameters.
        grad_z_out: dL/dz_out ``[B, T, C]``.
        needs_grad: For each of ``streamed``, whether its gradient is wanted.
        widen: Sum over chunks in fp32 where the tensors are narrower.

    Returns:
        Gradients of ``streamed``, and of ``shared`` and ``parameters`` together, each once, None where there is none.
    """
    grad_streamed = [torch.empty_like(x) if needed else None for x, needed in zip(streamed, needs_grad, strict=True)]
    sums = [_Sum(owner, widen) for owner in (*shared, *parameters)]
    for chunk in reversed(chunks):
        with torch.enable_grad():
            x_i = [x[:, chunk].detach().requires_grad_(n) for x, n in zip(streamed, needs_grad, strict=True)]
            shared_i = [x.detach().requires_grad_() for x in shared]
            z_out_i, cache = run_chunk(chunk, x_i, shared_i)
        handed_on = [(z_out_i, grad_z_out[:, chunk]), *cache.handed_on()]
        outputs, incoming = zip(*((out, grad) for out, grad in handed_on if out.requires_grad), strict=True)
        wanted = [x for x in x_i if x.requires_grad]
        inputs = [*wanted, *cache.leaves, *shared_i, *parameters]
        grads = iter(torch.autograd.grad(outputs, inputs, incoming, allow_unused=True))
        for whole, x in zip(grad_streamed, x_i, strict=True):
            if whole is not None:
                part = next(grads) if x.requires_grad else None
                whole[:, chunk] = 0 if part is None else part
        cache.hand_back(grads)
        for term, part in zip(sums, grads, strict=True):
            term.add(part)
    return grad_streamed, [term.result() for term in sums]


class _Sum:
    """A sum over chunks, cast once at the end. The first term is kept as it is: one chunk costs no extra memory."""

    def __init__(self, owner: Tensor, widen: bool) -> None:
        self.dtype = owner.dtype
        self.sum_dtype = sum_dtype(owner.dtype, widen)
        self.total: Tensor | None = None
        self.owned = False  # autograd may hand out one tensor twice: add in place only to what was made here

    def add(self, part: Tensor | None) -> None:
        if part is None:
            return
        if self.total is None:
            self.total = part
        elif self.owned:
            self.total.add_(part)
        else:
            self.total, self.owned = self.total.to(self.sum_dtype).add(part), True

    def result(self) -> Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)


def sum_dtype(dtype: torch.dtype, widen: bool) -> torch.dtype:
    """Dtype in which gradients of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32) if widen else dtype
