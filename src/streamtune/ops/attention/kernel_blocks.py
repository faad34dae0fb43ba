"""Use kernels beyond their limits: several calls for many elements, zero padding for other head sizes.

If one call would have more elements than a kernel can count, the kernel is called in blocks. Blocks of keys are merged
like segments in ``ops.attention``, and their backward is exact for the same reason.

Zeros appended to a head change neither scores nor outputs. They are needed for latent attention (DeepSeek), whose
values are shorter than its queries and keys, and for kernels on CUDA, which need multiples of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, Kernel, Scores
from streamtune.ops.devices import MAX_ELEMENTS, blocks

ROUND = 128
"""Blocks above this size are multiples of it: kernels read keys in tiles of 64 or 128."""


def in_blocks(kernel: Kernel, q_BHTD: Tensor, k_BGSD: Tensor, most: int = MAX_ELEMENTS) -> Kernel:
    """Return ``kernel`` if q and k are within its limits, else a kernel that makes several calls within the limits.

    A call has at most ``kernel.longest`` queries and keys. It also has at most ``most`` elements in ``k``, counted at
    all H heads, because a backward may allocate that many for its gradient.
    """
    batch, heads, queries, size = q_BHTD.shape
    longest = min(kernel.longest, max(1, most // max(1, batch * heads * size)))
    rounded = max(ROUND, kernel.grain)
    longest = longest // rounded * rounded or longest
    if max(queries, k_BGSD.shape[2]) <= longest:
        return kernel
    split = _InBlocks(kernel, longest)
    return replace(kernel, forward=split.forward, backward=split.backward)


class _InBlocks:
    def __init__(self, kernel: Kernel, longest: int) -> None:
        self.kernel, self.longest = kernel, longest

    def _keys(self, queries: slice, keys: int, causal: bool) -> Iterator[tuple[slice, bool]]:
        """Yield (block of keys, True if only its causal triangle is visible) for a block of queries."""
        for block in blocks(keys, self.longest):
            if not causal or block.start < queries.stop:
                yield block, causal and block == queries

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        done = []
        for rows in blocks(q.shape[2], self.longest):
            parts = (
                self.kernel.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], _part(scores, rows, keys, triangle))
                for keys, triangle in self._keys(rows, k.shape[2], scores.causal)
            )
            done.append(merged(parts))
        o, lse = (torch.cat(each, dim=2) if len(done) > 1 else each[0] for each in zip(*done, strict=True))
        return o.to(q.dtype), lse

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        """Implement ``Kernel.backward``; gradients to which several calls add are summed in fp32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = wide if q.shape[2] > self.longest else k.dtype
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
        for rows in blocks(q.shape[2], self.longest):
            grad_q_rows = torch.zeros_like(q[:, :, rows], dtype=wide)
            queries = [x[:, :, rows] for x in (grad_o, q, o, lse)]
            for keys, triangle in self._keys(rows, k.shape[2], scores.causal):
                g, q_rows, o_rows, lse_rows = queries
                grads = self.kernel.backward(
                    g, q_rows, k[:, :, keys], v[:, :, keys], o_rows, lse_rows.contiguous(),
                    _part(scores, rows, keys, triangle),
                )  # fmt: skip
                grad_q_rows += grads[0]
                grad_k[:, :, keys] += grads[1]
                grad_v[:, :, keys] += grads[2]
            grad_q[:, :, rows] = grad_q_rows
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def merged(parts: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the merged output and log-sum-exp of several parts, each computed over its own keys only.

    With more than one part, the output has the dtype of the log-sum-exp.
    """
    o, lse = next(parts)
    for o_s, lse_s in parts:
        total = torch.logaddexp(lse, lse_s)
        o = o.to(lse.dtype) * (lse - total).exp()[..., None]
        o += o_s * (lse_s - total).exp()[..., None]
        lse = total
    return o, lse


def _part(scores: Scores, rows: slice, keys: slice, triangle: bool) -> Scores:
    bias = None if scores.bias is None else scores.bias[:, :, rows, keys]
    return Scores(scores.scale, triangle, bias)


def padded(kernel: Kernel, size: int) -> Kernel:
    """Return ``kernel`` with padding: heads of at most ``size`` channels are padded to ``size``."""
    pads = _Padded(kernel, size)
    return replace(kernel, forward=pads.forward, backward=pads.backward)


class _Padded:
    def __init__(self, kernel: Kernel, size: int) -> None:
        self.kernel, self.size = kernel, size

    def _wide(self, x: Tensor) -> Tensor:
        missing = self.size - x.shape[-1]
        return torch.nn.functional.pad(x, (0, missing)) if missing else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        o, lse = self.kernel.forward(self._wide(q), self._wide(k), self._wide(v), scores)
        return o[..., : v.shape[-1]], lse

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        wide = [self._wide(x) for x in (grad_o, q, k, v, o)]
        grads = self.kernel.backward(wide[0], wide[1], wide[2], wide[3], wide[4], lse, scores)
        grad_q, grad_k, grad_v = (g[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True))
        return grad_q, grad_k, grad_v
