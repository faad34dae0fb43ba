"""Log-probabilities of target tokens and entropies; only one chunk of logits is allocated at a time.

A loss of these scores may need the scores of all tokens. So the logits of a chunk are recomputed in the backward. With
z the logits of a token, p = softmax(z) and y its target:

    log p_y         = z_y - logsumexp(z)            d/dz_j = [j = y] - p_j
    H = -sum p log p = logsumexp(z) - sum p_j z_j   d/dz_j = -p_j (log p_j + H)

Shape suffixes as in ``ops.head.cross_entropy``; n is the number of tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.ops.devices import MAX_ELEMENTS, autocast_device_type, block_slices
from streamtune.ops.first_order import first_order, suspend_tensor_hooks
from streamtune.ops.forward_state import Autocast, RandomState
from streamtune.ops.head.sweep import (
    HeadGradients,
    HeadSettings,
    Project,
    TargetRows,
    autocast_dtype,
    cast_tensors,
    gradient_buffers,
    gradients_or_none,
    loss_and_grad,
    scale_gradients,
)


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    lm_head_bias: Tensor | None = None,
    chunk_size: int = 1024,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return the differentiable log-probability of each target; the backward recomputes each chunk's logits.

    Equal to ``log_softmax(linear(hidden, weight, bias).float(), -1).gather(-1, targets)``, and 0 if the target is
    ``ignore_index``.

    Args:
        hidden: Final hidden states ``[B, T, C]``.
        lm_head_weight: Head weight ``[V, C]``.
        targets: Shifted targets ``[B, T]``.
        lm_head_bias: Head bias ``[V]``.
        chunk_size: Number of tokens whose logits exist at a time.
        ignore_index: Value in ``targets`` that marks positions without a target.

    Returns:
        ``[B, T]`` in fp32 (fp64 for fp64 inputs).

    Example:
        >>> hidden, weight = torch.randn(1, 8, 4), torch.randn(10, 4)
        >>> targets = torch.arange(8).view(1, 8)
        >>> found = token_logprobs(hidden, weight, targets, chunk_size=4)
        >>> whole = (hidden @ weight.T).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        >>> torch.allclose(found, whole, atol=1e-6)
        True
    """
    logprobs, _ = token_scores(
        hidden, lm_head_weight, targets, bias_V=lm_head_bias, chunk_size=chunk_size, ignore_index=ignore_index
    )
    return logprobs


def token_scores(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: Project | None = None,
    entropy: bool = False,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
    accumulate_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probabilities of the targets, entropies), differentiable and shaped like ``targets_BT``.

    Other arguments are as for :func:`streamtune.ops.linear_cross_entropy`; ``transform`` may include a temperature.
    Both scores are in fp32 (fp64 for fp64 inputs), and 0 at positions without a target.

    Args:
        entropy: True to compute entropies; False returns None in their place.
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    settings = HeadSettings(
        rows, transform, accumulate_dtype, autocast_dtype(hidden_BTC), grad_enabled=torch.is_grad_enabled()
    )
    with torch.autocast(autocast_device_type(hidden_BTC.device), enabled=False):
        scores = _TokenScores.apply(hidden_BTC.flatten(0, -2), weight_VC, bias_V, settings, entropy)
    return _reshape_scores(scores, targets_BT, entropy)


