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

from streamtune.errors import ArgumentError
from streamtune.ops.simulated import autocast_kind

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
        transform: Map of each token's logits (softcap, scale, a slice); targets number what it leaves.
        chunk_size: Tokens whose logits exist at once.
        num_items: The divisor: all target tokens of the global step. None counts those of this call.
        accumulate_dtype: Dtype in which the gradient of the weight is summed over chunks.

    Returns:
        The scalar loss in fp32 (fp64 for fp64 inputs).
    """
    rows = _Rows(targets_BT, ignore_index, chunk_size)
    compute_dtype, grad_enabled = _autocast_dtype(hidden_BTC), torch.is_grad_enabled()
    with torch.autocast(autocast_kind(hidden_BTC.device), enabled=False):
        total = _LinearCrossEntropy.apply(
            hidden_BTC.flatten(0, -2), weight_VC, bias_V, rows, transform, accumulate_dtype, compute_dtype, grad_enabled
        )
    return total / rows.divisor(num_items)


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
    rows = _Rows(targets_BT, ignore_index, chunk_size)
    total = _ProjectCrossEntropy.apply(hidden_BTC.flatten(0, -2), rows, project, torch.is_grad_enabled(), *parameters)
    return total / rows.divisor(num_items)


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
    rows = _Rows(targets, ignore_index, chunk_size)
    compute_dtype = _autocast_dtype(hidden)
    with torch.autocast(autocast_kind(hidden.device), enabled=False):
        logprobs_N = _TokenLogprobs.apply(hidden.flatten(0, -2), lm_head_weight, lm_head_bias, rows, compute_dtype)
    return logprobs_N.view(targets.shape)


def linear_cross_entropy_reference(
    hidden_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, *, bias_V: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """The slow, obvious form: all logits at once, mean over the targets."""
    logits = torch.nn.functional.linear(hidden_BTC, weight_VC, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignore_index)


class _Rows:
    """The positions that predict something, in chunks: slices where all do, indices (a chunk's copy) where some do."""

    def __init__(self, targets_BT: Tensor, ignore_index: int, chunk_size: int) -> None:
        self.targets, self.chunk_size = targets_BT.flatten(), chunk_size
        self.positions = (self.targets != ignore_index).nonzero().squeeze(-1)
        self.every = len(self.positions) == len(self.targets)

    def chunks(self) -> Iterator[Tensor | slice]:
        """Indices into the flattened positions, ``chunk_size`` of them at most."""
        for start in range(0, len(self.positions), self.chunk_size):
            chunk = slice(start, min(start + self.chunk_size, len(self.positions)))
            yield chunk if self.every else self.positions[chunk]

    def gradient(self, hidden_NC: Tensor) -> Tensor:
        """A buffer for the gradient of the hidden states: zero wherever nothing is predicted."""
        return torch.empty_like(hidden_NC) if self.every else torch.zeros_like(hidden_NC)

    def divisor(self, num_items: Tensor | float | None) -> Tensor | float:
        """What the summed loss is divided by."""
        if num_items is None:
            return max(1, len(self.positions))
        return num_items.to(self.targets.device) if isinstance(num_items, Tensor) else num_items


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of -log softmax(W h)[target]; dh = (p - onehot) W and dW = (p - onehot)' h in the same sweep."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: _Rows,
        transform: Project | None,
        accumulate_dtype: torch.dtype,
        compute_dtype: torch.dtype | None,
        grad_enabled: bool,
    ) -> Tensor:
        wanted = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        weight, bias = _cast(compute_dtype, weight, bias)
        sums = _HeadGradients(rows.gradient(hidden) if wanted[0] else None, weight, bias, wanted, accumulate_dtype)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in rows.chunks():
            (h,) = _cast(compute_dtype, hidden[chunk])
            logits = torch.nn.functional.linear(h, weight, bias)
            loss, grad = _loss_and_grad(logits, rows.targets[chunk], transform, any(wanted), reuse=transform is None)
            del logits
            total += loss
            sums.add(chunk, h, weight, grad)
        ctx.grads = sums.all()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = _handed_out(ctx)
        return (*_scaled(grads, ctx.inputs, grad_total), None, None, None, None, None)


