"""Attention of a chunk with a bias on its scores, or a sink beside them, that is another for each query.

    softmax(q k' * scale + bias + mask) v

The model has built the bias already. It is as large as the scores, so nothing is saved by not holding those; torch's
own operators do the backward, which the bias takes part in.

Shape suffixes: B batch, H query heads, G key/value heads (G divides H), T queries, S keys, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamtune.ops.view import MaskView, masked_score

__all__ = ["biased_attention"]


def biased_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    view: MaskView,
    bias_BHTS: Tensor | float,
    *,
    scale: float,
    sinks_BHT1: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of T queries over S keys; arguments as of ``prefix_attention``.

    Args:
        q_BHTD: Queries, any floating dtype.
        k_BGSD, v_BGSD: Keys and values of the prefix and of the chunk itself.
        view: Which query sees which key; ``view.shape[2:] == (T, S)``.
        bias_BHTS: Added to the scaled scores; its gradient is returned. Broadcasts against ``[B, H, T, S]``.
        scale: Factor on the products.
        sinks_BHT1: One more logit for each query in the softmax, with no value behind it.
        softcap: ``c * tanh(score / c)`` in place of the score, before the bias.
        dropout: Probability that an attention weight is dropped.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``; zeros for a query that sees no key.
    """
    shape = (*q_BHTD.shape[:3], k_BGSD.shape[2])
    q_BGRTD = q_BHTD.unflatten(1, (k_BGSD.shape[1], -1))
    s = (q_BGRTD @ k_BGSD[:, :, None].mT * scale).reshape(shape).to(torch.promote_types(q_BHTD.dtype, torch.float32))
    if softcap is not None:
        s = softcap * (s / softcap).tanh()
    allowed = view.mask.tile(view.q_start, view.q_stop, view.k_start, view.k_stop)
    s = (s + bias_BHTS).masked_fill(~allowed, masked_score(s.dtype))
    if sinks_BHT1 is not None:
        s = torch.cat([s, sinks_BHT1.to(s.dtype)], dim=-1)
    weights = (s.softmax(-1)[..., : k_BGSD.shape[2]] * allowed.any(-1, keepdim=True)).to(q_BHTD.dtype)
    weights = torch.dropout(weights, dropout, train=True)
    weights_BGRTS = weights.unflatten(1, (k_BGSD.shape[1], -1))
    return (weights_BGRTS @ v_BGSD[:, :, None]).flatten(1, 2)
