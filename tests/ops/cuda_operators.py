"""torch's CUDA attention operators as their documentation has them, in plain arithmetic, for machines without CUDA.

They let the code around the operators (layouts, groups of heads, alignment) run and be compared to the formula. That
the real operators do what is written here is for the self-check, and for ``tests/cuda``, to find out on a device.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor


def softmax_parts(
    q: Tensor, k: Tensor, causal: bool, bias: Tensor | None, scale: float, window: int | None = None
) -> Tensor:
    """Scores ``[B, H, T, S]`` in fp64; causal and windowed ones are aligned at the bottom right."""
    repeats = q.shape[1] // k.shape[1]
    s = q.double() @ k.double().repeat_interleave(repeats, 1).mT * scale
    behind = (torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]) - torch.arange(k.shape[2])
    if causal:
        s = s.masked_fill(behind < 0, -math.inf)
    if window is not None:
        s = s.masked_fill(behind > window, -math.inf)
    return s if bias is None else s + bias.double()


def forward(s: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    v = v.double().repeat_interleave(s.shape[1] // v.shape[1], 1)
    return (s.softmax(-1) @ v).to(dtype), s.logsumexp(-1).float()


def backward(
    s: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for any output and log-sum-exp."""
    repeats = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
    p = (s - lse.double()[..., None]).exp()
    delta = (grad.double() * o.double()).sum(-1, keepdim=True)
    ds = p * (grad.double() @ wide_v.mT - delta) * scale
    dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in (ds.mT @ q.double(), p.mT @ grad.double()))
    return (ds @ wide_k).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    if cum_q is not None:
        rows = row_slices(cum_q, cum_k, max_q, max_k, q, k)
        done = [
            flash_forward(
                q[None, i], k[None, j], v[None, j], None, None, i.stop - i.start, j.stop - j.start, dropout, causal,
                debug, scale=scale, window_size_left=window_size_left, window_size_right=window_size_right,
            )
            for i, j in rows
        ]  # fmt: skip
        return torch.cat([o[0] for o, *_ in done]), torch.cat([lse[0] for _, lse, *_ in done], 1), None, None, None
    assert (max_q, max_k, dropout, debug, cum_k) == (q.shape[1], k.shape[1], 0.0, False, None)
    q, k, v = heads_first(q, k, v)
    assert window_size_right in (None, 0)
    s = softmax_parts(q, k, causal or window_size_right == 0, None, scale, window_size_left)
    o, lse = forward(s, v, q.dtype)
    return o.transpose(1, 2).contiguous(), lse, None, None, None


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, unused: Tensor, *, scale: float,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.is_contiguous()
    if cum_q is not None:
        done = []
        for i, j in row_slices(cum_q, cum_k, max_q, max_k, q, k):
            parts = [x[None, each] for x, each in ((grad, i), (q, i), (k, j), (v, j), (o, i))]
            sizes = (i.stop - i.start, j.stop - j.start)
            row = flash_backward(
                *parts, lse[None, :, i].contiguous(), None, None, *sizes, dropout, causal, seed, unused, scale=scale,
                window_size_left=window_size_left, window_size_right=window_size_right,
            )  # fmt: skip
            done.append(row)
        return tuple(torch.cat([x[0] for x in each]) for each in zip(*done, strict=True))
    assert (max_q, max_k, dropout) == (q.shape[1], k.shape[1], 0.0)
    grad, q, k, v, o = heads_first(grad, q, k, v, o)
    s = softmax_parts(q, k, causal or window_size_right == 0, None, scale, window_size_left)
    return tuple(heads_first(*backward(s, grad, q, k, v, o, lse, scale)))


def row_slices(cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each row."""
    assert cum_q.dtype == cum_k.dtype == torch.int32
    rows = [[slice(*pair) for pair in pairwise(bounds.tolist())] for bounds in (cum_q, cum_k)]
    assert [max(row.stop - row.start for row in each) for each in rows] == [max_q, max_k]
    assert [each[-1].stop for each in rows] == [len(q), len(k)]
    return list(zip(*rows, strict=True))


def sdpa_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
) -> tuple[Any, ...]:
    q, k, v = heads_first(q, k, v)
    o, lse, *_ = flash_forward(q, k, v, None, None, q.shape[1], k.shape[1], dropout, causal, debug, scale=scale)
    return o.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], None, None, None


def sdpa_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    return tuple(heads_first(*flash_backward(*heads_first(grad, q, k, v, o), *rest, scale=scale)))


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float, causal: bool, debug: bool, *,
    scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    assert with_lse
    assert not causal or q.shape[2] == k.shape[2], "aligned at the top left"
    o, lse = forward(softmax_parts(q, k, causal, bias, scale), v, q.dtype)
    return o, lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.shape == (*q.shape[:3], 1)
    return backward(softmax_parts(q, k, causal, bias, scale), grad, q, k, v, o, lse[..., 0], scale)


def check_bias(q: Tensor, k: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-1) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:-1])


def efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, with_lse: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Any, ...]:
    assert q.shape[:2] == k.shape[:2] == v.shape[:2], "no groups of heads"
    check_bias(q, k, bias)
    o, lse = forward(softmax_parts(q, k, causal, bias, scale), v, q.dtype)
    missing = -lse.shape[2] % 32
    return o.transpose(1, 2).contiguous().transpose(1, 2), torch.nn.functional.pad(lse, (0, missing)), None, None


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool, *, scale: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert q.shape[:2] == k.shape[:2] == v.shape[:2]
    assert lse.shape[2] % 32 == 0
    assert not wanted[3]
    # In half precision the kernel computes this distance instead of reading it off the tensor; fp32 takes any.
    assert q.dtype == torch.float32 or o.stride(2) == o.shape[1] * o.shape[3], "tokens of the output lie H * D apart"
    check_bias(q, k, bias)
    s = softmax_parts(q, k, causal, bias, scale)
    return *backward(s, grad, q, k, v, o, lse[:, :, : q.shape[2]], scale), None


@pytest.fixture
def cuda_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of this file in the place of torch's."""
    for name, function in {
        "_scaled_dot_product_flash_attention": sdpa_flash_forward,
        "_scaled_dot_product_flash_attention_backward": sdpa_flash_backward,
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_scaled_dot_product_efficient_attention": efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    }.items():
        monkeypatch.setattr(torch.ops.aten, name, function)
