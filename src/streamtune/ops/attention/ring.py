"""Ring attention: ranks send the keys and values of their tokens around a ring.

At step s, a rank has the keys and values (the block) of the rank s places before it. It attends to the keys that its
queries see, and merges the result by the log-sum-exp. Meanwhile it sends the block to the next rank and receives the
next block (Liu et al., Ring Attention, arXiv 2310.01889; Li et al., DISTFLASHATTN, arXiv 2310.03294). In the backward,
dK and dV travel with their block. Every rank has some tokens (a shard) of every chunk, which balances causal work.

Shape suffixes: B batch, H query heads, G key/value heads, T queries, N keys of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.ops.attention.attention import (
    Memory,
    Prefix,
    SegmentAttention,
    finish_attention,
    sinks_gradient,
    without_autocast,
)
from streamtune.ops.attention.kernel_trial import ScoreRule
from streamtune.ops.attention.mask import MaskView, Segment
from streamtune.ops.attention.rules import MaskRules
from streamtune.ops.devices import autocast_device_type
from streamtune.ops.exchange import start_ring_exchange
from streamtune.ops.first_order import first_order

ShardPlaces = tuple[slice, slice]
"""Two slices for a shard: in a rank's tensor of concatenated shards, and in the sequence."""


@dataclass(frozen=True)
class Ring:
    """The ranks of ring attention, and where their queries and keys are in the sequence.

    Args:
        group: Process group of the ranks.
        queries: Shards of this rank's queries, as pairs of slices (:data:`ShardPlaces`).
        keys: Function from a rank to the shards of its keys, in order. Shards have equal lengths on all ranks.
    """

    group: Any
    queries: Sequence[ShardPlaces]
    keys: Callable[[int], Sequence[ShardPlaces]]

    def source_ranks(self) -> list[int]:
        """Return, for each step of the ring, the rank whose keys this rank has; the first is this rank itself."""
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        return [(rank - step) % size for step in range(size)]


def ring_attention(
    q_BHTD: Tensor,
    k_BGND: Tensor,
    v_BGND: Tensor,
    mask: MaskRules,
    ring: Ring,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    dropout: float = 0.0,
    memory: Memory | None = None,
    prefix: Prefix | None = None,
) -> Tensor:
    """Return the attention of this rank's queries over the keys of all ranks (ring attention).

    Args:
        q_BHTD: Queries of this rank.
        k_BGND, v_BGND: Keys and values of this rank: the prefix, followed by the chunk's own.
        mask: Mask of the whole sequence; no query sees a later key.
        ring: Ranks, and the places of their queries and keys.
        scale, softcap, sinks_H, dropout, memory: Arguments of :func:`streamtune.ops.prefix_attention`.
        prefix: Keys and values before the chunk that this rank has, with buffers for their gradients.
    """
    with torch.autocast(autocast_device_type(q_BHTD.device), enabled=False):
        own: tuple[Tensor | None, Tensor | None] = (None, None)
        if prefix is not None:
            own, k_BGND, v_BGND = prefix.own, k_BGND.detach(), v_BGND.detach()
        seed = int(torch.randint(1 << 62, ())) if dropout else 0
        settings = _RingSettings(mask, ring, ScoreRule(scale, softcap, dropout), prefix, memory, seed)
        out: Tensor = _RingAttention.apply(settings, q_BHTD, k_BGND, v_BGND, sinks_H, *own)
        return out


@dataclass(frozen=True)
class _RingSettings:
    mask: MaskRules
    ring: Ring
    rule: ScoreRule
    prefix: Prefix | None
    memory: Memory | None
    seed: int

    def segments_of_block(self, source_rank: int) -> Iterator[tuple[SegmentAttention, slice, slice]]:
        for q_at, q in self.ring.queries:
            for k_at, view, segment in _visible_segments(self.mask, q, self.ring.keys(source_rank)):
                seed = (self.seed + 1_000_033 * (view.k_start * 31 + q.start)) % (1 << 62)
                yield SegmentAttention(view, segment, self.rule, seed), q_at, k_at


