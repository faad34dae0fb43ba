"""Random projections (count sketches) of the gradients of dataset rows, to select rows (``select_rows``).

Only the gradient of one weight is computed: the value projection of the last layer that has one. So the layers below it
run without an autograd graph. CoLM (arXiv 2407.19580, section 4.3) uses the same weight.

If the weight has Adam's moments m and v, its gradient g is replaced by Adam's step for this row alone (section 4.2):

    ((b1 m + (1 - b1) g) / (1 - b1^t))  /  (sqrt((b2 v + (1 - b2) g^2) / (1 - b2^t)) + eps)

A count sketch divides the n values of a gradient into k random groups, and sums each group with random signs. In
expectation, dot products and squared distances of gradients are preserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine import StreamHandle
from streamtune.errors import UnsupportedModelError
from streamtune.ops.devices import to_float64
from streamtune.train.objective import MicroBatch, Objective, TreeBatch, autocast, evaluation_mode
from streamtune.train.process import preserve_rng

VALUE_PROJECTIONS = ("v_proj", "value", "kv_b_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
"""Names of modules that project values, alone or together with keys or queries."""

Weights = Mapping[str, nn.Parameter]


def value_projection_weights(layers: Sequence[nn.Module], recipe_key: str = "select_rows") -> dict[str, nn.Parameter]:
    """Return name -> parameter of the trained value projection in the last layer that has one.

    Args:
        layers: Decoder layers.
        recipe_key: Recipe key that needs the weights, for the error.

    Raises:
        UnsupportedModelError: No layer has a trained value projection.
    """
    for layer in reversed(layers):
        weights = {
            name: parameter
            for name, parameter in layer.named_parameters()
            if parameter.requires_grad and not set(VALUE_PROJECTIONS).isdisjoint(name.split("."))
        }
        if weights:
            return weights
    raise UnsupportedModelError(
        f"{recipe_key} needs a trained value projection, but {type(layers[-1]).__name__} has no trained weight in a "
        f"module named {', '.join(VALUE_PROJECTIONS)}",
        where=recipe_key,
        fix=f"add such a module to lora_target, or delete the key {recipe_key}",
    )


class CountSketch:
    """A random projection (count sketch) of vectors; the same seed gives the same projection.

    Args:
        num_values: Number of values of a vector.
        max_size: Largest number of values of its projection.
        seed: Random seed.
    """

    def __init__(self, num_values: int, max_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = min(max_size, num_values)
        self.order_n = torch.randperm(num_values, generator=generator).to(torch.int32)
        self.signs_n = torch.randint(0, 2, (num_values,), generator=generator, dtype=torch.int8) * 2 - 1

    def __call__(self, values_n: Tensor) -> Tensor:
        """Return the projection ``[k]`` of ``values_n`` ``[n]``, on the same device and in the same dtype."""
        order_n, signs_n = self.order_n.to(values_n.device), self.signs_n.to(values_n.device)
        signed_n = values_n.index_select(0, order_n) * signs_n
        missing = -len(signed_n) % self.size
        return nn.functional.pad(signed_n, (0, missing)).view(self.size, -1).sum(1)


class RowSketch:
    """Computes a random projection of the gradient of a row's loss, with the model in evaluation mode.

    Args:
        model: Model changed by ``streamtune.stream``.
        handle: Handle of the model, returned by ``streamtune.stream``.
        objective: Objective that computes the loss.
        device: Device of the model.
        size: Number of values of a projection.
        seed: Seed of the projection.
        autocast_dtype: Dtype of autocast in the forward pass; None: no autocast.
    """

    def __init__(
        self,
        model: Any,
        handle: StreamHandle,
        objective: Objective,
        *,
        device: torch.device,
        size: int,
        seed: int,
        autocast_dtype: str | None = None,
    ) -> None:
        self.model, self.handle, self.objective = model, handle, objective
        self.device, self.autocast_dtype = device, autocast_dtype
        self.weights: Weights = value_projection_weights(handle.layers)
        self.project = CountSketch(sum(weight.numel() for weight in self.weights.values()), size, seed)
        self.optimizer: torch.optim.Optimizer | None = None
        """Optimizer whose moments replace the gradient by Adam's step; None uses the plain gradient."""

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the projected gradient ``[k]`` of a one-row batch, on the host: fp32, or fp64 for fp64 weights.

        Dropout and router loss are off. Random state, accumulated gradients and gradient hooks are not affected.
        """
        batch = batch.to(self.device)
        totals = self.objective.step_totals([batch])
        if not totals:  # a row of weight 0 trains nothing
            return torch.zeros(self.project.size)

        def loss() -> Tensor:
            with autocast(self.device, self.autocast_dtype):
                return self.objective.score(self.model, batch, totals).loss

        grads = _weight_gradients(self.model, self.handle, self.weights, loss)
        with torch.no_grad():
            pairs = zip(self.weights.values(), grads, strict=True)
            return self.project(
                torch.cat([self._adam_step_or_gradient(weight, grad).flatten() for weight, grad in pairs])
            ).cpu()

    def _adam_step_or_gradient(self, weight: nn.Parameter, grad: Tensor) -> Tensor:
        grad = grad if grad.dtype == torch.float64 else grad.float()
        if self.optimizer is None:
            return grad
        state = self.optimizer.state.get(weight, {})
        group = next((g for g in self.optimizer.param_groups if any(p is weight for p in g["params"])), {})
        return adam_step(grad, state, group)


class CompletionGradient:
    """Computes the norm of the gradient of ``-log p`` of a completion, for the weights that :class:`RowSketch` uses.

    Args:
        model: Model changed by ``streamtune.stream``.
        handle: Handle of the model, returned by ``streamtune.stream``.
        temperature: Divisor of the logits.
        device: Device of the model.
        autocast_dtype: Dtype of autocast in the forward pass; None: no autocast.
    """

    def __init__(
        self,
        model: Any,
        handle: StreamHandle,
        *,
        temperature: float,
        device: torch.device,
        autocast_dtype: str | None = None,
    ) -> None:
        self.model, self.handle, self.temperature = model, handle, temperature
        self.device, self.autocast_dtype = device, autocast_dtype

    @cached_property
    def weights(self) -> Weights:
        """Name -> weight whose gradient is measured."""
        return value_projection_weights(self.handle.layers, "allocation")

    def __call__(self, batch: TreeBatch) -> float:
        """Return the gradient norm for a batch with one completion; gradients and random state do not change."""
        batch = batch.to(self.device)

        def loss() -> Tensor:
            with autocast(self.device, self.autocast_dtype):
                scores = self.handle.logprobs(
                    targets=batch.shift_labels, temperature=self.temperature, model=self.model, **batch.inputs
                )
            return -batch.gather_targets(scores.logprobs).sum()

        grads = _weight_gradients(self.model, self.handle, self.weights, loss)
        return float(torch.stack([to_float64(grad).norm() for grad in grads]).norm())


def _weight_gradients(model: Any, handle: StreamHandle, weights: Weights, loss: Callable[[], Tensor]) -> list[Tensor]:
    """Return the gradients of a loss for ``weights`` only; zeros if the loss does not depend on a weight."""
    with preserve_rng(), evaluation_mode(model), handle.routers.without_losses(), _train_only(model, weights):
        grads = torch.autograd.grad(loss(), list(weights.values()), allow_unused=True)
    pairs = zip(weights.values(), grads, strict=True)
    return [torch.zeros_like(weight) if grad is None else grad for weight, grad in pairs]


def adam_step(grad: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """Return Adam's step for a gradient, without the learning rate; the gradient itself if the weight has no moments.

    Args:
        grad: Gradient of a weight; the result has the same shape and dtype.
        state: Optimizer state of the weight, with ``exp_avg``, ``exp_avg_sq`` and ``step``.
        group: Options of its parameter group, with ``betas`` and ``eps``.
    """
    moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
    has_moments = all(isinstance(x, Tensor) and x.shape == grad.shape and x.is_floating_point() for x in moments)
    if not has_moments or "step" not in state or "betas" not in group or "eps" not in group:
        return grad
    (beta1, beta2), step = group["betas"], float(state["step"]) + 1
    mean, square = (x.to(grad.device, grad.dtype) for x in moments if x is not None)
    mean = mean.mul(beta1).add_(grad, alpha=1 - beta1).div_(1 - beta1**step)
    square = square.mul(beta2).addcmul_(grad, grad, value=1 - beta2).div_(1 - beta2**step)
    return mean / square.sqrt_().add_(group["eps"])


@contextmanager
def _train_only(model: nn.Module, weights: Weights) -> Iterator[None]:
    kept_ids = {id(weight) for weight in weights.values()}
    others: Iterable[nn.Parameter] = [p for p in model.parameters() if p.requires_grad and id(p) not in kept_ids]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
