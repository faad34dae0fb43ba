"""Fused attention kernels, and the choice of a kernel for given tensors; :class:`Kernel` is their interface.

On CPU, torch's flash attention is the only kernel. On CUDA, the kernels that agree with the attention formula are timed
once, and the fastest is used. The backward of each kernel accepts the log-sum-exp of a softmax over more keys than the
call has.

The CUDA kernels are the ATen operators below ``scaled_dot_product_attention``, which neither returns nor accepts a
log-sum-exp. Keys and values have G heads; no kernel copies them to all query heads.

Torch's flash attention operators have several implementations:

    FA2  part of torch
    FA3  the package ``flash_attn_interface``, for devices of capability 9 (Shah et al., arXiv 2407.08608)
    FA4  the package ``flash_attn.cute``, for capabilities 9 and 10

Torch activates one implementation for the whole process. The command line may choose it; ``streamtune.stream`` uses the
active implementation.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from streamtune.ops.attention.kernel_blocks import pad_heads, split_into_blocks
from streamtune.ops.attention.kernel_trial import (
    MARGIN,
    AttentionHeadCounts,
    Grads,
    Kernel,
    Scores,
    agrees_with_formula,
    call_kernel,
    choose_fastest,
    make_readable,
    median_seconds,
)
from streamtune.ops.devices import kernel_device_type

log = logging.getLogger(__name__)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    o, lse = call_kernel(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        q, k, v, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale,
    )  # fmt: skip
    return o, lse


def _cpu_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    grad_q, grad_k, grad_v = call_kernel(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
        grad_o, q, k, v, o, lse.contiguous(), 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


CPU = Kernel("cpu-flash", _cpu_forward, _cpu_backward, takes_bias=True)
HEADS_OF_8B = AttentionHeadCounts(32, 8, 128)
"""Attention heads of an 8B model, with which ``streamtune env`` chooses a kernel."""


def fused_segment_kernel(q: Tensor, k: Tensor, v: Tensor, biased: bool) -> Kernel | None:
    """Return the fused attention kernel for these tensors; None if no kernel supports them.

    ``biased`` is True if an additive mask is used. The kernel is wrapped where necessary, to split long tensors and to
    pad heads to a supported size.
    """
    if not q.dtype == k.dtype == v.dtype:
        return None
    kind, size = kernel_device_type(q.device), max(q.shape[-1], v.shape[-1])
    if kind == "cuda":
        size += -size % 8
    heads = AttentionHeadCounts(q.shape[1], k.shape[1], size)
    if q.device.type == "meta":
        kernel = _kernel_on_meta(kind, q.dtype, heads, biased)
    else:
        index, name = q.device.index or 0, active_flash_name()
        kernel = _choose_kernel(kind, index, q.dtype, heads, biased, name)
        if kernel is not None and not kernel.accepts_lengths(q.shape[2], k.shape[2]):
            kernel = _choose_kernel(kind, index, q.dtype, heads, biased, name, any_shape=True)
    if kernel is None:
        return None
    kernel = split_into_blocks(kernel, q, k)
    return kernel if size == q.shape[-1] == v.shape[-1] else pad_heads(kernel, size)


def _kernel_on_meta(kind: str, dtype: torch.dtype, heads: AttentionHeadCounts, biased: bool) -> Kernel | None:
    if kind == "cpu":
        return CPU
    tried = _candidate_kernels(dtype, heads, biased)
    return tried[0] if tried else None


@lru_cache(maxsize=256)
def _choose_kernel(
    device: str,
    index: int,
    dtype: torch.dtype,
    heads: AttentionHeadCounts,
    biased: bool,
    flash_name: str,
    any_shape: bool = False,
) -> Kernel | None:
    """Return the fastest kernel that agrees with the attention formula; ``any_shape`` demands a ``grain`` of 1.

    ``flash_name`` is only part of the cache key.
    """
    if device == "cpu":
        return CPU if dtype.is_floating_point else None
    candidates = _candidate_kernels(dtype, heads, biased) if device == "cuda" else []
    candidates = [kernel for kernel in candidates if not (any_shape and kernel.grain > 1)]
    return _fastest_agreeing_kernel(candidates, index, dtype, heads, biased) if candidates else None


def _candidate_kernels(dtype: torch.dtype, heads: AttentionHeadCounts, biased: bool) -> list[Kernel]:
    if dtype == torch.float64:
        return []
    half = dtype in (torch.float16, torch.bfloat16)
    found = [FLASH, CUDNN, EFFICIENT] if half and heads.size <= 256 else [EFFICIENT]
    return [kernel for kernel in found if kernel.takes_bias or not biased]


def _fastest_agreeing_kernel(
    candidates: list[Kernel], index: int, dtype: torch.dtype, heads: AttentionHeadCounts, biased: bool
) -> Kernel | None:
    where = _cuda_device(index)
    agreeing = [kernel for kernel in candidates if agrees_with_formula(kernel, where, dtype, heads.size, biased)]
    # Timing uses no mask: with a mask there is only one candidate.
    chosen = choose_fastest(agreeing, lambda kernel: median_seconds(kernel, where, dtype, heads))
    problem = f"{dtype}, {heads.queries} query heads, {heads.groups} key heads of {heads.size}"
    if chosen is None:
        names = " and ".join(kernel.name for kernel in candidates)
        warnings.warn(
            f"{names} failed the self-check for {problem}; attention is computed in tiles, which is slower",
            stacklevel=2,
        )
    else:
        log.info("attention %s: %s", f"{problem}, masked" if biased else problem, chosen.name)
    return chosen


def _cuda_device(index: int) -> torch.device:
    return torch.device("cuda", index)


def kernel_names(device: torch.device, dtype: torch.dtype, head_dim: int = 128) -> dict[str, str]:
    """Return the names of the attention kernels for calls without a mask (``unmasked``) and with a mask (``masked``).

    The name is ``tiled`` if no fused kernel can be used.
    """
    heads = AttentionHeadCounts(HEADS_OF_8B.queries, HEADS_OF_8B.groups, head_dim)
    chosen = {
        label: _choose_kernel(device.type, device.index or 0, dtype, heads, biased, active_flash_name())
        for label, biased in (("unmasked", False), ("masked", True))
    }
    names = {label: kernel.name if kernel else "tiled" for label, kernel in chosen.items()}
    return {label: f"{name} ({active_flash_name()})" if name == FLASH.name else name for label, name in names.items()}


def use_installed_flash(device: torch.device) -> None:
    """Activate the fastest installed implementation of torch's flash attention, for the whole process."""
    use_fastest_flash(device, FLASH, HEADS_OF_8B)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    o, lse, *_ = call_kernel(
        torch.ops.aten._scaled_dot_product_flash_attention,
        q, k, v, 0.0, scores.causal, False, scale=scores.scale,
    )  # fmt: skip
    return o, lse


