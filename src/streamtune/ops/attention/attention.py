"""Exact attention of a chunk of queries over the keys before it (the prefix) and its own keys, without a dense mask.

    softmax([q k_1' | q k_2' | ...]) [v_1; v_2; ...] = sum_s exp(lse_s - lse) o_s,    lse = log sum_s exp(lse_s)

The keys are divided into segments s: the prefix (a rectangle of scores), the chunk itself (a causal square), the edge
of a sliding window. Each segment has an output ``o_s`` and a log-sum-exp ``lse_s``. They are merged as above (Dao,
FlashAttention-2, arXiv 2307.08691; Liu, Ring Attention, arXiv 2310.01889). The backward of a segment needs the merged
output and log-sum-exp, and nothing of other segments:

    P_s = exp(S_s - lse),  delta = rowsum(dO * O),  dS_s = P_s * (dO v_s' - delta),  dq += dS_s k_s,  dk_s = dS_s' q

Shape suffixes: B batch, H query heads, G key/value heads (G divides H), T queries, S keys, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from streamtune.ops.attention.kernel_trial import Kernel, ScoreRule, Scores
from streamtune.ops.attention.kernels import fused_segment_kernel
from streamtune.ops.attention.mask import MaskView, Segment, score_of_hidden_key
from streamtune.ops.attention.view_kernels import fused_view_kernel, run_view_backward, run_view_forward
from streamtune.ops.devices import autocast_device_type, block_slices, repeat_work
from streamtune.ops.first_order import first_order
from streamtune.ops.fused import is_fusion_faster

R = TypeVar("R")

KEY_BLOCK = 1024
"""Smallest number of keys whose gradients dK and dV a backward computes in one call.

