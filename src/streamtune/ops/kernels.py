"""Flash kernels that return and accept the log-sum-exp, one pair of functions each.

Every kernel is ``forward(q, k, v, causal, bias, scale) -> (o, lse)`` and
``backward(grad_o, q, k, v, o, lse, causal, bias, scale) -> (grad_q, grad_k, grad_v)`` with q ``[B, H, T, D]``, k and v
``[B, G, S, D]`` (G divides H), o like q, lse ``[B, H, T]`` in fp32 (fp64 for fp64 inputs). The backward takes any o and
lse, so also those of a softmax that spans more keys than k and v hold: that is what makes prefix attention exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from streamtune.ops.simulated import kernel_device

__all__ = ["Kernel", "flash_kernel", "kernel_names"]

Forward = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, Tensor | None, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class Kernel:
    """A named pair of attention functions and whether it takes an additive mask."""

    name: str
    forward: Forward
    backward: Backward
    takes_bias: bool


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_o, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return o, lse


def _flash_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_o, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
    )
    return grad_q, _sum_heads(grad_k, groups), _sum_heads(grad_v, groups)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    o, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return o, lse[:, :, : q.shape[2]]


def _efficient_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    rows = lse.shape[2]
    # this kernel reads rows in blocks of 32
    aligned = lse.new_full((*lse.shape[:2], -(-rows // 32) * 32), float("inf"))
    aligned[:, :, :rows] = lse
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_o, q, k, v, None, o, aligned, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
    )
    return grad_q, _sum_heads(grad_k, groups), _sum_heads(grad_v, groups)


def _repeat_heads(x_BGSD: Tensor, heads: int) -> Tensor:
    repeats = heads // x_BGSD.shape[1]
    return x_BGSD if repeats == 1 else x_BGSD.repeat_interleave(repeats, dim=1)


def _sum_heads(x_BHSD: Tensor, groups: int) -> Tensor:
    return x_BHSD if x_BHSD.shape[1] == groups else x_BHSD.unflatten(1, (groups, -1)).sum(dim=2)


CPU = Kernel("cpu-flash", _cpu_forward, _cpu_backward, takes_bias=True)
FLASH = Kernel("cuda-flash", _flash_forward, _flash_backward, takes_bias=False)
EFFICIENT = Kernel("cuda-efficient", _efficient_forward, _efficient_backward, takes_bias=False)


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, biased: bool) -> Kernel | None:
    """The fused kernel for these tensors, or None where only the tiled formula of ``ops.attention`` applies."""
    if not (q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1] == v.shape[-1]):
        return None
    if q.device.type == "meta":
        return _assumed(kernel_device(q.device), q.dtype, q.shape[-1], biased)
    return _choose(q.device.type, q.device.index or 0, q.dtype, q.shape[-1], biased)


def _assumed(kind: str, dtype: torch.dtype, head_dim: int, biased: bool) -> Kernel | None:
    """What a device that is not there is taken to choose: the first of those it would try."""
    if kind == "cpu":
        return CPU
    if biased or head_dim % 8 or dtype == torch.float64:
        return None
    half = dtype in (torch.float16, torch.bfloat16)
    return FLASH if half and head_dim <= 256 else EFFICIENT


@lru_cache(maxsize=256)
def _choose(device: str, index: int, dtype: torch.dtype, head_dim: int, biased: bool) -> Kernel | None:
    if device == "cpu":
        return CPU if dtype.is_floating_point else None
    if device != "cuda" or biased or head_dim % 8:
        return None
    if dtype == torch.float64:
        return None
    half = dtype in (torch.float16, torch.bfloat16)
    tried = (FLASH, EFFICIENT) if half and head_dim <= 256 else (EFFICIENT,)
    for kernel in tried:
        if _agrees_with_formula(kernel, torch.device(device, index), dtype, head_dim):
            return kernel
    names = " and ".join(kernel.name for kernel in tried)
    warnings.warn(
        f"{names} failed the self-check for {dtype} and heads of {head_dim}; attention runs tiled, slower",
        stacklevel=2,
    )
    return None


def _agrees_with_formula(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Try a kernel once on a small problem with a foreign log-sum-exp; a build or device where it fails is not used."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(length: int) -> Tensor:
        larger = (1, 2, length + 8, head_dim)  # a packed row's queries and keys are a part of the sequence's
        return torch.randn(larger, generator=generator, device=device, dtype=dtype)[:, :, 3 : 3 + length]

    def agrees(keys: int, causal: bool) -> bool:
        q, k, v, grad = draw(40), draw(keys), draw(keys), draw(40)
        scale = head_dim**-0.5
        s = q.double() @ k.double().mT * scale
        if causal:
            s = s.masked_fill(torch.ones(40, keys, dtype=torch.bool, device=device).triu(1), -torch.inf)
        lse = s.logsumexp(-1) + 0.5  # as if further keys took part in the softmax
        p = (s - lse[..., None]).exp()
        o = p @ v.double()
        delta = (grad.double() * o).sum(-1, keepdim=True)
        ds = p * (grad.double() @ v.double().mT - delta) * scale
        want = (ds @ k.double(), ds.mT @ q.double(), p.mT @ grad.double())
        try:
            own_o, own_lse = kernel.forward(q, k, v, causal, None, scale)
            placed = torch.nn.functional.pad(o.to(dtype), (0, 0, 3, 5))[:, :, 3:43]
            got = kernel.backward(grad, q, k, v, placed, lse.float(), causal, None, scale)
        except (RuntimeError, NotImplementedError):
            return False
        bound = 1e-4 if dtype == torch.float32 else 3e-2
        pairs = [(own_o.double(), s.softmax(-1) @ v.double()), (own_lse.double(), s.logsumexp(-1))]
        pairs += [(g.double(), w) for g, w in zip(got, want, strict=True)]
        return all(bool((g - w).norm() <= bound * w.norm()) for g, w in pairs)

    with torch.no_grad():
        return agrees(72, causal=False) and agrees(40, causal=True)


def kernel_names(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, str]:
    """Which kernel runs without and with a mask, for ``streamtune env``."""
    chosen = {
        label: _choose(device.type, device.index or 0, dtype, head_dim, biased)
        for label, biased in (("unmasked", False), ("masked", True))
    }
    return {label: kernel.name if kernel else "tiled" for label, kernel in chosen.items()}
