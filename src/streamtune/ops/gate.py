"""Gated activation ``silu(gate) * up`` of SwiGLU (Shazeer, arXiv 2002.05202, eq. 6), by Liger's kernel.

PyTorch runs two kernels forward and three backward, which read and write 14 tensors of the size of ``gate``. Liger's
kernels (Hsu et al., arXiv 2410.10989) read and write 8: they recompute ``silu(gate)`` in the backward, and write the
gradients over ``gate`` and ``up``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[..., I]`` by Liger's kernel; use only if :func:`is_gate_kernel_correct`.

    The backward writes over ``gate`` and ``up``, unless the graph is kept (``retain_graph=True``). So no other
    operator may have saved them, and the caller must not read them after the backward.
    """
    y: Tensor = _SiluMul.apply(gate, up)
    return y


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        if gate.device.type == "meta":
            y: Tensor = torch.ops.streamtune.silu_mul(gate, up)
            return y
        return _kernels()[0](gate, up)[2].view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():
            gate, up = gate.clone(), up.clone()
        if gate.device.type == "meta":
            torch.ops.streamtune.silu_mul_backward(grad.contiguous(), gate, up)
            return gate, up
        shape = gate.shape
        grad_gate, grad_up = _kernels()[1](gate, up, grad.contiguous())
        return grad_gate.view(shape), grad_up.view(shape)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Forward, Backward]:
    module = importlib.import_module("liger_kernel.ops.swiglu")
    return module.swiglu_forward, module.swiglu_backward


@lru_cache(maxsize=1)
def is_liger_installed() -> bool:
    """Return True if Liger and Triton are installed; neither is imported."""
    return all(find_spec(package) is not None for package in ("triton", "liger_kernel"))


@lru_cache(maxsize=16)
def is_gate_kernel_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if Liger's kernel agrees with the formula in fp64 on this device; on ``meta``, if it is installed.

    The error may be at most twice the error of PyTorch's operators in ``dtype``.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not is_liger_installed():
        return False
    if device.type == "meta":
        return True
    generator = torch.Generator(device).manual_seed(0)
    gate, up, grad = (torch.randn(24, 160, generator=generator, device=device).to(dtype) for _ in range(3))

    def output_and_gradients(function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            inputs = [x.to(dtype, copy=True).requires_grad_() for x in (gate, up)]
            y = function(*(x * 1 for x in inputs))
            return [y.detach().double(), *(g.double() for g in torch.autograd.grad(y, inputs, grad.to(dtype)))]

    try:
        found = output_and_gradients(silu_mul, dtype)
    except Exception:  # whatever the package's compiler raises
        return False
    plain = output_and_gradients(lambda gate, up: silu(gate) * up, dtype)
    truth = output_and_gradients(lambda gate, up: silu(gate) * up, torch.float64)
    smallest = torch.finfo(dtype).eps
    return all(
        (a - want).norm() <= 2 * (b - want).norm() + smallest * want.norm()
        for a, b, want in zip(found, plain, truth, strict=True)
    )


def _silu_mul_on_meta(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _silu_mul_backward_on_meta(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate, up


_LIBRARY = torch.library.Library("streamtune", "FRAGMENT")
_LIBRARY.define("silu_mul(Tensor gate, Tensor up) -> Tensor")
_LIBRARY.define("silu_mul_backward(Tensor grad, Tensor(a!) gate, Tensor(b!) up) -> (Tensor(a!), Tensor(b!))")
_LIBRARY.impl("silu_mul", _silu_mul_on_meta, "Meta")
_LIBRARY.impl("silu_mul_backward", _silu_mul_backward_on_meta, "Meta")
