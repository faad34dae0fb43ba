"""Context managers that change a model for a comparison, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.adapters import base_of, is_adapter_name
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.hf_names import CAUSAL_LOSS, FIXED_LOSS, LOSS, hf_internal

FILL_STD = 1e-2
"""Standard deviation of the random values that replace all-zero matrices and vectors."""


@contextmanager
def prepared_for_comparison(model: nn.Module) -> Iterator[int]:
    """Context manager: prepare a model for the comparison, and restore it on exit.

    Inside, the model is in evaluation mode, ``grad`` is cleared, float32 matrix products have full precision, and
    random numbers have a fixed seed. The second matrix of a fresh LoRA adapter is all zeros, which makes the gradient
    of the first matrix zero even if streaming is wrong. A fresh VeRA adapter has a zero vector with the same effect.
    All-zero matrices, and all-zero vectors of adapters, therefore hold small random values.

    Yields:
        The number of all-zero matrices and vectors.
    """
    training = [(module, module.training) for module in model.modules()]
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    factors = [p for name, p in trained if p.dim() > 1 or is_adapter_name(name)]
    zeros = [(p, p.detach().clone()) for p in factors if not bool(p.detach().any())]
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
                p.data.normal_(std=FILL_STD)
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
def widening_weights(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Context manager: convert narrower parameters and buffers in place to ``dtype``, and restore them on exit.

    With None, nothing changes. In float64, experts are computed one by one, because grouped matrix products have no
    float64 kernel.
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
        with _using_eager_experts(model, dtype):
            yield
    finally:
        for p, was in before:
            p.data = p.data.to(was)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def _using_eager_experts(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    inner = base_of(model)
    before = getattr(inner.config, "_experts_implementation", None)
    if dtype != torch.float64 or not isinstance(before, str) or before == "eager" or not has_experts(model):
        yield
        return
    inner.set_experts_implementation("eager")
    try:
        yield
    finally:
        inner.set_experts_implementation(before)


@contextmanager
def computing_wide_loss(model: nn.Module) -> Iterator[None]:
    """Context manager: let transformers compute the loss of float64 logits in float64.

    ``ForCausalLMLoss`` begins with ``logits.float()``, which rounds every logit. If a target has a probability close to
    1, its gradient (softmax minus one) would lose most of its digits.
    """
    inner = base_of(model)
    if inner.loss_function is not hf_internal(CAUSAL_LOSS):  # the user's own, or a family's
        yield
        return
    own = inner.__dict__.get(LOSS)
    inner.loss_function = _causal_loss
    try:
        yield
    finally:
        if own is None:
            delattr(inner, LOSS)
        else:
            inner.loss_function = own


def _causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Compute ``ForCausalLMLoss`` without rounding the logits to float32."""
    if logits.dtype != torch.float64:
        return hf_internal(CAUSAL_LOSS)(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **more
        )
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    return hf_internal(FIXED_LOSS)(logits.view(-1, vocab_size), targets, num_items_in_batch, ignore_index, **more)


@contextmanager
def using_attention(model: nn.Module, name: str | None) -> Iterator[str]:
    """Context manager: use the attention implementation ``name`` (None: the model's own); yield the name in use."""
    inner = base_of(model)
    own = str(inner.config._attn_implementation)
    if name is None or name == own:
        yield own
        return
    inner.set_attn_implementation(name)
    try:
        yield name
    finally:
        inner.set_attn_implementation(own)


def why_not_widened(model: nn.Module) -> str:
    """Return the reason why the weights cannot be converted to a wider dtype; empty if they can."""
    for p in model.parameters():
        if not p.is_floating_point() or type(p.data) is not torch.Tensor:
            return "the weights are quantised"
    return ""


def has_experts(model: nn.Module) -> bool:
    """Return True if a parameter's name shows that the model is a mixture of experts."""
    return any(part in name for name, _ in model.named_parameters() for part in ("expert", "router", "moe"))
