"""Layer operators that run fewer kernels than their formulas would; results are equal up to rounding.

weight_gradient  gradient of a linear layer's weight ``[V, C]``; ``add_weight_gradient`` adds it to a sum in place
rms_norm         root mean square norm (Zhang and Sennrich, arXiv 1910.07467, eq. 4), by torch's kernel
apply_rotary     rotary position embedding (Su et al., arXiv 2104.09864, eq. 34), halves as in ``transformers``
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from streamtune.ops.devices import block_slices, kernel_device_type

FUSION_DEVICES = {"cuda"}
"""Device types on which each operator of a formula is a separate kernel that reads and writes memory."""


def is_fusion_faster(device: torch.device) -> bool:
    """Return True if one fused kernel is faster than several operators on this device (CUDA)."""
    return kernel_device_type(device) in FUSION_DEVICES


def weight_gradient(grad_nV: Tensor, hidden_nC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad.T @ hidden`` ``[V, C]`` in ``dtype``, rounded once if the device has a matmul with this output."""
    if dtype != grad_nV.dtype and _can_output_wide(grad_nV, dtype):
        return torch.mm(grad_nV.mT, hidden_nC, out_dtype=dtype)
    if grad_nV.dtype == torch.float16 and dtype != torch.float16:  # a sum over tokens may exceed 65,504
        return grad_nV.to(dtype).mT @ hidden_nC.to(dtype)
    return (grad_nV.mT @ hidden_nC).to(dtype)


def add_weight_gradient(acc_VC: Tensor, grad_nV: Tensor, hidden_nC: Tensor) -> None:
    """Compute ``acc += grad.T @ hidden`` in place: in one matmul if the dtypes allow it, else in blocks of rows."""
    if acc_VC.dtype == grad_nV.dtype:
        acc_VC.addmm_(grad_nV.mT, hidden_nC)
    elif _can_output_wide(grad_nV, acc_VC.dtype):
        torch.addmm(acc_VC, grad_nV.mT, hidden_nC, out_dtype=acc_VC.dtype, out=acc_VC)
    else:
        block = max(1, (1 << 24) // acc_VC.shape[1])
        if grad_nV.dtype == torch.float16:  # a sum over tokens may exceed 65,504
            hidden_nC = hidden_nC.to(acc_VC.dtype)
        for part in block_slices(len(acc_VC), block):
            acc_VC[part] += grad_nV[:, part].to(hidden_nC.dtype).mT @ hidden_nC


def _can_output_wide(grad: Tensor, wide: torch.dtype) -> bool:
    return (
        grad.numel() > 0
        and kernel_device_type(grad.device) == "cuda"
        and _matmul_accumulates_wide(grad.device, wide, grad.dtype)
    )


@lru_cache(maxsize=16)
def _matmul_accumulates_wide(device: torch.device, wide: torch.dtype, narrow: torch.dtype) -> bool:
    if device.type == "meta":
        return True
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(24, 40, generator=generator, device=device, dtype=narrow) for _ in range(2))
    acc = torch.ones(40, 40, device=device, dtype=wide)
    try:
        torch.addmm(acc, a.mT, b, out_dtype=wide, out=acc)
        product = torch.mm(a.mT, b, out_dtype=wide)
    except (RuntimeError, TypeError):
        return False
    want = a.double().mT @ b.double()
    errors = [(acc.double() - 1 - want).norm(), (product.double() - want).norm()]
    return bool(torch.stack(errors).max() <= 1e-5 * want.norm())


# The norm.


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32 and rounded once.

    ``weight`` ``[C]`` has the dtype of ``x`` ``[..., C]``; None means ones.
    """
    if x.device.type == "meta":
        y: Tensor = _SimulatedNorm.apply(x, weight)
        return y
    return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)[0]


class _SimulatedNorm(torch.autograd.Function):
    """RMS norm on ``meta``, where torch has no kernel: allocates and saves the same tensors as the CUDA kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, rstd = torch.ops.streamtune.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        grad_x, grad_weight = torch.ops.streamtune.rms_norm_backward(grad, *ctx.saved_tensors)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None


def _rms_norm_on_meta(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def _rms_norm_backward_on_meta(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


_LIBRARY = torch.library.Library("streamtune", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor)")
_LIBRARY.impl("rms_norm", _rms_norm_on_meta, "Meta")
_LIBRARY.impl("rms_norm_backward", _rms_norm_backward_on_meta, "Meta")


@lru_cache(maxsize=16)
def is_norm_kernel_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if :func:`rms_norm` agrees with the formula in fp64 on this device; True on ``meta``."""
    if device.type == "meta":
        return True
    generator = torch.Generator(device).manual_seed(0)
    x, weight, grad = (torch.randn(n, 64, generator=generator, device=device) for n in (48, 1, 48))

    def output_and_gradients(norm: Any, dtype: torch.dtype) -> list[Tensor]:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            inputs = [t.to(dtype).requires_grad_() for t in (x, weight[0])]
            y = norm(*inputs)
            return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))]

    try:
        got = output_and_gradients(lambda x, weight: rms_norm(x, weight, 1e-5), dtype)
    except (RuntimeError, AttributeError):
        return False
    want = output_and_gradients(
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w, torch.float64
    )
    bound = 16 * torch.finfo(dtype).eps
    return all((a.double() - b).norm() <= bound * b.norm() for a, b in zip(got, want, strict=True))


# The rotary embedding.


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x cos + rotate_half(x) sin``, where ``rotate_half([a, b]) = [-b, a]``.

    Forward and backward run three kernels each. The result has the strides of ``x`` ``[B, H, T, D]``. ``cos`` and
    ``sin`` ``[B, 1, T, D]`` have the dtype of ``x`` and get no gradient.
    """
    y: Tensor = _Rotation.apply(x, cos, sin)
    return y


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (a, b), (sin_a, sin_b), y = x.chunk(2, -1), sin.chunk(2, -1), x * cos
        y_a, y_b = y.chunk(2, -1)
        y_a.addcmul_(b, sin_a, value=-1)
        y_b.addcmul_(a, sin_b)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        (a, b), (sin_a, sin_b), grad_x = grad.chunk(2, -1), sin.chunk(2, -1), grad * cos
        grad_a, grad_b = grad_x.chunk(2, -1)
        grad_a.addcmul_(b, sin_b)
        grad_b.addcmul_(a, sin_a, value=-1)
        return grad_x, None, None
