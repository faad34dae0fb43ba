"""AdamW whose moments are in float8 with their range expanded: COAT's optimizer states (arXiv 2410.19313, section 4).

Values of a moment that lie together have a far smaller range than float8 (e4m3) can have, so most of its codes are
never used. Of each group of ``group_size`` values x, with y = |x| / max |x|, a power of y is stored whose range is all
of float8's:

    k = log(R) / log(1 / min y),   R = 448 / 2^-9, the largest over the smallest number above 0
    codes = float8(448 sign(x) y^k)          x = max |x| sign(codes) (|codes| / 448)^(1/k)

The minimum is over values that are not 0, which stay 0. A step writes both moments out in float32 for one weight, steps
it by AdamW, and packs them again. Bytes of a value: 1, and 8 for each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from streamtune.optim.narrow_states import adamw_step

LARGEST, RANGE = 448.0, 448.0 / 2**-9
"""The largest number of float8 (e4m3), and that over the smallest above 0."""
POWERS = (1 / 16, 16.0)
"""The smallest and the largest k: a group of equal values has none of its own."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = ("codes", "largest", "power")


class ExpandedFp8AdamW(torch.optim.Optimizer):
    """AdamW with moments in float8.

    Args:
        params: Parameters, or groups of them.
        lr: The learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        group_size: Values with a power of their own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        group_size: int = 128,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "group_size": group_size}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        weight = parameter if parameter.dtype == torch.float32 else parameter.float()
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        else:
            first, second = (_written(state, name, weight) for name in MOMENTS)
        adam = {"exp_avg": first, "exp_avg_sq": second, "step": state["step"]}
        adamw_step(weight, parameter.grad.to(weight.dtype), adam, group, fused=False)
        if weight is not parameter:
            parameter.copy_(weight)
        for name, moment in zip(MOMENTS, (first, second), strict=True):
            for part, value in zip(PARTS, pack_expanded(moment, group["group_size"]), strict=True):
                state[f"{name}_{part}"] = value


def _written(state: dict[str, Tensor], name: str, weight: Tensor) -> Tensor:
    """Return a moment in float32, in the shape of its weight."""
    codes, largest, power = (state[f"{name}_{part}"] for part in PARTS)
    return expand(codes, largest, power, weight.numel()).view_as(weight)


def pack_expanded(x: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes ``[g, group_size]`` in float8, the largest magnitudes ``[g]`` and the powers ``[g]`` in float32.

    Args:
        x: In float32, of any shape; its end is filled up with zeros to a whole group.
        group_size: Values of a group.
    """
    flat = x.flatten()
    groups = torch.nn.functional.pad(flat, (0, -len(flat) % group_size)).view(-1, group_size)
    size = groups.abs()
    largest = size.amax(1)
    part = size / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    least = torch.where(part > 0, part, 1.0).amin(1)
    power = (math.log(RANGE) / -least.log().clamp_max(-1e-6)).clamp_(*POWERS)
    codes = (LARGEST * part.pow_(power[:, None])).copysign_(groups)
    return codes.to(torch.float8_e4m3fn), largest, power


def expand(codes: Tensor, largest: Tensor, power: Tensor, count: int) -> Tensor:
    """Return the ``count`` values that were packed, in float32."""
    wide = codes.float()
    size = (wide.abs() / LARGEST).pow_((1 / power)[:, None]).mul_(largest[:, None])
    return size.copysign_(wide).flatten()[:count]
