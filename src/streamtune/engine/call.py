"""One call of a decoder layer, with arguments bound by name, so that the call can be repeated on any chunk.

Nothing here depends on a model family. An argument is cut along the sequence if its name or shape shows that it has a
sequence dimension. Otherwise it is passed unchanged:

    hidden states, 2D masks, other tensors [B, T, ...]    dim 1
    parallel streams of hidden states [N, B, T, C]        dim 2
    position_ids ([B, T] or [3, B, T])                    last dim
    position_embeddings (cos, sin of [B, T, D])           dim -2; prefix and chunk if the layer rotates pooled keys
    position_embeddings with a head dim ([B, 1, T, D])    dim 2
    a bias over the keys (alibi: [..., 1, T])             last dim, cut to prefix and chunk
    a lazy mask                                           rows
    a dense mask ([B, H, T, T])                           rows; columns cut to prefix and chunk
    a dense mask of all queries ([B, H, 1, T])            as a dense mask
    a mask of flex_attention (BlockMask)                  as a lazy mask
    distances of queries to keys ([T, T])                 rows; columns cut to prefix and chunk
    the cache, keys and values shared between layers      replaced by the cache of the chunk

The prefix of a chunk is the tokens before it. A layer with its own attention code (``own_attention``) gets its masks as
tensors.

Shape suffixes: B batch, T tokens of the sequence, C channels, H heads, N streams.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from streamtune.engine.attention import NAME, lazy_mask_from_blocks, lazy_mask_from_dense
from streamtune.engine.cache import ChunkCache, save_returned_state, state_argument
from streamtune.engine.call_parts import ChunkSharing, SharedKey
from streamtune.engine.hf_names import (
    DISTANCES,
    INDEXER_POOLING,
    KERNEL_ROWS,
    KEY_BIASES,
    OTHER_SEQUENCES,
    POSITIONS,
    ROTATIONS,
    STATE,
    cache_argument,
    renamed_cache,
)
from streamtune.engine.kv import Past, refuse_filled_cache
from streamtune.engine.observe import temporary_attention_names
from streamtune.engine.own_attention import OwnAttention, dense_mask_of_view, sees_future
from streamtune.engine.rows import PackedRows
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.engine.sharded import peft_wrapped_weights, preserve_version_counters
from streamtune.engine.vjp import Along, chunk_view
from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.mask import LazyMask
from streamtune.schedule import Schedule

PAST = "past"
"""Name of trained keys (place 0) and values (place 1) of tokens before the call, in :attr:`LayerCall.inputs`."""


@lru_cache(maxsize=512)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def layer_cache_argument(layer: nn.Module) -> str | None:
    """Return the name of the cache argument of a layer's forward; None if it has none, as in vision layers."""
    return cache_argument(type(layer).forward)


