"""Parts of the loop over chunks of the language-model head (the sweep): losses, gradients, and sums over chunks.

Shape suffixes as in ``ops.head.cross_entropy``; n is the number of tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamtune.errors import ArgumentError
from streamtune.ops.devices import (
    MAX_ELEMENTS,
    autocast_device_type,
    block_slices,
    kernel_device_type,
    loop_or_simulate,
)
from streamtune.ops.first_order import is_graph_retained
from streamtune.ops.fused import add_weight_gradient

WIDENED = 1 << 24
"""Number of half-precision logits that are cast to fp32 at a time (64 MiB).

An fp32 copy of a whole chunk would be the largest tensor of a step. Parts of this size stay in the cache between
operators.
"""

FEW_ROWS, FEW_ROWS_BLOCK = 12, 512
"""On a CPU, a matmul of fewer rows than the first number sums the vocabulary in blocks of the second number."""

FLOAT16_UNIT = 1024.0
"""Factor by which gradients of float16 logits are multiplied until the backward.

Losses that are computed in the forward have their gradients before the loss is scaled. Without this factor, a
probability below 6e-8 would be zero in float16. The backward divides by the factor, which is a power of two.
"""

Project = Callable[[Tensor], Tensor]
"""Differentiable function from hidden states ``[n, C]`` to logits ``[n, V]``, or from logits to logits."""


def gradient_unit(logits_dtype: torch.dtype, sum_dtype: torch.dtype = torch.float32) -> float:
    """Return the factor of gradients that the forward computes; ``sum_dtype`` is the dtype of sums over chunks."""
    return FLOAT16_UNIT if logits_dtype == torch.float16 and sum_dtype != torch.float16 else 1.0


class HeadGradients:
    """Gradients of hidden states, weight and bias, accumulated over chunks; None for a gradient that is not wanted."""

    def __init__(
        self,
        grad_hidden: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Sequence[bool],
        accumulate_dtype: torch.dtype,
    ) -> None:
        dtype = torch.promote_types(accumulate_dtype, weight.dtype)
        self.hidden = grad_hidden
        self.weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and wanted[2] else None

    def add_chunk(self, chunk: Tensor | slice, h_nC: Tensor, weight_VC: Tensor, grad_nV: Tensor) -> None:
        """Add the gradients of a chunk, computed from its hidden states, the weight and the gradient of its logits."""
        if self.hidden is not None:
            self.hidden[chunk] = _matmul_over_vocabulary(grad_nV, weight_VC).to(self.hidden.dtype)
        if self.weight is not None:
            add_weight_gradient(self.weight, grad_nV, h_nC)
        if self.bias is not None:
            self.bias += grad_nV.sum(0, dtype=self.bias.dtype)

    def add_gradients(self, chunk: Tensor | slice, grad_h_nC: Tensor | None, grad_weight_VC: Tensor | None) -> None:
        """Add the gradients of hidden states and weight that a fused kernel computed for a chunk."""
        if self.hidden is not None and grad_h_nC is not None:
            self.hidden[chunk] = grad_h_nC.to(self.hidden.dtype)
        if self.weight is not None and grad_weight_VC is not None:
            self.weight += grad_weight_VC

    def as_tuple(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of (hidden states, weight, bias)."""
        return self.hidden, self.weight, self.bias


