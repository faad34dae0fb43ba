"""The cache that a layer is given for one chunk, through which it reads and writes what is passed between chunks.

An attention layer calls ``update(k, v)``, which stores the chunk's keys and values and returns those of prefix and
chunk together. A recurrent or convolution layer asks for the state after the prefix (``get_recurrent_state``,
``get_conv_state``) and stores its own. :class:`ChunkCache` does both, in each pass over the chunks:

    store      forward: write k_i, v_i and the state after chunk i, and return [prefix | own] and the state before i
    project    backward, first: write k_i, v_i again, and leave the layer after the last of them
    recompute  backward in the order of chunks: as store for keys and values; states are there already
    replay     backward: return [prefix | own] and the state before i, where prefix and state are leaves, so that their
               gradients can be computed

Keys and values are computed again in the backward, because they are as long as the sequence. States are kept from the
forward, one of a fixed size for each chunk.

Two families are handed their state as an argument and return it; the cache keeps it like other states:

    xLSTM   ``x, (c, n, m) = layer(x, state=(c, n, m))``
    RWKV    ``state[i][:, :, layer_id]`` is read and written for i = 0..4, tensors of all layers

Shape suffixes: B batch, G key/value heads, S tokens of prefix and chunk, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, Literal
from weakref import proxy

import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import CACHE, CACHE_CLASS, RWKV_KERNEL, RWKV_LAYER, RWKV_SIZE, inside
from streamtune.engine.kv import KeysAndValues, StateKey, States, refuse_past
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import autocast_kind

Pass = Literal["store", "project", "recompute", "replay", "whole"]


class ProjectionDone(BaseException):
    """Raised after the layer's last key/value update in ``project``: the rest of its forward is not needed."""


