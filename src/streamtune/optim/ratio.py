"""AdamW on a part of each weight at a time: the ratio form of BAdam (arXiv 2404.02827, appendix).

Of a weight with n values, k = max(1, ratio n) that lie next to each other are trained for ``switch_block_every`` steps
by AdamW whose moments begin at zero, while all its others stay. Then k others are, at a place drawn at random. The
gradient is of all values: what is saved is state, 8 k bytes of a weight in place of 8 n.

Weights of 16 bits are stepped in float32: the part has a copy of them for as long as it is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from streamtune.optim.narrow_states import adamw_step


def part_size(count: int, ratio: float) -> int:
    """Return the number of values that are trained at a time, of ``count``."""
    return min(count, max(1, round(ratio * count)))


class RatioAdamW(torch.optim.Optimizer):
    """AdamW on a part of each weight.

    Args:
        params: Parameters, or groups of them; each state may begin with a number of the weight as ``seed``.
        lr: The learning rate.
        betas: Decay rates of the first and second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, of the part.
        update_ratio: The part of a weight's values that is trained at a time.
        switch_block_every: Steps until another part is.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        update_ratio: float = 0.01,
        switch_block_every: int = 50,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "update_ratio": update_ratio, "switch_block_every": switch_block_every})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step a part of each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, values = self.state[parameter], parameter.view(-1)
        assert parameter.grad is not None
        size = part_size(len(values), group["update_ratio"])
        if "step" not in state or (not parameter.is_meta and int(state["step"]) == group["switch_block_every"]):
            state["turn"] = state.get("turn", -1) + 1
            state["start"] = _start(len(values) - size, state.get("seed", 0), state["turn"])
            state |= _fresh_state(values[state["start"] : state["start"] + size])
        part = slice(state["start"], state["start"] + size)
        weight = state.get("float32", values[part])
        grad = parameter.grad.reshape(-1)[part].to(weight.dtype)
        adamw_step(weight, grad, state, group, fused=False)
        if "float32" in state:
            values[part] = weight.to(parameter.dtype)


def _start(last: int, seed: int, turn: int) -> int:
    """Return the first value of a part, from 0 to ``last``: a function of the weight's number and of the turn."""
    digest = hashlib.blake2b(f"{seed} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (last + 1)


def _fresh_state(part: Tensor) -> dict[str, Tensor]:
    wide = torch.promote_types(part.dtype, torch.float32)
    state = {"step": torch.zeros((), dtype=torch.float32)}
    state |= {key: torch.zeros_like(part, dtype=wide) for key in ("exp_avg", "exp_avg_sq")}
    if part.dtype != wide:
        state["float32"] = part.detach().to(wide)
    return state
