"""Log-probabilities and cross entropy of a language-model head that never holds more than one chunk of logits.

Shape suffixes: B batch, T tokens, N = B * T or the target tokens among them, V vocabulary, C hidden size.
Targets are already shifted: ``targets[:, t]`` is the token that position t predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference", "project_cross_entropy", "token_logprobs"]

Project = Callable[[Tensor], Tensor]
"""Hidden states ``[n, C]`` to logits ``[n, V]``; autograd differentiates it."""


def linear_cross_entropy(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: Project | None = None,
    ignore_index: int = -100,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` in one sweep: loss and gradient together, 3 matmuls a chunk.

    Equal to ``cross_entropy(transform(linear(hidden, weight, bias)).float(), targets, reduction="sum") / num_items``.
    Only target tokens are projected: a masked prompt costs nothing here.

    Args:
        hidden_BTC: Final hidden states ``[..., C]``.
        weight_VC: Head weight.
        targets_BT: Shifted targets ``[...]``; ``ignore_index`` where nothing is predicted.
        bias_V: Head bias.
        transform: Elementwise map of the logits (softcap, scale).
        chunk_size: Tokens whose logits exist at once.
        num_items: The divisor: all target tokens of the global step. None counts those of this call.
        accumulate_dtype: Dtype in which the gradient of the weight is summed over chunks.

    Returns:
        The scalar loss in fp32 (fp64 for fp64 inputs).
    """
    hidden_NC, targets_N = _targets_only(hidden_BTC, targets_BT, ignore_index)
    compute_dtype, grad_enabled = _autocast_dtype(hidden_NC), torch.is_grad_enabled()
    with torch.autocast(hidden_NC.device.type, enabled=False):
        total = _LinearCrossEntropy.apply(
            hidden_NC,
            weight_VC,
            bias_V,
            targets_N,
            transform,
            chunk_size,
            accumulate_dtype,
            compute_dtype,
            grad_enabled,
        )
    return total / _divisor(num_items, targets_N)


