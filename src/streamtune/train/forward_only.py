"""A backend without a backward: the losses of several forwards decide the step (``optim.zeroth_order``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import ArgumentError
from streamtune.optim import ZerothOrderSGD, perturbed, set_learning_rate
from streamtune.train.backend import TorchBackend
from streamtune.train.objective import StepScore
from streamtune.train.rng import capture_rng, restore_rng
from streamtune.train.slices import Slice, SliceReader
from streamtune.train.world import WORLD, World

LEAST_MOVED = 0.5
"""Part of the weights that a perturbation has to reach."""


class ForwardBackend(TorchBackend):
    """Steps by the losses of a step's micro-batches at perturbed weights: no gradient is ever there.

    Several ranks have the same weights and draw the same directions. All they exchange is the loss of each forward,
    after which they take the same step.

    The loss of a step is the mean of those that were measured, which is that of its weights to second order in eps.
    Dropout takes the same random numbers in all of them.

    Args:
        module: The model; streamed already.
        optimizer: Over its parameters.
        layers: Its decoder layers.
        world: The ranks that share the step.

    Raises:
        ArgumentError: The perturbation is lost in the rounding of most weights.
    """

    optimizer: ZerothOrderSGD

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZerothOrderSGD,
        layers: Iterable[nn.Module],
        world: World = WORLD,
    ) -> None:
        super().__init__(module, optimizer)
        self.whole, self.layers = world.size == 1, list(layers)
        self._world, self._loss = world, 0.0
        self._slopes: list[float] = []
        self._check_moved()

    def compute(self, take: Callable[[], StepScore | None]) -> StepScore | None:
        """See :class:`Backend`. Call ``take`` on both sides of the weights in each direction."""
        optimizer, began, scores = self.optimizer, capture_rng(), list[StepScore]()
        self._slopes = []
        for direction in range(optimizer.directions):
            losses = []
            for sign in (1, -1):
                restore_rng(began)
                self._loss = 0.0
                with perturbed(optimizer, self.module, self.layers, direction, sign), torch.no_grad():
                    score = take()
                if score is None:
                    return None
                scores.append(score)
                losses += self._world.sums([self._loss])
            self._slopes.append((losses[0] - losses[1]) / (2 * optimizer.eps))
        return StepScore.mean(scores)

    def backward(self, loss: Tensor) -> None:
        """Add a loss to that of the forward."""
        self._loss += loss.item()

    def clip_gradients(self, max_norm: float) -> float:
        """Return the root mean square of the slopes, which is an estimate of the gradient's norm; bound it."""
        norm = math.sqrt(sum(slope * slope for slope in self._slopes) / max(1, len(self._slopes)))
        if 0 < max_norm < norm < math.inf:
            self._slopes = [slope * max_norm / norm for slope in self._slopes]
        return norm

    def step(self, learning_rate: float) -> None:
        """See :class:`Backend`."""
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step(self._slopes)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """See :class:`Backend`."""
        self._slopes = []

    def state(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`Backend`."""
        self.optimizer.steps_taken = state.get("steps_taken", 0)

    def slices(self) -> Iterator[Slice]:
        """See :class:`Backend`. No weight has a state."""
        return iter(())

    def load_slices(self, saved: SliceReader) -> None:
        """See :class:`Backend`."""

    def _check_moved(self) -> None:
        """Refuse an eps that is lost in the rounding of most weights.

        Raises:
            ArgumentError: It is.
        """
        moved = self.optimizer.moved_share()
        if moved < LEAST_MOVED:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
            raise ArgumentError(
                f"an eps of {self.optimizer.eps:g} is rounded off in {1 - moved:.0%} of the weights, which are in "
                f"{' and '.join(dtypes)}",
                where="optim_args.eps",
                mend="write a larger eps, dtype: float32, or train adapters (finetuning_type: lora)",
            )
