"""One chunk of the head: loss and gradient of its logits, and its terms of the gradients of the head.

Shape suffixes as in ``ops.head.cross_entropy``, n the tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from streamtune.ops.indexing import MAX_ELEMENTS, blocks

__all__ = ["HeadGradients", "Project", "loss_and_grad"]

Project = Callable[[Tensor], Tensor]
"""Hidden states ``[n, C]`` to logits ``[n, V]``; autograd differentiates it."""


class HeadGradients:
    """Gradients of hidden states, weight and bias, summed over chunks; None for those that are not wanted."""

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

    def add(self, chunk: Tensor | slice, h_nC: Tensor, weight_VC: Tensor, grad_nV: Tensor) -> None:
        """Add a chunk's share, given the gradient of its logits."""
        if self.hidden is not None:
            self.hidden[chunk] = (grad_nV @ weight_VC).to(self.hidden.dtype)
        if self.weight is not None:
            _add_outer(self.weight, grad_nV, h_nC)
        if self.bias is not None:
            self.bias += grad_nV.sum(0, dtype=self.bias.dtype)

    def put(self, chunk: Tensor | slice, grad_h_nC: Tensor | None, grad_weight_VC: Tensor | None) -> None:
        """Add a chunk's share that a fused kernel has computed."""
        if self.hidden is not None and grad_h_nC is not None:
            self.hidden[chunk] = grad_h_nC.to(self.hidden.dtype)
        if self.weight is not None and grad_weight_VC is not None:
            self.weight += grad_weight_VC

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the order of the inputs."""
        return self.hidden, self.weight, self.bias


def loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    with_grad: bool,
    reuse: bool = False,
    factor_n: Tensor | None = None,
    most: int = MAX_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Compute the summed cross entropy of a chunk, and its gradient ``[n, V]`` for the logits before ``transform``.

    Args:
        logits_nV: Logits of the chunk.
        targets_n: The target token of each row.
        transform: Map of the logits before the loss.
        with_grad: Compute the gradient; None in its place otherwise.
        reuse: The gradient may take the memory of the logits; only right where no graph has saved them.
        factor_n: Multiplies each row of the gradient before it is rounded to the dtype of the logits.
        most: Elements the kernels of this function can count; a larger chunk is computed in several parts.
    """
    parts = list(blocks(len(logits_nV), most // logits_nV.shape[1]))
    if len(parts) <= 1:
        return _loss_and_grad(logits_nV, targets_n, transform, with_grad, reuse, factor_n)
    grad = torch.empty_like(logits_nV) if with_grad else None
    losses = []
    for part in parts:
        factor = None if factor_n is None else factor_n[part]
        loss, grad_part = _loss_and_grad(logits_nV[part], targets_n[part], transform, with_grad, reuse, factor)
        losses.append(loss)
        if grad is not None and grad_part is not None:
            grad[part] = grad_part
    return torch.stack(losses).sum(), grad


def _loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    with_grad: bool,
    reuse: bool,
    factor_n: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    raw = logits_nV
    if transform is not None:
        with torch.set_grad_enabled(with_grad):
            raw = logits_nV.detach().requires_grad_(with_grad)
            logits_nV = transform(raw)
    loss, grad = _loss_and_softmax(logits_nV.detach(), targets_n, reuse)
    if not with_grad:
        return loss, None
    grad.scatter_add_(1, targets_n[:, None], grad.new_full((len(targets_n), 1), -1.0))
    if factor_n is not None:
        grad.mul_(factor_n[:, None])
    grad = grad.to(logits_nV.dtype)
    if transform is not None:
        (grad,) = torch.autograd.grad(logits_nV, raw, grad)
    return loss, grad


def _loss_and_softmax(logits_nV: Tensor, targets_n: Tensor, reuse: bool) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the probabilities in fp32 or wider, without further memory of their size."""
    dtype = torch.promote_types(logits_nV.dtype, torch.float32)
    if logits_nV.is_cuda and logits_nV.dtype != dtype:
        # There it is one kernel, which widens what it reads; elsewhere torch would make a wide copy first.
        logprobs = torch.log_softmax(logits_nV, -1, dtype=dtype)
        return -logprobs.gather(-1, targets_n[:, None]).sum(), logprobs.exp_()
    scores = logits_nV.to(dtype)
    peak = scores.amax(-1, keepdim=True)
    picked = scores.gather(-1, targets_n[:, None])
    owned = reuse or scores.dtype != logits_nV.dtype
    p = (scores.sub_(peak) if owned else scores - peak).exp_()
    total = p.sum(-1, keepdim=True)
    return (total.log() + peak - picked).sum(), p.div_(total)


def _add_outer(acc_VC: Tensor, grad_nV: Tensor, hidden_nC: Tensor) -> None:
    """Compute ``acc += grad.T @ hidden``, in one matmul where it can be, by blocks of the vocabulary elsewhere."""
    if acc_VC.dtype == grad_nV.dtype:
        acc_VC.addmm_(grad_nV.mT, hidden_nC)
    elif acc_VC.is_cuda and _adds_wide(acc_VC.device, acc_VC.dtype, grad_nV.dtype):
        torch.addmm(acc_VC, grad_nV.mT, hidden_nC, out_dtype=acc_VC.dtype, out=acc_VC)
    else:
        block = max(1, (1 << 24) // acc_VC.shape[1])
        for part in blocks(len(acc_VC), block):
            acc_VC[part] += grad_nV[:, part].mT @ hidden_nC


@lru_cache(maxsize=16)
def _adds_wide(device: torch.device, wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if a matmul of narrow matrices can add to a wide one on this device; the CPU and some others cannot.

    Such a matmul rounds only the sum; a separate one would round each chunk's term.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(24, 40, generator=generator, device=device, dtype=narrow) for _ in range(2))
    acc = torch.ones(40, 40, device=device, dtype=wide)
    try:
        torch.addmm(acc, a.mT, b, out_dtype=wide, out=acc)
    except (RuntimeError, TypeError):
        return False
    want = 1 + a.double().mT @ b.double()
    return bool((acc.double() - want).norm() <= 1e-5 * want.norm())
