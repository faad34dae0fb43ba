"""Cross entropy of a language-model head; only one chunk of logits is allocated at a time.

Shape suffixes: B batch, T tokens, N = B * T tokens or only the targets among them, V vocabulary, C hidden size.
Targets are already shifted: ``targets[:, t]`` is the token that position t predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.ops.devices import autocast_device_type
from streamtune.ops.first_order import first_order, suspend_tensor_hooks
from streamtune.ops.head.kernels import Chunk, HeadShape, choose_head_kernel, run_head_kernel
from streamtune.ops.head.logprobs import project_scores
from streamtune.ops.head.sweep import (
    HeadGradients,
    HeadSettings,
    Project,
    TargetRows,
    autocast_dtype,
    cast_tensors,
    gradient_buffers,
    gradient_unit,
    gradients_or_none,
    loss_and_grad,
    pop_stored_gradients,
    scale_gradients,
)


def linear_cross_entropy(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: Project | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the cross entropy of a linear head's logits, computed one chunk of tokens at a time.

    Equal to ``cross_entropy(transform(linear(hidden, weight, bias)).float(), targets, reduction="sum") / num_items``.
    The forward also computes the gradients, so a chunk needs 3 matmuls in all. Logits are computed only at positions
    with a target.

    Args:
        hidden_BTC: Final hidden states ``[..., C]``.
        weight_VC: Head weight.
        targets_BT: Shifted targets ``[...]``; ``ignore_index`` at positions without a target.
        bias_V: Head bias.
        transform: Function applied to each token's logits before the loss (softcap, scale, a slice of the vocabulary).
        ignore_index: Value in ``targets_BT`` that marks positions without a target.
        chunk_size: Number of tokens whose logits exist at a time.
        num_items: Divisor of the summed loss: the number of targets of the optimizer step. None counts the targets of
            this call.
        accumulate_dtype: Dtype in which the gradient of the weight is summed over chunks.

    Returns:
        The scalar loss in fp32 (fp64 for fp64 inputs).

    Example:
        >>> hidden, weight = torch.randn(1, 8, 4), torch.randn(10, 4)
        >>> targets = torch.arange(8).view(1, 8)
        >>> loss = linear_cross_entropy(hidden, weight, targets, chunk_size=4)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy((hidden @ weight.T)[0], targets[0]), atol=1e-6)
        True
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    settings = HeadSettings(
        rows, transform, accumulate_dtype, autocast_dtype(hidden_BTC), grad_enabled=torch.is_grad_enabled()
    )
    with torch.autocast(autocast_device_type(hidden_BTC.device), enabled=False):
        total = _LinearCrossEntropy.apply(hidden_BTC.flatten(0, -2), weight_VC, bias_V, settings)
    return total / rows.loss_divisor(num_items)


def project_cross_entropy(
    hidden_BTC: Tensor,
    project: Project,
    parameters: Sequence[Tensor],
    targets_BT: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Return the cross entropy of a head given as a function, computed one chunk of tokens at a time.

    ``project`` maps hidden states to logits; ``parameters`` are the tensors that ``project`` uses and that get
    gradients. Other arguments are as for :func:`linear_cross_entropy`. In float16 the backward recomputes the logits.
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    if (autocast_dtype(hidden_BTC) or hidden_BTC.dtype) == torch.float16:
        # The gradients of parameters are summed in float16: only the backward knows the scale of the loss.
        how: dict[str, Any] = {"ignore_index": ignore_index, "chunk_size": chunk_size}
        logprobs, _ = project_scores(hidden_BTC, project, parameters, targets_BT, **how)
        return -logprobs.sum() / rows.loss_divisor(num_items)
    total = _ProjectCrossEntropy.apply(hidden_BTC.flatten(0, -2), rows, project, torch.is_grad_enabled(), *parameters)
    return total / rows.loss_divisor(num_items)


def linear_cross_entropy_reference(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    bias_V: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return the mean cross entropy over the targets, computed from all logits at once: slow, for comparison."""
    logits = torch.nn.functional.linear(hidden_BTC, weight_VC, bias_V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    return torch.nn.functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross entropy summed over tokens, with gradients dh = (p - onehot) W and dW = (p - onehot)' h per chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings) -> Tensor:
        rows, transform, accumulate_dtype = settings.rows, settings.transform, settings.accumulate_dtype
        wanted = [settings.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        weight, bias = cast_tensors(settings.compute_dtype, weight, bias)
        ctx.unit = gradient_unit(weight.dtype, accumulate_dtype)
        sums = HeadGradients(
            rows.gradient_buffer(hidden) if wanted[0] else None, weight, bias, wanted, accumulate_dtype
        )
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        shape = HeadShape(
            rows.chunk_size, weight.shape[0], weight.shape[1], weight.dtype, (wanted[0], wanted[1]), accumulate_dtype
        )
        for chunk in rows.chunks():
            (h,) = cast_tensors(settings.compute_dtype, hidden[chunk])
            targets = rows.targets[chunk]
            kernel = None
            if bias is None and transform is None:
                kernel = choose_head_kernel(
                    h, weight, targets, shape, partial(_chunk_loss_and_grads, h, weight, targets, shape.wanted)
                )
            if kernel is not None:
                loss, grad_h, grad_weight = run_head_kernel(kernel, h, weight, targets, shape.wanted)
                sums.add_gradients(chunk, grad_h, grad_weight)
            else:
                logits = torch.nn.functional.linear(h, weight, bias)
                overwrite = transform is None
                loss, grad = loss_and_grad(
                    logits, targets, transform, any(wanted), overwrite_logits=overwrite, unit=ctx.unit
                )
                del logits
                if grad is not None:
                    sums.add_chunk(chunk, h, weight, grad)
            total += loss
        ctx.grads = sums.as_tuple()
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        return (*scale_gradients(pop_stored_gradients(ctx), ctx.inputs, grad_total, ctx.unit), None)


class _ProjectCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: TargetRows, project: Project, grad_enabled: bool, *params: Tensor
    ) -> Tensor:
        wanted = [p for p in params if p.requires_grad] if grad_enabled else []
        backward = grad_enabled and (bool(wanted) or ctx.needs_input_grad[0])
        grad_hidden = rows.gradient_buffer(hidden) if backward else None
        sums = gradient_buffers(wanted)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for chunk in rows.chunks():
            with torch.set_grad_enabled(backward):
                h = hidden[chunk].detach().requires_grad_(backward)
                logits = project(h)
            loss, grad = loss_and_grad(logits.detach(), rows.targets[chunk], None, backward)
            total += loss
            if grad_hidden is not None and grad is not None:
                with suspend_tensor_hooks(wanted):
                    grad_hidden[chunk], *terms = torch.autograd.grad(logits, (h, *wanted), grad.to(logits.dtype))
                for acc, term in zip(sums, terms, strict=True):
                    acc += term
        ctx.grads = (grad_hidden, *sums)
        ctx.inputs = (hidden.dtype, *(p.dtype for p in wanted))
        ctx.needed = [grad_enabled and p.requires_grad for p in params]
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *rest = scale_gradients(pop_stored_gradients(ctx), ctx.inputs, grad_total)
        return (grad_hidden, None, None, None, *gradients_or_none(rest, ctx.needed))


def _chunk_loss_and_grads(h: Tensor, weight: Tensor, targets: Tensor, needs_grad: Sequence[bool]) -> Chunk:
    loss, grad = loss_and_grad(
        torch.nn.functional.linear(h, weight), targets, None, any(needs_grad), overwrite_logits=True
    )
    sums = HeadGradients(
        torch.empty_like(h) if needs_grad[0] else None, weight, None, [*needs_grad, False], weight.dtype
    )
    if grad is not None:
        sums.add_chunk(slice(None), h, weight, grad)
    return loss, sums.hidden, sums.weight
