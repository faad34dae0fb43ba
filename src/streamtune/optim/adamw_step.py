"""A step of AdamW on one weight, by torch's own function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw


def adamw_step(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, group: Mapping[str, Any], *, fused: bool
) -> None:
    """Step a weight and its moments in place.

    Args:
        weight, grad, first, second: Of one shape and dtype.
        step: Steps taken, a float32 scalar; it is counted up. On the device of the weight if ``fused``.
        group: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        fused: Step by torch's fused kernel; its plain operators otherwise.
    """
    adamw(
        [weight],
        [grad],
        [first],
        [second],
        [],
        [step],
        fused=fused,
        foreach=False,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