def forwarded_cache_argument(layer: nn.Module) -> str | None:
    """Return the name of a layer's cache argument, also if the layer only passes a cache on in ``**kwargs``."""
    parameters = _signature(type(layer).forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return next((name for module in layer.modules() if (name := layer_cache_argument(module))), None)
    return layer_cache_argument(layer)


@dataclass
class LayerCall:
    """One call of ``layer.forward`` with its arguments by name, so that it can be repeated on any chunk.

    ``inputs`` maps the names of the hidden states, and of other tensors that need a gradient, to their sequence
    dimension. None means that the tensor is not cut. Tensors in a dictionary that layers share have the name (argument,
    dictionary key, 0 for keys or 1 for values).
    """

    layer: nn.Module
    arguments: dict[str, Any]
    parameter_names: frozenset[str]
    """Names of the arguments that are parameters of the layer's forward; the other arguments go
    into its ``**kwargs``.
    """
    cache_name: str
    hidden_name: str
    length: int
    inputs: dict[str | SharedKey, Along]
    shared: dict[SharedKey, Tensor | None]
    dtype: torch.dtype
    own_attention: OwnAttention | None = None
    """Attention of a layer that computes attention in its own code; None uses StreamTune's attention."""
    configs: Sequence[Any] = ()
    """Configs from which the layer reads its attention implementation."""
    shards: SequenceShards | None = None
    past: Past | None = None

    @classmethod
    def bind(
        cls,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own_attention: OwnAttention | None = None,
        configs: Sequence[Any] = (),
    ) -> LayerCall:
        """Return a call of ``layer`` with its arguments bound to the parameters of the layer's forward.

        Raises:
            UnsupportedModelError: An argument cannot be cut into chunks, or would lose its gradient.
        """
        name = type(layer).__name__
        cache_name = layer_cache_argument(layer) or forwarded_cache_argument(layer)
        if cache_name is None:
            raise UnsupportedModelError(
                f"{name} takes no key/value cache, so its chunks cannot attend to earlier chunks"
            )
        bound = _signature(type(layer).forward).bind(layer, *args, **renamed_cache(kwargs, cache_name))
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(arguments)))  # self
        others: dict[str, Any] = {}
        for parameter in bound.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                others = arguments.pop(parameter.name, {})
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(parameter.name, ()):
                raise UnsupportedModelError(f"{name} takes *args, which cannot be cut into chunks safely")
        hidden_name = next(iter(arguments), "")
        hidden = arguments.get(hidden_name)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (3, 4):
            raise UnsupportedModelError(f"the first argument of {name} must be hidden states [B, T, C]")
        parameter_names = frozenset(arguments)
        arguments |= others
        along = _hidden_sequence_dim(name, hidden, arguments)
        length = hidden.shape[along]
        _refuse_other_sequences(name, arguments, length)
        for key, value in arguments.items():
            if isinstance(value, BlockMask):
                arguments[key] = lazy_mask_from_blocks(value)
                continue
            if key.endswith("mask") and isinstance(value, Tensor) and _is_one_query_mask(value, length):
                arguments[key] = value = value.expand(-1, -1, length, -1)
            if key == hidden_name or not _is_dense_mask(value, length):  # streams [N, B, T, C] may have T = C
                continue
            if own_attention is None:
                arguments[key] = lazy_mask_from_dense(value)
            elif sees_future(value):
                raise UnsupportedModelError(
                    f"{key!r} of {name} must be a causal mask; it lets a token see later tokens, or is not a mask"
                )
        inputs: dict[str | SharedKey, Along] = {hidden_name: along}
        call = cls(
            layer,
            arguments,
            parameter_names,
            cache_name,
            hidden_name,
            length,
            inputs,
            {},
            hidden.dtype,
            own_attention,
            configs,
        )
        for key, value in arguments.items():
            call._add_gradient_input(key, value)
        return call

    def _add_gradient_input(self, key: str, value: Any) -> None:
        name = type(self.layer).__name__
        if isinstance(value, UserDict):
            for entry, pair in value.items():
                for index, x in enumerate(pair):
                    self.shared[key, entry, index] = x
                    if x.requires_grad:
                        self.inputs[key, entry, index] = None
        elif not isinstance(value, Tensor) and torch.is_grad_enabled() and _holds_gradient(value):
            raise UnsupportedModelError(
                f"{name} gets {key!r}, a {type(value).__name__} that holds a tensor with a gradient; streaming returns "
                "gradients only for tensors that are arguments themselves",
                fix="freeze the parameters that this tensor is computed from, or train without streaming",
            )
        elif key != self.hidden_name and isinstance(value, Tensor) and value.requires_grad:
            self.inputs[key] = self._sequence_dim(key, value, self.length)

    def prepend_past(self, past: Past) -> None:
        """Make the call's tokens also attend to ``past``, the keys and values of tokens before the call.

        Raises:
            UnsupportedModelError: An argument or the layer does not support tokens before the call.
        """
        name = type(self.layer).__name__
        if self.shards is not None:
            refuse_filled_cache("ranks share the sequence", name)
        if self.shared_kv is not None:
            refuse_filled_cache("the layer shares keys and values with other layers", name)
        if self._rotates_pooled_keys:
            refuse_filled_cache("the layer pools its keys", name)
        for key, value in self.arguments.items():
            if (
                isinstance(value, Tensor)
                and value.dim() == 4
                and key != self.hidden_name
                and (key.endswith("mask") or _is_dense_mask(value, self.length))
            ):
                refuse_filled_cache(f"{key!r} is a dense mask", name)
        for index, x in enumerate((past.keys, past.values)):
            if x.requires_grad:
                self.shared[PAST, None, index] = x
                self.inputs[PAST, None, index] = None
        self.past = past.detached()

    def restrict_masks_to_rows(self, rows: PackedRows) -> None:
        """Restrict the masks so that a token sees only its own packed row, or its own row and a shared prefix."""
        self._change_masks(rows.restrict_mask)

    def set_rank_shards(self, shards: SequenceShards) -> None:
        """Set which tokens of the sequence this rank holds (``shards``); extend the masks to the whole sequence.

        Raises:
            UnsupportedModelError: An argument or the layer does not support sequence parallelism.
        """
        name = type(self.layer).__name__
        for key, value in self.arguments.items():
            dense = isinstance(value, Tensor) and (key in (*KEY_BIASES, *DISTANCES) or key.endswith("mask"))
            if dense and (key in DISTANCES or shards.own_padding(value) is None):
                what = f"gets {key!r} as a tensor over the whole sequence, which sequence parallelism does not support"
            elif isinstance(value, UserDict) and shards.form == "ring":
                what = "shares keys and values with other layers, which ring attention does not support"
            else:
                continue
            raise UnsupportedModelError(f"{name} {what}", fix="set sequence_parallel_size: 1")
        if self.length != shards.own_length:
            raise UnsupportedModelError(
                f"{name} gets {self.length} hidden states, but this rank has {shards.own_length} tokens, which "
                "sequence parallelism does not support",
                fix="set sequence_parallel_size: 1",
            )
        if self._rotates_pooled_keys:
            raise UnsupportedModelError(
                f"{name} pools keys, which sequence parallelism does not support", fix="set sequence_parallel_size: 1"
            )
        self.shards = shards
        self._change_masks(shards.whole_mask, shards.own_padding)

    def _change_masks(
        self,
        change_mask: Callable[[LazyMask], LazyMask],
        change_padding: Callable[[Tensor], Tensor | None] = lambda mask: None,
    ) -> None:
        self.arguments = {
            key: _replace_masks(value, key.endswith("mask"), change_mask, change_padding)
            for key, value in self.arguments.items()
        }

    @property
    def hidden(self) -> Tensor:
        """Hidden states ``[B, T, C]`` that the layer gets."""
        return self.arguments[self.hidden_name]

    @property
    def lazy_mask(self) -> LazyMask | None:
        """The first argument that is a ``LazyMask``; None if there is none."""
        return next((value for value in self.arguments.values() if isinstance(value, LazyMask)), None)

    @cached_property
    def _adapted_tensors(self) -> tuple[Tensor, ...]:
        return peft_wrapped_weights(self.layer)

    @cached_property
    def _rotates_pooled_keys(self) -> bool:
        """True if the layer selects keys with an indexer that pools them before it applies rotary embeddings."""
        return any(hasattr(module, INDEXER_POOLING) for module in self.layer.modules())

    def key_positions(self, chunk: slice) -> slice:
        """Return the positions of a chunk's own keys among all keys, in which keys before the call come first."""
        before = 0 if self.past is None else self.past.length
        return slice(before + chunk.start, before + chunk.stop)

    def first_key_position(self, chunk: slice) -> int:
        """Return the position of the first key that the mask lets a chunk see.

        It is 0 for a layer with its own attention code, which may index keys from 0.
        """
        if self.lazy_mask is None or self.own_attention is not None:
            return 0
        if self.shards is None:
            start = self.key_positions(chunk).start
            return min(self.lazy_mask.first_key(start), start)
        start = self.shards.global_chunk(chunk).start
        first = min(self.lazy_mask.first_key(start), start)
        return self.shards.local_chunk_start(first) if self.shards.form == "ring" else first

    @property
    def passed_cache(self) -> Any:
        """Cache that the model passed to the layer; None if it passed none."""
        return self.arguments.get(self.cache_name)

    @property
    def shared_kv(self) -> Any:
        """Dictionary of keys and values that the model passes from layer to layer; None if it passes none."""
        return next((value for value in self.arguments.values() if isinstance(value, UserDict)), None)

    def input_tensors(self) -> list[Tensor]:
        """Return the hidden states and each other tensor that needs a gradient, in the order of ``inputs``."""
        tensors = [self.shared[name] if isinstance(name, tuple) else self.arguments[name] for name in self.inputs]
        return [x for x in tensors if x is not None]

    def drop_input_tensors(self) -> None:
        """Drop the references to tensors that need a gradient. Autograd saves them, and frees them after use."""
        for name in self.inputs:
            if isinstance(name, tuple):
                self.shared[name] = None
            else:
                self.arguments[name] = None
        self.arguments |= {key: UserDict() for key, value in self.arguments.items() if isinstance(value, UserDict)}

    def run_chunk(
        self, chunk: slice, cache: ChunkCache, x_i: dict[str | SharedKey, Tensor]
    ) -> tuple[Any, dict[Any, int]]:
        """Call the layer's own forward on one chunk; ``x_i`` has the chunk of each tensor in ``inputs``.

        Return the output, and the index of the cache update that computed each entry which the layer adds to the shared
        keys and values.
        """
        sharing: ChunkSharing | None = None
        arguments: dict[str, Any] = {}
        for key, value in self.arguments.items():
            if isinstance(value, UserDict):
                arguments[key] = sharing = self._shared_kv_of_chunk(cache, x_i)
            elif key in self.inputs:
                arguments[key] = x_i[key]
            elif key in self.parameter_names or key not in ("use_cache", *KERNEL_ROWS):
                arguments[key] = self._cut_to_chunk(key, value, chunk, cache.first_key)
        by_state = self.cache_name == STATE
        arguments[self.cache_name] = state_argument(self.layer, cache, x_i[self.hidden_name]) if by_state else cache
        if "use_cache" in arguments:
            arguments["use_cache"] = True
        checkpointing = getattr(self.layer, "gradient_checkpointing", False)
        try:
            if checkpointing:
                self.layer.gradient_checkpointing = False  # type: ignore[assignment]
            with self._attention_names_set(), preserve_version_counters(self._adapted_tensors):
                out = type(self.layer).forward(self.layer, **arguments)
                out = save_returned_state(self.layer, cache, arguments[STATE], out) if by_state else out
        finally:
            if checkpointing:
                self.layer.gradient_checkpointing = True  # type: ignore[assignment]
        return out, {} if sharing is None else sharing.entry_updates

    def run_unchunked(self) -> Any:
        """Call the layer's own forward on all tokens at once, with the cache that the model passed (generation)."""
        arguments = dict(self.arguments)
        if self.own_attention is not None:
            dtype = self.own_attention.mask_dtype(self.dtype)
            for key, value in arguments.items():
                if isinstance(value, LazyMask):
                    arguments[key] = dense_mask_of_view(value.view_queries(0, value.q_length), dtype)
        with self._attention_names_set(), preserve_version_counters(self._adapted_tensors):
            return type(self.layer).forward(self.layer, **arguments)

    def split_into_chunks(self, schedule: Schedule) -> list[slice]:
        """Return the chunks of the call; a token is in the same chunk as the later tokens that it sees.

        Raises:
            UnsupportedModelError: A chunk would be longer than twice the schedule's ``chunk_size``
                (docs/decisions/005-bidirectional-blocks.md).
        """
        if self.shards is not None:  # the masks of shards are causal
            return self.shards.chunks
        cuts = None if self.lazy_mask is None else self.lazy_mask.allowed_cuts
        complete = cuts is None or cuts[-1] == self.length  # else a token sees tokens beyond the end of the call
        chunks = schedule.chunks(self.length, cuts if complete else [0, self.length])
        longest = max(chunk.stop - chunk.start for chunk in chunks)
        if complete and longest <= max(2 * schedule.chunk_size, 3):  # a chunk has at least two tokens, so up to three
            return chunks
        what, where = "the attention mask lets a token see later tokens", type(self.layer).__name__
        if len(chunks) == 1 or not complete:
            raise UnsupportedModelError(f"{what}, so a chunk would need the keys of later chunks", where=where)
        raise UnsupportedModelError(
            f"{what}: {longest:,} consecutive tokens must be one chunk, which is more than twice chunk_size "
            f"({schedule.chunk_size:,})",
            where=where,
            fix=f"set chunk_size to {-(-longest // 2):,} or more; these {longest:,} tokens are then computed at once",
        )

    def _attention_names_set(self) -> AbstractContextManager[None]:
        name = NAME if self.own_attention is None else self.own_attention.name
        return temporary_attention_names(list(self.configs), [name] * len(self.configs))

    def _shared_kv_of_chunk(self, cache: ChunkCache, x_i: dict[str | SharedKey, Tensor]) -> ChunkSharing:
        full: dict[Any, tuple[Tensor, ...]] = {}
        for name, x in self.shared.items():
            x = x_i.get(name, x)
            assert x is not None
            full[name[1]] = (*full.get(name[1], ()), x)
        return ChunkSharing(cache, full)

    def _sequence_dim(self, key: str, value: Tensor, length: int) -> Along:
        if key in (*POSITIONS, *KEY_BIASES) and not _is_dense_mask(value, length):
            dim = value.dim() - 1
        elif key == ROTATIONS:
            dim = value.dim() - 2
        elif _is_dense_mask(value, length) or (value.dim() == 4 and value.shape[1] == 1):
            dim = 2
        elif value.dim() >= 2:
            dim = 1
        else:
            return None
        return dim if value.shape[dim] == length else None

    def _cut_to_chunk(self, key: str, value: Any, chunk: slice, first_key: int) -> Any:
        """Return a chunk's part of an argument: the chunk's tokens, and in masks and biases the keys from ``first_key``
        on.
        """
        if isinstance(value, Tensor):
            if _is_dense_mask(value, self.length):
                return value[..., chunk, first_key : chunk.stop]
            if key in KEY_BIASES and value.shape[-1] == self.key_positions(slice(0, self.length)).stop:
                return value[..., first_key : self.key_positions(chunk).stop]
            if key in DISTANCES and value.shape[-2:] == (self.length, self.key_positions(slice(0, self.length)).stop):
                return value[..., chunk, first_key : self.key_positions(chunk).stop]
            if key == ROTATIONS and self._rotates_pooled_keys and value.shape[-2] == self.length:
                return value[..., first_key : chunk.stop, :]
            return chunk_view(value, self._sequence_dim(key, value, self.length), chunk)
        if isinstance(value, LazyMask):
            if self.shards is not None:
                chunk = self.shards.global_chunk(chunk)
                first_key = chunk.start if self.shards.form == "ring" else first_key
            view = value.view_chunk(chunk.start, chunk.stop, first_key)
            return (
                view
                if self.own_attention is None
                else dense_mask_of_view(view, self.own_attention.mask_dtype(self.dtype))
            )
        if isinstance(value, tuple | list):
            return type(value)(self._cut_to_chunk(key, item, chunk, first_key) for item in value)
        if isinstance(value, dict):
            return {name: self._cut_to_chunk(key, item, chunk, first_key) for name, item in value.items()}
        return value


