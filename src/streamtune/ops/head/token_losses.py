"""Losses per token other than plain cross entropy, with their gradients, computed one chunk of logits at a time.

With z the logits of a token, p = softmax(z), y its target, V the vocabulary and Z the sum of exp(z):

    nll                 -log p_y
    dft                 -stop_gradient(p_y) log p_y              dynamic fine-tuning, arXiv 2508.05629
    focal               -(1 - p_y)^gamma log p_y                 arXiv 1708.02002
    label smoothing     -(1 - e) log p_y - e mean_v log p_v      arXiv 1512.00567; only with nll
    z-loss              + c (log Z)^2                            arXiv 2204.02311; with any of the above

and with a teacher's probabilities t, where t and p are computed from logits / T, and m = (1 - b) p + b t:

    forward             sum_v t_v log(t_v / p_v)
    reverse             sum_v p_v log(p_v / t_v)
    jsd                 b sum_v t_v log(t_v / m_v) + (1 - b) sum_v p_v log(p_v / m_v)      arXiv 2306.13649

If only the probabilities of the teacher's top k tokens are known, the divergence is over k + 1 classes: these tokens,
and one class of all others. It is at most the divergence over all tokens. Both are equal if the other tokens have the
same proportions in both models.

Each loss depends on one token's logits only, so its gradient is computed in the forward: 3 matmuls per chunk, as for
plain cross entropy, and one more for a teacher's logits. In addition to a chunk's logits, a few tensors of
:data:`WIDENED` elements are allocated at a time.

Shape suffixes as in ``ops.head.cross_entropy``; n is the number of tokens of a part of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.ops.devices import autocast_device_type, block_slices
from streamtune.ops.first_order import first_order, suspend_tensor_hooks
from streamtune.ops.head.sweep import (
    WIDENED,
    HeadGradients,
    HeadSettings,
    Project,
    TargetRows,
    autocast_dtype,
    cast_tensors,
    gradient_buffers,
    gradient_unit,
    gradients_or_none,
    pop_stored_gradients,
    scale_gradients,
)

MEASURED = ("nll", "kl")
"""Names of the sums over the targets that are returned in addition to the loss, without gradient."""


@dataclass(frozen=True)
class Divergence:
    """Divergence between the model and a teacher (knowledge distillation), as a term of each token's loss.

    Attributes:
        kind: Forward or reverse KL divergence (``forward``, ``reverse``), or generalised Jensen-Shannon (``jsd``).
        beta: Weight of the teacher in the mixture of ``jsd``.
        temperature: Divisor of both models' logits.
        target_loss_weight: Weight of the loss without a teacher; the divergence has weight ``1 - target_loss_weight``.

    Example:
        >>> TokenLoss(divergence=Divergence(kind="reverse", temperature=2.0, target_loss_weight=0.5)).divergence.kind
        'reverse'
    """

    kind: Literal["forward", "reverse", "jsd"] = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    target_loss_weight: float = 0.0


@dataclass(frozen=True)
class TeacherHead:
    """Teacher of a distillation, given by its hidden states; its logits are computed one chunk at a time.

    Attributes:
        hidden_BTC: Final hidden states ``[..., C]`` of the teacher, for the same tokens as the student's.
        project: Function from hidden states ``[n, C]`` to logits ``[n, V]``. The teacher's vocabulary begins with the
            student's tokens.
    """

    hidden_BTC: Tensor  # noqa: N815
    project: Project

    def logits(self, chunk: Tensor | slice) -> Tensor:
        """Return the teacher's logits ``[n, V]`` of a chunk of the flattened positions, without gradient."""
        with torch.no_grad():
            return self.project(self.hidden_BTC.flatten(0, -2)[chunk])

    def teacher_values(self, chunk: Tensor | slice, device: torch.device) -> tuple[Tensor, ...]:
        """Return a tuple with only the teacher's logits ``[n, V]`` for a chunk of the flattened positions."""
        return (self.logits(chunk),)