class ChunkCache(inside(CACHE_CLASS)):  # type: ignore[misc]
    """The cache that one layer is given for one chunk.

    Args:
        kv: Keys and values of the layer.
        states: States of the layer.
        chunk: Positions of the chunk.
        first_key: First position that the chunk can see (later than 0 under a sliding window).
        pass_name: Pass in which the layer runs.
        exchange: Exchange between the ranks that share the sequence, if they do.
    """

    def __init__(
        self,
        kv: KeysAndValues,
        states: States,
        chunk: slice,
        first_key: int,
        pass_name: Pass,
        exchange: ChunkExchange | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.exchange = exchange
        self.kv, self.states, self.chunk, self.pass_name = kv, states, chunk, pass_name
        self.first_key = min(first_key, chunk.start)
        self.layers = _LayerViews(proxy(self))  # a cycle would keep the chunk until the next garbage collection
        self.own: list[Tensor] = []
        self.prefix_leaves: list[Tensor] = []
        self.own_states: dict[StateKey, Tensor] = {}
        self.sent_states: list[Tensor] = []
        self.state_leaves: dict[StateKey, Tensor] = {}
        self.updates = 0
        self.met_states = False
        """True if the layer has read or written a state."""

    # What the engine asks.

    @property
    def prefix_keys(self) -> slice:
        """Positions of the prefix the chunk can see."""
        return slice(self.first_key, self.chunk.start)

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that the chunk read of earlier ones, in the order of their gradients in :meth:`hand_back`."""
        return [*self.prefix_leaves, *self.state_leaves.values()]

    def handed_on(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors that later chunks read of this one, each with its gradient, complete when all have run."""
        if self.kv.grads_begun:
            grads = [grad for index in range(self.kv.updates) for grad in self.kv.grad(index, self.chunk)]
            for own, grad in zip(self.own, grads, strict=True):
                yield own, grad.to(own.dtype)
        if not self.met_states:
            return
        for key, grad in self.states.grads.pop(self._place[1], {}).items():
            yield self.own_states[key], grad
        for sent in self.sent_states:
            yield sent, torch.zeros_like(sent)

    def hand_back(self, grads: Iterator[Tensor | None]) -> None:
        """Add the gradients of :attr:`leaves` to those kept for the chunks that made them."""
        for index in range(len(self.prefix_leaves) // 2):
            for total in self.kv.grad(index, self.prefix_keys):
                if (part := next(grads)) is not None:
                    total += part
        parts = {key: next(grads) for key in self.state_leaves}
        if self.met_states:
            self.states.hand_back(self._own, *self._place, parts)

    def close(self) -> None:
        """End the chunk's forward: the layer asks for no more states and makes no more."""
        if self.met_states and self.pass_name == "store":
            self.states.close(*self._place)

    @property
    def _own(self) -> slice:
        """The chunk; if ranks share the sequence, its places among this rank's own tokens."""
        return self.chunk if self.exchange is None else self.exchange.part

    @cached_property
    def _place(self) -> tuple[int | None, int]:
        return self.states.place(self._own)

    # What an attention layer asks.

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store or join keys and values, depending on the pass; return those ``[B, G, S, D]`` of prefix and chunk."""
        index, self.updates = self.updates, self.updates + 1
        if self.kv.past is not None and layer_idx != self.kv.past.layer_idx:
            refuse_past(f"layer {self.kv.past.layer_idx} keeps its keys under number {layer_idx}", CACHE)
        key_states, value_states = _attended_dtype(key_states), _attended_dtype(value_states)
        if self.exchange is not None:
            if self.met_states:
                self.states.meet_keys()
            key_states, value_states = self.exchange.keys_and_values(key_states, value_states)
        if self.pass_name in ("store", "project", "recompute"):
            self.kv.write(index, self.chunk, key_states, value_states)
            if self.pass_name == "project" and self.updates == self.kv.updates:
                raise ProjectionDone
            return self._handed(self.kv.prefix(index, slice(self.first_key, self.chunk.stop)))
        self.own += [key_states, value_states]
        if self.chunk.start == 0:
            return self._handed((key_states, value_states))
        self.kv.open(index, key_states, value_states)
        before = _Prefix(self.kv, index, self.prefix_keys, (key_states, value_states))
        trained = key_states.requires_grad or value_states.requires_grad  # else attention has no node of its own
        joined = []
        views = zip(self.kv.prefix(index, self.prefix_keys), (key_states, value_states), strict=True)
        for position, (prefix, own) in enumerate(views):
            leaf = prefix.detach().requires_grad_()
            self.prefix_leaves.append(leaf)
            buffer = self.kv.pairs[index][position]
            place = self.kv.at(slice(self.first_key, self.chunk.stop))
            joined.append(_Join.apply(leaf, own, (buffer, place)))
            if trained or self.kv.past is None:
                joined[-1].streamtune_prefix = before  # for an attention that is handed this very tensor
        return tuple(joined)

    def _handed(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.exchange is not None:
            self.exchange.returned = pair
        return pair

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Update with the keys ``[B, S, D]`` by which a layer chooses the tokens it attends to: one head, no values."""
        if self.exchange is not None:
            raise UnsupportedModelError(
                "a layer chooses whom it attends to by an indexer, which ranks that share a sequence do not have",
                fix="set sequence_parallel_size: 1",
            )
        keys = indexer_key_states[:, None]
        joined, _ = self.update(keys, keys[..., :0], layer_idx)
        return joined[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the chunk; if ranks share the sequence, before this rank's shard."""
        return self.chunk.start if self.exchange is None else self.exchange.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return ``(kv_length, kv_offset)`` of the keys that the chunk attends to."""
        return self.chunk.stop - self.first_key, self.first_key

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the chunk's first token."""
        return self.get_seq_length(layer_idx)

    # What a recurrent or convolution layer asks.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs ``[B, C, K]`` of a causal convolution before the chunk, None at a row's start."""
        return self._before(("conv", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the chunk's inputs ``[B, C, T]`` behind those kept from before; keep the last K for the next chunk.

        At the start of a row K is ``conv_kernel_size``, or the number of inputs if that is None. Fewer inputs than K
        are padded with zeros.
        """
        key = ("conv", layer_idx, state_idx)
        before = self._before(key)
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            full = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            full = torch.cat([before, conv_states], dim=-1)
        self._keep(key, full[..., full.shape[-1] - size :])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state after the tokens before the chunk, None at the start of a row."""
        return self._before(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the state after the chunk for the next one."""
        self._keep(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the one recurrent state, under MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Keep the one recurrent state, under MiniMax's name."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if earlier tokens of the row left a state."""
        after = self._place[0]
        return after is not None and (self.exchange is not None or self.states.known(after))

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: a chunk of one token must not take the decoding path, which writes its state in place."""
        return True

    def _meet_states(self) -> None:
        self.met_states = True
        if self.kv.past is not None:
            refuse_past("a layer carries a state from token to token", CACHE)
        if self.updates:
            self.states.meet_keys()
        self.states.meet(self.pass_name == "whole")

    def _before(self, key: StateKey) -> Tensor | None:
        self._meet_states()
        (after, _), rows = self._place, self.states.rows
        if after is None:
            return None
        if self.pass_name == "store":
            self.states.receive(after, key)
        state = self.state_leaves.get(key)  # one tensor for all that the chunk reads of a state
        if state is None and (state := self.states.before(after, key)) is None:
            return None
        if self.pass_name == "replay" and state.is_floating_point() and key not in self.state_leaves:
            state = self.state_leaves[key] = state.detach().requires_grad_()
            self.states.watch(self._own, after, key, state)
        start = self.chunk.start if self.exchange is None else self.exchange.start
        return state if rows is None or start not in rows.starts else rows.without_begun(state, start)

    def _keep(self, key: StateKey, state: Tensor) -> None:
        self._meet_states()
        self.states.met = True
        position = self._place[1]
        if self.pass_name == "replay":
            self.own_states[key] = state
            if (sent := self.states.handed_to_ranks(position, key, state)) is not None:
                self.sent_states.append(sent)
        elif self.pass_name == "store":
            self.states.keep(position, key, state.detach())


class _Prefix:
    """Prefix of one update, in the form in which :func:`streamtune.ops.prefix_attention` adds its gradient."""

    def __init__(self, kv: KeysAndValues, index: int, keys: slice, own: tuple[Tensor, Tensor]) -> None:
        self.kv, self.index, self.keys, self.own = kv, index, keys, own
        self.length = keys.stop - keys.start

    def begin(self) -> None:
        self.kv.grad(self.index, self.keys)

    def add(self, place: tuple[slice, slice, slice], grad_k: Tensor, grad_v: Tensor) -> None:
        for total, grad in zip(self.kv.grad(self.index, self.keys), (grad_k, grad_v), strict=True):
            total[place] += grad


def prefix_of(key: Tensor, value: Tensor) -> _Prefix | None:
    """Return the prefix that keys and values begin with, if an ``update`` returned them; else None."""
    prefix: _Prefix | None = getattr(key, "streamtune_prefix", None)
    return prefix if prefix is getattr(value, "streamtune_prefix", None) else None


class _LayerViews:
    """The list ``cache.layers``: transformers 5.17 reads ``conv_states[j]``, ``recurrent_states[j]`` of its items."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 0

    def __getitem__(self, layer_idx: int) -> _LayerView:
        return _LayerView(self.cache, layer_idx)


class _UnknownStateError(UnsupportedModelError, AttributeError):
    """Error for a state of another kind; also an ``AttributeError``, so that ``hasattr`` of the cache works."""


class _LayerView:
    record_past = True

    def __init__(self, cache: ChunkCache, layer_idx: int) -> None:
        self.conv_states = _StateViews(partial(cache.get_conv_state, layer_idx))
        self.recurrent_states = _StateViews(partial(cache.get_recurrent_state, layer_idx))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _UnknownStateError(
            f"a layer asks its cache for {name!r}, a state of a kind of its own, which is not streamed in this release",
            fix="train this model without streaming",
        )


class _StateViews:
    def __init__(self, get: Callable[[int], Tensor | None]) -> None:
        self.get = get

    def __getitem__(self, state_idx: int) -> Tensor | None:
        return self.get(state_idx)


def _attended_dtype(x: Tensor) -> Tensor:
    """Cast keys or values to autocast's dtype: rotary embeddings widen them, and attention narrows them again."""
    kind = autocast_kind(x.device)
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _Join(torch.autograd.Function):
    """``cat([prefix, own], dim=2)`` without a copy of the prefix: the layer's buffer has room for ``own`` behind it."""

    @staticmethod
    def forward(ctx: Any, prefix: Tensor, own: Tensor, place: tuple[Tensor, slice]) -> Tensor:
        buffer, keys = place  # in a tuple, so that autograd does not take the result for a view of an input
        ctx.split = prefix.shape[2]
        joined = buffer[:, :, keys]
        joined[:, :, ctx.split :] = own
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[:, :, : ctx.split], grad[:, :, ctx.split :], None


XLSTM_STATES, RWKV_STATES = 3, 5
NOTHING = -1e30
"""Largest exponent of RWKV's state before any token."""


def state_before(layer: nn.Module, cache: ChunkCache, hidden: Tensor) -> Any:
    """Return the state argument for a chunk: what the chunk before left."""
    if not hasattr(layer, RWKV_LAYER):
        parts = [cache.get_recurrent_state(0, index) for index in range(XLSTM_STATES)]
        return None if parts[0] is None else tuple(parts)
    if hidden.is_cuda and getattr(sys.modules[type(layer).__module__], RWKV_KERNEL, None) is not None:
        raise UnsupportedModelError(
            "the CUDA kernel of RWKV gives no gradient of the state that it begins with",
            where=type(layer).__name__,
            fix="train this model without streaming",
        )
    known = [cache.get_recurrent_state(0, index) for index in range(RWKV_STATES)]
    alone = hidden.shape[1] == 1  # then the last token takes the place of a shifted sequence [B, T, C]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    attended = int(getattr(layer.attention, RWKV_SIZE))
    sizes = [(hidden.shape[2], hidden.dtype)] * 2 + [(attended, wide)] * 3
    begin = [hidden.new_zeros((hidden.shape[0], size), dtype=dtype) for size, dtype in sizes]
    begin[4] = begin[4] + NOTHING
    columns = [new if old is None else old for old, new in zip(known, begin, strict=True)]
    return [_Column(x[:, None] if alone and index < 2 else x) for index, x in enumerate(columns)]


def state_after(layer: nn.Module, cache: ChunkCache, given: Any, out: Any) -> Any:
    """Keep the state that a chunk left, and return its output without it; ``given`` comes from :func:`state_before`."""
    parts = [column.x for column in given] if isinstance(given, list) else out[1]
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
        raise UnsupportedModelError(
            f"{type(layer).__name__} does not give back its state, which the next chunk needs",
            fix="set config.mode = 'inference', which computes the same and returns it",
        )
    for index, part in enumerate(parts):
        cache.update_recurrent_state(part, 0, index)
    return (out[0], None, *out[2:])


class _Column:
    """One layer's part of a tensor ``[B, C, layers]``, read and written whole, without an operation in place."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, key: Any) -> Tensor:
        return self.x

    def __setitem__(self, key: Any, x: Tensor) -> None:
        self.x = x