def _replace_masks(
    value: Any,
    is_mask: bool,
    change_mask: Callable[[LazyMask], LazyMask],
    change_padding: Callable[[Tensor], Tensor | None],
) -> Any:
    """Return an argument with each lazy mask and padding mask changed, also inside nested dictionaries.

    ``change_padding`` returns None for a padding mask that stays as it is.
    """
    if isinstance(value, LazyMask):
        return change_mask(value)
    if isinstance(value, Tensor) and is_mask:
        return value if (padding := change_padding(value)) is None else padding
    if not isinstance(value, dict):
        return value
    return {name: _replace_masks(item, is_mask, change_mask, change_padding) for name, item in value.items()}


def _hidden_sequence_dim(layer_name: str, hidden: Tensor, arguments: dict[str, Any]) -> int:
    """Return the sequence dimension of the hidden states: 1, or 2 for parallel streams [N, B, T, C]."""
    if hidden.dim() == 3:
        return 1
    mask = next((value for value in arguments.values() if isinstance(value, LazyMask)), None)
    positions = arguments.get(ROTATIONS)
    if mask is not None:
        length: int | None = mask.q_length
    else:
        length = positions[0].shape[-2] if isinstance(positions, tuple) else None
    dims = [dim for dim in (1, 2) if hidden.shape[dim] == length]
    if not dims:
        raise UnsupportedModelError(
            f"{layer_name} takes hidden states {tuple(hidden.shape)}, none of whose dimensions is the sequence length"
        )
    if len(dims) == 1:
        return dims[0]
    rows = positions[0].shape[0] if isinstance(positions, tuple) else hidden.shape[0]
    rows = rows if mask is None else mask.batch_size
    return 1 if hidden.shape[0] == rows else 2  # as many rows as tokens: streams [N, B, T, C] begin with N


def _refuse_other_sequences(name: str, arguments: dict[str, Any], length: int) -> None:
    for key in OTHER_SEQUENCES:
        if arguments.get(key) is not None:
            raise UnsupportedModelError(
                f"{name} uses cross-attention ({key!r}), which is not supported",
                fix="train without streaming, or without the other sequence (images, an encoder)",
            )
    for key, value in arguments.items():
        if key.endswith("mask") and isinstance(value, Tensor) and _is_dense_mask(value, other := value.shape[-1]):
            if other == length:
                continue
            raise UnsupportedModelError(
                f"{name} gets {length} hidden states but {key!r} over {other} tokens: several streams concatenated "
                "along the sequence are not supported"
            )


def _holds_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(_holds_gradient(item) for item in items)


def _is_dense_mask(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and tuple(value.shape[2:]) == (length, length)


def _is_one_query_mask(value: Tensor, length: int) -> bool:
    """Return True if a mask ``[B, H, 1, T]`` stands for all queries."""
    return length > 1 and value.dim() == 4 and tuple(value.shape[2:]) == (1, length)
