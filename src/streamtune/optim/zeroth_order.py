"""SGD from losses alone, without a backward: MeZO (arXiv 2305.17333, algorithm 1, and n-SPSA of its definition 1).

L is the loss over all rows of a step, w are the weights, and z is drawn from a standard normal distribution for each of
n directions:

    s = (L(w + eps z) - L(w - eps z)) / (2 eps)               the slope of the loss along z
    w <- w - lr (mean of s z over the directions) - lr weight_decay w

z is never stored. It is drawn slice by slice. The seed of a slice is a hash of the run's seed, the step, the direction,
the weight and the slice's position. E[s^2] is the squared norm of the gradient.

*Rounding.* The paper adds eps z, subtracts 2 eps z and adds eps z again, which leaves each weight off by a few
roundings per step. Here the exact bits of a weight are restored (:func:`perturb_weights`), from copies of one layer at
a time. ``w + eps z`` is rounded to the weight's dtype, so the loss is measured along

    d = (round(w + eps z) - round(w - eps z)) / (2 eps)

and w is updated along d, not z. In fp32, d and z are equal up to rounding. In bfloat16 neighbouring numbers differ by
2^-8 of a weight. Where eps z is below half of this distance, d is 0, so the weight is not updated. Weights in bfloat16
are updated in fp32 and rounded stochastically: an update is far below their precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.ops.devices import loop_or_simulate
from streamtune.optim.weight_step import (
    flat_slices,
    parameter_indices,
    random_bits,
    round_stochastically,
    seeded_generator,
)

BITS = -1
"""Number in place of the direction in the key for the random bits of stochastic rounding."""


class ZerothOrderSGD(torch.optim.Optimizer):
    """MeZO: SGD along random directions, without a backward. Its only state is ``steps_taken``.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        eps: Distance from the weights, along a direction, at which losses are measured.
        directions: Number of directions per step.
        seed: Seed of the random numbers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        eps: float = 1e-3,
        directions: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps, "directions": directions})
        self.eps, self.directions, self.seed = eps, directions, seed
        self.steps_taken = 0
        self._weight_number = parameter_indices(self)

    def is_trained(self, parameter: Tensor) -> bool:
        return id(parameter) in self._weight_number

    @torch.no_grad()
    def perturb(self, parameter: Tensor, direction: int, sign: int) -> None:
        """Set a weight w to w + sign eps z in place, rounded to its dtype; ``direction`` is the index of z."""
        with _flat_weight(parameter) as flat:
            for span in loop_or_simulate(flat_slices(flat), flat.device):
                z = self._draw_direction(parameter, direction, span, flat)
                flat[span] = z.mul_(sign * self.eps).add_(flat[span])

    @torch.no_grad()
    def step(self, slopes: Sequence[float] | None = None) -> None:  # type: ignore[override]
        """Update all weights by the slope of the loss along each direction; None (in simulations) means slopes of 0."""
        slopes = [0.0] * self.directions if slopes is None else slopes
        for group in self.param_groups:
            for parameter in group["params"]:
                with _flat_weight(parameter) as flat:
                    for span in loop_or_simulate(flat_slices(flat), flat.device):
                        self._step_slice(parameter, group, span, flat, slopes)
        self.steps_taken += 1

    def perturbed_value_fraction(self) -> float:
        """Return the fraction of weight values for which w + eps z and w - eps z still differ after rounding.

        z is the first direction of the next step.
        """
        moved = total = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                with _flat_weight(parameter) as flat:
                    for span in flat_slices(flat):
                        moved += int(self._measured_direction(parameter, 0, span, flat).count_nonzero())
                        total += span.stop - span.start
        return moved / max(total, 1)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do nothing: this optimizer stores no state for the weights."""

    def _draw_direction(self, parameter: Tensor, direction: int, span: slice, flat: Tensor) -> Tensor:
        """Return a slice ``[n]`` of a weight's random direction, in float32 (float64 for a float64 weight)."""
        wide = torch.promote_types(flat.dtype, torch.float32)
        z = torch.empty(span.stop - span.start, dtype=wide, device=flat.device)
        key = (self.seed, self.steps_taken, direction, self._weight_number[id(parameter)], span.start)
        return z.normal_(generator=seeded_generator(flat.device, *key))

    def _measured_direction(self, parameter: Tensor, direction: int, span: slice, flat: Tensor) -> Tensor:
        """Return the direction ``[n]`` in which :meth:`perturb` moves a slice of a weight: z, changed by rounding."""
        z = self._draw_direction(parameter, direction, span, flat).mul_(self.eps)
        weight = flat[span]
        above = (weight + z).to(weight.dtype)  # added in the wider dtype, then rounded as in `perturb`
        below = z.neg_().add_(weight).to(weight.dtype)
        return above.to(z.dtype).sub_(below).div_(2 * self.eps)

    def _step_slice(
        self, parameter: Tensor, group: Mapping[str, Any], span: slice, flat: Tensor, slopes: Sequence[float]
    ) -> None:
        weight = flat[span]
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        update = wide * group["weight_decay"]  # one sum, rounded once: decay alone is below a weight's precision
        for direction, slope in enumerate(slopes):
            update.add_(self._measured_direction(parameter, direction, span, flat), alpha=slope / len(slopes))
        new = wide.add_(update, alpha=-group["lr"])
        if weight.dtype == torch.bfloat16:
            key = (self.seed, self.steps_taken, BITS, self._weight_number[id(parameter)], span.start)
            round_stochastically(new, random_bits(len(new), flat.device, *key), out=weight)
        else:
            weight.copy_(new)