def project_cross_entropy(
    hidden_BTC: Tensor,
    project: Project,
    parameters: Sequence[Tensor],
    targets_BT: Tensor,
    *,
    ignore_index: int = -100,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """:func:`linear_cross_entropy` for a head that is any module: ``project`` is differentiated chunk by chunk.

    ``parameters`` are the tensors ``project`` reads whose gradients are wanted.
    """
    hidden_NC, targets_N = _targets_only(hidden_BTC, targets_BT, ignore_index)
    total = _ProjectCrossEntropy.apply(hidden_NC, targets_N, project, chunk_size, torch.is_grad_enabled(), *parameters)
    return total / _divisor(num_items, targets_N)


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    lm_head_bias: Tensor | None = None,
    chunk_size: int = 1024,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of each target, differentiable; the logits of a chunk are computed again in the backward.

    Equal to ``log_softmax(linear(hidden, weight, bias).float(), -1).gather(-1, targets)``, with 0 where the target is
    ``ignore_index``.

    Args:
        hidden: ``[B, T, C]`` final hidden states.
        lm_head_weight: ``[V, C]``.
        targets: ``[B, T]``, already shifted.
        lm_head_bias: ``[V]``.
        chunk_size: Tokens whose logits exist at once.
        ignore_index: Target value that has no log-probability.

    Returns:
        ``[B, T]`` in fp32 (fp64 for fp64 inputs).
    """
    hidden_NC, targets_N = _targets_only(hidden, targets, ignore_index)
    compute_dtype = _autocast_dtype(hidden_NC)
    with torch.autocast(hidden_NC.device.type, enabled=False):
        logprobs_N = _TokenLogprobs.apply(hidden_NC, lm_head_weight, lm_head_bias, targets_N, chunk_size, compute_dtype)
    out = logprobs_N.new_zeros(targets.numel())
    return out.index_put((_target_positions(targets, ignore_index),), logprobs_N).view(targets.shape)


def linear_cross_entropy_reference(
    hidden_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, *, bias_V: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """The slow, obvious form: all logits at once, mean over the targets."""
    logits = torch.nn.functional.linear(hidden_BTC, weight_VC, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(W h)[target]; dh = (p - onehot) W and dW = (p - onehot)' h in the same sweep."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: Project | None,
        chunk_size: int,
        accumulate_dtype: torch.dtype,
        compute_dtype: torch.dtype | None,
        grad_enabled: bool,
    ) -> Tensor:
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        hidden, weight, bias = _cast(compute_dtype, hidden, weight, bias)
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        accumulate = torch.promote_types(accumulate_dtype, weight.dtype)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accumulate) if wanted[2] and bias is not None else None
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in _chunks(len(targets), chunk_size):
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias)
            loss, grad = _loss_and_grad(logits, targets[chunk], transform, any(wanted), reuse=transform is None)
            del logits
            total += loss
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_outer(grad_weight, grad, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=accumulate)
        ctx.grads = (grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        scaled = _scaled(grads, ctx.inputs, grad_total)
        return (*scaled, None, None, None, None, None, None)


class _ProjectCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        project: Project,
        chunk_size: int,
        grad_enabled: bool,
        *params: Tensor,
    ) -> Tensor:
        wanted = [p for p in params if p.requires_grad] if grad_enabled else []
        backward = grad_enabled and (bool(wanted) or ctx.needs_input_grad[0])
        grad_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in _chunks(len(targets), chunk_size):
            with torch.set_grad_enabled(backward):
                h = hidden[chunk].detach().requires_grad_(backward)
                logits = project(h)
            loss, grad = _loss_and_grad(logits.detach(), targets[chunk], None, backward)
            total += loss
            if backward:
                grad_hidden[chunk], *terms = torch.autograd.grad(logits, (h, *wanted), grad.to(logits.dtype))
                for acc, term in zip(sums, terms, strict=True):
                    acc += term
        ctx.grads = (grad_hidden if backward else None, *sums)
        ctx.inputs = (hidden.dtype, *(p.dtype for p in wanted))
        ctx.needed = [grad_enabled and p.requires_grad for p in params]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        grad_hidden, *rest = _scaled(grads, ctx.inputs, grad_total)
        terms = iter(rest)
        return (grad_hidden, None, None, None, None, *(next(terms) if needed else None for needed in ctx.needed))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_size: int,
        compute_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        hidden, weight, bias = _cast(compute_dtype, hidden, weight, bias)
        out = hidden.new_empty(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in _chunks(len(targets), chunk_size):
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias).to(out.dtype)
            out[chunk] = logits.gather(-1, targets[chunk, None]).squeeze(-1) - logits.logsumexp(-1)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.chunk_size = chunk_size
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=accumulate) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accumulate) if ctx.needs_input_grad[2] else None
        for chunk in _chunks(len(targets), ctx.chunk_size):
            logits = torch.nn.functional.linear(hidden[chunk], weight, bias)
            _, grad = _loss_and_grad(
                logits, targets[chunk], None, True, reuse=True
            )  # of -log p, in the dtype of the logits
            grad = grad * -grad_out[chunk, None].to(grad.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_outer(grad_weight, grad, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=accumulate)
        one = torch.ones((), device=hidden.device)
        return (*_scaled((grad_hidden, grad_weight, grad_bias), ctx.inputs, one), None, None, None)


def _targets_only(hidden_BTC: Tensor, targets_BT: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The hidden states and targets of the positions that predict something; no copy if all of them do."""
    hidden_NC, targets_N = hidden_BTC.flatten(0, -2), targets_BT.flatten()
    positions = _target_positions(targets_BT, ignore_index)
    if len(positions) == len(targets_N):
        return hidden_NC, targets_N
    return hidden_NC.index_select(0, positions), targets_N.index_select(0, positions)


def _target_positions(targets_BT: Tensor, ignore_index: int) -> Tensor:
    return (targets_BT.flatten() != ignore_index).nonzero().squeeze(-1)


def _divisor(num_items: Tensor | float | None, targets_N: Tensor) -> Tensor | float:
    if num_items is None:
        return max(1, len(targets_N))
    return num_items.to(targets_N.device) if isinstance(num_items, Tensor) else num_items


def _chunks(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype autocast would run the head in, or None (the sums beside the matmuls keep theirs, hence no autocast)."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)


def _loss_and_grad(
    logits_nV: Tensor, targets_n: Tensor, transform: Project | None, with_grad: bool, reuse: bool = False
) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of a chunk and its gradient ``[n, V]`` with respect to the logits before ``transform``.

    ``reuse`` lets the gradient take the memory of the logits; only right where no graph has saved them.
    """
    dtype = torch.promote_types(logits_nV.dtype, torch.float32)
    raw = logits_nV
    if transform is not None:
        with torch.set_grad_enabled(with_grad):
            raw = logits_nV.detach().requires_grad_(with_grad)
            logits_nV = transform(raw)
    scores = logits_nV.detach().to(dtype)
    lse = scores.logsumexp(-1, keepdim=True)
    loss = (lse - scores.gather(-1, targets_n[:, None])).sum()
    if not with_grad:
        return loss, scores
    owned = reuse or scores.dtype != logits_nV.dtype
    grad = (scores.sub_(lse) if owned else scores - lse).exp_()
    grad.scatter_add_(1, targets_n[:, None], grad.new_full((len(targets_n), 1), -1.0))
    grad = grad.to(logits_nV.dtype)
    if transform is not None:
        (grad,) = torch.autograd.grad(logits_nV, raw, grad)
    return loss, grad


def _add_outer(acc_VC: Tensor, grad_nV: Tensor, hidden_nC: Tensor) -> None:
    """``acc += grad.T @ hidden``, in place where the dtypes agree and by blocks of the vocabulary where they do not."""
    if acc_VC.dtype == grad_nV.dtype:
        acc_VC.addmm_(grad_nV.mT, hidden_nC)
        return
    block = max(1, (1 << 24) // acc_VC.shape[1])
    for rows in _chunks(acc_VC.shape[0], block):
        acc_VC[rows] += grad_nV[:, rows].mT @ hidden_nC


def _scaled(
    grads: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None], factor: Tensor
) -> list[Tensor | None]:
    """Multiply the gradients of the sum by the upstream gradient, in the wider dtype, and cast to the input's.

    ``factor`` stays a fp32 scalar: rounded to bf16 it would scale the whole gradient by up to 0.4%.
    """
    out: list[Tensor | None] = []
    for grad, dtype in zip(grads, dtypes, strict=True):
        if grad is None or dtype is None:
            out.append(None)
        else:
            out.append(grad.to(torch.promote_types(grad.dtype, dtype)).mul_(factor).to(dtype))
    return out
