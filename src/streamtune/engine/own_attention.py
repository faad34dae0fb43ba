"""Masks for layers that compute their attention themselves: dense tensors, but only one chunk's tile at a time.

Most models of ``transformers`` pass queries, keys, values and mask to a function that their config names; the engine
puts its own there (``attention``). Others add the mask to their scores themselves (bloom, falcon, gptj), or compute
with it before they attend (sparse attention with an indexer). Such a layer keeps its own attention. It gets the rows of
the chunk and the columns of prefix and chunk, in the form that its own implementation expects:

    eager   additive, 0 or the lowest finite number, in the dtype of the hidden states
    sdpa    boolean, True where attention is allowed

Scores and mask take memory for the chunk times the prefix; the engine never builds the whole square. A model that
computes with its mask *before* its layers (alibi merged into it) gets the square, as without streaming; the call of
each layer is then given a chunk's part of it.

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
from streamtune.engine.hf_names import attention_of, set_attention
from streamtune.engine.observe import attention_as
from streamtune.errors import UnsupportedModelError
from streamtune.ops.attention.mask import LazyMask, MaskView

FORMS = ("eager", "sdpa")
"""Implementations that a layer may keep while its chunks are handed tiles."""

_OVER = f"{NAME}-over-"


def over(own: str) -> str:
    """Return the attention name for a config whose layers keep ``own``: our mask, and their own attention."""
    return _OVER + own


class CallNames:
    """Lets the configs of a streamed model name our attention while it runs, and at no other time.

    So another model that is built from a config, or from a copy of it, attends as it would without the streamed one.

    Args:
        configs: Configs from which the decoder and its layers read their attention.
        own: Implementation kept by layers that compute their attention themselves; None where ours is used.
    """

    def __init__(self, configs: Sequence[Any], own: str | None) -> None:
        self.configs = list(configs)
        self.before = [attention_of(config) for config in configs]
        """Names that the configs have outside of calls."""
        self.ours = [NAME if own is None else over(own)] * len(self.configs)
        self._depth = 0

    def begin(self, where: str) -> int:
        """Begin a call, which may be inside of another; return the number of calls around it."""
        if not self._depth:
            for config, name in zip(self.configs, self.before, strict=True):
                refuse_another(config, name, where)
            self._set(self.ours)
        self._depth += 1
        return self._depth - 1

    def end(self, around: int | None = None) -> None:
        """End the innermost call, or all inside of ``around`` calls."""
        if self._depth:
            self._depth = self._depth - 1 if around is None else around
            if not self._depth:
                self._set(self.before)

    @contextmanager
    def using(self, names: list[Any]) -> Iterator[None]:
        """Give the configs these names inside the context, also while calls run in it."""
        self._depth += 1
        try:
            with attention_as(self.configs, names):
                yield
        finally:
            self._depth -= 1

    def _set(self, names: list[Any]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            set_attention(config, name)


def refuse_another(config: Any, name: Any, where: str) -> None:
    """Refuse a config that names another attention than when its model was streamed.

    It does not align the queries of a chunk with the last of its keys.
    """
    now = attention_of(config)
    if now != name and not is_ours(now):
        raise UnsupportedModelError(
            f"the attention was set to {now!r} while the model is streamed",
            where=where,
            fix="call set_attn_implementation before stream(model), or .remove() the stream first",
        )


def is_ours(name: Any) -> bool:
    """Return True if a config's attention implementation is one of ours."""
    return name == NAME or name in map(over, FORMS)


@dataclass(frozen=True)
class OwnAttention:
    """Attention that one layer computes itself: the implementation that its configs name while it runs."""

    name: str

    def form(self, dtype: torch.dtype) -> torch.dtype:
        """Return the mask dtype that the layer expects for hidden states of ``dtype``.

        Eager attention computes its softmax in fp32 even for fp64 scores. There the lowest fp64 number would become
        -inf, and a query that sees no key would give NaN.
        """
        if self.name == "sdpa":
            return torch.bool
        return torch.float32 if dtype == torch.float64 else dtype


def tile(view: MaskView, form: torch.dtype) -> Tensor:
    """Return the tile ``[B, 1, T, S]`` of a lazy mask: boolean, or additive in a floating ``form``."""
    rows, _, queries, keys = view.shape
    allowed = view.mask.tile(view.q_start, view.q_stop, view.k_start, view.k_stop).expand(rows, 1, queries, keys)
    if form == torch.bool:
        return allowed
    bias = torch.zeros(allowed.shape, dtype=form, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(form).min)


def sees_future(dense_BHTT: Tensor) -> bool:
    """Return True if a dense square mask lets a query see a later key.

    True in a boolean mask may mean allowed or forbidden. So the mask is causal if all later keys have the same value,
    False, or True where not every query has True for its own key.
    """
    later = torch.ones(dense_BHTT.shape[-2:], dtype=torch.bool, device=dense_BHTT.device).triu(1)
    above = dense_BHTT[..., later]
    if dense_BHTT.dtype != torch.bool:
        return bool((above > -1e4).any())
    if not bool(above.any()):
        return False
    return not bool(above.all()) or bool(dense_BHTT.diagonal(dim1=-2, dim2=-1).all())


@dataclass(eq=False)
class FormedMask(LazyMask):
    """A lazy mask that becomes the dense one as soon as a model computes with it outside of its layers."""

    form: torch.dtype = torch.bool

    def dense(self) -> Tensor:
        """Build the whole mask ``[B, 1, T, S]``."""
        return tile(self.rows(0, self.q_length), self.form)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.dense()[key]

    def __eq__(self, other: object) -> Any:
        return self.dense() == other if isinstance(other, int | float | Tensor) else self is other

    def __ne__(self, other: object) -> Any:
        return self.dense() != other if isinstance(other, int | float | Tensor) else self is not other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *(arg.dense() if isinstance(arg, FormedMask) else arg for arg in args),
            **{key: arg.dense() if isinstance(arg, FormedMask) else arg for key, arg in (kwargs or {}).items()},
        )


def _operator(name: str) -> Any:
    return lambda mask, *others: getattr(mask.dense(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert", "lt", "le", "gt", "ge"):
    setattr(FormedMask, f"__{_name}__", _operator(f"__{_name}__"))


def _formed_mask(own: str, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> FormedMask:
    mask = lazy_mask(*args, **kwargs)
    known = {item.name: getattr(mask, item.name) for item in fields(mask)}
    return FormedMask(**known, form=torch.bool if own == "sdpa" else dtype)


for _own in FORMS:
    AttentionMaskInterface.register(over(_own), partial(_formed_mask, _own))
