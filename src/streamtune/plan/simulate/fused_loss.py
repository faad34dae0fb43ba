"""The bytes of Liger's fused head and loss, so that a baseline has the head that people train with.

Liger (``LigerFusedLinearCrossEntropyLoss``, version 0.8.5) computes loss and gradients of the head together, in chunks
of tokens, and keeps the gradients until the backward. Chunks and buffers here have its sizes; its kernels write over
the logits, so on ``meta`` there is nothing else to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamtune.base.adapters import base_of


def fused_loss(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the loss of a model on ``meta`` as it is computed with Liger's head; all tokens have a target."""
    causal = base_of(model)
    hidden: Tensor = causal.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    out: Tensor = _FusedLoss.apply(hidden.flatten(0, 1), causal.get_output_embeddings().weight)
    return out


class _FusedLoss(torch.autograd.Function):
    """``mean cross entropy of hidden_NC @ weight_VC.T``, on ``meta``."""

    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, weight_VC: Tensor) -> Tensor:
        tokens, (classes, width) = len(hidden_NC), weight_VC.shape
        size = min(tokens, 1 << (-(-tokens // -(-classes // width)) - 1).bit_length())
        ctx.hidden_grad = torch.zeros_like(hidden_NC)
        ctx.weight_grad = torch.zeros_like(weight_VC) if ctx.needs_input_grad[1] else None
        losses = hidden_NC.new_zeros(tokens, dtype=torch.float32)
        logits = hidden_NC.new_empty(size, classes)
        for start in range(0, tokens, size):
            chunk = hidden_NC[start : start + size]
            chunk_logits = logits[: len(chunk)]
            torch.mm(chunk, weight_VC.t().to(chunk.dtype), out=chunk_logits)
            torch.mm(chunk_logits, weight_VC.to(chunk.dtype), out=ctx.hidden_grad[start : start + size])
            if ctx.weight_grad is not None:
                torch.addmm(ctx.weight_grad, chunk_logits.t(), chunk, out=ctx.weight_grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden_grad, weight_grad = ctx.hidden_grad, ctx.weight_grad
        del ctx.hidden_grad, ctx.weight_grad
        return hidden_grad, weight_grad