So a kernel's memory for dK and dV does not grow with the prefix.
"""

KEYS_PER_QUERY = 2
"""Number of keys per query in one call of the backward, on devices with a fixed cost per call (CUDA)."""

TILE_ELEMENTS = 1 << 22
"""Number of attention scores that are computed at a time without a fused kernel (16 MiB in fp32)."""


def keys_per_block(queries: int, device: torch.device) -> int:
    """Return the number of keys whose gradients a backward of ``queries`` queries computes in one call."""
    return max(KEY_BLOCK, queries * (KEYS_PER_QUERY if is_fusion_faster(device) else 1))


def prefix_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    view: MaskView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
    memory: Memory | None = None,
    prefix: Prefix | None = None,
) -> Tensor:
    """Return the attention of T queries over S keys, without a dense mask or dense scores.

    Equal to :func:`prefix_attention_reference` up to rounding.

    Args:
        q_BHTD: Queries, of any floating dtype.
        k_BGSD, v_BGSD: Keys and values of the prefix, followed by the chunk's own.
        view: Part of the mask for these queries and keys; ``view.shape[2:] == (T, S)``.
        scale: Factor of the scores, usually ``D ** -0.5``.
        softcap: Constant c of ``c * tanh(score / c)``, which replaces the score (Gemma 2).
        sinks_H: Additional logit per head in the softmax, without a value (gpt-oss).
        dropout: Probability that an attention weight is dropped. The backward draws the same dropout mask again.
        memory: Cache of attention outputs. If it has the output of this call, the forward is not computed.
        prefix: Keys and values before the chunk, with buffers in which their gradients are summed. Autograd then
            computes gradients only of the chunk's own keys and values, ``prefix.own``.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``. The output of a query that sees no key (left padding) is zero.
    """
    assert tuple(view.shape[2:]) == (q_BHTD.shape[2], k_BGSD.shape[2]), (view.shape, q_BHTD.shape, k_BGSD.shape)
    with torch.autocast(autocast_device_type(q_BHTD.device), enabled=False):  # the formula chooses matmul dtypes
        own: tuple[Tensor | None, Tensor | None] = (None, None)
        if prefix is not None:
            own, k_BGSD, v_BGSD = prefix.own, k_BGSD.detach(), v_BGSD.detach()
        differentiable = [q_BHTD, k_BGSD, v_BGSD, *own]
        backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in differentiable)
        settings = _AttentionSettings(view, ScoreRule(scale, softcap, dropout), prefix, memory, backward)
        return _PrefixAttention.apply(settings, q_BHTD, k_BGSD, v_BGSD, sinks_H, *own)


Place = tuple[slice, slice, slice]
"""Slices of batch rows, heads and positions in a tensor ``[B, H, T, D]``."""


class Memory(Protocol):
    """Interface: a cache of attention outputs and log-sum-exps, with which a recomputed layer skips the attention."""

    def read_output(self) -> tuple[Tensor, Tensor] | None:
        """Return the output ``[B, H, T, D]`` and log-sum-exp ``[B, H, T]`` of the current call; None if not stored."""

    def save_output(self, o: Tensor, lse: Tensor) -> None:
        """Store the output and log-sum-exp of the current call."""


class Prefix(Protocol):
    """Interface: the keys and values before a chunk, and buffers in which their gradients are summed."""

    @property
    def length(self) -> int:
        """Number of keys in the prefix."""

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the chunk itself, ``[B, G, S - length, D]``, whose gradients autograd computes."""

    def allocate_grads(self) -> None:
        """Allocate the gradients of the prefix's keys and values, if they are not allocated yet."""

    def add_grads(self, place: Place, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add ``grad_k`` and ``grad_v`` to the gradients of the prefix's keys and values, at the slices ``place``."""


def without_autocast(backward: Callable[[Any, Tensor], R]) -> Callable[[Any, Tensor], R]:
    """Disable autocast in an attention's ``backward``, which chooses the dtypes of its matmuls itself (decorator)."""

    @functools.wraps(backward)
    def wrapped(ctx: Any, grad_o: Tensor) -> R:
        with torch.autocast(autocast_device_type(grad_o.device), enabled=False):
            return backward(ctx, grad_o)

    return wrapped


@dataclass(frozen=True)
class _AttentionSettings:
    view: MaskView
    rule: ScoreRule
    prefix: Prefix | None
    memory: Memory | None
    for_backward: bool


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _AttentionSettings, *tensors: Tensor) -> Tensor:
        q, k, v, sinks, _, _ = tensors  # the chunk's own keys and values are inputs only for their gradients
        view, rule, memory = settings.view, settings.rule, settings.memory
        seed = int(torch.randint(1 << 62, ())) if rule.dropout else 0
        parts = [SegmentAttention(view, segment, rule, seed) for segment in view.segments()]
        lacks_fused_kernel = any(part.lacks_fused_kernel(q, k, v) for part in parts)
        view_kernel = fused_view_kernel(view, q, k, v, rule, lacks_fused_kernel)
        stored = None if memory is None else memory.read_output()
        if stored is None:
            result = None if view_kernel is None else run_view_forward(view_kernel, q, k, v, settings.for_backward)
            view_kernel = None if result is None else view_kernel
            o, lse = _merge_segments(parts, q, k, v) if result is None else result
            masked = result is not None or any(part.segment.masked for part in parts)
            o, lse = finish_attention(o, lse, sinks, q.dtype, masked)
            # The formula computes delta from the unrounded o; a fused kernel needs o in the dtype of q.
            o = o if view_kernel is None and all(part.lacks_fused_kernel(q, k, v) for part in parts) else o.to(q.dtype)
            if memory is not None:
                memory.save_output(o, lse)
        else:
            o, lse = stored
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.whole, ctx.parts, ctx.prefix = view_kernel, parts, settings.prefix
        ctx.shared_keys = view.mask.block_start is not None or view.mask.branches is not None
        return o.detach() if o.dtype == q.dtype else o.to(q.dtype)  # o itself may be stored in memory, without a graph

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        prefix: Prefix | None = ctx.prefix
        parts: list[tuple[SegmentAttention, float]] = [
            block for part in ctx.parts for block in part.split_keys(q.device)
        ]
        grads = None if ctx.whole is None else run_view_backward(ctx.whole, grad_o, q, k, v, o, lse)
        if grads is not None:
            sums = _KeyGradients(k, v, prefix, k.dtype)
            sums.add((slice(None), slice(None), slice(0, k.shape[2])), *grads[1:])
            grad_q, grad_k, grad_v = grads[0], sums.k, sums.v
        elif len(parts) == 1 and prefix is None and parts[0][0].covers_all(q, k):
            grad_q, grad_k, grad_v = parts[0][0].backward(grad_o, q, k, v, o, lse)
        else:
            # A query's gradient is a sum over its segments. A key's gradient has one term, or many terms if ranges of
            # queries share the key. Sums are in fp32, as in a kernel.
            wide = torch.promote_types(q.dtype, torch.float32)
            grad_q = torch.zeros_like(q, dtype=wide if len(parts) > 1 else q.dtype)
            sums = _KeyGradients(k, v, prefix, wide if ctx.shared_keys else k.dtype)
            if prefix is not None:
                prefix.allocate_grads()  # once, not for each block
            for part, times in parts:
                with repeat_work(times):
                    grad_q_s, grad_k_s, grad_v_s = part.backward(grad_o, q, k, v, o, lse)
                    grad_q[part.queries] += grad_q_s
                    sums.add(part.keys, grad_k_s, grad_v_s)
                    del grad_q_s, grad_k_s, grad_v_s  # freed before the next block allocates its gradients
            grad_q, grad_k, grad_v = grad_q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype)
        grad_sinks = sinks_gradient(grad_o, sinks, o, lse) if ctx.needs_input_grad[4] else None
        if prefix is not None:
            return None, grad_q, None, None, grad_sinks, grad_k, grad_v
        return None, grad_q, grad_k, grad_v, grad_sinks, None, None


