"""The cache that a layer gets for one chunk: it gives access to the chunk's prefix, the tokens of earlier chunks.

An attention layer calls ``update(k, v)``, which stores the chunk's keys and values and returns the keys and values of
prefix and chunk. A recurrent or convolution layer reads the state after the prefix (``get_recurrent_state``,
``get_conv_state``) and stores the state after the chunk. :class:`ChunkCache` supports both, in each pass:

    store      forward: write k_i, v_i and the state after chunk i; return [prefix | chunk] and the state before i
    project    backward, first: write k_i, v_i again; stop the layer after the last update
    recompute  backward with ``order="chunk"``: like store for keys and values; states were saved in the forward
    replay     backward: return [prefix | chunk] and the state before i. Prefix and state are leaves, so that their
               gradients can be computed

Keys and values are recomputed in the backward by default, because they grow with the sequence. States have a fixed size
and are saved in the forward, one per chunk.

xLSTM and RWKV take their state as an argument and return it. The cache stores it like other states:

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

from streamtune.engine.hf_names import CACHE, CACHE_CLASS, RWKV_KERNEL, RWKV_LAYER, RWKV_SIZE, hf_internal
from streamtune.engine.kv import KeysAndValues, StateKey, States, refuse_filled_cache, version_counter
from streamtune.engine.sequence.shards import ChunkExchange
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import autocast_device_type

Pass = Literal["store", "project", "recompute", "replay", "whole"]


class ProjectionDone(BaseException):
    """Stops a layer's forward after its last key/value update, if only its keys and values are needed."""