@contextmanager
def perturb_weights(
    optimizer: ZerothOrderSGD, model: nn.Module, layers: Sequence[nn.Module], direction: int, sign: int
) -> Iterator[None]:
    """Context manager: replace the trained weights w by w + sign eps z; on exit w is restored bit for bit.

    ``z`` is the random direction with index ``direction``. A layer's weights are perturbed only during the layer's
    call. Weights outside layers, or shared by a layer and another module, are perturbed until the context ends. So
    copies exist only of these weights and of one layer.

    Args:
        optimizer: Optimizer with eps, the seed, and the trained weights.
        model: Model, which is called without gradients.
        layers: Decoder layers, each called as a module.
        direction: Index of the direction.
        sign: Sign of the perturbation, 1 or -1.
    """
    originals: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def perturb_all(parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in originals:
                originals[id(parameter)] = parameter, parameter.detach().clone()
                optimizer.perturb(parameter, direction, sign)

    @torch.no_grad()
    def restore_all(parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if (original := originals.pop(id(parameter), None)) is not None:
                parameter.copy_(original[1])

    weights_by_layer, other_weights = _split_by_layer(optimizer, model, layers)
    hooks = []
    for layer, layer_weights in zip(layers, weights_by_layer, strict=True):
        if layer_weights:
            hooks.append(
                layer.register_forward_pre_hook(lambda *_, layer_weights=layer_weights: perturb_all(layer_weights))
            )
            # Runs before other hooks, and also if the layer raises an error.
            back = layer.register_forward_hook(
                lambda *_, layer_weights=layer_weights: restore_all(layer_weights), prepend=True, always_call=True
            )
            hooks.append(back)
    try:
        perturb_all(other_weights)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore_all([parameter for parameter, _ in originals.values()])


def _split_by_layer(
    optimizer: ZerothOrderSGD, model: nn.Module, layers: Sequence[nn.Module]
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return, for each layer, the trained weights that only layers use; and all other trained weights."""
    layer_modules = {id(module) for layer in layers for module in layer.modules()}
    outside_ids = {
        id(parameter)
        for module in model.modules()
        if id(module) not in layer_modules
        for parameter in module.parameters(recurse=False)
    }
    weights_by_layer: list[list[Tensor]] = [
        [p for p in layer.parameters() if optimizer.is_trained(p) and id(p) not in outside_ids] for layer in layers
    ]
    inside_ids = {id(parameter) for own in weights_by_layer for parameter in own}
    return weights_by_layer, [p for p in model.parameters() if optimizer.is_trained(p) and id(p) not in inside_ids]


@contextmanager
def _flat_weight(parameter: Tensor) -> Iterator[Tensor]:
    """Context manager: yield a weight as a flat tensor ``[n]``. If this is a copy, changes are copied back on exit."""
    whole = parameter.detach()
    if whole.is_contiguous():
        yield whole.view(-1)
        return
    copy = whole.contiguous()
    yield copy.view(-1)
    whole.copy_(copy)