def _visible_segments(
    mask: MaskRules, q: slice, shards: Sequence[ShardPlaces]
) -> Iterator[tuple[slice, MaskView, Segment]]:
    """Yield (slice of a rank's keys, mask view, segment) for the keys that queries ``q`` see.

    Adjacent shards without a mask are joined.
    """
    run: tuple[slice, MaskView, Segment] | None = None
    for k_at, k in shards:
        if k.start >= q.stop:
            break
        view = MaskView(mask, q.start, q.stop, k.start, k.stop)
        spans_other_shards = mask.branches is not None and k.stop > q.start  # a branch's trunk lies in other shards
        segments = view.examined_segments() if spans_other_shards else view.segments()
        plain = len(segments) == 1 and k.stop <= q.start and not segments[0].masked
        if plain and run is not None and run[0].stop == k_at.start:
            joined = slice(run[0].start, k_at.stop)
            run = joined, run[1], Segment(0, joined.stop - joined.start, 0, q.stop - q.start)
            continue
        if run is not None:
            yield run
        run = (k_at, view, segments[0]) if plain else None
        if not plain:
            yield from ((k_at, view, segment) for segment in segments)
    if run is not None:
        yield run


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _RingSettings, *tensors: Tensor) -> Tensor:
        q, k, v, sinks, _, _ = tensors  # the chunk's own keys and values are inputs only for their gradients
        memory = settings.memory
        known = None if memory is None else memory.read_output()
        o, lse = _ring_forward(q, k, v, sinks, settings) if known is None else known
        if known is None and memory is not None:
            memory.save_output(o, lse)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.settings = settings
        return o.detach() if o.dtype == q.dtype else o.to(q.dtype)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        settings: _RingSettings = ctx.settings
        prefix = settings.prefix
        grad_q, grad_k, grad_v = _ring_backward(grad_o, (q, k, v, o, lse), settings)
        grad_sinks = sinks_gradient(grad_o, sinks, o, lse) if ctx.needs_input_grad[4] else None
        if prefix is None:
            return None, grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, None, None
        before = prefix.length
        place = (slice(None), slice(None), slice(0, before))
        prefix.add_grads(place, grad_k[:, :, :before], grad_v[:, :, :before])
        own = [grad[:, :, before:].to(x.dtype) for grad, x in ((grad_k, k), (grad_v, v))]
        return None, grad_q, None, None, grad_sinks, *own


def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, settings: _RingSettings
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    fused, block, source_ranks = False, [k, v], settings.ring.source_ranks()
    for source_rank in source_ranks:
        next_block, works = (
            start_ring_exchange(block, settings.ring.group) if source_rank != source_ranks[-1] else (block, [])
        )
        for part, q_at, k_at in settings.segments_of_block(source_rank):
            seen_k, seen_v = block[0][:, :, k_at], block[1][:, :, k_at]
            fused = fused or not part.lacks_fused_kernel(q[:, :, q_at], seen_k, seen_v)
            o_s, lse_s = part.forward(q[:, :, q_at], seen_k, seen_v)
            _merge_in_place(o[:, :, q_at][part.queries], lse[:, :, q_at][part.queries], o_s, lse_s)
        for work in works:
            work.wait()
        block = next_block
    o, lse = finish_attention(o, lse, sinks, q.dtype, may_see_no_key=True)
    return (o.to(q.dtype) if fused else o), lse


def _merge_in_place(o: Tensor, lse: Tensor, o_s: Tensor, lse_s: Tensor) -> None:
    total = torch.logaddexp(lse, lse_s)
    o.mul_((lse - total).exp()[..., None]).add_(o_s * (lse_s - total).exp()[..., None])
    lse.copy_(total)


def _ring_backward(
    grad_o: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], settings: _RingSettings
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, lse = saved
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.zeros_like(q, dtype=wide)
    grads, block = [torch.zeros_like(x, dtype=wide) for x in (k, v)], [k, v]
    source_ranks = settings.ring.source_ranks()
    for source_rank in source_ranks:
        is_last = source_rank == source_ranks[-1]
        next_block, works = (block, []) if is_last else start_ring_exchange(block, settings.ring.group)
        for whole, q_at, k_at in settings.segments_of_block(source_rank):
            grad_o_here, q_here, o_here, lse_here = (x[:, :, q_at] for x in (grad_o, q, o, lse))
            k_here, v_here = (x[:, :, k_at] for x in block)
            for part, _ in whole.split_keys(q.device):
                terms = part.backward(grad_o_here, q_here, k_here, v_here, o_here, lse_here)
                grad_q[:, :, q_at][part.queries] += terms[0]
                for total, term in zip(grads, terms[1:], strict=True):
                    total[:, :, k_at][part.keys] += term
        for work in works:
            work.wait()
        grads, works = start_ring_exchange(grads, settings.ring.group)
        for work in works:
            work.wait()
        block = next_block
    return grad_q.to(q.dtype), grads[0], grads[1]
