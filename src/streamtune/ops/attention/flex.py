"""Attention of a chunk by one ``flex_attention`` call (Dong et al., Flex Attention, arXiv 2412.05496).

The mask becomes a ``mask_mod`` function; its tiles determine which blocks are skipped. The call is compiled on CUDA.
Uncompiled flex attention would allocate all scores, so it is not used. All values that differ between chunks are passed
as tensors, because other values would compile the function again for each chunk.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental import _config as shapes
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from streamtune.ops.attention.kernel_trial import AttentionHeadCounts, Grads, draw_token_major, view_kernel_agrees
from streamtune.ops.attention.mask import LazyMask, MaskView
from streamtune.ops.attention.rules import MaskRules

log = logging.getLogger(__name__)

BLOCK = 128
"""Number of queries and of keys in a block, which is skipped, computed as a whole, or computed with its mask."""

NO_WINDOW = 1 << 62

Modifier = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexView:
    """Attention under a :class:`MaskView` by one ``flex_attention`` call; arguments as for ``prefix_attention``."""

    name = "flex"

    def __init__(self, view: MaskView, scale: float, softcap: float | None) -> None:
        self.view, self.scale, self.softcap = view, scale, softcap
        self._saved: tuple[Tensor, ...] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return output ``[B, H, T, D]`` and log-sum-exp ``[B, H, T]``; ``for_backward`` keeps the autograd graph."""
        # With a graph whenever possible, so that only one function is compiled.
        graph = for_backward or not any(x.is_inference() for x in (q, k, v))
        with torch.set_grad_enabled(graph):
            leaves = [x.detach().requires_grad_(graph) for x in (q, k, v)]
            o, lse = self._run(*leaves)
        if for_backward:
            self._saved = (*leaves, o, lse)
        return o.detach(), lse.detach()

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of q, k and v in a softmax over more keys, with output ``o`` and log-sum-exp ``lse``.

        Flex attention has softmax P, output ``o_own`` and log-sum-exp ``lse_own`` over its own keys. For the gradients
        ``a dO`` and ``g`` of these outputs, it computes ``dS = P (a dP - a rowsum(dO o_own) + g)``. With
        ``a = exp(lse_own - lse)``, ``a P`` is the softmax over all keys, whose dS is ``a P (dP - rowsum(dO o))``. So
        ``g = a rowsum(dO (o_own - o))``.
        """
        if self._saved is None:
            self.forward(q, k, v, for_backward=True)
        assert self._saved is not None
        *leaves, own_o, own_lse = self._saved
        self._saved = None
        wide = own_lse.dtype
        share = (own_lse.detach() - lse.to(wide)).exp()
        inner = (grad_o.to(wide) * (own_o.detach().to(wide) - o.to(wide))).sum(-1)
        grads = (grad_o * share[..., None]).to(own_o.dtype), share * inner
        grad_q, grad_k, grad_v = torch.autograd.grad((own_o, own_lse), leaves, grads)
        return grad_q, grad_k, grad_v

    def _run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        run: Any = _call_compiled if q.is_cuda else flex_attention
        o, aux = run(
            q, k, v, score_mod=_make_score_mod(self.softcap, q.device), block_mask=_cached_block_mask(self.view),
            scale=self.scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return o, aux.lse


MAX_LAYOUTS = 64
"""Largest number of compiled functions: one per memory layout of queries, keys and values."""


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)  # a split graph would run some parts uncompiled


def _call_compiled(*args: Any, **kwargs: Any) -> Any:
    # Sizes that are equal by chance, as for a first chunk's queries and keys, are not compiled as one size.
    distinct: Any = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    limit = torch._dynamo.config.patch(recompile_limit=MAX_LAYOUTS)
    # The compiled function depends on the state of autocast; the kernel needs no autocast.
    with distinct, limit, torch.autocast("cuda", enabled=False, cache_enabled=True):
        return _compiled_flex_attention()(*args, **kwargs)


@lru_cache(maxsize=8)
def _make_score_mod(softcap: float | None, device: torch.device) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    # a float in a closure becomes a symbol under `dynamic=True` and fails to compile
    cap = torch.tensor(softcap, device=device)

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


_masks: WeakKeyDictionary[MaskRules, dict[tuple[int, int, int, int], BlockMask]] = WeakKeyDictionary()
"""Block masks by mask and view. They are cached because all layers and the backward use the same block masks."""


def _cached_block_mask(view: MaskView) -> BlockMask:
    known = _masks.setdefault(view.mask, {})
    key = (view.q_start, view.q_stop, view.k_start, view.k_stop)
    if key not in known:
        known[key] = _make_block_mask(view)
    return known[key]


def _make_block_mask(view: MaskView) -> BlockMask:
    mask, queries, keys = view.mask, view.q_stop - view.q_start, view.k_stop - view.k_start
    partly_visible, fully_visible = [], []
    for start in range(view.q_start, view.q_stop, BLOCK):
        stop = min(start + BLOCK, view.q_stop)
        tile = mask.tile(start, stop, view.k_start, view.k_stop)[:, 0]
        tile = tile.expand(mask.batch_size, -1, -1)
        tile = torch.nn.functional.pad(tile, (0, -keys % BLOCK, 0, BLOCK - (stop - start)))
        seen = tile.unflatten(-1, (-1, BLOCK)).sum(dim=(1, 3))
        partly_visible.append((seen > 0) & (seen < BLOCK * BLOCK))
        fully_visible.append(seen == BLOCK * BLOCK)
    partial, full = _count_and_order_blocks(partly_visible), _count_and_order_blocks(fully_visible)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=_make_mask_mod(view), seq_lengths=(queries, keys)
    )


def _count_and_order_blocks(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``kv_num_blocks`` and ``kv_indices`` of a ``BlockMask``; ``rows`` marks key blocks by query block."""
    found = torch.stack(rows, dim=1)[:, None].int()
    order = found.argsort(dim=-1, descending=True, stable=True)
    return found.sum(-1, dtype=torch.int32), order.int()


