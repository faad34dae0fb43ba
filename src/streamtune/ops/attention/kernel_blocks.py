"""Kernels beyond their limits: several calls for many elements, zero padding for other head sizes.

A kernel is called in blocks where one call would have more elements than it can count. The blocks of keys are merged
as segments are in ``ops.attention``, and their backward is exact for the same reason.

Zeros behind a head change no score and no output. Latent attention (DeepSeek) has values shorter than its queries and
keys; kernels on CUDA want multiples of 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Grads, Kernel, Scores
from streamtune.ops.devices import MAX_ELEMENTS, blocks

ROUND = 128
"""Larger blocks are a multiple of this: kernels read keys in tiles of 64 or 128."""


def in_blocks(kernel: Kernel, q_BHTD: Tensor, k_BGSD: Tensor, most: int = MAX_ELEMENTS) -> Kernel:
    """Return ``kernel`` itself if q and k are within its limits, else a kernel that makes several calls within them.

    No call then has more queries or keys than ``kernel.longest``, or more than ``most`` elements of ``k`` at all H
    heads (a backward may allocate as many for its gradient).
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
        """Yield the blocks of keys that a block of queries sees, with True if it sees only the causal triangle."""
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
        """Compute ``Kernel.backward``; gradients that several calls add to are summed in fp32."""
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
    """Merge output and log-sum-exp of several parts, each computed over its own keys alone.

    The output of more than one part has the dtype of the log-sum-exp.
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
    """Return ``kernel`` for heads of at most ``size``, which are padded to it."""
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
