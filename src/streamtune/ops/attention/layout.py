"""Layouts in memory that an attention kernel reads rightly; :func:`call_kernel` copies tensors that have another.

``scaled_dot_product_attention`` checks strides before it calls a kernel. The operators below it, which are called here
directly, do not. On a CPU they take the channels of a head to be neighbours in memory whatever the stride says, and lay
their output out as the queries are, which fails where tokens overlap. On CUDA they read 16 bytes at once wherever these
begin. A dimension of stride zero is read rightly: a group of heads that shares its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamtune.ops.simulated import kernel_device

VECTOR = 16
"""Bytes that a kernel on CUDA reads at once."""


def call_kernel(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call an operator of ``torch`` with tensors in layouts that it reads rightly.

    Args:
        operator: Operator below ``scaled_dot_product_attention``.
        *arguments: Its arguments; tensors among them are copied where their layout requires it.
        **options: Further arguments, likewise.
    """
    return operator(
        *(readable(x) if isinstance(x, Tensor) else x for x in arguments),
        **{name: readable(x) if isinstance(x, Tensor) else x for name, x in options.items()},
    )


def readable(x: Tensor) -> Tensor:
    """Return ``x`` itself where its channels are neighbours in memory and begin where a kernel can read, else a copy.

    Args:
        x: Tensor whose last dimension is the channels of a head, or the keys of a mask.
    """
    if x.dim() < 2 or (_is_apart(x) and (kernel_device(x.device) != "cuda" or _is_aligned(x))):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _steps(x: Tensor) -> list[int]:
    """Return the strides of all dimensions but the last that have more than one place."""
    return [step for length, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if length > 1]


def _is_apart(x: Tensor) -> bool:
    """Return True if the channels of a token are neighbours, and no two tokens overlap in part."""
    channels = x.shape[-1]
    return channels <= 1 or (x.stride(-1) == 1 and all(step == 0 or step >= channels for step in _steps(x)))


def _is_aligned(x: Tensor) -> bool:
    """Return True if the channels of each token begin at a multiple of 16 bytes, or no copy of ``x`` would do so."""
    size = x.element_size()
    if x.shape[-1] * size % VECTOR:
        return True
    return x.data_ptr() % VECTOR == 0 and all(step * size % VECTOR == 0 for step in _steps(x))


ODD_LAYOUTS = ("channels apart", "every other channel", "odd offset", "expanded", "overlapping")
"""Layouts of ``[B, H, T, D]`` that a projection, a slice or a gradient may have, beside the usual ones."""


def odd_layout(x: Tensor, layout: str) -> Tensor:
    """Return a tensor of the shape of ``x``, with its numbers or with some of them, in one of :data:`ODD_LAYOUTS`.

    Args:
        x: ``[B, H, T, D]``.
        layout: The layout. An expanded tensor repeats the first row; places that overlap share numbers.
    """
    if layout == "channels apart":  # of one channel all heads are neighbours: a projection laid out ``(d h)``
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    if layout == "every other channel":
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]
    if layout == "odd offset":
        return torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    assert layout == "overlapping"
    return x.flatten().as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1, 1))
