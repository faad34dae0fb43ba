"""For layers that compute their attention themselves: the mask as a real tensor, but only one chunk's tile of it.

Most models of ``transformers`` hand queries, keys, values and mask to a function their config names, and that is ours
(``attention``). Others add the mask to their scores with their own hands (bloom, falcon, gptj), or compute with it
before they attend (sparse attention with an indexer). Such a layer keeps its own attention. It is handed the rows of
the chunk and the columns of prefix and chunk, in the form its own implementation asks for:

    eager   additive, 0 or the lowest finite number, in the dtype of the hidden states
    sdpa    boolean, True where attention is allowed

What it costs is the chunk times the prefix, in scores and mask; the whole square is never built by us. A model that
computes with its mask *before* its layers (alibi merged into it) gets the square, as it would without streaming; the
layers then cut that.

Shape suffixes: B batch, T queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from streamtune.engine.attention import NAME, lazy_mask
from streamtune.ops.mask import LazyMask, MaskView

__all__ = ["FORMS", "FormedMask", "OwnAttention", "is_ours", "over", "sees_future", "tile"]

FORMS = ("eager", "sdpa")
"""Implementations a layer may keep while its chunks are handed tiles."""

_OVER = f"{NAME}-over-"


def over(own: str) -> str:
    """The name in the config of a model whose layers keep their ``own`` attention: our mask over it."""
    return _OVER + own


def is_ours(name: Any) -> bool:
    """Whether a config's attention implementation is one of ours."""
    return name == NAME or name in map(over, FORMS)


@dataclass(frozen=True)
class OwnAttention:
    """How one layer attends by itself: the implementation its configs name while it runs."""

    name: str
    configs: tuple[Any, ...] = ()

    def form(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the mask it expects, given that of its hidden states.

        Eager attention takes its softmax in fp32 even of fp64 scores, where fp64's lowest number would be -inf and a
        query that sees nothing NaN.
        """
        if self.name == "sdpa":
            return torch.bool
        return torch.float32 if dtype == torch.float64 else dtype


def tile(view: MaskView, form: torch.dtype) -> Tensor:
    """The tile ``[B, 1, T, S]`` of a lazy mask: boolean, or additive in a floating ``form``."""
    rows, _, queries, keys = view.shape
    allowed = view.mask.tile(view.q_start, view.q_stop, view.k_start, view.k_stop).expand(rows, 1, queries, keys)
    if form == torch.bool:
        return allowed
    bias = torch.zeros(allowed.shape, dtype=form, device=allowed.device)
    return bias.masked_fill_(~allowed, torch.finfo(form).min)


def sees_future(dense_BHTT: Tensor) -> bool:
    """Whether a dense square mask lets a query see a later key.

    A boolean mask may say what is allowed or what is forbidden: all later keys must say the same, and it must not be
    what every query says of itself.
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
        """The whole mask ``[B, 1, T, S]``."""
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
    """What Python's operator does on the dense mask."""
    return lambda mask, *others: getattr(mask.dense(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "or", "invert", "lt", "le", "gt", "ge"):
    setattr(FormedMask, f"__{_name}__", _operator(f"__{_name}__"))


def _formed_mask(own: str, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> FormedMask:
    mask = lazy_mask(*args, **kwargs)
    known = {item.name: getattr(mask, item.name) for item in fields(mask)}
    return FormedMask(**known, form=torch.bool if own == "sdpa" else dtype)


for _own in FORMS:
    AttentionMaskInterface.register(over(_own), partial(_formed_mask, _own))
