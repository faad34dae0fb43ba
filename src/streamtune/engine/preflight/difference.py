"""Measures of the difference between two computations of a tensor, and bounds on the difference rounding explains."""

from __future__ import annotations

import math
from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BOUND", "compared_dtype", "distance", "norm_of", "ratio", "widened"]

BOUND = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Relative difference that rounding explains. fp64: some layers compute their norms, rotations or routers in fp32."""


def compared_dtype(tensor: Tensor, layer: nn.Module | None = None) -> torch.dtype:
    """Return the key of a tensor's bound: its dtype, or that of the layer it went through where that is coarser.

    Some models keep the residual stream in fp32 between layers that compute in bf16.
    """
    dtypes = [tensor.dtype, *(p.dtype for p in layer.parameters())] if layer is not None else [tensor.dtype]
    return max((dtype for dtype in dtypes if dtype in BOUND), key=BOUND.__getitem__, default=torch.float32)


def distance(value: Tensor, reference: Tensor, valid: Tensor | None) -> float:
    """Return ``||value - reference|| / ||reference||`` over the valid tokens."""
    if value.shape != reference.shape:
        return math.inf
    if valid is not None:
        value, reference = value[valid], reference[valid]
    return ratio(norm_of(value, reference), norm_of(reference))


def norm_of(value: Tensor | None, other: Tensor | None = None) -> float:
    """Return ``||value - other||`` in fp32 or wider, where a missing tensor is zero."""
    if value is None:
        value, other = other, None
    if value is None:
        return 0.0
    wide = value.detach().to(torch.promote_types(value.dtype, torch.float32))
    return float((wide if other is None else wide - other.detach().to(wide)).norm())


def ratio(difference: float, whole: float) -> float:
    """Return ``difference / whole``: 0 for no difference, infinity if one is not finite or ``whole`` is 0."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) and math.isfinite(whole) else math.inf


def widened(value: Any, dtype: torch.dtype) -> Any:
    """Return nested containers with every floating tensor in a wider dtype."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype) if value.is_floating_point() else value
    if isinstance(value, UserDict):
        return type(value)({key: widened(item, dtype) for key, item in value.items()})
    if isinstance(value, dict):
        return {key: widened(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(widened(item, dtype) for item in value)
    return value
