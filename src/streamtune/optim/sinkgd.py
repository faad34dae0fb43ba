"""SinkGD: gradient descent whose gradient is normalised by rows and columns in turn; it keeps no state.

With a gradient G of shape [m, n], L times (Scetbon et al., arXiv 2502.06742, algorithm 3):

    G <- sqrt(n) G / |rows of G|;   G <- sqrt(m) G / |columns of G|
    W <- (1 - lr wd) W - lr scale G

so that rows and columns have the same norms, and a value of G is about 1, as that of AdamW's step is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SMALLEST_NORM = 1e-8
"""Norms are at least this: a row of zeros, such as that of a token that did not occur, stays one."""


class SinkGD(torch.optim.Optimizer):
    """Gradient descent with normalised gradients.

    Args:
        params: Matrices, or groups of them.
        lr: The learning rate.
        weight_decay: Decoupled decay.
        iterations: Times that rows and columns are normalised.
        scale: Factor of the step beside the learning rate.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        iterations: int = 5,
        scale: float = 1.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "iterations": iterations, "scale": scale})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = normalize_rows_and_columns(parameter.grad, group["iterations"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * group["scale"])


def normalize_rows_and_columns(gradient: Tensor, iterations: int) -> Tensor:
    """Return the normalised gradient, in float32 at least.

    Args:
        gradient: [m, n].
        iterations: Times that the rows are normalised, and then the columns.
    """
    rows, columns = gradient.shape
    x = gradient.float() if gradient.element_size() < 4 else gradient.clone()
    for _ in range(iterations):
        for dim, size in ((1, columns), (0, rows)):
            x.mul_(math.sqrt(size) / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_(min=SMALLEST_NORM))
    return x
