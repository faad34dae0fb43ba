"""Masks for layers with their own attention code: dense tensors, but one chunk's tile at a time.

Most models of ``transformers`` pass queries, keys, values and mask to a function that their config names, and
StreamTune registers its own function there (``attention``). Other layers add the mask to their scores themselves
(bloom, falcon, gptj), or compute with it before attention (sparse attention with an indexer). Such a layer keeps its
attention code. It gets a tile of the mask: the rows of the chunk, and the columns of the chunk and all earlier chunks.
The tile has the dtype that the layer's attention implementation expects:

    eager   additive, 0 or the lowest finite number, in the dtype of the hidden states
    sdpa    boolean, True where attention is allowed

A model that computes with its mask *before* its layers (alibi merged into it) gets the whole mask, as without
streaming. The call of each layer then gets a chunk's part of it.

Shape suffixes: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from streamtune.engine.attention import NAME, lazy_mask
from streamtune.engine.hf_names import attention_name, set_attention_name
from streamtune.engine.observe import temporary_attention_names
from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.mask import HIGHEST_HIDDEN, LazyMask, MaskView

TILED_IMPLEMENTATIONS = ("eager", "sdpa")
"""Attention implementations that a layer may keep: they accept tiles."""

_TILED_PREFIX = f"{NAME}-over-"


def lazy_mask_attention_name(implementation: str) -> str:
    """Return the attention name for configs whose layers keep ``implementation``, but get a ``LazyMask``."""
    return _TILED_PREFIX + implementation


class AttentionNames:
    """Switches a model's configs to StreamTune's attention while a call runs, and back afterwards.

    Outside of calls the configs are unchanged. So another model that is built from a config, or from a copy of it, uses
    the attention that the config names.

    Args:
        configs: Configs from which the decoder and its layers read their attention implementation.
        own_attention: Attention implementation of layers that compute attention in their own code; None if StreamTune's
            attention is used.
    """

    def __init__(self, configs: Sequence[Any], own_attention: str | None) -> None:
        self.configs = list(configs)
        self.plain_names = [attention_name(config) for config in configs]
        """Attention implementations that the configs name outside of calls."""
        self.engine_names = [NAME if own_attention is None else lazy_mask_attention_name(own_attention)] * len(
            self.configs
        )
        """Attention implementations that the configs name during calls."""
        self._depth = 0

    def begin_call(self, where: str) -> int:
        """Begin a model call, which may be nested in another; return the number of enclosing calls."""
        if not self._depth:
            for config, name in zip(self.configs, self.plain_names, strict=True):
                refuse_changed_attention(config, name, where)
            self._set_names(self.engine_names)
        self._depth += 1
        return self._depth - 1

    def end_call(self, outer_calls: int | None = None) -> None:
        """End the innermost call; with ``outer_calls`` end calls until only that number of outermost calls is left."""
        if self._depth:
            self._depth = self._depth - 1 if outer_calls is None else outer_calls
            if not self._depth:
                self._set_names(self.plain_names)

    @contextmanager
    def using_names(self, names: list[Any]) -> Iterator[None]:
        """Set these attention implementations in the configs in the ``with`` block, also during calls."""
        self._depth += 1
        try:
            with temporary_attention_names(self.configs, names):
                yield
        finally:
            self._depth -= 1

    def _set_names(self, names: list[Any]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            set_attention_name(config, name)


def refuse_changed_attention(config: Any, name: Any, where: str) -> None:
    """Raise an error for a config whose attention implementation was changed after its model was streamed.

    Other implementations do not align the queries of a chunk with the last keys, so the result would be wrong.

    Raises:
        UnsupportedModelError: The config names neither ``name`` nor an attention implementation of StreamTune.
    """
    now = attention_name(config)
    if now != name and not is_engine_attention(now):
        raise UnsupportedModelError(
            f"the attention implementation was set to {now!r} while the model is streamed",
            where=where,
            fix="call set_attn_implementation before stream(model), or call handle.remove() first",
        )


def is_engine_attention(name: Any) -> bool:
    """Return True if ``name`` is an attention implementation that StreamTune registered."""
    return name == NAME or name in map(lazy_mask_attention_name, TILED_IMPLEMENTATIONS)


@dataclass(frozen=True)
class OwnAttention:
    """Attention of a layer that computes attention in its own code.

    ``name`` is the implementation that the layer's configs name while the layer runs.
    """

    name: str

    def mask_dtype(self, hidden_dtype: torch.dtype) -> torch.dtype:
        """Return the mask dtype that the layer expects for hidden states of ``hidden_dtype``.

        For fp64 hidden states the mask is fp32. Eager attention computes its softmax in fp32, where the lowest fp64
        number would be -inf, and a query that sees no key would give NaN.
        """
        if self.name == "sdpa":
            return torch.bool
        return torch.float32 if hidden_dtype == torch.float64 else hidden_dtype


def dense_mask_of_view(view: MaskView, dtype: torch.dtype) -> Tensor:
    """Return the dense mask ``[B, 1, T, S]`` of a lazy mask's view: additive if ``dtype`` is floating, else boolean."""
    rows, _, queries, keys = view.shape
    allowed = view.mask.tile(view.q_start, view.q_stop, view.k_start, view.k_stop).expand(rows, 1, queries, keys)
    if dtype == torch.bool:
        return allowed
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(dtype).min)