class ChunkCache(hf_internal(CACHE_CLASS)):  # type: ignore[misc]
    """Cache that a decoder layer gets for one chunk; it returns keys, values and states of earlier chunks.

    Args:
        kv: Keys and values of all chunks of the layer call.
        states: Recurrent and convolution states of the layer call.
        chunk: Positions of the chunk's keys.
        first_key: Position of the first key that the chunk attends to (above 0 with a sliding window).
        pass_name: Purpose of this run of the layer: ``store`` is the forward, ``replay`` the run with a graph.
        exchange: Exchange with the ranks that share the sequence; None if this rank has the whole sequence.
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
        self.chunk_kv: list[Tensor] = []
        """Keys and values that the layer computed on the chunk: a key and a value tensor for each update."""
        self.prefix_leaves: list[Tensor] = []
        self.chunk_states: dict[StateKey, Tensor] = {}
        self.sent_states: list[Tensor] = []
        self.state_leaves: dict[StateKey, Tensor] = {}
        self.read_states: list[tuple[Tensor, int]] = []
        """States that the layer read in the forward, each with its version counter."""
        self.updates = 0
        self.uses_states = False
        """True if the layer has read or written a state."""

    # Methods that the engine calls.

    @property
    def prefix_keys(self) -> slice:
        """Positions of the earlier chunks' keys that this chunk attends to."""
        return slice(self.first_key, self.chunk.start)

    @property
    def read_leaves(self) -> list[Tensor]:
        """Autograd leaves with the keys, values and states that the layer read from earlier chunks."""
        return [*self.prefix_leaves, *self.state_leaves.values()]

    def tensors_for_later_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each key, value and state tensor that later chunks read from this chunk, with its gradient.

        The gradients are complete, because all later chunks have already run backward.
        """
        if self.kv.has_grads:
            grads = [grad for index in range(self.kv.updates) for grad in self.kv.grad_views(index, self.chunk)]
            for x, grad in zip(self.chunk_kv, grads, strict=True):
                yield x, grad.to(x.dtype)
        if not self.uses_states:
            return
        for key, grad in self.states.grads.pop(self._state_positions[1], {}).items():
            yield self.chunk_states[key], grad
        for sent in self.sent_states:
            yield sent, torch.zeros_like(sent)

    def add_leaf_grads(self, grads: Iterator[Tensor | None]) -> None:
        """Add the gradients of :attr:`read_leaves`, given in the same order, to the gradient sums of earlier chunks."""
        for index in range(len(self.prefix_leaves) // 2):
            for total in self.kv.grad_views(index, self.prefix_keys):
                if (part := next(grads)) is not None:
                    total += part
        parts = {key: next(grads) for key in self.state_leaves}
        if self.uses_states:
            self.states.add_state_grads(self._own_tokens, *self._state_positions, parts)

    def end_chunk(self) -> None:
        """Free the states that no other chunk reads, after the chunk's forward; does nothing in the backward.

        Raises:
            UnsupportedModelError: The layer wrote into a state of earlier tokens.
        """
        if self.uses_states and self.pass_name == "store":
            self._refuse_changed_states()
            self.states.end_chunk(*self._state_positions)

    def _refuse_changed_states(self) -> None:
        """Raise an error if the layer wrote into a state that it read, from which other chunks start too.

        Many layers do so with a single token: they compute it as a decoding step, which also gives no gradient.

        Raises:
            UnsupportedModelError: The layer wrote into a state.
        """
        if any(version_counter(state) != version for state, version in self.read_states):
            start, tokens = self._own_tokens.start, self._own_tokens.stop - self._own_tokens.start
            raise UnsupportedModelError(
                f"a layer with a recurrent state writes into the state before position {start}, from which other rows "
                f"start too; it computes a chunk of {tokens} token{'s' * (tokens > 1)} as a decoding step",
                fix="set share_prefix: never",
            )

    @property
    def _own_tokens(self) -> slice:
        return self.chunk if self.exchange is None else self.exchange.part

    @cached_property
    def _state_positions(self) -> tuple[int | None, int]:
        return self.states.state_positions(self._own_tokens)

    # Methods that an attention layer calls.

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store the chunk's keys and values; return keys and values ``[B, G, S, D]`` of earlier chunks and this one."""
        index, self.updates = self.updates, self.updates + 1
        if self.kv.past is not None and layer_idx != self.kv.past.layer_idx:
            refuse_filled_cache(
                f"layer {self.kv.past.layer_idx} writes its keys to index {layer_idx} of the cache", CACHE
            )
        key_states, value_states = _to_autocast_dtype(key_states), _to_autocast_dtype(value_states)
        if self.exchange is not None:
            if self.uses_states:
                self.states.on_keys_used()
            key_states, value_states = self.exchange.kv_to_cache(key_states, value_states)
        if self.pass_name in ("store", "project", "recompute"):
            self.kv.write(index, self.chunk, key_states, value_states)
            if self.pass_name == "project" and self.updates == self.kv.updates:
                raise ProjectionDone
            return self._record_returned_kv(self.kv.kv_views(index, slice(self.first_key, self.chunk.stop)))
        self.chunk_kv += [key_states, value_states]
        if self.chunk.start == 0:
            return self._record_returned_kv((key_states, value_states))
        self.kv.allocate(index, key_states, value_states)
        prefix_grads = _PrefixGrads(self.kv, index, self.prefix_keys, (key_states, value_states))
        trained = key_states.requires_grad or value_states.requires_grad  # else attention has no node of its own
        joined = []
        views = zip(self.kv.kv_views(index, self.prefix_keys), (key_states, value_states), strict=True)
        for position, (prefix, x) in enumerate(views):
            leaf = prefix.detach().requires_grad_()
            self.prefix_leaves.append(leaf)
            buffer = self.kv.pairs[index][position]
            place = self.kv.buffer_slice(slice(self.first_key, self.chunk.stop))
            joined.append(_JoinKeys.apply(leaf, x, (buffer, place)))
            if trained or self.kv.past is None:
                joined[-1].streamtune_prefix = prefix_grads  # read by an attention that gets this very tensor
        return tuple(joined)

    def _record_returned_kv(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.exchange is not None:
            self.exchange.returned_kv = pair
        return pair

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store the chunk's keys ``[B, T, D]`` of an indexer, a module that selects which keys are attended to.

        Return the indexer's keys of earlier chunks and of this chunk.
        """
        if self.exchange is not None:
            raise UnsupportedModelError(
                "a layer selects its keys with an indexer, which sequence parallelism does not support",
                fix="set sequence_parallel_size: 1",
            )
        keys = indexer_key_states[:, None]
        joined, _ = self.update(keys, keys[..., :0], layer_idx)
        return joined[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the chunk, or before this rank's part of the chunk."""
        return self.chunk.start if self.exchange is None else self.exchange.position

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the chunk attends to, and the position of the first of these keys."""
        return self.chunk.stop - self.first_key, self.first_key

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the chunk's first token."""
        return self.get_seq_length(layer_idx)

    # Methods that a recurrent or convolution layer calls.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last K inputs ``[B, C, K]`` of a causal convolution before the chunk; None for the first chunk."""
        return self._read_state(("conv", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return a causal convolution's last K inputs before the chunk, then the chunk's inputs; save the new last K.

        If no tokens precede the chunk, K is ``conv_kernel_size`` (None: the chunk's number of inputs), and a chunk with
        fewer inputs gets zeros on its left.
        """
        key = ("conv", layer_idx, state_idx)
        before = self._read_state(key)
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            full = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size = before.shape[-1]
            full = torch.cat([before, conv_states], dim=-1)
        self._save_state(key, full[..., full.shape[-1] - size :])
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state before the chunk; None if no tokens precede the chunk."""
        return self._read_state(("recurrent", layer_idx, state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Save the recurrent state after the chunk, which the next chunk starts from; return it."""
        self._save_state(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Alias of :meth:`get_recurrent_state`: the name that MiniMax layers call."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Alias of :meth:`update_recurrent_state`: the name that MiniMax layers call."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if the chunk starts from a state of earlier tokens."""
        read_position = self._state_positions[0]
        return read_position is not None and (self.exchange is not None or self.states.has_state_after(read_position))

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: layers then do not run a chunk of one token as a decoding step, which writes states in place."""
        return True

    def _report_state_use(self) -> None:
        self.uses_states = True
        if self.kv.past is not None:
            refuse_filled_cache("a layer has a recurrent state", CACHE)
        if self.updates:
            self.states.on_keys_used()
        self.states.on_state_used(self.pass_name == "whole")

    def _read_state(self, key: StateKey) -> Tensor | None:
        """Return a state before the chunk, in the backward as an autograd leaf; None if no tokens precede the chunk."""
        self._report_state_use()
        (read_position, _), rows = self._state_positions, self.states.rows
        if read_position is None:
            return None
        if self.pass_name == "store":
            self.states.receive_state(read_position, key)
        state = self.state_leaves.get(key)  # one leaf, however often the chunk reads the state
        if state is None and (state := self.states.get_state(read_position, key)) is None:
            return None
        if self.pass_name == "replay" and state.is_floating_point() and key not in self.state_leaves:
            state = self.state_leaves[key] = state.detach().requires_grad_()
            self.states.on_state_leaf(self._own_tokens, read_position, key, state)
        if self.pass_name == "store":
            self.read_states.append((state, version_counter(state)))
        start = self.chunk.start if self.exchange is None else self.exchange.start
        return state if rows is None or start not in rows.row_starts else rows.zero_states_at_row_starts(state, start)

    def _save_state(self, key: StateKey, state: Tensor) -> None:
        self._report_state_use()
        self.states.has_states = True
        position = self._state_positions[1]
        if self.pass_name == "replay":
            self.chunk_states[key] = state
            if (sent := self.states.remote_gradient_tensor(position, key, state)) is not None:
                self.sent_states.append(sent)
        elif self.pass_name == "store":
            self.states.save_state(position, key, state.detach())


class _PrefixGrads:
    """Gradients of earlier chunks' keys and values, to which the attention's backward adds directly."""

    def __init__(self, kv: KeysAndValues, index: int, keys: slice, chunk_kv: tuple[Tensor, Tensor]) -> None:
        self.kv, self.index, self.keys, self.own = kv, index, keys, chunk_kv
        self.length = keys.stop - keys.start

    def allocate_grads(self) -> None:
        self.kv.grad_views(self.index, self.keys)

    def add_grads(self, index: tuple[slice, slice, slice], grad_k: Tensor, grad_v: Tensor) -> None:
        for total, grad in zip(self.kv.grad_views(self.index, self.keys), (grad_k, grad_v), strict=True):
            total[index] += grad


def attached_prefix_grads(key: Tensor, value: Tensor) -> _PrefixGrads | None:
    """Return the gradient buffers that :meth:`ChunkCache.update` attached to ``key`` and ``value``, or None."""
    prefix: _PrefixGrads | None = getattr(key, "streamtune_prefix", None)
    return prefix if prefix is getattr(value, "streamtune_prefix", None) else None


class _LayerViews:
    """Replaces the list ``cache.layers``, from whose items transformers 5.17 reads convolution and recurrent states."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 0

    def __getitem__(self, layer_idx: int) -> _LayerView:
        return _LayerView(self.cache, layer_idx)


class _UnknownStateError(UnsupportedModelError, AttributeError):
    """Raised if a layer reads an unsupported kind of state; an ``AttributeError``, so that
    ``hasattr`` returns False.
    """


class _LayerView:
    record_past = True

    def __init__(self, cache: ChunkCache, layer_idx: int) -> None:
        self.conv_states = _StateViews(partial(cache.get_conv_state, layer_idx))
        self.recurrent_states = _StateViews(partial(cache.get_recurrent_state, layer_idx))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _UnknownStateError(
            f"a layer reads {name!r} from its cache, a kind of state that streaming does not support",
            fix="train this model without streaming",
        )


class _StateViews:
    def __init__(self, get: Callable[[int], Tensor | None]) -> None:
        self.get = get

    def __getitem__(self, state_idx: int) -> Tensor | None:
        return self.get(state_idx)


def _to_autocast_dtype(x: Tensor) -> Tensor:
    kind = autocast_device_type(x.device)
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


class _JoinKeys(torch.autograd.Function):
    """``cat([prefix, own], dim=2)`` without a copy of the prefix: ``own`` is written behind it, in the same buffer."""

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
EMPTY_MAXIMUM = -1e30
"""Initial value of the running maximum of exponents in RWKV's state."""


def state_argument(layer: nn.Module, cache: ChunkCache, hidden: Tensor) -> Any:
    """Return the argument with which xLSTM or RWKV gets its state: the state after the preceding chunk."""
    if not hasattr(layer, RWKV_LAYER):
        parts = [cache.get_recurrent_state(0, index) for index in range(XLSTM_STATES)]
        return None if parts[0] is None else tuple(parts)
    if hidden.is_cuda and getattr(sys.modules[type(layer).__module__], RWKV_KERNEL, None) is not None:
        raise UnsupportedModelError(
            "the CUDA kernel of RWKV computes no gradient of the state that a chunk starts from",
            where=type(layer).__name__,
            fix="train this model without streaming",
        )
    saved = [cache.get_recurrent_state(0, index) for index in range(RWKV_STATES)]
    single = hidden.shape[1] == 1  # RWKV then uses the last token in place of a shifted sequence [B, T, C]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    attended = int(getattr(layer.attention, RWKV_SIZE))
    sizes = [(hidden.shape[2], hidden.dtype)] * 2 + [(attended, wide)] * 3
    begin = [hidden.new_zeros((hidden.shape[0], size), dtype=dtype) for size, dtype in sizes]
    begin[4] = begin[4] + EMPTY_MAXIMUM
    columns = [new if old is None else old for old, new in zip(saved, begin, strict=True)]
    return [_Column(x[:, None] if single and index < 2 else x) for index, x in enumerate(columns)]


def save_returned_state(layer: nn.Module, cache: ChunkCache, state: Any, out: Any) -> Any:
    """Save the state of xLSTM or RWKV after a chunk; return the layer's output with None in place of this state.

    ``state`` is the argument that :func:`state_argument` returned; RWKV writes into it.
    """
    parts = [column.x for column in state] if isinstance(state, list) else out[1]
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
        raise UnsupportedModelError(
            f"{type(layer).__name__} does not return its state, which the next chunk needs",
            fix="set config.mode = 'inference', which computes the same and returns the state",
        )
    for index, part in enumerate(parts):
        cache.update_recurrent_state(part, 0, index)
    return (out[0], None, *out[2:])


class _Column:
    """Replaces RWKV's state ``[B, C, layers]`` in one layer. An item assignment stores a new tensor and changes none in
    place.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, key: Any) -> Tensor:
        return self.x

    def __setitem__(self, key: Any, x: Tensor) -> None:
        self.x = x