@dataclass(frozen=True)
class TopKTeacher:
    """Teacher of a distillation, given by the log-probabilities of its top k tokens at each of K targets.

    Attributes:
        index_BT: Row of each position ``[B, T]`` in the two tables below, int64; -100 at positions without a target.
        ids_Kk: Token ids ``[K, k]``, int32, on the CPU, distinct within a row.
        logprobs_Kc: Log-probabilities of these tokens and, last, of all other tokens together, ``[K, k + 1]``, fp32.
    """

    index_BT: Tensor  # noqa: N815
    ids_Kk: Tensor  # noqa: N815
    logprobs_Kc: Tensor  # noqa: N815

    @classmethod
    def of_targets(cls, targets_BT: Tensor, ids_Kk: Tensor, logprobs_Kc: Tensor) -> TopKTeacher:
        """Return the teacher for tables that have one row per target, in the order of the targets in ``targets_BT``."""
        targets = targets_BT.cpu()
        is_target = targets != IGNORE_INDEX
        index = torch.where(is_target, is_target.flatten().cumsum(0).view(targets.shape) - 1, IGNORE_INDEX)
        assert int(is_target.sum()) == len(ids_Kk) == len(logprobs_Kc), "the tables must have one row per target"
        return cls(index, ids_Kk, logprobs_Kc)

    def reindexed_for(self, targets_BT: Tensor) -> TopKTeacher:
        """Return the same teacher for a batch ``[B, T]`` of another layout, with the same targets in the same order."""
        return self.of_targets(targets_BT, self.ids_Kk, self.logprobs_Kc)

    def teacher_values(self, chunk: Tensor | slice, device: torch.device) -> tuple[Tensor, ...]:
        """Return (ids ``[n, k]``, int64; log-probabilities ``[n, k + 1]``) for a chunk of the flattened positions."""
        rows = self.index_BT.flatten()[chunk.cpu() if isinstance(chunk, Tensor) else chunk]
        return self.ids_Kk[rows].to(device).long(), self.logprobs_Kc[rows].to(device)