class _ProjectCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: _Rows, project: Project, grad_enabled: bool, *params: Tensor) -> Tensor:
        wanted = [p for p in params if p.requires_grad] if grad_enabled else []
        backward = grad_enabled and (bool(wanted) or ctx.needs_input_grad[0])
        grad_hidden = rows.gradient(hidden) if backward else None
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in wanted]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in rows.chunks():
            with torch.set_grad_enabled(backward):
                h = hidden[chunk].detach().requires_grad_(backward)
                logits = project(h)
            loss, grad = _loss_and_grad(logits.detach(), rows.targets[chunk], None, backward)
            total += loss
            if grad_hidden is not None:
                grad_hidden[chunk], *terms = torch.autograd.grad(logits, (h, *wanted), grad.to(logits.dtype))
                for acc, term in zip(sums, terms, strict=True):
                    acc += term
        ctx.grads = (grad_hidden, *sums)
        ctx.inputs = (hidden.dtype, *(p.dtype for p in wanted))
        ctx.needed = [grad_enabled and p.requires_grad for p in params]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grads = _handed_out(ctx)
        grad_hidden, *rest = _scaled(grads, ctx.inputs, grad_total)
        terms = iter(rest)
        return (grad_hidden, None, None, None, *(next(terms) if needed else None for needed in ctx.needed))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: _Rows,
        compute_dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rows, ctx.compute_dtype = rows, compute_dtype
        weight, bias = _cast(compute_dtype, weight, bias)
        out = hidden.new_zeros(len(rows.targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in rows.chunks():
            (h,) = _cast(compute_dtype, hidden[chunk])
            logits = torch.nn.functional.linear(h, weight, bias).to(out.dtype)
            out[chunk] = logits.gather(-1, rows.targets[chunk, None]).squeeze(-1) - logits.logsumexp(-1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        rows: _Rows = ctx.rows
        hidden, weight, bias = ctx.saved_tensors
        weight, bias = _cast(ctx.compute_dtype, weight, bias)
        wanted = ctx.needs_input_grad[:3]
        sums = _HeadGradients(rows.gradient(hidden) if wanted[0] else None, weight, bias, wanted, torch.float32)
        for chunk in rows.chunks():
            (h,) = _cast(ctx.compute_dtype, hidden[chunk])
            logits = torch.nn.functional.linear(h, weight, bias)
            # the loss is -log p, hence the sign
            _, grad = _loss_and_grad(logits, rows.targets[chunk], None, True, reuse=True, factor_n=-grad_out[chunk])
            sums.add(chunk, h, weight, grad)
        one = torch.ones((), device=hidden.device)
        return (*_scaled(sums.all(), ctx.inputs, one), None, None)


class _HeadGradients:
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

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the order of the inputs."""
        return self.hidden, self.weight, self.bias


def _handed_out(ctx: Any) -> tuple[Tensor | None, ...]:
    """The gradients the forward made, once: they are scaled in place and must not outlive the backward.

    Raises:
        ArgumentError: They were handed out before.
    """
    grads, ctx.grads = ctx.grads, None
    if grads is None:
        raise ArgumentError("a streamed loss can go backward once", mend="compute the loss again for a second backward")
    return grads


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype autocast would run the head in, or None. Autocast itself is off: the sums keep their dtypes."""
    kind = autocast_kind(hidden.device)
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(t if t is None or dtype is None else t.to(dtype) for t in tensors)


def _loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    with_grad: bool,
    reuse: bool = False,
    factor_n: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of a chunk and its gradient ``[n, V]`` with respect to the logits before ``transform``.

    ``reuse`` lets the gradient take the memory of the logits; only right where no graph has saved them. ``factor_n``
    multiplies each row of the gradient before it is rounded to the dtype of the logits.
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
    if factor_n is not None:
        grad.mul_(factor_n[:, None])
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
    for start in range(0, acc_VC.shape[0], block):
        acc_VC[start : start + block] += grad_nV[:, start : start + block].mT @ hidden_nC


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
