"""Wrap attention kernels to exceed their limits: several calls for long inputs, zero padding for other head sizes.

If a call would have more elements than a kernel can index, the kernel is called on blocks. Outputs over blocks of keys
are merged by their log-sum-exps, and the backward of a block is exact (``ops.attention.attention``).

Zeros appended to a head change neither scores nor outputs. Padding is needed for latent attention (DeepSeek), whose
values are shorter than its queries and keys. It is also needed on CUDA, where head sizes must be multiples of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, Kernel, Scores
from streamtune.ops.devices import MAX_ELEMENTS, block_slices

ROUND = 128
"""Divisor of the length of longer blocks: kernels read keys in tiles of 64 or 128 tokens."""


def split_into_blocks(kernel: Kernel, q_BHTD: Tensor, k_BGSD: Tensor, max_elements: int = MAX_ELEMENTS) -> Kernel:
    """Return ``kernel`` if q and k are within its limits, else a kernel that calls ``kernel`` on smaller blocks.

    A block has at most ``kernel.longest`` queries and keys. Its keys, repeated for all H query heads, have at most
    ``max_elements`` elements, because a backward may allocate a gradient of this size.
    """
    batch, heads, queries, size = q_BHTD.shape
    max_length = min(kernel.longest, max(1, max_elements // max(1, batch * heads * size)))
    rounded = max(ROUND, kernel.grain)
    max_length = max_length // rounded * rounded or max_length
    if max(queries, k_BGSD.shape[2]) <= max_length:
        return kernel
    split = _BlockedKernel(kernel, max_length)
    return replace(kernel, forward=split.forward, backward=split.backward)


class _BlockedKernel:
    def __init__(self, kernel: Kernel, longest: int) -> None:
        self.kernel, self.longest = kernel, longest

    def _visible_key_blocks(self, queries: slice, keys: int, causal: bool) -> Iterator[tuple[slice, bool]]:
        for block in block_slices(keys, self.longest):
            if not causal or block.start < queries.stop:
                yield block, causal and block == queries

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        done = []
        for rows in block_slices(q.shape[2], self.longest):
            parts = (
                self.kernel.forward(
                    q[:, :, rows], k[:, :, keys], v[:, :, keys], _scores_of_block(scores, rows, keys, triangle)
                )
                for keys, triangle in self._visible_key_blocks(rows, k.shape[2], scores.causal)
            )
            done.append(merge_attentions(parts))
        o, lse = (torch.cat(each, dim=2) if len(done) > 1 else each[0] for each in zip(*done, strict=True))
        return o.to(q.dtype), lse

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = wide if q.shape[2] > self.longest else k.dtype
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
        for rows in block_slices(q.shape[2], self.longest):
            grad_q_rows = torch.zeros_like(q[:, :, rows], dtype=wide)
            queries = [x[:, :, rows] for x in (grad_o, q, o, lse)]
            for keys, triangle in self._visible_key_blocks(rows, k.shape[2], scores.causal):
                g, q_rows, o_rows, lse_rows = queries
                grads = self.kernel.backward(
                    g, q_rows, k[:, :, keys], v[:, :, keys], o_rows, lse_rows.contiguous(),
                    _scores_of_block(scores, rows, keys, triangle),
                )  # fmt: skip
                grad_q_rows += grads[0]
                grad_k[:, :, keys] += grads[1]
                grad_v[:, :, keys] += grads[2]
            grad_q[:, :, rows] = grad_q_rows
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def merge_attentions(parts: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge pairs (output, log-sum-exp) of the same queries over different keys into one such pair.

    The merged output has the dtype of the log-sum-exps. A single pair is returned unchanged.
    """
    o, lse = next(parts)
    for o_s, lse_s in parts:
        total = torch.logaddexp(lse, lse_s)
        o = o.to(lse.dtype) * (lse - total).exp()[..., None]
        o += o_s * (lse_s - total).exp()[..., None]
        lse = total
    return o, lse


def _scores_of_block(scores: Scores, rows: slice, keys: slice, triangle: bool) -> Scores:
    bias = None if scores.bias is None else scores.bias[:, :, rows, keys]
    return Scores(scores.scale, triangle, bias)


def pad_heads(kernel: Kernel, size: int) -> Kernel:
    """Return a kernel that pads heads with zeros to ``size`` channels, and removes the padding from the results."""
    pads = _PaddedKernel(kernel, size)
    return replace(kernel, forward=pads.forward, backward=pads.backward)


class _PaddedKernel:
    def __init__(self, kernel: Kernel, size: int) -> None:
        self.kernel, self.size = kernel, size

    def _pad_channels(self, x: Tensor) -> Tensor:
        missing = self.size - x.shape[-1]
        return torch.nn.functional.pad(x, (0, missing)) if missing else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        o, lse = self.kernel.forward(self._pad_channels(q), self._pad_channels(k), self._pad_channels(v), scores)
        return o[..., : v.shape[-1]], lse

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores
    ) -> Grads:
        wide = [self._pad_channels(x) for x in (grad_o, q, k, v, o)]
        grads = self.kernel.backward(wide[0], wide[1], wide[2], wide[3], wide[4], lse, scores)
        grad_q, grad_k, grad_v = (g[..., : x.shape[-1]] for g, x in zip(grads, (q, k, v), strict=True))
        return grad_q, grad_k, grad_v
