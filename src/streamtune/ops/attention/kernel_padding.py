"""Heads a kernel has no size for: zeros behind them change no score and no output.

Latent attention (DeepSeek) has values shorter than its queries and keys; kernels on CUDA want multiples of 8.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, Kernel, Scores

__all__ = ["padded"]


def padded(kernel: Kernel, size: int) -> Kernel:
    """``kernel`` on heads of ``size``, for queries, keys and values of that or less."""
    pads = _Padded(kernel, size)
    return replace(kernel, forward=pads.forward, backward=pads.backward)


class _Padded:
    def __init__(self, kernel: Kernel, size: int) -> None:
        self.kernel, self.size = kernel, size

    def _wide(self, x: Tensor) -> Tensor:
        missing = self.size - x.shape[-1]
        return torch.nn.functional.pad(x, (0, missing)) if missing else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """``Kernel.forward``, with an output as long as the values are."""
        o, lse = self.kernel.forward(self._wide(q), self._wide(k), self._wide(v), scores)
        return o[..., : v.shape[-1]], lse

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """``Kernel.backward``."""
        wide = [self._wide(x) for x in (grad_o, q, k, v, o)]
        grads = self.kernel.backward(wide[0], wide[1], wide[2], wide[3], wide[4], lse, scores)
        grad_q, grad_k, grad_v = (g[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True))
        return grad_q, grad_k, grad_v