def top_k_classes(logits_nV: Tensor, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the ids ``[n, k]`` of the k most likely tokens, and log-probabilities ``[n, k + 1]``.

    The last log-probability is of all other tokens together.
    """
    wide = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
    logp = (wide / temperature).log_softmax(-1)
    top, ids = logp.topk(k, dim=-1)
    rest = logp.scatter_(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return ids, torch.cat([top, rest], -1)


@dataclass(frozen=True)
class TokenLoss:
    """Formula of the loss of a target token.

    Attributes:
        kind: Formula of the loss: ``nll`` (cross entropy), ``dft`` (dynamic fine-tuning) or ``focal``.
        focal_gamma: Exponent of ``focal``.
        label_smoothing: Probability that is spread evenly over the vocabulary; only with ``nll``.
        z_loss: Factor of (log Z)^2, where Z is the sum of exp(logits).
        divergence: Divergence from a teacher, with its weight in the loss; None without a teacher.

    Example:
        >>> TokenLoss(kind="focal", focal_gamma=1.5, label_smoothing=0.1).kind
        'focal'
    """

    kind: Literal["nll", "dft", "focal"] = "nll"
    focal_gamma: float = 2.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    divergence: Divergence | None = None

    @property
    def is_plain(self) -> bool:
        """True for plain cross entropy: ``nll`` without label smoothing, z-loss and teacher."""
        smoothed = self.label_smoothing != 0 or self.z_loss != 0
        return self.kind == "nll" and not smoothed and self.divergence is None


@dataclass(frozen=True)
class _Sweep(HeadSettings):
    loss: TokenLoss
    weights_N: Tensor | None  # noqa: N815
    teacher: TeacherHead | TopKTeacher | None

    def chunk_loss_and_grad(
        self, logits_nV: Tensor, chunk: Tensor | slice, with_grad: bool, unit: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Return (loss, nll, kl) summed over a chunk, and the gradient of the logits before ``transform``.

        The gradient overwrites the logits, and is multiplied by ``unit`` (:func:`gradient_unit`).
        """
        targets = self.rows.targets[chunk]
        weights = None if self.weights_N is None else self.weights_N[chunk]
        wide = torch.promote_types(logits_nV.dtype, torch.float32)
        sums = logits_nV.new_zeros(1 + len(MEASURED), dtype=wide)
        teacher_values = () if self.teacher is None else self.teacher.teacher_values(chunk, logits_nV.device)
        max_elements = WIDENED // 4 if teacher_values else WIDENED
        for part in block_slices(len(targets), max(1, max_elements // logits_nV.shape[1])):
            raw = logits = logits_nV[part]
            if self.transform is not None:
                with torch.set_grad_enabled(with_grad):
                    raw = logits.detach().requires_grad_(with_grad)
                    logits = self.transform(raw)
            part_weights = None if weights is None else weights[part].to(wide)
            found, grad = _loss_and_grad(
                logits.detach().to(wide),
                targets[part],
                self.loss,
                part_weights,
                tuple(x[part].to(wide) if x.is_floating_point() else x[part] for x in teacher_values),
                with_grad=with_grad,
            )
            sums += found
            if grad is None:
                continue
            grad = (grad if unit == 1.0 else grad.mul_(unit)).to(logits.dtype)
            if self.transform is not None:
                (grad,) = torch.autograd.grad(logits, raw, grad)
            logits_nV[part] = grad
        return sums, logits_nV if with_grad else None


def _loss_and_grad(
    logits_nV: Tensor,
    targets_n: Tensor,
    loss: TokenLoss,
    weights_n: Tensor | None,
    teacher_values: tuple[Tensor, ...],
    *,
    with_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (loss, nll, kl), each summed over tokens, and the gradient of the logits.

    Both are in fp32 or wider. ``teacher_values`` is the result of the teacher's method of this name.
    """
    targets_n1 = targets_n[:, None]
    logprobs_nV = logits_nV.log_softmax(-1)
    logp_n = logprobs_nV.gather(-1, targets_n1).squeeze(-1)
    target_loss_n, slope_n = _target_term(logp_n, loss)
    values_n, smoothing = target_loss_n, loss.label_smoothing
    if smoothing:
        values_n = (1 - smoothing) * values_n - smoothing * logprobs_nV.mean(-1)
    p_factor_n = slope_n  # factor of p in the gradient, from the target and from label smoothing
    if loss.z_loss:
        log_z_n = logits_nV.logsumexp(-1)
        values_n = values_n + loss.z_loss * log_z_n.square()
        p_factor_n = p_factor_n + 2 * loss.z_loss * log_z_n
    divergence, kl_n, kl_grad = loss.divergence, None, None
    if divergence is not None:
        assert teacher_values, "a divergence needs a teacher"
        if len(teacher_values) == 1:
            kl_n, kl_grad = _divergence_and_grad(logits_nV, teacher_values[0], divergence, with_grad=with_grad)
        else:
            kl_n, kl_grad = _top_k_divergence_and_grad(
                logits_nV, teacher_values[0], teacher_values[1], divergence, with_grad=with_grad
            )
        values_n = divergence.target_loss_weight * values_n + (1 - divergence.target_loss_weight) * kl_n
    weighted_n = values_n if weights_n is None else values_n * weights_n
    sums = torch.stack([weighted_n.sum(), -logp_n.sum(), weighted_n.new_zeros(()) if kl_n is None else kl_n.sum()])
    if not with_grad:
        return sums, None
    grad = logprobs_nV.exp_().mul_(p_factor_n[:, None])
    grad.scatter_add_(1, targets_n1, (slope_n * (smoothing - 1))[:, None])
    if smoothing:
        grad.sub_(smoothing / grad.shape[1])
    if divergence is not None and kl_grad is not None:
        grad.mul_(divergence.target_loss_weight)
        grad[:, : kl_grad.shape[1]] += kl_grad.mul_(1 - divergence.target_loss_weight)
    if weights_n is not None:
        grad.mul_(weights_n[:, None])
    return sums, grad


def _target_term(logp_n: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
    if loss.kind == "nll":
        return -logp_n, torch.ones_like(logp_n)
    if loss.kind == "dft":
        p_n = logp_n.exp()
        return -p_n * logp_n, p_n
    gamma = loss.focal_gamma
    rest_n = (-torch.expm1(logp_n)).clamp_min(torch.finfo(logp_n.dtype).tiny)  # 1 - p without cancellation
    return (
        -rest_n.pow(gamma) * logp_n,
        rest_n.pow(gamma) - gamma * rest_n.pow(gamma - 1) * logp_n.exp() * logp_n,
    )


def _divergence_and_grad(
    logits_nV: Tensor, teacher_nV: Tensor, divergence: Divergence, *, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return each token's divergence from the teacher over the common vocabulary, and the gradient of the logits."""
    size, temperature = min(logits_nV.shape[1], teacher_nV.shape[1]), divergence.temperature
    logp = (logits_nV[:, :size] / temperature).log_softmax(-1)
    logt = (teacher_nV[:, :size] / temperature).log_softmax(-1)
    if divergence.kind == "forward":
        p, t = logp.exp(), logt.exp()
        values = _kl_of_tokens(t, logt, p, logp)
        return values, p.sub_(t).div_(temperature) if with_grad else None
    share, other = 1.0, logt
    if divergence.kind == "jsd":
        share = 1 - divergence.beta
        other = torch.logaddexp(logp + math.log(share), logt + math.log(divergence.beta))
    p, m = logp.exp(), other.exp()
    values = share * _kl_of_tokens(p, logp, m, other)
    if divergence.kind == "jsd":
        values = values + divergence.beta * _kl_of_tokens(logt.exp(), logt, m, other)
    if not with_grad:
        return values, None
    ratio = logp.sub_(other)
    mean = _nan_to_zero(p * ratio).sum(-1, keepdim=True)
    return values, _nan_to_zero(ratio.sub_(mean).mul_(p)).mul_(share / temperature)


def _top_k_divergence_and_grad(
    logits_nV: Tensor, ids_nk: Tensor, logt_nc: Tensor, divergence: Divergence, *, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return each token's divergence over k + 1 classes, and the gradient of the logits.

    The classes are the teacher's top k tokens, and all other tokens together. The gradient of a token's logit is the
    gradient of its class, as if classes had logits, times the token's share of the class's probability.
    """
    logp = (logits_nV / divergence.temperature).log_softmax(-1)
    top = logp.gather(-1, ids_nk)
    others = logp.scatter_(-1, ids_nk, -math.inf)
    rest = others.logsumexp(-1, keepdim=True)  # 1 - sum p would be lost to rounding if the model is certain
    without_temperature = replace(divergence, temperature=1.0)
    values, slope = _divergence_and_grad(torch.cat([top, rest], -1), logt_nc, without_temperature, with_grad=with_grad)
    if slope is None:
        return values, None
    grad = _nan_to_zero(others.sub_(rest).exp_()).mul_(slope[:, -1:])
    return values, grad.scatter_(-1, ids_nk, slope[:, :-1]).div_(divergence.temperature)


def _kl_of_tokens(p: Tensor, logp: Tensor, q: Tensor, logq: Tensor) -> Tensor:
    """Return ``sum p log(p / q)`` for each token.

    ``q - p``, whose sum is zero, is added to each term. Then a rounding error of the softmax normaliser, which shifts
    all logarithms equally, changes the sum only to second order.
    """
    return _nan_to_zero((logp - logq).mul_(p)).sub_(p).add_(q).sum(-1)


def _nan_to_zero(x: Tensor) -> Tensor:
    """Replace NaN by 0 in place: it is 0 times infinity, for a token of probability 0."""
    return x.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


def linear_token_loss(
    hidden_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    *,
    loss: TokenLoss,
    weights_BT: Tensor | None = None,
    teacher: TeacherHead | TopKTeacher | None = None,
    bias_V: Tensor | None = None,
    transform: Project | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
    accumulate_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute the loss ``loss`` (a :class:`TokenLoss`) of a linear head's logits, one chunk of tokens at a time.

    Equal to ``token_loss_reference(transform(linear(hidden, weight, bias)), targets, loss, weights) / num_items``. The
    forward also computes the gradients. Other arguments are as for :func:`streamtune.ops.linear_cross_entropy`.

    Args:
        loss: Formula of a token's loss.
        weights_BT: Factor of each token's loss, shaped like ``targets_BT``; None means 1.
        teacher: Teacher of the loss's divergence; None if the loss has none.
        num_items: Divisor of the summed loss: the sum of the weights in the whole step. None sums the weights of this
            call.

    Returns:
        The scalar loss in fp32 (fp64 for fp64 inputs), and the sums of nll and kl (:data:`MEASURED`), without gradient.
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    sweep = _Sweep(
        rows,
        transform,
        accumulate_dtype,
        autocast_dtype(hidden_BTC),
        torch.is_grad_enabled(),
        loss,
        None if weights_BT is None else weights_BT.flatten(),
        teacher,
    )
    with torch.autocast(autocast_device_type(hidden_BTC.device), enabled=False):
        total, measured = _LinearTokenLoss.apply(hidden_BTC.flatten(0, -2), weight_VC, bias_V, sweep)
    return total / _loss_divisor(rows, weights_BT, num_items), measured


def project_token_loss(
    hidden_BTC: Tensor,
    project: Project,
    parameters: Sequence[Tensor],
    targets_BT: Tensor,
    *,
    loss: TokenLoss,
    weights_BT: Tensor | None = None,
    teacher: TeacherHead | TopKTeacher | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk_size: int = 1024,
    num_items: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss ``loss`` (a :class:`TokenLoss`) of a head given as a function, one chunk of tokens at a time.

    ``project`` maps hidden states to logits; ``parameters`` are the tensors that ``project`` uses and that get
    gradients. Other arguments and the result are as for :func:`linear_token_loss`.
    """
    rows = TargetRows(targets_BT, ignore_index, chunk_size)
    weights = None if weights_BT is None else weights_BT.flatten()
    sweep = _Sweep(rows, None, torch.float32, None, torch.is_grad_enabled(), loss, weights, teacher)
    total, measured = _ProjectTokenLoss.apply(hidden_BTC.flatten(0, -2), sweep, project, *parameters)
    return total / _loss_divisor(rows, weights_BT, num_items), measured


def token_loss_reference(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    loss: TokenLoss,
    weights_BT: Tensor | None = None,
    *,
    teacher_BTV: Tensor | None = None,
    top_k: TopKTeacher | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return ``loss`` summed over the targets, computed from all logits at once: slow, for comparison."""
    is_target = targets_BT != ignore_index
    logits = logits_BTV[is_target]
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    logp = logprobs.gather(-1, targets_BT[is_target][:, None]).squeeze(-1)
    if loss.kind == "dft":
        values = -logp.exp().detach() * logp
    elif loss.kind == "focal":
        values = -((1 - logp.exp()) ** loss.focal_gamma) * logp
    else:
        values = -(1 - loss.label_smoothing) * logp - loss.label_smoothing * logprobs.mean(-1)
    if loss.z_loss:
        values = values + loss.z_loss * logits.to(logprobs.dtype).logsumexp(-1) ** 2
    if loss.divergence is not None:
        hard = loss.divergence.target_loss_weight
        if top_k is not None:
            of_teacher = _dense_class_divergence(logits, is_target, top_k, loss.divergence)
        else:
            assert teacher_BTV is not None, "a divergence needs a teacher"
            of_teacher = _dense_divergence(logits, teacher_BTV[is_target], loss.divergence)
        values = hard * values + (1 - hard) * of_teacher
    return (values if weights_BT is None else values * weights_BT[is_target]).sum()


def _dense_divergence(logits_NV: Tensor, teacher_NV: Tensor, divergence: Divergence) -> Tensor:
    size, wide = min(logits_NV.shape[1], teacher_NV.shape[1]), torch.promote_types(logits_NV.dtype, torch.float32)
    p, t = ((x[:, :size].to(wide) / divergence.temperature).softmax(-1) for x in (logits_NV, teacher_NV))
    return _dense_divergence_formula(p, t, divergence)


def _dense_class_divergence(
    logits_NV: Tensor, is_target: Tensor, teacher: TopKTeacher, divergence: Divergence
) -> Tensor:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    ids, logt = teacher.teacher_values(is_target.flatten().nonzero().squeeze(-1), logits_NV.device)
    probabilities = (logits_NV.to(wide) / divergence.temperature).softmax(-1)
    rest = probabilities.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
    return _dense_divergence_formula(
        torch.cat([probabilities.gather(-1, ids), rest], -1), logt.to(wide).softmax(-1), divergence
    )


def _dense_divergence_formula(p: Tensor, t: Tensor, divergence: Divergence) -> Tensor:
    if divergence.kind == "forward":
        return (t * (t.log() - p.log())).sum(-1)
    if divergence.kind == "reverse":
        return (p * (p.log() - t.log())).sum(-1)
    m = (1 - divergence.beta) * p + divergence.beta * t
    of_teacher, of_student = ((x * (x.log() - m.log())).sum(-1) for x in (t, p))
    return divergence.beta * of_teacher + (1 - divergence.beta) * of_student


def _loss_divisor(rows: TargetRows, weights_BT: Tensor | None, num_items: Tensor | float | None) -> Tensor | float:
    if num_items is None and weights_BT is not None:
        return weights_BT.flatten()[rows.positions].sum()
    return rows.loss_divisor(num_items)


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sweep: _Sweep) -> tuple[Tensor, Tensor]:
        wanted = [sweep.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        ctx.inputs = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        rows = sweep.rows
        weight, bias = cast_tensors(sweep.compute_dtype, weight, bias)
        grad_hidden = rows.gradient_buffer(hidden) if wanted[0] else None
        gradients = HeadGradients(grad_hidden, weight, bias, wanted, sweep.accumulate_dtype)
        ctx.unit = gradient_unit(weight.dtype, sweep.accumulate_dtype)

        def head_logits(chunk: Tensor | slice) -> tuple[Tensor, Tensor]:
            (h,) = cast_tensors(sweep.compute_dtype, hidden[chunk])
            return h, torch.nn.functional.linear(h, weight, bias)

        sums = _zero_sums(hidden)
        for chunk in rows.chunks():
            h, logits = head_logits(chunk)
            found, grad = sweep.chunk_loss_and_grad(logits, chunk, any(wanted), ctx.unit)
            sums += found
            if grad is not None:
                gradients.add_chunk(chunk, h, weight, grad)
            del logits, grad
        ctx.grads = gradients.as_tuple()
        return _split_sums(ctx, sums)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*scale_gradients(pop_stored_gradients(ctx), ctx.inputs, grad_total, ctx.unit), None)


class _ProjectTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, sweep: _Sweep, project: Callable[[Tensor], Tensor], *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = [p for p in params if p.requires_grad] if sweep.grad_enabled else []
        backward = sweep.grad_enabled and (bool(wanted) or ctx.needs_input_grad[0])
        grad_hidden = sweep.rows.gradient_buffer(hidden) if backward else None
        gradients = gradient_buffers(wanted)
        sums = _zero_sums(hidden)
        for chunk in sweep.rows.chunks():
            with torch.set_grad_enabled(backward):
                h = hidden[chunk].detach().requires_grad_(backward)
                logits = project(h)
            found, grad = sweep.chunk_loss_and_grad(logits.detach().clone(), chunk, backward)
            sums += found
            if grad_hidden is not None and grad is not None:
                with suspend_tensor_hooks(wanted):
                    grad_hidden[chunk], *terms = torch.autograd.grad(logits, (h, *wanted), grad)
                for acc, term in zip(gradients, terms, strict=True):
                    acc += term
        ctx.grads = (grad_hidden, *gradients)
        ctx.inputs = (hidden.dtype, *(p.dtype for p in wanted))
        ctx.needed = [sweep.grad_enabled and p.requires_grad for p in params]
        return _split_sums(ctx, sums)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *rest = scale_gradients(pop_stored_gradients(ctx), ctx.inputs, grad_total)
        return (grad_hidden, None, None, *gradients_or_none(rest, ctx.needed))


def _zero_sums(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(1 + len(MEASURED), dtype=torch.promote_types(hidden.dtype, torch.float32))


def _split_sums(ctx: Any, sums: Tensor) -> tuple[Tensor, Tensor]:
    total, measured = sums[0].clone(), sums[1:].clone()
    ctx.mark_non_differentiable(measured)
    return total, measured