def _make_mask_mod(view: MaskView) -> Modifier:
    """Return the ``mask_mod`` of ``flex_attention``; its indices count from the view's first query and first key."""
    mask = view.mask
    q_start, k_start = (_scalar_on_device(start, mask.device) for start in (view.q_start, view.k_start))
    # A mask without a window gets an unlimited window, to share a compiled function with masks that have a window.
    window = _scalar_on_device(NO_WINDOW if mask.window is None else mask.window, mask.device)
    first, block, padding = mask.first_visible_key, mask.block_start, mask.padding

    rows = None if mask.branches is None else mask.branch_tensors

    def allowed(b: Tensor, h: Tensor, q_place: Tensor, k_place: Tensor) -> Tensor:
        q, k = q_place + q_start, k_place + k_start
        own = None
        if rows is not None:
            positions, (part, *trunk) = rows
            own = (k >= part[q]) & (k <= q)
            for start, stop in zip(trunk[::2], trunk[1::2], strict=True):
                own = own | ((k >= start[q]) & (k < stop[q]))
            q, k = positions[q], positions[k]
        near = q - k < window
        seen = k <= q if mask.causal else q == q
        seen = (seen if own is None else seen & own) & near
        if first is not None:
            seen = seen & (k >= _value_in_row(first, b, q))
        if mask.function is not None:
            seen = seen & mask.function(b, h, q, k)
        if block is not None:
            mutual = _value_in_row(block, b, q) == _value_in_row(block, b, k)
            seen = seen | (mutual & near if mask.window_cuts_blocks else mutual)
        return seen if padding is None else seen & _value_in_row(padding, b, k)

    return allowed


def _scalar_on_device(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, device=device)


def _value_in_row(x_BL: Tensor, b: Tensor, place: Tensor) -> Tensor:
    return x_BL[b, place] if x_BL.shape[0] > 1 else x_BL[0, place]


@lru_cache(maxsize=64)
def is_flex_correct(device: torch.device, dtype: torch.dtype, heads: AttentionHeadCounts, softcapped: bool) -> bool:
    """Return True if flex attention agrees with the attention formula in fp64 on two small random problems.

    The problems have packed rows, a sliding window and an attention sink.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's warnings
            right = all(_flex_agrees(device, dtype, heads, softcapped, *sizes) for sizes in ((136, 200), (300, 300)))
    except Exception as error:  # the compiler may raise anything
        log.info("flex attention is not used: %s: %s", type(error).__name__, error)
        right = False
    log.info("flex attention, %s, heads of %d: %s", dtype, heads.size, "used" if right else "not used")
    return right


def _flex_agrees(
    device: torch.device, dtype: torch.dtype, heads: AttentionHeadCounts, softcapped: bool, queries: int, keys: int
) -> bool:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((heads.queries, queries), (heads.groups, keys), (heads.groups, keys), (heads.queries, queries))
    q, k, v, grad = (draw_token_major(generator, dtype, 2, *shape, heads.size) for shape in shapes)
    offset, softcap, scale = keys - queries, 5.0 if softcapped else None, heads.size**-0.5
    starts = torch.arange(keys, device=device) // 90 * 90
    mask = LazyMask(2, queries, keys, q_offset=offset, window=70, row_start=starts[None], device=device)
    flex = FlexView(mask.view_queries(0, queries), scale, softcap)
    return view_kernel_agrees(flex, (q, k, v, grad), mask.tile(offset, keys, 0, keys), scale, softcap)
