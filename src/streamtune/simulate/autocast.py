"""Autocast for tensors on ``meta``, for which torch has none: the casts of an operator's arguments on a device.

The operators are those of torch's own lists (``aten/src/ATen/autocast_mode.h``), the casts those of its
``cached_cast``: a trainable weight in fp32 is cast once and kept until the outermost region ends, anything else is cast
for each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from streamtune.ops.simulated import autocast_kind

__all__ = ["MetaAutocast", "Rule", "rule_of"]

Rule = Literal["lower", "fp32", "to fp32", "widest"]
"""Arguments in the lower precision; in fp32; a result in fp32 unless another is asked for; all as the widest is."""


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


LOWER = _names(
    "linear matmul mm bmm addmm addbmm baddbmm einsum conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d prelu linalg_vecdot scaled_dot_product_attention"
)
"""On every device. The CPU has no rule for ``einsum``; what that is made of has one."""

LOSSES = _names(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss margin_ranking_loss "
    "cosine_embedding_loss hinge_embedding_loss soft_margin_loss multi_margin_loss multilabel_margin_loss "
    "triplet_margin_loss binary_cross_entropy_with_logits"
)
RULES: dict[str, dict[Rule, frozenset[str]]] = {
    "cpu": {
        "lower": LOWER,
        "fp32": LOSSES | _names("prod cdist trace polar view_as_complex quantile nanquantile"),
        "widest": _names("cat stack index_copy"),
    },
    "cuda": {
        "lower": LOWER | {"addmv", "addr", "mv", "chain_matmul"},
        "fp32": LOSSES
        | _names(
            "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow softplus layer_norm "
            "rms_norm group_norm cosine_similarity cdist dist pdist renorm logsumexp"
        ),
        "to fp32": _names("softmax log_softmax sum prod cumsum cumprod"),
        "widest": _names("addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"),
    },
}
"""By kind of device. What no layer of a language model runs, such as decompositions and interpolation, is left out."""

SPELLINGS = {"__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow"}


@lru_cache(maxsize=4096)
def rule_of(func: Any, device: str) -> Rule | None:
    """Return the rule for a function of torch, by its name; None where autocast leaves it alone."""
    name = getattr(func, "__name__", "")
    name = SPELLINGS.get(name, name)
    return next((rule for rule, names in RULES[device].items() if name in names), None)


class MetaAutocast:
    """Casts arguments as autocast would, where it is enabled.

    Args:
        device: The kind of device that is simulated. Autocast counts as enabled if it is for the kind of device that
            :func:`~streamtune.ops.simulated.autocast_kind` returns for ``meta``.
    """

    def __init__(self, device: str) -> None:
        self.device, self.switch = device, autocast_kind(torch.device("meta"))
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def region(self) -> Iterator[None]:
        """Enter an outermost region of autocast: casts that are kept inside are freed at its end."""
        try:
            yield
        finally:
            self._kept.clear()

    def given(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as autocast passes them to the operator."""
        rule = rule_of(func, self.device)
        if rule is None or not torch.is_autocast_enabled(self.switch):
            return args, kwargs
        if rule == "to fp32":
            first = args[0] if args else kwargs.get("input")
            asked = any(isinstance(item, torch.dtype) for item in (*args, *kwargs.values()))
            return args, {**kwargs, "dtype": torch.float32} if _eligible(first) and not asked else kwargs
        lower = torch.get_autocast_dtype(self.switch)
        dtype = lower if rule == "lower" else torch.float32
        if rule == "widest" and not any(x.dtype == torch.float32 for x in _tensors((args, tuple(kwargs.values())))):
            dtype = lower
        return self._cast(args, dtype), {name: self._cast(item, dtype) for name, item in kwargs.items()}

    def _cast(self, item: Any, dtype: torch.dtype) -> Any:
        if isinstance(item, (tuple, list)):
            return type(item)([self._cast(part, dtype) for part in item])
        if not _eligible(item) or item.dtype == dtype:
            return item
        weight = item.dtype == torch.float32 and item.requires_grad and item.is_leaf and not item._is_view()
        if not weight or dtype == torch.float32 or not torch.is_autocast_cache_enabled():
            return item.to(dtype)
        known = self._kept.get(id(item))
        if known is None:  # the tensor goes along, so that its id stays its own
            known = self._kept[id(item)] = (item, item.to(dtype))
        return known[1]


def _eligible(item: Any) -> bool:
    if not isinstance(item, Tensor) or item.device.type != "meta":
        return False
    return item.is_floating_point() and item.dtype != torch.float64


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from _tensors(part)
    elif _eligible(item):
        yield item