def sees_future(dense_BHTT: Tensor) -> bool:
    """Return True if a dense mask ``[B, H, T, T]`` lets a query see a later key.

    In a boolean mask True may mean allowed or forbidden. The mask is causal if all entries for later keys are False. It
    is also causal if all of them are True and some query has False for its own key: True then means forbidden.
    """
    later = torch.ones(dense_BHTT.shape[-2:], dtype=torch.bool, device=dense_BHTT.device).triu(1)
    above = dense_BHTT[..., later]
    if dense_BHTT.dtype != torch.bool:
        return bool((above > HIGHEST_HIDDEN).any())
    if not bool(above.any()):
        return False
    return not bool(above.all()) or bool(dense_BHTT.diagonal(dim1=-2, dim2=-1).all())


@dataclass(eq=False)
class DenseOnUseMask(LazyMask):
    """A lazy mask that becomes a dense tensor when a model computes with it outside its layers."""

    dense_dtype: torch.dtype = torch.bool

    def to_dense(self) -> Tensor:
        """Return the dense mask ``[B, 1, T, S]``."""
        return dense_mask_of_view(self.view_queries(0, self.q_length), self.dense_dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.to_dense(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.to_dense()[key]

    def __eq__(self, other: object) -> Any:
        return self.to_dense() == other if isinstance(other, int | float | Tensor) else self is other

    def __ne__(self, other: object) -> Any:
        return self.to_dense() != other if isinstance(other, int | float | Tensor) else self is not other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(arg.to_dense() if isinstance(arg, DenseOnUseMask) else arg for arg in args),
            **{key: arg.to_dense() if isinstance(arg, DenseOnUseMask) else arg for key, arg in (kwargs or {}).items()},
        )


def _dense_operator(name: str) -> Any:
    return lambda mask, *others: getattr(mask.to_dense(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert", "lt", "le", "gt", "ge"):
    setattr(DenseOnUseMask, f"__{_name}__", _dense_operator(f"__{_name}__"))


def _make_densified_mask(
    implementation: str, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> DenseOnUseMask:
    mask = lazy_mask(*args, **kwargs)
    values = {item.name: getattr(mask, item.name) for item in fields(mask)}
    return DenseOnUseMask(**values, dense_dtype=torch.bool if implementation == "sdpa" else dtype)


for _implementation in TILED_IMPLEMENTATIONS:
    AttentionMaskInterface.register(
        lazy_mask_attention_name(_implementation), partial(_make_densified_mask, _implementation)
    )
