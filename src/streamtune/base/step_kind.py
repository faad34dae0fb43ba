"""The kind of an optimizer step, which plan, simulation, count of operations and training loop share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Gradients = Literal["all", "layer", "block", "none"]
States = Literal["device", "host", "none"]


@dataclass(frozen=True)
class StepKind:
    """An optimizer step: what each micro-batch computes, the gradients that exist at once, and where states are.

    An optimizer has one in its entry of the table (``base.optimizer_table``), and a recipe's keys change it
    (``Recipe.step_kind``).

    Attributes:
        forwards: Forwards of each micro-batch.
        backwards: Backwards of each micro-batch; 0 for an optimizer that steps by losses.
        gradients: ``all`` of the trained weights; ``layer``: each weight is stepped in the backward, and its gradient
            freed; ``block``: one block of the weights is trained, and all others are frozen; ``none`` without a
            backward.
        states: ``device``: beside the weights; ``host``: on the host, where the optimizer steps, wherever weights are;
            ``none``: the optimizer keeps nothing of a weight.
    """

    forwards: int = 1
    backwards: int = 1
    gradients: Gradients = "all"
    states: States = "device"

    def in_backward(self, *, norm_first: bool = False) -> StepKind:
        """Return the step whose optimizer steps each weight in the backward.

        Args:
            norm_first: A first forward and backward measure the norm of the gradient, which is clipped by it.
        """
        times = 2 if norm_first else 1
        return replace(self, forwards=times, backwards=times, gradients="layer")

    def on_host(self) -> StepKind:
        """Return the step whose optimizer has its states on the host."""
        return replace(self, states="host")


PLAIN_STEP = StepKind()
"""One forward, one backward, and the optimizer when all gradients are there."""
