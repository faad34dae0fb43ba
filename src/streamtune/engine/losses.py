"""Calls with labels whose loss is another one than the plain cross entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamtune.engine.lazy_logits import LazyLogits, ScoreRequest
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TokenLoss

__all__ = ["LogitsRequest", "LossRequest"]


@dataclass
class LossRequest:
    """The request of a call's loss, and what was measured beside it."""

    loss: TokenLoss
    weights: Tensor | None = None
    """``[B, T]`` factor of the loss of each target; None is 1"""
    teacher: LazyLogits | None = None
    """Logits of a teacher for the same tokens, from ``StreamHandle.lazy_logits``, where the loss has a divergence"""
    measured: dict[str, Tensor] | None = None
    """Sums over the targets of the call, by the names of ``ops.MEASURED``, without gradient; None before the call"""

    def weights_of(self, targets: Tensor, weights: Tensor | None, model: str) -> Tensor | None:
        """Return the weights on the device of the targets.

        Args:
            targets: ``[...]``, those that the model's loss is of.
            weights: As many, or None.
            model: The name of the model, for the error.

        Raises:
            UnsupportedModelError: The model has left out tokens since, so that weights are of others.
        """
        if weights is None:
            return None
        if weights.shape != targets.shape:
            raise UnsupportedModelError(
                f"{model} leaves out tokens before its loss, whose rows have weights",
                mend="remove the column loss_weight from the data",
            )
        return weights.to(targets.device)


@dataclass
class LogitsRequest(ScoreRequest):
    """The request of a call's lazy logits themselves, in place of scores."""

    def compute(self, model: nn.Module, output: Any) -> dict[str, Any]:
        """Return the lazy logits of this rank's tokens as ``logits``.

        Raises:
            UnsupportedModelError: The model has no lazy logits of all tokens.
        """
        return {"logits": self.logits_of(model, output)}
