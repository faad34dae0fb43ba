"""The share of the trained weights that a step changes: a step that is smaller than a rounding changes none.

Values before a step are kept on the host and compared after it. Models of up to 4 million trained values are compared
whole. Of a larger one, every n-th value of each weight is compared, always the same ones, and weights count by their
size; a weight of up to 4,096 values is compared whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from streamtune.train.world import World

FIRST_STEPS = 10
"""Steps of a run whose share is recorded."""
MOST = 1 << 22
"""Values that are compared of a model."""
WHOLE = 4096
"""Values of a weight that is always compared whole."""


class MovedWeights:
    """Values of the weights before a step.

    Args:
        weights: The weights that the optimizer steps, as far as this rank has them.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [x for x in weights if x.numel()]
        every = -(-sum(x.numel() for x in self._weights) // MOST)
        self._every = [1 if x.numel() <= WHOLE else max(1, every) for x in self._weights]
        self._before = [_values(x, n) for x, n in zip(self._weights, self._every, strict=True)]

    def share(self, world: World) -> float:
        """Return the share of the weights of all ranks that are other ones now."""
        moved = 0.0
        for x, n, before in zip(self._weights, self._every, self._before, strict=True):
            changed = int((_values(x, n) != before).sum())
            moved += changed / len(before) * x.numel()
        found, all_of_them = world.sums([moved, float(sum(x.numel() for x in self._weights))])
        return found / all_of_them if all_of_them else 0.0


def _values(x: Tensor, every: int) -> Tensor:
    return x.detach().reshape(-1)[::every].to("cpu", copy=True)


def describe_moved(share: float, dtypes: Iterable[torch.dtype], learning_rate: float) -> str:
    """Return a note on a step that changed next to nothing.

    Args:
        share: Share of the trained weights that it changed.
        dtypes: Dtypes of the weights that the optimizer steps.
        learning_rate: Learning rate of the step.
    """
    narrow = any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)
    why = "it is smaller than the rounding of bfloat16 weights" if narrow else "it is smaller than a rounding of theirs"
    mend = "delete 'dtype' to train float32 weights, or write weight_rounding: stochastic" if narrow else (
        "raise learning_rate, or look at grad_norm: a gradient of 0 moves nothing"
    )  # fmt: skip
    return f"a step at a learning rate of {learning_rate:g} changes {share:.1%} of the trained weights: {why}; {mend}"