def project_scores(
    hidden_BTC: Tensor,
    project: Project,
    parameters: Sequence[Tensor],
    targets_BT: Tensor,
    *,
    entropy: bool = False,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    """Return (log-probabilities of the targets, entropies) for a head given as a function, one chunk at a time.

    ``project`` maps hidden states to logits; ``parameters`` are the tensors that ``project`` uses and that get
    gradients. Other arguments and the result are as for :func:`token_scores`.
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    scores = _ProjectScores.apply(hidden_BTC.flatten(0, -2), rows, project, entropy, *parameters)
    return _reshape_scores(scores, targets_BT, entropy)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        weight, bias = cast_tensors(settings.compute_dtype, weight, bias)
        scores = _score_buffers(hidden, settings.rows, entropy)
        for chunk in settings.rows.chunks():
            (h,) = cast_tensors(settings.compute_dtype, hidden[chunk])
            logits = torch.nn.functional.linear(h, weight, bias)
            mapped = logits if settings.transform is None else settings.transform(logits)
            _write_scores(scores, chunk, mapped, settings.rows.targets[chunk])
            del mapped
        return scores

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: HeadSettings = ctx.settings
        rows = settings.rows
        hidden, weight, bias = ctx.saved_tensors
        weight, bias = cast_tensors(settings.compute_dtype, weight, bias)
        wanted = ctx.needs_input_grad[:3]
        grad_hidden = rows.gradient_buffer(hidden) if wanted[0] else None
        sums = HeadGradients(grad_hidden, weight, bias, wanted, settings.accumulate_dtype)
        for chunk in rows.chunks():
            (h,) = cast_tensors(settings.compute_dtype, hidden[chunk])
            logits = torch.nn.functional.linear(h, weight, bias)
            given = [None if grad is None else grad[chunk] for grad in (grad_logprobs, grad_entropy)]
            sums.add_chunk(chunk, h, weight, _logits_gradient(logits, rows.targets[chunk], settings.transform, *given))
        one = torch.ones((), device=hidden.device)
        return (*scale_gradients(sums.as_tuple(), ctx.inputs, one), None, None)


class _ProjectScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, rows: TargetRows, project: Project, entropy: bool, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, *params)
        ctx.rows, ctx.project = rows, project
        ctx.autocast, ctx.random_states = Autocast.capture(hidden.device), []
        ctx.set_materialize_grads(False)
        scores = _score_buffers(hidden, rows, entropy)
        for chunk in rows.chunks():
            ctx.random_states.append(RandomState.capture(hidden.device))  # for dropout in the head
            _write_scores(scores, chunk, project(hidden[chunk]), rows.targets[chunk])
        return scores

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, *params = ctx.saved_tensors
        rows: TargetRows = ctx.rows
        needed = ctx.needs_input_grad[4:]
        wanted = [p for p, each in zip(params, needed, strict=True) if each]
        sums = gradient_buffers(wanted)
        grad_hidden = rows.gradient_buffer(hidden)
        for chunk, random_state in zip(rows.chunks(), ctx.random_states, strict=True):
            given = [None if grad is None else grad[chunk] for grad in (grad_logprobs, grad_entropy)]
            with torch.enable_grad(), ctx.autocast.applied(), random_state.replayed():
                h = hidden[chunk].detach().requires_grad_()
                logits = ctx.project(h)
            grad = _logits_gradient(logits.detach(), rows.targets[chunk], None, *given)
            with suspend_tensor_hooks(wanted):
                grad_hidden[chunk], *terms = torch.autograd.grad(logits, (h, *wanted), grad.to(logits.dtype))
            for acc, term in zip(sums, terms, strict=True):
                acc += term
        grads = [acc.to(p.dtype) for acc, p in zip(sums, wanted, strict=True)]
        return (grad_hidden, None, None, None, *gradients_or_none(grads, needed))


def _score_buffers(hidden: Tensor, rows: TargetRows, entropy: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    count = len(rows.targets)
    return hidden.new_zeros(count, dtype=dtype), hidden.new_zeros(count if entropy else 0, dtype=dtype)


def _write_scores(scores: tuple[Tensor, Tensor], chunk: Tensor | slice, logits_nV: Tensor, targets_n: Tensor) -> None:
    logprobs, entropies = (x.new_empty(len(targets_n)) for x in scores)
    for part in block_slices(len(targets_n), MAX_ELEMENTS // logits_nV.shape[1]):
        wide = logits_nV[part].to(logprobs.dtype)
        total = wide.logsumexp(-1)
        logprobs[part] = wide.gather(-1, targets_n[part, None]).squeeze(-1) - total
        if len(scores[1]):
            # -sum p log p, not logsumexp(z) - sum p z: that would be a difference of two large numbers
            surprise = wide - total[:, None]
            p = surprise.exp()
            entropies[part] = -p.mul_(surprise).nan_to_num_(nan=0.0).sum(-1)  # a token of probability 0 adds 0
    scores[0][chunk] = logprobs
    if len(scores[1]):
        scores[1][chunk] = entropies


def _logits_gradient(
    logits_nV: Tensor,
    targets_n: Tensor,
    transform: Project | None,
    grad_logprobs_n: Tensor | None,
    grad_entropy_n: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits before ``transform``, given the scores' gradients; may overwrite logits."""
    if grad_entropy_n is None:
        assert grad_logprobs_n is not None, "backward got no gradient"
        # the loss is -log p, hence the sign
        _, grad = loss_and_grad(logits_nV, targets_n, transform, True, overwrite_logits=True, factor_n=-grad_logprobs_n)
        assert grad is not None
        return grad
    raw = logits_nV
    if transform is not None:
        with torch.enable_grad():
            raw = logits_nV.detach().requires_grad_()
            logits_nV = transform(raw)
    logprobs = logits_nV.detach().to(grad_entropy_n.dtype).log_softmax(-1)
    p = logprobs.exp()
    surprise = (p * logprobs).nan_to_num_(nan=0.0)
    grad = -grad_entropy_n[:, None] * (surprise - p * surprise.sum(-1, keepdim=True))
    if grad_logprobs_n is not None:
        grad.sub_(p.mul_(grad_logprobs_n[:, None]))
        grad.scatter_add_(1, targets_n[:, None], grad_logprobs_n[:, None].to(grad.dtype))
    grad = grad.to(logits_nV.dtype)
    if transform is not None:
        (grad,) = torch.autograd.grad(logits_nV, raw, grad)
    return grad


def _reshape_scores(scores: tuple[Tensor, Tensor], targets_BT: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    logprobs, entropies = scores
    return logprobs.view(targets_BT.shape), entropies.view(targets_BT.shape) if entropy else None