def sinks_gradient(grad_o: Tensor, sinks: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient ``[H]`` of the attention sinks; ``o`` and ``lse`` are the results over all keys."""
    delta_BHT = (grad_o.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    p_BHT = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
    return -(p_BHT * delta_BHT).sum((0, 2)).to(sinks.dtype)


class _KeyGradients:
    """Sums dK and dV: in buffers of ``prefix`` for the prefix's keys, in ``k`` and ``v`` for the chunk's own keys."""

    def __init__(self, k: Tensor, v: Tensor, prefix: Prefix | None, dtype: torch.dtype) -> None:
        self.prefix, self.first = prefix, 0 if prefix is None else prefix.length
        self.k = torch.zeros_like(k[:, :, self.first :], dtype=dtype)
        self.v = torch.zeros_like(v[:, :, self.first :], dtype=dtype)

    def add(self, place: Place, grad_k: Tensor, grad_v: Tensor) -> None:
        rows, heads, keys = place
        before = min(max(self.first - keys.start, 0), keys.stop - keys.start)
        if before:
            assert self.prefix is not None
            at = (rows, heads, slice(keys.start, keys.start + before))
            self.prefix.add_grads(at, grad_k[:, :, :before], grad_v[:, :, :before])
        if keys.start + before < keys.stop:
            at = (rows, heads, slice(keys.start + before - self.first, keys.stop - self.first))
            self.k[at] += grad_k[:, :, before:]
            self.v[at] += grad_v[:, :, before:]


def finish_attention(
    o: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype, may_see_no_key: bool
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp with the attention sinks included, and output zero for queries that see no key.

    ``dtype`` is the dtype of the queries. ``may_see_no_key`` is True if such queries may exist; their log-sum-exp
    becomes +inf, so that they pass no gradient.
    """
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
        o, lse = o * (lse - total).exp()[..., None], total
    if may_see_no_key:  # a query that sees no key has output zero and passes no gradient
        blind = lse < score_of_hidden_key(lse.dtype if dtype == torch.bfloat16 else dtype) / 2
        o, lse = o.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, float("inf"))
    return o, lse