def gradient_buffers(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a zero buffer for the gradient of each parameter, in fp32 or wider."""
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]


def gradients_or_none(grads: Sequence[Tensor | None], needed: Sequence[bool]) -> Iterator[Tensor | None]:
    """Yield the next of ``grads`` for each True in ``needed``, and None for each False."""
    found = iter(grads)
    return (next(found) if each else None for each in needed)


def _matmul_over_vocabulary(grad_nV: Tensor, weight_VC: Tensor) -> Tensor:
    """Return ``grad @ weight``; for few rows on a CPU, the products are summed in blocks of the vocabulary.

    On a CPU, a matmul of few rows adds all V products in one running sum, whose rounding error grows with V. For 7 rows
    and 49,152 tokens, the error is 6 times the error for 12 or more rows. The time is equal.
    """
    n, V = grad_nV.shape
    wide = grad_nV.dtype in (torch.float32, torch.float64)
    if n >= FEW_ROWS or V < 2 * FEW_ROWS_BLOCK or not wide or kernel_device_type(grad_nV.device) != "cpu":
        return grad_nV @ weight_VC
    count = V // FEW_ROWS_BLOCK
    whole = count * FEW_ROWS_BLOCK
    grads = grad_nV[:, :whole].unflatten(1, (count, FEW_ROWS_BLOCK)).transpose(0, 1)
    total = torch.bmm(grads, weight_VC[:whole].unflatten(0, (count, FEW_ROWS_BLOCK))).sum(0)
    return total if whole == V else total + grad_nV[:, whole:] @ weight_VC[whole:]


def loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    with_grad: bool,
    overwrite_logits: bool = False,
    factor_n: Tensor | None = None,
    unit: float = 1.0,
    max_elements: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's summed cross entropy, and the gradient ``[n, V]`` of the logits before ``transform``.

    Args:
        logits_nV: Logits of the chunk.
        targets_n: Target token of each position.
        transform: Function applied to the logits before the loss (softcap, scale), or None.
        with_grad: True to compute the gradient; False returns None in its place.
        overwrite_logits: True to write the gradient into ``logits_nV``; then no autograd graph may need the logits.
        factor_n: Factor of each position's gradient, applied before rounding to the dtype of the logits.
        unit: Factor of all gradients, applied there too (:func:`gradient_unit`).
        max_elements: Largest number of logits that are processed at a time. The default is the limit of 32-bit indices,
            or :data:`WIDENED` for logits narrower than fp32.
    """
    if max_elements is None:
        max_elements = MAX_ELEMENTS if logits_nV.dtype in (torch.float32, torch.float64) else WIDENED
    parts = list(block_slices(len(logits_nV), max_elements // logits_nV.shape[1]))
    if len(parts) <= 1:
        return _loss_and_grad(logits_nV, targets_n, transform, with_grad, overwrite_logits, factor_n, unit)
    grad = None if not with_grad else logits_nV if overwrite_logits else torch.empty_like(logits_nV)
    losses = []
    for part in parts:
        factor = None if factor_n is None else factor_n[part]
        loss, grad_part = _loss_and_grad(
            logits_nV[part], targets_n[part], transform, with_grad, overwrite_logits, factor, unit
        )
        losses.append(loss)
        if grad is not None and grad_part is not None:
            grad[part] = grad_part
    return torch.stack(losses).sum(), grad


def _loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    with_grad: bool,
    overwrite_logits: bool,
    factor_n: Tensor | None,
    unit: float,
) -> tuple[Tensor, Tensor | None]:
    raw = logits_nV
    if transform is not None:
        with torch.set_grad_enabled(with_grad):
            raw = logits_nV.detach().requires_grad_(with_grad)
            logits_nV = transform(raw)
    loss, grad = _loss_and_softmax(logits_nV.detach(), targets_n, overwrite_logits)
    if not with_grad:
        return loss, None
    grad.scatter_add_(1, targets_n[:, None], grad.new_full((len(targets_n), 1), -1.0))
    if factor_n is not None:
        grad.mul_(factor_n[:, None])
    if unit != 1.0:
        grad.mul_(unit)
    grad = grad.to(logits_nV.dtype)
    if transform is not None:
        (grad,) = torch.autograd.grad(logits_nV, raw, grad)
    return loss, grad


def _loss_and_softmax(logits_nV: Tensor, targets_n: Tensor, overwrite_logits: bool) -> tuple[Tensor, Tensor]:
    scores = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    if kernel_device_type(logits_nV.device) == "cuda" and scores.dtype != logits_nV.dtype:
        logprobs = torch.log_softmax(scores, -1)  # one kernel on CUDA, instead of five
        return -logprobs.gather(-1, targets_n[:, None]).sum(), logprobs.exp_()
    peak = scores.amax(-1, keepdim=True)
    picked = scores.gather(-1, targets_n[:, None])
    owned = overwrite_logits or scores.dtype != logits_nV.dtype
    p = (scores.sub_(peak) if owned else scores - peak).exp_()
    total = p.sum(-1, keepdim=True)
    return (total.log() + (peak - picked)).sum(), p.div_(total)


class TargetRows:
    """The positions that have a target, in chunks: slices if all positions have a target, else index tensors."""

    def __init__(self, targets_BT: Tensor, ignore_index: int, chunk_size: int) -> None:
        self.targets, self.chunk_size = targets_BT.flatten(), chunk_size
        self.positions = (self.targets != ignore_index).nonzero().squeeze(-1)
        self.every = len(self.positions) == len(self.targets)

    def chunks(self) -> Iterator[Tensor | slice]:
        """Yield chunks of the positions that have a target, as indices into the flattened positions."""
        count = len(self.positions)
        for start in loop_or_simulate(range(0, count, self.chunk_size), self.targets.device):
            chunk = slice(start, min(start + self.chunk_size, count))
            yield chunk if self.every else self.positions[chunk]

    def gradient_buffer(self, hidden_NC: Tensor) -> Tensor:
        """Return a buffer for the gradient of the hidden states; it is zero at positions without a target."""
        return torch.empty_like(hidden_NC) if self.every else torch.zeros_like(hidden_NC)

    def loss_divisor(self, num_items: Tensor | float | None) -> Tensor | float:
        """Return the divisor of the summed loss: ``num_items``, or for None the number of targets (at least 1)."""
        if num_items is None:
            return max(1, len(self.positions))
        return num_items.to(self.targets.device) if isinstance(num_items, Tensor) else num_items


@dataclass(frozen=True)
class HeadSettings:
    """Targets, dtypes and logit transform for the loss of a linear head.

    Attributes:
        rows: Positions with a target, in chunks.
        transform: Function applied to the logits, or None.
        accumulate_dtype: Dtype in which the gradients of weight and bias are summed over chunks.
        compute_dtype: Dtype of the logits; None for the dtype of the hidden states.
        grad_enabled: True if autograd is enabled in the call of the head.
    """

    rows: TargetRows
    transform: Project | None
    accumulate_dtype: torch.dtype
    compute_dtype: torch.dtype | None
    grad_enabled: bool


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast would compute the head; None without autocast and for fp64 hidden states.

    The head disables autocast and casts its inputs to this dtype, so that sums keep their own dtypes.
    """
    kind = autocast_device_type(hidden.device)
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast_tensors(dtype: torch.dtype | None, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the tensors cast to ``dtype``; unchanged if ``dtype`` is None."""
    return tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)


def scale_gradients(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], factor: Tensor, unit: float = 1.0
) -> list[Tensor | None]:
    """Return the gradients times ``factor``, the gradient of the loss, each cast to its dtype in ``dtypes``.

    ``unit`` is the factor with which the gradients were computed (:func:`gradient_unit`).
    The product is computed in the wider dtype of both: ``factor`` in bf16 would change the gradient by up to 0.4%.
    """
    factor = factor if unit == 1.0 else factor / unit
    out: list[Tensor | None] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if grad is None or dtype is None:
            out.append(None)
        else:
            out.append(grad.to(torch.promote_types(grad.dtype, dtype)).mul_(factor).to(dtype))
    return out


def pop_stored_gradients(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients that the forward stored in ``ctx``; with ``retain_graph=True``, ``ctx`` keeps a copy.

    Raises:
        ArgumentError: An earlier backward without ``retain_graph=True`` freed the gradients.
    """
    grads: tuple[Tensor | None, ...] | None = ctx.grads
    if grads is None:
        raise ArgumentError(
            "backward was called a second time on a streamed loss", fix="pass retain_graph=True to the first backward"
        )
    ctx.grads = None
    if is_graph_retained():
        ctx.grads = tuple(None if grad is None else grad.clone() for grad in grads)
    return grads
