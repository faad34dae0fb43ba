"""Dynamic loss scaling for training in float16, with the rule and the numbers of ``torch.amp.GradScaler``.

The smallest positive float16 number is 6e-8, and many gradients of activations are smaller. So the backward starts from
``scale * loss``, and the gradients of the weights, which are float32, are divided by ``scale``. The scale is a power of
two, so both are exact. A gradient above 65,504 overflows: the step is skipped, and the scale is halved. After
:data:`GROWTH_INTERVAL` steps in a row without overflow, it is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

INITIAL_SCALE = 65536.0
GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5
GROWTH_INTERVAL = 2000
"""Number of consecutive steps without overflow after which the scale grows."""
LARGEST_SCALE = 2.0**127
"""Largest power of two in float32."""
SMALLEST_SCALE = 1.0
"""Scale below which no step is skipped as an overflow: a gradient that is still not finite is an error."""


@dataclass
class LossScale:
    """Factor of the loss, changed after every step."""

    value: float = field(default_factory=lambda: INITIAL_SCALE)
    steps_since_change: int = 0
    """Number of steps without overflow since the scale last changed."""

    def is_overflow(self, grad_norm: float) -> bool:
        """Return True if a smaller scale may make this gradient norm finite, of a step whose loss is finite."""
        return not math.isfinite(grad_norm) and self.value > SMALLEST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Change the scale after a step."""
        if overflowed:
            self.value, self.steps_since_change = self.value * BACKOFF_FACTOR, 0
            return
        self.steps_since_change += 1
        if self.steps_since_change == GROWTH_INTERVAL:
            self.value, self.steps_since_change = min(self.value * GROWTH_FACTOR, LARGEST_SCALE), 0

    def state(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint saves."""
        return asdict(self)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state`."""
        self.value, self.steps_since_change = float(state["value"]), int(state["steps_since_change"])