def _flash_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v = call_kernel(
        torch.ops.aten._scaled_dot_product_flash_attention_backward,
        grad_o, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, scores.causal,
        unused, unused, scale=scores.scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    o, lse, *_ = call_kernel(
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        q, k, v, None, True, 0.0, scores.causal, False, scale=scores.scale,
    )  # fmt: skip
    return o, lse.reshape(o.shape[:3])


def _cudnn_backward(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> Grads:
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v = call_kernel(
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
        grad_o, q, k, v, o, lse.contiguous()[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0,
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    if scores.bias is not None and q.shape[0] > 1:  # a mask per row would be copied for each group of heads
        rows = zip(*_split_batch_rows(q, k, v, scores.bias.expand(q.shape[0], -1, -1, -1)), strict=True)
        done = [_efficient_forward(q_r, k_r, v_r, replace(scores, bias=bias_r)) for q_r, k_r, v_r, bias_r in rows]
        return torch.cat([o for o, _ in done]), torch.cat([lse for _, lse in done])
    grouped = [_groups_as_batch_rows(x, q, k) for x in (q, k, v)]
    o, lse, *_ = call_kernel(
        torch.ops.aten._scaled_dot_product_efficient_attention,
        *grouped, _align_bias(scores.bias, grouped[0]), True, 0.0, scores.causal, scale=scores.scale,
    )  # fmt: skip
    return o.reshape(q.shape), lse[:, :, : q.shape[2]].reshape(q.shape[:3])


def _efficient_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
) -> Grads:
    if scores.bias is not None and q.shape[0] > 1:
        rows = zip(*_split_batch_rows(grad_o, q, k, v, o, lse, scores.bias.expand(q.shape[0], -1, -1, -1)), strict=True)
        done = [
            _efficient_backward(g_r, q_r, k_r, v_r, o_r, lse_r, replace(scores, bias=bias_r))
            for g_r, q_r, k_r, v_r, o_r, lse_r, bias_r in rows
        ]
        grad_q, grad_k, grad_v = (torch.cat(grads) for grads in zip(*done, strict=True))
        return grad_q, grad_k, grad_v
    grouped, queries = [_groups_as_batch_rows(x, q, k) for x in (grad_o, q, k, v)], q.shape[2]
    # this kernel reads rows in blocks of 32
    aligned = lse.new_full((*lse.shape[:2], -(-queries // 32) * 32), float("inf"))
    aligned[:, :, :queries] = lse
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of a dropout of zero
    grad_q, grad_k, grad_v, _ = call_kernel(
        torch.ops.aten._scaled_dot_product_efficient_attention_backward,
        *grouped, _align_bias(scores.bias, grouped[1]), _to_token_major(_groups_as_batch_rows(o, q, k)),
        aligned.unflatten(1, (k.shape[1], -1)).flatten(0, 1), unused, unused, 0.0, [True, True, True, False],
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    return grad_q.reshape(q.shape), grad_k.sum(1).view(k.shape), grad_v.sum(1).view(v.shape)


def _groups_as_batch_rows(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    split = make_readable(x).unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    return split.expand(-1, q.shape[1] // k.shape[1], -1, -1)


def _to_token_major(x: Tensor) -> Tensor:
    """Return ``[B, H, T, D]`` with the heads of a token adjacent in memory.

    In half precision, the backward kernel assumes that two tokens of the output are ``H * D`` elements apart, whatever
    its strides are (``o_strideM`` in torch's ``mem_eff_attention/kernel_backward.h``).
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _split_batch_rows(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [x.split(1) for x in tensors]


def _align_bias(bias: Tensor | None, grouped_q: Tensor) -> Tensor | None:
    if bias is None:
        return None
    keys = bias.shape[-1]
    if keys % 16 or bias.stride(-1) != 1 or bias.stride(-2) % 16:
        bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys]
    return bias.expand(*grouped_q.shape[:2], -1, -1)


FLASH = Kernel("cuda-flash", _flash_forward, _flash_backward, takes_bias=False)
# cuDNN builds a plan for each shape in tenths of a second. Chunks of one length over key blocks have few shapes.
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, takes_bias=False, longest=1 << 15, grain=1 << 10)
# With a mask, or causal, this kernel is wrong beyond 2^16 queries or keys: the limit is half of that.
EFFICIENT = Kernel("cuda-efficient", _efficient_forward, _efficient_backward, takes_bias=True, longest=1 << 15)


# --- implementations of flash attention -------------------------------------------------------------------------------

DEFAULT = "FA2"
PACKAGES = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}
"""By implementation: the package, and the major compute capabilities of supported devices."""

_attention: Any = torch.nn.attention


def active_flash_name() -> str:
    """Return the name of torch's active flash attention implementation, such as ``FA2``."""
    current = getattr(_attention, "current_flash_attention_impl", lambda: None)()
    return current or DEFAULT


@lru_cache(maxsize=8)
def use_fastest_flash(device: torch.device, kernel: Kernel, heads: AttentionHeadCounts) -> str:
    """Activate the fastest implementation of flash attention that agrees with the attention formula; return its name.

    An implementation that the user activated stays active. Without a CUDA device nothing changes.

    Args:
        device: Device of this process.
        kernel: Kernel that calls torch's active flash attention.
        heads: Attention heads with which implementations are checked and timed, in bfloat16.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or active_flash_name() != DEFAULT:
        return active_flash_name()
    names = _installed_flash_names(device)
    best, least = DEFAULT, median_seconds(kernel, device, torch.bfloat16, heads) if names else None
    for name in names:
        try:
            _attention.activate_flash_attention_impl(name)
        except Exception as error:  # the package may raise anything
            log.info("%s is installed but cannot be used: %s", name, error)
            continue
        right = agrees_with_formula(kernel, device, torch.bfloat16, heads.size)
        seconds = median_seconds(kernel, device, torch.bfloat16, heads) if right else None
        if seconds is not None and (least is None or seconds < least * MARGIN):
            best, least = name, seconds
    if best != active_flash_name():
        if best == DEFAULT:
            _attention.restore_flash_attention_impl()
        else:
            _attention.activate_flash_attention_impl(best)
    if best != DEFAULT:
        log.info("flash attention by %s", best)
    return best


def _installed_flash_names(device: torch.device) -> list[str]:
    known: list[str] = getattr(_attention, "list_flash_attention_impls", list)()
    capability = torch.cuda.get_device_capability(device)[0]
    return [
        name
        for name, (package, capabilities) in PACKAGES.items()
        if name in known and capability in capabilities and _is_installed(package)
    ]


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # the parent package is missing
        return False
