"""One call of a decoder layer, taken apart by name so that it can be made again for any chunk of its tokens.

Nothing here knows a model family. An argument is cut along the sequence if it says so by its name or its shape, and
handed over whole otherwise:

    hidden states, 2D masks, other tensors of T columns   dim 1
    position_ids ([B, T] or [3, B, T])                    last dim
    position_embeddings (cos, sin of [B, T, D])           dim -2
    the same for all heads ([B, 1, T, D])                 dim 2
    a bias that follows the keys (alibi: [..., 1, T])     last dim, to prefix and chunk
    a lazy mask                                           its rows
    a dense square ([B, H, T, T])                         its rows, and its columns to prefix and chunk
    the cache                                             replaced by the chunk's own

A layer that computes its attention itself (``tiles``) gets its masks as tensors.

Shape suffixes: B batch, T tokens of the sequence, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine.attention import dense_mask
from streamtune.engine.borrow import attention_as
from streamtune.engine.cache import ChunkCache
from streamtune.engine.tiles import OwnAttention, sees_future, tile
from streamtune.errors import UnsupportedModelError
from streamtune.ops.mask import LazyMask

__all__ = ["CACHE_NAMES", "LayerCall", "hands_on_cache", "takes_cache"]

CACHE_NAMES = ("past_key_values", "layer_past", "past_key_value", "cache_params")
"""What decoder layers call their cache argument."""
KEY_BIASES = ("alibi", "position_bias")
"""Arguments that are added to the scores of all queries alike; one number for each key in the last dimension."""


@lru_cache(maxsize=512)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def takes_cache(layer: nn.Module) -> str | None:
    """The name of a layer's cache argument, or None if it has none (an encoder or vision layer)."""
    names = _signature(type(layer).forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def hands_on_cache(layer: nn.Module) -> str | None:
    """:func:`takes_cache`, also where the layer takes it unseen among others and hands it on to its attention."""
    parameters = _signature(type(layer).forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return next((name for module in layer.modules() if (name := takes_cache(module))), None)
    return takes_cache(layer)


@dataclass
class LayerCall:
    """A bound call of ``layer.forward``: every argument by name, hidden states first.

    ``streamed`` names the tensor arguments that need a gradient and are cut along the sequence (the hidden states are
    always the first of them); ``shared`` those that need one and go to every chunk whole. ``own`` is set where the
    layer computes its attention itself.
    """

    layer: nn.Module
    arguments: dict[str, Any]
    extra: dict[str, Any]
    cache_name: str
    hidden_name: str
    streamed: list[str]
    shared: list[str]
    dtype: torch.dtype
    own: OwnAttention | None = None

    @classmethod
    def bind(
        cls, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], own: OwnAttention | None = None
    ) -> LayerCall:
        """Bind a call as Python would.

        Args:
            layer: The decoder layer.
            args, kwargs: What it is called with.
            own: Its own attention, where it keeps that.

        Raises:
            UnsupportedModelError: The layer has no cache argument, or its first argument is not ``[B, T, ..., C]``.
        """
        name = type(layer).__name__
        cache_name = takes_cache(layer) or hands_on_cache(layer)
        if cache_name is None:
            raise UnsupportedModelError(f"{name} takes no key/value cache, so its chunks cannot see their prefix")
        bound = _signature(type(layer).forward).bind(layer, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(arguments)))  # self
        extra: dict[str, Any] = {}
        for parameter in bound.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                extra = arguments.pop(parameter.name, {})
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL and arguments.pop(parameter.name, ()):
                raise UnsupportedModelError(f"{name} takes unnamed arguments, which cannot be cut into chunks safely")
        hidden_name = next(iter(arguments), "")
        hidden = arguments.get(hidden_name)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (3, 4):  # 4: several residual streams side by side
            raise UnsupportedModelError(f"the first argument of {name} is not a tensor of hidden states [B, T, C]")
        for group in (arguments, extra):
            for key, value in group.items():
                if not _is_square(value, hidden.shape[1]):
                    continue
                if own is None:
                    group[key] = dense_mask(value)
                elif sees_future(value):
                    raise UnsupportedModelError(f"{key!r} of {name} lets a token see later tokens, or is no mask")
        call = cls(layer, arguments, extra, cache_name, hidden_name, [hidden_name], [], hidden.dtype, own)
        for key, value in call._all().items():
            if not isinstance(value, Tensor) and torch.is_grad_enabled() and _holds_gradient(value):
                raise UnsupportedModelError(
                    f"{name} is handed {key!r}, which needs a gradient inside a {type(value).__name__}; only tensors "
                    "that are arguments themselves get theirs back",
                    mend="freeze what it is computed from, or train without streaming",
                )
            if key != hidden_name and isinstance(value, Tensor) and value.requires_grad:
                dim = call._dim(key, value)
                if dim not in (None, 1):
                    raise UnsupportedModelError(
                        f"{name} is handed {key!r}, which needs a gradient and follows the sequence along dim {dim}"
                    )
                (call.shared if dim is None else call.streamed).append(key)
        return call

    @property
    def hidden(self) -> Tensor:
        """The layer's input ``[B, T, C]``."""
        return self.arguments[self.hidden_name]

    @property
    def length(self) -> int:
        """Tokens T of the sequence."""
        return self.hidden.shape[1]

    @property
    def mask(self) -> LazyMask | None:
        """The lazy mask among the arguments, if the model made one."""
        return next((value for value in self._all().values() if isinstance(value, LazyMask)), None)

    def first_key(self, chunk: slice) -> int:
        """The first position a chunk is shown.

        A layer that attends by itself is shown the whole prefix: it may count its keys from the first.
        """
        if self.mask is None or self.own is not None:
            return 0
        return min(self.mask.first_key(chunk.start), chunk.start)

    @property
    def cache(self) -> Any:
        """The cache the model itself passed, or None."""
        return self._all().get(self.cache_name)

    def _all(self) -> dict[str, Any]:
        return {**self.arguments, **self.extra}

    def tensors(self, names: list[str]) -> list[Tensor]:
        """The named arguments."""
        arguments = self._all()
        return [arguments[name] for name in names]

    def forget_tensors(self) -> None:
        """Drop the tensors that need a gradient: autograd saves them, a second reference would keep them too long."""
        for name in (*self.streamed, *self.shared):
            (self.arguments if name in self.arguments else self.extra)[name] = None

    def run(self, chunk: slice, cache: ChunkCache, given: dict[str, Tensor], length: int) -> Any:
        """Call the layer's own forward on one chunk.

        Args:
            chunk: Positions of the chunk.
            cache: What the layer sees of its prefix.
            given: Replaces arguments by name; already cut to the chunk.
            length: Tokens T of the whole sequence.
        """
        arguments = {key: given.get(key, value) for key, value in self.arguments.items()}
        extra = {key: given.get(key, value) for key, value in self.extra.items()}
        for group in (arguments, extra):
            for key, value in group.items():
                if key not in given:
                    group[key] = self._cut(key, value, chunk, cache.first_key, length)
        extra.pop(self.cache_name, None)
        arguments[self.cache_name] = cache
        if "use_cache" in arguments:
            arguments["use_cache"] = True
        extra.pop("use_cache", None)
        checkpointing = getattr(self.layer, "gradient_checkpointing", False)
        try:
            if checkpointing:
                self.layer.gradient_checkpointing = False  # type: ignore[assignment]
            with self._attending():
                return type(self.layer).forward(self.layer, **arguments, **extra)
        finally:
            if checkpointing:
                self.layer.gradient_checkpointing = True  # type: ignore[assignment]

    def run_whole(self) -> Any:
        """Call the layer's own forward with the arguments as they came, the cache among them (generation)."""
        arguments, extra = dict(self.arguments), dict(self.extra)
        if self.own is not None:
            form = self.own.form(self.dtype)
            for group in (arguments, extra):
                for key, value in group.items():
                    if isinstance(value, LazyMask):
                        group[key] = tile(value.rows(0, value.q_length), form)
        with self._attending():
            return type(self.layer).forward(self.layer, **arguments, **extra)

    def _attending(self) -> AbstractContextManager[None]:
        """A context in which the layer's configs name the attention it computes with."""
        if self.own is None:
            return nullcontext()
        configs = list(self.own.configs)
        return attention_as(configs, [self.own.name] * len(configs))

    def _dim(self, key: str, value: Tensor, length: int | None = None) -> int | None:
        """The dimension along which an argument follows the sequence, or None."""
        length = self.length if length is None else length
        if key in ("position_ids", "cache_position", *KEY_BIASES) and not _is_square(value, length):
            dim = value.dim() - 1
        elif key == "position_embeddings":
            dim = value.dim() - 2
        elif _is_square(value, length) or (value.dim() == 4 and value.shape[1] == 1):
            dim = 2
        elif value.dim() >= 2:
            dim = 1
        else:
            return None
        return dim if value.shape[dim] == length else None

    def _cut(self, key: str, value: Any, chunk: slice, first_key: int, length: int) -> Any:
        if isinstance(value, Tensor):
            if _is_square(value, length):
                return value[..., chunk, first_key : chunk.stop]
            if key in KEY_BIASES and value.shape[-1] == length:
                return value[..., first_key : chunk.stop]
            dim = self._dim(key, value, length)
            if dim is None:
                return value
            return value.narrow(dim, chunk.start, chunk.stop - chunk.start)
        if isinstance(value, LazyMask):
            view = value.chunk(chunk.start, chunk.stop, first_key)
            return view if self.own is None else tile(view, self.own.form(self.dtype))
        if isinstance(value, tuple | list):
            return type(value)(self._cut(key, item, chunk, first_key, length) for item in value)
        if isinstance(value, dict):
            return {name: self._cut(key, item, chunk, first_key, length) for name, item in value.items()}
        return value


def _holds_gradient(value: Any) -> bool:
    """Whether a tensor in nested containers needs a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(_holds_gradient(item) for item in items)


def _is_square(value: Any, length: int) -> bool:
    """Whether it is a dense mask ``[B, H, T, T]``."""
    return isinstance(value, Tensor) and value.dim() == 4 and tuple(value.shape[2:]) == (length, length)