def _merge_segments(parts: list[SegmentAttention], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    regions = [list(group) for _, group in groupby(parts, key=lambda part: part.segment.queries)]
    if len(regions) == 1:
        return _merge_same_queries(regions[0], q, k, v)
    out: Tensor | None = None
    lse: Tensor | None = None
    for region in regions:
        o_r, lse_r = _merge_same_queries(region, q, k, v)
        if out is None or lse is None:
            lse = lse_r.new_empty(q.shape[:3])
            out = lse_r.new_empty((*q.shape[:3], v.shape[-1]))
        place = region[0].queries
        out[place], lse[place] = o_r, lse_r
    assert out is not None
    assert lse is not None
    return out, lse


def _merge_same_queries(region: list[SegmentAttention], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = region[0].forward(q, k, v)
    if len(region) > 1:
        o = o.to(lse.dtype)  # rounded once, after the merge
    for part in region[1:]:
        o_s, lse_s = part.forward(q, k, v)
        total = torch.logaddexp(lse, lse_s)
        o = o * (lse - total).exp()[..., None]
        o += o_s * (lse_s - total).exp()[..., None]
        lse = total
    return o, lse


class SegmentAttention:
    """Attention of one block of queries over one block of keys: by a fused kernel if possible, else in tiles of scores.

    ``queries`` and ``keys`` are the slices of these blocks in tensors ``[B, H, T, D]`` and ``[B, G, S, D]``.
    """

    def __init__(self, view: MaskView, segment: Segment, rule: ScoreRule, seed: int) -> None:
        self.view, self.segment, self.rule, self.seed = view, segment, rule, seed
        rows = slice(None) if segment.row is None else slice(segment.row, segment.row + 1)
        self.queries = (rows, slice(None), slice(segment.q_start, segment.q_stop))
        self.keys = (rows, slice(None), slice(segment.start, segment.stop))

    def split_keys(self, device: torch.device) -> Iterator[tuple[SegmentAttention, float]]:
        """Yield (attention over a block of the keys, count), for a backward that computes one block at a time.

        The backward of a block needs the log-sum-exp over all keys, but not the other blocks. The count is 1, except on
        ``meta``: there one block stands for all, and the count is the number of keys divided by the block size.
        """
        segment = self.segment
        size = keys_per_block(segment.q_stop - segment.q_start, device)
        if segment.causal or self.rule.dropout or segment.stop - segment.start <= size:
            yield self, 1
            return
        starts = range(segment.start, segment.stop, size)
        simulated = device.type == "meta"
        times = (segment.stop - segment.start) / size if simulated else 1
        for start in starts[:1] if simulated else starts:
            block = replace(segment, start=start, stop=min(start + size, segment.stop))
            yield SegmentAttention(self.view, block, self.rule, self.seed), times

    def covers_all(self, q: Tensor, k: Tensor) -> bool:
        """Return True if the segment contains all queries and all keys."""
        s = self.segment
        return s.row is None and (s.q_stop - s.q_start, s.stop - s.start) == (q.shape[2], k.shape[2])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output ``[B, H, T, D]`` and log-sum-exp ``[B, H, T]`` of the queries over this segment's keys only.

        The output has the dtype of ``q`` from a fused kernel, else fp32 or wider.
        """
        q, k, v, kernel = q[self.queries], k[self.keys], v[self.keys], self._fused_kernel(q, k, v)
        if kernel is not None:
            return kernel.forward(q, k, v, self._kernel_scores(q.dtype))
        return self._tiled_forward(q, k, v)

    def backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the segment's q, k and v; ``o`` and ``lse`` are the results over all keys."""
        q, k, v, kernel = q[self.queries], k[self.keys], v[self.keys], self._fused_kernel(q, k, v)
        grad_o, o, lse = grad_o[self.queries], o[self.queries], lse[self.queries].contiguous()
        if kernel is not None:
            return kernel.backward(grad_o, q, k, v, o, lse, self._kernel_scores(q.dtype))
        return self._tiled_backward(grad_o, q, k, v, o, lse)

    def lacks_fused_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return True if no fused kernel supports this segment, so that it is computed in tiles of scores."""
        return self._fused_kernel(q, k, v) is None

    def _fused_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Kernel | None:
        if self.rule.softcap is not None or self.rule.dropout > 0:
            return None
        return fused_segment_kernel(q, k, v, self.segment.masked)

    def _kernel_scores(self, dtype: torch.dtype) -> Scores:
        return Scores(self.rule.scale, self.segment.causal, self.view.additive_mask(self.segment, dtype))

    def _query_tiles(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        return block_slices(q.shape[2], TILE_ELEMENTS // (q.shape[0] * q.shape[1] * max(1, k.shape[2])))

    def _scores(self, q_BGRTD: Tensor, k: Tensor, queries: slice) -> tuple[Tensor, Tensor | None]:
        """Return the scores ``[B, G, R, T, S]`` after softcap and mask, and the derivative of the softcap.

        Both have the dtype of ``k``. The derivative is None without a softcap. R = H / G is the number of query heads
        per key head.
        """
        tile = q_BGRTD[:, :, :, queries]
        s = (tile.flatten(2, 3).to(k.dtype) @ k.mT).mul_(self.rule.scale).unflatten(2, tile.shape[2:4])
        slope = None
        if (softcap := self.rule.softcap) is not None:
            squashed = (s / softcap).tanh()
            s, slope = squashed * softcap, 1 - squashed**2
        if self.segment.causal or self.segment.masked:
            s = s.masked_fill(~self._allowed_tile(queries)[:, :, None], score_of_hidden_key(s.dtype))
        return s, slope

    def _allowed_tile(self, rows: slice) -> Tensor:
        segment, view = self.segment, self.view
        if not segment.causal:
            return view.segment_mask(segment, rows)
        first, keys = view.q_start + segment.q_start, (view.k_start + segment.start, view.k_start + segment.stop)
        return view.mask.tile(first + rows.start, first + rows.stop, *keys, segment.row)

    def _dropout_factor(self, shape: torch.Size, queries: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return a tile's dropout mask, scaled by 1 / (1 - p); it depends only on seed, segment and rows."""
        place = 1_000_003 * self.segment.start + self.segment.q_start + queries.start
        seed = (self.seed + place + (self.segment.row or 0) * (1 << 48)) % (1 << 62)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        not_dropped = torch.rand(shape, generator=generator, device=device) >= self.rule.dropout
        return not_dropped.to(dtype) / (1 - self.rule.dropout)

    def _tiled_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        q_BGRTD, k, v = q.unflatten(1, (k.shape[1], -1)), k.to(dtype), v.to(dtype)
        o, lse = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)
        for rows in self._query_tiles(q, k):
            s, _ = self._scores(q_BGRTD, k, rows)
            lse_tile = s.logsumexp(-1)
            p = s.sub_(lse_tile[..., None]).exp_()
            if self.rule.dropout:
                p = p * self._dropout_factor(p.shape, rows, p.device, dtype)
            o_tile = (p.flatten(2, 3) @ v).unflatten(2, p.shape[2:4])
            o[:, :, rows], lse[:, :, rows] = o_tile.flatten(1, 2), lse_tile.flatten(1, 2)
        return o, lse

    def _tiled_backward(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, heads = lse.dtype, (k.shape[1], -1)
        wide_k, wide_v, grad_o = k.to(dtype), v.to(dtype), grad_o.to(dtype)
        q_BGRTD, grad_BGRTD, lse_BGRT = q.unflatten(1, heads), grad_o.unflatten(1, heads), lse.unflatten(1, heads)
        delta_BGRT = (grad_o * o.to(dtype)).sum(-1).unflatten(1, heads)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for rows in self._query_tiles(q, k):
            s, slope = self._scores(q_BGRTD, wide_k, rows)
            shape, grad_tile = s.shape[2:4], grad_BGRTD[:, :, :, rows].flatten(2, 3)
            p = s.sub_(lse_BGRT[:, :, :, rows, None]).exp_()
            grad_p = (grad_tile @ wide_v.mT).unflatten(2, shape)
            weights = p
            if self.rule.dropout:
                factor = self._dropout_factor(p.shape, rows, p.device, dtype)
                grad_p, weights = grad_p * factor, p * factor
            grad_v += weights.flatten(2, 3).mT @ grad_tile
            grad_s = p * (grad_p - delta_BGRT[:, :, :, rows, None])
            grad_s = (grad_s if slope is None else grad_s * slope).mul_(self.rule.scale).flatten(2, 3)
            grad_q[:, :, rows] = (grad_s @ wide_k).unflatten(2, shape).flatten(1, 2)
            grad_k += grad_s.mT @ q_BGRTD[:, :, :, rows].flatten(2, 3).to(dtype)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def prefix_attention_reference(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    allowed_BHTS: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention computed from all scores at once with a dense boolean mask: slow, for comparison."""
    groups = q_BHTD.shape[1] // k_BGSD.shape[1]
    k, v = k_BGSD.repeat_interleave(groups, 1), v_BGSD.repeat_interleave(groups, 1)
    s = q_BHTD @ k.mT * scale
    if softcap is not None:
        s = softcap * (s / softcap).tanh()
    s = s.masked_fill(~allowed_BHTS, score_of_hidden_key(s.dtype))
    if sinks_H is not None:
        s = torch.cat([s, sinks_H[None, :, None, None].expand(*s.shape[:3], 1).to(s.dtype)], dim=-1)
    weights = s.softmax(-1)[..., : k.shape[2]]
    return (weights * allowed_BHTS.any(-1, keepdim=True)) @ v
