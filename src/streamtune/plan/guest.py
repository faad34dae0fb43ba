"""A model as a guest leaves it: what a comparison changes for its own purposes is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["attending", "borrowed", "cast", "quantised_as", "routes"]

FILLED = 1e-2
"""Standard deviation of what stands in for a matrix of zeros."""


@contextmanager
def borrowed(model: nn.Module) -> Iterator[int]:
    """Evaluation mode, no gradients, full float32 precision and a random state of our own; yields the matrices filled.

    A fresh adapter's second matrix is all zeros, and with it the gradient of its first one is zero whatever the engine
    does. Such matrices hold small random values for the while, so that there is something to compare.
    """
    training = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    zeros = [(p, p.detach().clone()) for p in matrices if not bool(p.detach().any())]
    precision = torch.get_float32_matmul_precision()
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            torch.set_float32_matmul_precision("highest")
            for module, _ in training:
                module.training = False
            for p, _ in grads:
                p.grad = None
            for p, _ in zeros:
                p.data.normal_(std=FILLED)
            yield len(zeros)
        finally:
            torch.set_float32_matmul_precision(precision)
            for module, flag in training:
                module.training = flag
            for p, was in zeros:
                p.data.copy_(was)
            for p in model.parameters():
                p.grad = None
            for p, grad in grads:
                p.grad = grad


@contextmanager
def cast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters and buffers in a wider dtype, one at a time and in place; narrowed again they are what they were.

    Nothing is made narrower. In float64 experts are computed one by one: their grouped matrix product knows none.
    """
    if dtype is None:
        yield
        return
    narrow = [p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize < dtype.itemsize]
    before = [(p, p.dtype) for p in narrow]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype.itemsize < dtype.itemsize
    ]
    try:
        for p in narrow:
            p.data = p.data.to(dtype)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(dtype)
        with _experts(model, dtype):
            yield
    finally:
        for p, was in before:
            p.data = p.data.to(was)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def _experts(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    inner = _transformers_model(model)
    before = getattr(inner.config, "_experts_implementation", None)
    if dtype != torch.float64 or not isinstance(before, str) or before == "eager" or not routes(model):
        yield
        return
    inner.set_experts_implementation("eager")
    try:
        yield
    finally:
        inner.set_experts_implementation(before)


@contextmanager
def attending(model: nn.Module, name: str | None) -> Iterator[str]:
    """Plain autograd with the named attention, or with the model's own; yields which."""
    inner = _transformers_model(model)
    own = str(inner.config._attn_implementation)
    if name is None or name == own:
        yield own
        return
    inner.set_attn_implementation(name)
    try:
        yield name
    finally:
        inner.set_attn_implementation(own)


def quantised_as(model: nn.Module) -> str:
    """Why the weights cannot be widened, or an empty string."""
    for p in model.parameters():
        if not p.is_floating_point() or type(p.data) is not torch.Tensor:
            return "the weights are quantised"
    return ""


def routes(model: nn.Module) -> bool:
    """Whether tokens are sent to experts, by what its parameters are called."""
    return any(part in name for name, _ in model.named_parameters() for part in ("expert", "router", "moe"))


def _transformers_model(model: nn.Module) -> Any:
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()
