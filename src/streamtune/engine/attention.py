"""The two functions that ``transformers`` looks up by name: attention of a chunk, and the mask that it reads.

Both are registered under :data:`NAME` when the engine is imported. A model uses them while its config names this
attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from streamtune.engine.cache import attached_prefix_grads
from streamtune.engine.context import ChunkContext
from streamtune.engine.hf_names import CAUSAL_MASK, UNREAD_ARGUMENTS, hf_internal
from streamtune.engine.masks import recognise_mask
from streamtune.engine.memory.tiers import Block, Tier
from streamtune.engine.observe import notify_tensors
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.errors import UnsupportedModelError
from streamtune.ops import LazyMask, MaskView, prefix_attention
from streamtune.ops.attention.mask import HIGHEST_HIDDEN
from streamtune.ops.attention.ring import ring_attention
from streamtune.ops.attention.rules import NeedsMaskTensorError
from streamtune.ops.devices import autocast_device_type

NAME = "streamtune"
"""Name of the attention implementation in a model's config."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskView | LazyMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention output of a chunk's queries; ``transformers`` calls it as an ``AttentionInterface``.

    The output is ``(softmax(q @ k.T * scaling + mask) @ v).transpose(1, 2)`` ``[B, T, H, D]``. The matrix of attention
    weights is never built.

    Args:
        module: Attention module that calls this function.
        query: Queries ``[B, H, T, D]`` of the chunk.
        key, value: Keys and values ``[B, G, S, D]`` of earlier chunks and of this chunk.
        attention_mask: Mask of this chunk, ``LazyMask`` of the whole call, dense mask, or None (then ``is_causal``
            counts).
        scaling: Factor on the scores; None is ``D ** -0.5``.
        dropout: Probability with which an attention weight is dropped.
        softcap: Bound c of the scores: ``c * tanh(score / c)``.
        s_aux: Attention sink logits ``[H]``, one per head.
        is_causal: True for a causal mask if no mask is given; None reads ``module.is_causal``.
        **kwargs: Other arguments of the layer. A tensor with a name that StreamTune does not know raises an error.

    Raises:
        NeedsMaskTensorError: The layer adds a bias to its scores, or selects its keys, in an unsupported way.
        UnsupportedModelError: Ranks share the sequence, and the attention is not causal or has a dense mask.
    """
    for name, more in kwargs.items():
        if isinstance(more, Tensor) and name not in UNREAD_ARGUMENTS:
            raise NeedsMaskTensorError(
                f"{type(module).__name__} passes {name!r} to its attention, which streaming does not support"
            )
    kind = autocast_device_type(query.device)
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    chunk = ChunkContext.current()
    options: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks_H": s_aux,
        "dropout": dropout,
        "memory": chunk.outputs,
        "prefix": attached_prefix_grads(key, value),
    }
    if chunk.exchange is None:
        out = prefix_attention(query, key, value, _as_mask_view(attention_mask, query, key, bool(causal)), **options)
        if isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool:
            out = _average_fully_masked_queries(out, value, attention_mask)
    else:
        name = type(module).__name__
        if isinstance(attention_mask, Tensor) or not causal:
            raise UnsupportedModelError(
                f"{name} uses a dense or non-causal mask, which sequence parallelism does not support", where=name
            )
        out = _attend_across_ranks(chunk.exchange, name, (query, key, value), attention_mask, options)
    return out.transpose(1, 2).contiguous(), None  # contiguous as for sdpa: some layers take a view of it


def _average_fully_masked_queries(output: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return ``output`` ``[B, H, T, D]``, with the mean of all values for each query whose keys are all masked.

    Softmax gives this mean if the mask adds the lowest finite number to all scores. Such queries occur only in dense
    masks that a model builds itself, for example in a cross-attention outside the decoder layers.
    """
    hidden = (mask <= torch.finfo(mask.dtype).min).all(-1, keepdim=True) & mask.isfinite().all(-1, keepdim=True)
    if not bool(hidden.any()):
        return output
    mean = value.mean(2, keepdim=True).repeat_interleave(output.shape[1] // value.shape[1], 1)
    return torch.where(hidden, mean.to(output.dtype), output)


def _attend_across_ranks(
    exchange: ChunkExchange,
    module_name: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: MaskView | LazyMask | None,
    options: dict[str, Any],
) -> Tensor:
    if not exchange.uses_ring:
        query, key, value = exchange.exchange_heads(*qkv, module_name)
        options["sinks_H"] = exchange.sinks_of_rank(options["sinks_H"])
        return exchange.exchange_heads_back(
            prefix_attention(query, key, value, _as_mask_view(mask, query, key, True), **options)
        )
    rules = mask.mask if isinstance(mask, MaskView) else mask
    if rules is None:
        query, length = qkv[0], exchange.shards.padded_length
        rules = LazyMask(query.shape[0], length, length, device=query.device)
    return ring_attention(*qkv, rules, exchange.ring_layout, **options)


class BiasError(NeedsMaskTensorError):
    """Raised if a dense mask has values other than 0 and -inf, or differs between heads.

    Only eager attention supports such a mask.
    """


def _as_mask_view(mask: MaskView | LazyMask | Tensor | None, query: Tensor, key: Tensor, causal: bool) -> MaskView:
    """Return a mask as a ``MaskView``. For None, the last query and the last key have the same position."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if isinstance(mask, MaskView):
        return mask
    if isinstance(mask, LazyMask):
        return mask.view_queries(0, mask.q_length)
    if isinstance(mask, Tensor):
        return lazy_mask_from_dense(mask).view_queries(0, queries)
    if mask is not None:
        raise UnsupportedModelError(
            f"attention gets a mask of type {type(mask).__name__}, which streaming does not support",
            fix="pass a padding mask [B, T] or a dense mask [B, 1, T, T]",
        )
    lazy = LazyMask(batch, queries, keys, q_offset=keys - queries, causal=causal, device=query.device)
    return lazy.view_queries(0, queries)


def lazy_mask_from_dense(mask: Tensor) -> LazyMask:
    """Convert a dense mask ``[B, 1, T, S]`` to a ``LazyMask``, the form that the streamed attention reads.

    The dense mask is boolean (True: allowed) or additive (0: allowed, -inf: masked).

    Raises:
        BiasError: The mask has other values, or differs between heads.
    """
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((allowed | (mask <= HIGHEST_HIDDEN)).all()):
        raise BiasError("a dense attention mask has values other than 0 and -inf, so it is a bias")
    if allowed.shape[1] != 1:
        raise BiasError("a dense attention mask differs between heads")
    return LazyMask.from_dense(allowed)


def lazy_mask_from_blocks(mask: BlockMask) -> LazyMask:
    """Convert a mask of ``flex_attention`` to a ``LazyMask``; its last query and last key are the same token.

    Raises:
        UnsupportedModelError: The mask differs between heads.
    """
    rows, heads, queries, keys = mask.shape
    if heads != 1:
        raise UnsupportedModelError(
            f"a BlockMask has a mask for each of {heads} heads, which streaming does not support",
            fix="pass a dense mask [B, H, T, T]",
        )
    visible_blocks, (q_size, k_size), offset = mask.to_dense().bool(), mask.BLOCK_SIZE, keys - queries

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q - offset
        return visible_blocks[b, h, q // q_size, k // k_size] & mask.mask_mod(b, h, q, k)

    device = visible_blocks.device
    return LazyMask(
        rows, queries, keys, q_offset=offset, causal=False, function=function, vectorize=True, device=device
    )


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = hf_internal(CAUSAL_MASK),  # noqa: B008
    attention_mask: Tensor | LazyMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LazyMask:
    """Return a mask without its ``[T, S]`` tensor; ``transformers`` calls it as an ``AttentionMaskInterface``.

    Rules in ``mask_function`` that are recognised (causal, window, packed rows, blocks) become fields of the
    ``LazyMask``. Its other rules stay a function of positions.
    """
    if isinstance(attention_mask, LazyMask):  # built by an outer model
        return attention_mask
    device = torch.device(device)
    facts = recognise_mask(mask_function, int(kv_offset) + int(kv_length), device)
    padding = attention_mask
    if padding is not None:
        padding = padding.bool()
        if padding.shape[1] < kv_offset + kv_length:  # a static cache has room for more tokens: mask them
            missing = kv_offset + kv_length - padding.shape[1]
            padding = torch.nn.functional.pad(padding, (0, missing), value=False)
    return LazyMask(
        int(batch_size),
        int(q_length),
        int(kv_length),
        int(q_offset),
        int(kv_offset),
        causal=facts.causal,
        window=facts.window,
        function=facts.function,
        padding=padding,
        vectorize=use_vmap,
        device=device,
        row_start=facts.row_start,
        span_start=facts.span_start,
        block_start=facts.block_start,
        window_cuts_blocks=facts.window_cuts_blocks,
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lazy_mask)


class SavedAttention:
    """Stores output o and log-sum-exp (lse) of each attention of a layer call, by chunk, on the device or host."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.blocks: dict[tuple[int, int], tuple[Block, Block]] = {}
        self._next: dict[int, int] = {}

    def set_read_order(self, chunks: Sequence[slice]) -> None:
        """Set the order in which the backward will read the chunks, so that the next chunk's outputs are prefetched."""
        starts = [chunk.start for chunk in chunks]
        self._next = dict(pairwise(starts))


class SavedOutputs:
    """Saved outputs of the attentions that a layer computes on one chunk, read in the order of their computation.

    ``last_read`` is True if the layer runs on this chunk for the last time. Each output is then freed once it is read.
    """

    def __init__(self, saved: SavedAttention, start: int, last_read: bool) -> None:
        self.saved, self.start, self.last_read, self.index = saved, start, last_read, -1

    def read_output(self) -> tuple[Tensor, Tensor] | None:
        """Return output o and log-sum-exp of the layer's next attention; None if they were not saved."""
        self.index += 1
        blocks = self.saved.blocks.get((self.start, self.index))
        if blocks is None:
            return None
        o, lse = (block.get() for block in blocks)
        if self.last_read:
            for block in self.saved.blocks.pop((self.start, self.index)):
                block.free()
            for block in self.saved.blocks.get((self.saved._next.get(self.start, -1), self.index), ()):
                block.prefetch_to_device()
        return o, lse

    def save_output(self, o: Tensor, lse: Tensor) -> None:
        """Save output o and log-sum-exp of the attention for which :meth:`read_output` has just returned None."""
        notify_tensors("attention output", o, lse)
        self.saved.blocks[self.start, self.index] = self.saved.tier.put(o), self.saved.tier.put(lse)
