"""Optimizers for the matrices of layers: GaLore, natural GaLore and SinkGD.

**GaLore** (arXiv 2403.03507, algorithm 2) is AdamW with moments of gradients that are projected to a low rank. For a
matrix with gradient G [m, n], m >= n, and a projection P [n, r] with orthonormal columns:

    R = G P                                               [m, r]
    M = b1 M + (1 - b1) R;  V = b2 V + (1 - b2) R^2       the moments, [m, r] in place of [m, n]
    W <- W - lr * scale * sqrt(1 - b2^t) / (1 - b1^t) * (M / (sqrt(V) + eps)) P^T
    W <- (1 - lr wd) W

With m < n, all matrices are transposed. Every ``update_proj_gap`` steps P is recomputed from the gradient of that step;
the moments do not change. The option ``projection`` chooses P:

    svd         the first r right singular vectors of G
    randomized  the same from a random sketch of G, in r / n of the time (arXiv 0909.4061, algorithm 4.4)
    dct         the r columns D_i of the orthonormal cosine transform for which |G D_i| is largest: no decomposition,
                and only the indices are stored (arXiv 2505.17967)

Each weight has its own step count and moments, so weights may be updated in any order. The caller is
``streamtune.optim.WeightwiseOptimizer``, which also sets a seed for each weight.

With ``proj_type: full`` the other side is projected too, by a Q [m, r] that is computed from G^T as P is from G:

    R = Q^T G P                                           [r, r]
    W <- W - lr * scale * sqrt(1 - b2^t) / (1 - b1^t) * Q (M / (sqrt(V) + eps)) P^T

For adapters whose weight is normalised (``dora``) this is the method of arXiv 2412.19616.

The gradient is projected after it has been summed over the chunks of a sequence. Vectors, and matrices that the rank
does not make smaller, are updated by plain AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from streamtune.optim.weight_step import ADAMW, PerWeightOptimizer

Projection = Literal["svd", "randomized", "dct"]
"""Method that computes a projection."""
ProjType = Literal["std", "full"]
"""Sides of a gradient that are projected: the shorter side (``std``) or both (``full``), as in ``galore-torch``."""

OVERSAMPLED = 8
"""Number of columns of a random sketch beyond the rank."""
POWERS = 2
"""Number of power iterations: a sketch is multiplied by the gradient and its transpose to shrink small singular values.
"""


SMALLEST_NORM = 1e-8
"""Lower bound of norms, so that a row of zeros, such as the row of an unseen token, stays zero."""


class GaLoreAdamW(PerWeightOptimizer):
    """GaLore: AdamW on gradients that are projected to a low rank. Groups with ``rank: None`` use plain AdamW.

    Args:
        params: Parameters, or groups of them.
        options: Options of AdamW, and:

            - ``rank``: rank r.
            - ``scale``: factor of the projected update.
            - ``update_proj_gap``: number of steps between two projections.
            - ``projection``: method that computes P, a :data:`Projection`.
            - ``proj_type``: sides that are projected, a :data:`ProjType`.
    """

    DEFAULTS: ClassVar = {
        **ADAMW,
        "rank": 128,
        "scale": 0.25,
        "update_proj_gap": 200,
        "projection": "svd",
        "proj_type": "std",
    }

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self._transforms: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        """Cosine transform by size, dtype and device, shared by all weights of a size."""

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, rank = self.state[parameter], group["rank"]
        low_rank = rank is not None and parameter.dim() == 2 and rank < min(parameter.shape)
        left_projection: Tensor | None = None
        right_projection: Tensor | None = None
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        if low_rank:
            # On meta, simulate the step that needs the most memory.
            recompute = parameter.is_meta or int(state["step"]) % group["update_proj_gap"] == 0
            left_projection, right_projection = self._projections(grad, group, state, recompute=recompute)
            projected = grad if left_projection is None else left_projection.T @ grad
            projected = projected if right_projection is None else projected @ right_projection
            # Moments of a wide matrix are stored transposed.
            grad = self._gradient_to_average(projected if right_projection is not None else projected.T, state, group)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        count, (beta1, beta2) = 1 if parameter.is_meta else int(state["step"]), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = math.sqrt(1 - beta2**count)
        update = mean / square.sqrt().add_(group["eps"])
        rate = group["lr"] * corrected / (1 - beta1**count)
        if low_rank:
            update = update if right_projection is not None else update.T
            update = update if left_projection is None else left_projection @ update
            update, rate = update if right_projection is None else update @ right_projection.T, rate * group["scale"]
        parameter.add_(update, alpha=-rate)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])

    def _projections(
        self, grad: Tensor, group: dict[str, Any], state: dict[str, Any], *, recompute: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return Q ``[m, r]`` and P ``[n, r]`` for a gradient ``[m, n]``; None for a side that is not projected."""
        wide = grad.shape[0] < grad.shape[1]
        sides = {"projection": wide}  # the shorter side first; True is the left side
        if group["proj_type"] == "full":
            sides["other_projection"] = not wide
        projections: dict[bool, Tensor] = {}
        for name, is_left in sides.items():
            across = grad.T if is_left else grad
            if recompute:
                state[name] = self._compute_projection(across, group, state, is_transposed=is_left)
            projections[is_left] = self._projection_columns(state[name], across)
        return projections.get(True), projections.get(False)

    def _gradient_to_average(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the tensor that the moments average: here the projected gradient. Subclasses override this method."""
        return grad

    def _compute_projection(
        self, grad: Tensor, group: dict[str, Any], state: dict[str, Any], *, is_transposed: bool
    ) -> Tensor:
        """Return P ``[n, r]`` for a gradient ``[m, n]``, or for ``dct`` the indices of P's columns, int64 ``[r]``.

        ``is_transposed`` is True if ``grad`` is the transposed gradient of a matrix, whose rows are then projected.
        """
        rank, kind = group["rank"], group["projection"]
        if kind == "dct":
            return cosine_columns(grad, self._cosine_transform_for(grad), rank)
        if kind == "randomized":
            seed = 0 if grad.is_meta else (state.get("seed", 0) << 32) + int(state["step"])
            return randomized_columns(grad, rank, seed)
        # Signs of singular vectors are arbitrary and old moments depend on them: always decompose the untransposed
        # matrix.
        if is_transposed:
            left, _, _ = torch.linalg.svd(grad.T.float(), full_matrices=False)
            return left[:, :rank].to(grad.dtype).contiguous()
        _, _, vectors = torch.linalg.svd(grad.float(), full_matrices=False)
        return vectors[:rank].T.to(grad.dtype).contiguous()

    def _cosine_transform_for(self, grad: Tensor) -> Tensor:
        key = (grad.shape[1], grad.dtype, grad.device)
        if key not in self._transforms:
            self._transforms[key] = cosine_transform(*key)
        return self._transforms[key]

    def _projection_columns(self, projection: Tensor, grad: Tensor) -> Tensor:
        return projection if projection.dim() == 2 else self._cosine_transform_for(grad)[:, projection]


class NaturalGaLoreAdamW(GaLoreAdamW):
    """GaLore with a natural gradient, from the Fisher matrix of the last steps (arXiv 2410.16029).

    The moments average R times the inverse of the empirical Fisher matrix of the last projected gradients r_1 ... r_s
    (as vectors; the last is R). Woodbury's identity gives this product from a system of s equations:

        F = 1/s sum_i r_i r_i^T + lambda I,   lambda = damping * 1/s sum_i |r_i|^2
        lambda F^-1 r = r - G^T (s lambda I + G G^T)^-1 G r,   with the rows r_i^T of G [s, m r], or [s, r^2]

    The factor lambda preserves the size of an update: with large damping the update is GaLore's. Each new projection
    starts a new history, because its columns differ.

    ``history`` is s, which includes the latest gradient. ``damping`` is the fraction of the gradients' mean squared
    norm that is added to the Fisher matrix.
    """

    DEFAULTS: ClassVar = {**GaLoreAdamW.DEFAULTS, "history": 8, "damping": 1.0}

    def _gradient_to_average(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return ``lambda F^-1 r`` for the projected gradient r, and add r to the history."""
        size = group["history"]
        if "history" not in state:
            state["history"] = torch.zeros(size, *grad.shape, dtype=grad.dtype, device=grad.device)
        index = size - 1 if grad.is_meta else int(state["step"]) % group["update_proj_gap"]
        state["history"][index % size] = grad
        gradients = state["history"][: index + 1].flatten(1).float()
        products = gradients @ gradients.T
        damped = products + group["damping"] * products.trace() * torch.eye(len(gradients), device=grad.device)
        weights = torch.linalg.solve_ex(damped, products[:, index % size])[0].nan_to_num()  # 0 if the gradients are 0
        return grad - (weights @ gradients).view_as(grad).to(grad.dtype)


def randomized_columns(grad: Tensor, rank: int, seed: int) -> Tensor:
    """Return the first right singular vectors ``[n, rank]`` of ``grad`` ``[m, n]``, from a random sketch."""
    matrix = grad.float()
    generator = torch.Generator().manual_seed(seed % 2**63)
    size = min(rank + OVERSAMPLED, min(matrix.shape))
    drawn = torch.randn(matrix.shape[0], size, generator=generator).to(matrix.device)
    basis, _ = torch.linalg.qr(matrix.T @ drawn)
    for _ in range(POWERS):
        left, _ = torch.linalg.qr(matrix @ basis)
        basis, _ = torch.linalg.qr(matrix.T @ left)
    _, _, vectors = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return (basis @ vectors[:rank].T).to(grad.dtype).contiguous()


def cosine_columns(grad: Tensor, transform: Tensor, rank: int) -> Tensor:
    """Return the indices of the columns D_i of ``transform`` ``[n, n]`` with the largest |G D_i|, int64 ``[rank]``.

    G is ``grad``, ``[m, n]``.
    """
    return torch.linalg.vector_norm(grad @ transform, dim=0, dtype=torch.float32).topk(rank).indices.sort().values


def cosine_transform(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II ``[size, size]``: column j is ``cos(pi / n (i + 1/2) j)``, scaled to norm 1."""
    index = torch.arange(size, dtype=torch.int32 if size < 2**15 else torch.int64, device=device)
    # Angles are (2 i + 1) j in units of a full turn / 4 n: integers, reduced modulo 4 n.
    angle = ((2 * index[:, None] + 1) * index) % (4 * size)
    columns = angle.to(torch.float32).mul_(math.pi / (2 * size)).cos_().mul_(math.sqrt(2 / size))
    columns[:, 0] /= math.sqrt(2)
    return columns.to(dtype)


class SinkGD(PerWeightOptimizer):
    """Gradient descent whose gradient is normalised by rows and columns in turn; the optimizer has no state.

    With a gradient G ``[m, n]``, ``iterations`` times (Scetbon et al., arXiv 2502.06742, algorithm 3):

        G <- sqrt(n) G / |rows of G|;   G <- sqrt(m) G / |columns of G|

    and then ``W <- (1 - lr wd) W - lr scale G``. So all rows have the same norm, and all columns too. An entry of G is
    about 1, like an entry of AdamW's update.
    """

    DEFAULTS: ClassVar = {"lr": 1e-3, "weight_decay": 0.0, "iterations": 5, "scale": 1.0}

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        update = normalize_rows_and_columns(grad, group["iterations"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * group["scale"])


def normalize_rows_and_columns(gradient: Tensor, iterations: int) -> Tensor:
    """Return the gradient ``[m, n]`` normalised by rows and columns in turn, in float32 or wider."""
    rows, columns = gradient.shape
    x = gradient.float() if gradient.element_size() < 4 else gradient.clone()
    for _ in range(iterations):
        for dim, size in ((1, columns), (0, rows)):
            x.mul_(math.sqrt(size) / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_(min=SMALLEST_NORM))
    return x
