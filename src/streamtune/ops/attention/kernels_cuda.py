"""torch's fused attention operators for CUDA as :class:`~streamtune.ops.attention.kernel_trial.Kernel` pairs.

They are operators of torch's own, below ``scaled_dot_product_attention``: that one returns no log-sum-exp and takes
none. Keys and values stay at their G heads; none of these copies them to all query heads.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, Kernel, Scores

__all__ = ["CUDNN", "EFFICIENT", "FLASH"]


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = (_last_together(x) for x in (q, k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, scores.causal, False, scale=scores.scale
    )
    return o, lse


def _flash_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    grad_o, q, k, v, o = (_last_together(x) for x in (grad_o, q, k, v, o))
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_o, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, scores.causal,
        unused, unused, scale=scores.scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = (_last_together(x) for x in (q, k, v))
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, scores.causal, False, scale=scores.scale
    )
    return o, lse.reshape(o.shape[:3])


def _cudnn_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    grad_o, q, k, v, o = (_last_together(x) for x in (grad_o, q, k, v, o))
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_o, q, k, v, o, lse.contiguous()[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0,
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    if scores.bias is not None and q.shape[0] > 1:  # a mask of each row's own would be copied for each group of heads
        rows = zip(*_rows(q, k, v, scores.bias.expand(q.shape[0], -1, -1, -1)), strict=True)
        done = [_efficient_forward(q_r, k_r, v_r, replace(scores, bias=bias_r)) for q_r, k_r, v_r, bias_r in rows]
        return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done])
    grouped = [_grouped(x, q, k) for x in (q, k, v)]
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *grouped, _aligned(scores.bias, grouped[0]), True, 0.0, scores.causal, scale=scores.scale
    )
    return o.reshape(q.shape), lse[:, :, : q.shape[2]].reshape(q.shape[:3])


def _efficient_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    if scores.bias is not None and q.shape[0] > 1:
        rows = zip(*_rows(grad_o, q, k, v, o, lse, scores.bias.expand(q.shape[0], -1, -1, -1)), strict=True)
        done = [
            _efficient_backward(g_r, q_r, k_r, v_r, o_r, lse_r, replace(scores, bias=bias_r))
            for g_r, q_r, k_r, v_r, o_r, lse_r, bias_r in rows
        ]
        grad_q, grad_k, grad_v = (torch.cat(grads) for grads in zip(*done, strict=True))
        return grad_q, grad_k, grad_v
    grouped, queries = [_grouped(x, q, k) for x in (grad_o, q, k, v)], q.shape[2]
    # this kernel reads rows in blocks of 32
    aligned = lse.new_full((*lse.shape[:2], -(-queries // 32) * 32), float("inf"))
    aligned[:, :, :queries] = lse
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *grouped, _aligned(scores.bias, grouped[1]), _by_token(_grouped(o, q, k)),
        aligned.unflatten(1, (k.shape[1], -1)).flatten(0, 1), unused, unused, 0.0, [True, True, True, False],
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    return grad_q.reshape(q.shape), grad_k.sum(1).view(k.shape), grad_v.sum(1).view(v.shape)


def _grouped(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return ``[B, H or G, T, D]`` as ``[B G, H / G, T, D]``: a group is a batch row, all its heads read its keys.

    The kernel has no notion of groups, but it takes a stride of zero.
    """
    split = _last_together(x).unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    return split.expand(-1, q.shape[1] // k.shape[1], -1, -1)


def _by_token(x: Tensor) -> Tensor:
    """Return ``[B, H, T, D]`` with the heads of a token side by side in memory.

    In half precision the kernel sums ``grad_o * o`` itself and takes ``H * D`` for the distance between two tokens of
    the output, whatever the tensor's strides are (``o_strideM`` in torch's ``mem_eff_attention/kernel_backward.h``).
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _rows(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split every tensor into its batch rows, each a batch of one."""
    return [x.split(1) for x in tensors]


def _aligned(bias: Tensor | None, grouped_q: Tensor) -> Tensor | None:
    """Return the mask for all heads, its rows at multiples of 16 elements, as the kernel requires."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys % 16 or bias.stride(-1) != 1 or bias.stride(-2) % 16:
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys]
    return bias.expand(*grouped_q.shape[:2], -1, -1)


def _last_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


FLASH = Kernel("cuda-flash", _flash_forward, _flash_backward, takes_bias=False)
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, takes_bias=False)
# With a mask, or causal, this one is wrong past 2^16 queries or keys: it is never given more than half of that.
EFFICIENT = Kernel("cuda-efficient", _efficient_forward, _efficient_backward, takes_bias=True, longest=1 << 15)
