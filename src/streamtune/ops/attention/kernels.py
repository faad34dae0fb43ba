"""The fused attention kernels, and the choice of one for given tensors; :class:`Kernel` is their interface.

On CPU there is one, torch's. On CUDA those that agree with the formula are timed once and the fastest runs. The
backward of each takes the log-sum-exp of a softmax over more keys than it sees; so prefix attention is exact.
"""

from __future__ import annotations

import logging
import warnings
from functools import lru_cache

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_blocks import in_blocks
from streamtune.ops.attention.kernel_padding import padded
from streamtune.ops.attention.kernel_trial import (
    Grads,
    Kernel,
    Scores,
    TrialHeads,
    agrees_with_formula,
    fastest,
    median_seconds,
)
from streamtune.ops.attention.kernels_cuda import CUDNN, EFFICIENT, FLASH
from streamtune.ops.simulated import kernel_device

__all__ = ["Kernel", "Scores", "flash_kernel", "kernel_names"]

log = logging.getLogger(__name__)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale
    )


def _cpu_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_o, q, k, v, o, lse, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale
    )


CPU = Kernel("cpu-flash", _cpu_forward, _cpu_backward, takes_bias=True)
USUAL_HEADS = TrialHeads(32, 8, 128)
"""Those of an 8B model, for the trial that ``streamtune env`` shows."""


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, biased: bool) -> Kernel | None:
    """Return the fused kernel for these tensors, or None where only the tiled formula of ``ops.attention`` applies.

    It is wrapped where needed, to cut tensors with more elements than it can count, and to pad heads to a size it has.
    """
    if not q.dtype == k.dtype == v.dtype:
        return None
    kind, size = kernel_device(q.device), max(q.shape[-1], v.shape[-1])
    if kind == "cuda":
        size += -size % 8
    heads = TrialHeads(q.shape[1], k.shape[1], size)
    if q.device.type == "meta":
        kernel = _assumed(kind, q.dtype, heads, biased)
    else:
        kernel = _choose(kind, q.device.index or 0, q.dtype, heads, biased)
    if kernel is None:
        return None
    kernel = in_blocks(kernel, q, k)
    return kernel if size == q.shape[-1] == v.shape[-1] else padded(kernel, size)


def _assumed(kind: str, dtype: torch.dtype, heads: TrialHeads, biased: bool) -> Kernel | None:
    """Return the kernel that a simulated device is assumed to choose: the first it would try."""
    if kind == "cpu":
        return CPU
    tried = _candidates(dtype, heads, biased)
    return tried[0] if tried else None


@lru_cache(maxsize=256)
def _choose(device: str, index: int, dtype: torch.dtype, heads: TrialHeads, biased: bool) -> Kernel | None:
    if device == "cpu":
        return CPU if dtype.is_floating_point else None
    candidates = _candidates(dtype, heads, biased) if device == "cuda" else []
    return _tried(candidates, index, dtype, heads, biased) if candidates else None


def _candidates(dtype: torch.dtype, heads: TrialHeads, biased: bool) -> list[Kernel]:
    """Return the kernels a CUDA device may have for a problem, the most trusted first."""
    if dtype == torch.float64:
        return []
    half = dtype in (torch.float16, torch.bfloat16)
    found = [FLASH, CUDNN, EFFICIENT] if half and heads.size <= 256 else [EFFICIENT]
    return [kernel for kernel in found if kernel.takes_bias or not biased]


def _tried(candidates: list[Kernel], index: int, dtype: torch.dtype, heads: TrialHeads, biased: bool) -> Kernel | None:
    """Return the fastest of the candidates that agree with the formula, and log it: once, for its caller caches it."""
    where = _device(index)
    agreeing = [kernel for kernel in candidates if agrees_with_formula(kernel, where, dtype, heads.size, biased)]
    # The trial is without a mask: with one there is a single candidate.
    chosen = fastest(agreeing, lambda kernel: median_seconds(kernel, where, dtype, heads))
    problem = f"{dtype}, {heads.queries} heads of {heads.size} ({heads.groups} for keys)"
    if chosen is None:
        names = " and ".join(kernel.name for kernel in candidates)
        warnings.warn(
            f"{names} failed the self-check for {problem}; attention runs tiled, slower",
            stacklevel=2,
        )
    else:
        log.info("attention %s: %s", f"{problem}, masked" if biased else problem, chosen.name)
    return chosen


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def kernel_names(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, str]:
    """Return the names of the kernels that run without and with a mask, for ``streamtune env``."""
    heads = TrialHeads(USUAL_HEADS.queries, USUAL_HEADS.groups, head_dim)
    chosen = {
        label: _choose(device.type, device.index or 0, dtype, heads, biased)
        for label, biased in (("unmasked", False), ("masked", True))
    }
    return {label: kernel.name if kernel else "tiled" for label, kernel in chosen.items()}
