"""Calls with labels whose loss is another one than the plain cross entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.lazy_logits import LazyLogits, ScoreRequest
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TokenLoss, TopKTeacher


@dataclass
class LossRequest:
    """The request of a call's loss, and what was measured beside it."""

    loss: TokenLoss
    weights: Tensor | None = None
    """``[B, T]`` factor of the loss of each target; None is 1"""
    teacher: LazyLogits | None = None
    """Logits of a teacher for the same tokens, from ``StreamHandle.lazy_logits``, where the loss has a divergence"""
    top_k: TopKTeacher | None = None
    """The likeliest tokens of a teacher at the targets of the call, in place of its logits"""
    measured: dict[str, Tensor] | None = None
    """Sums over the targets of the call, by the names of ``ops.MEASURED``, without gradient; None before the call"""

    def top_k_of(self, shape: torch.Size, shards: SequenceShards | None, model: str) -> TopKTeacher | None:
        """Return the likeliest tokens of a teacher for the tokens of this rank, or None without.

        Args:
            shape: ``[...]`` of the targets that the model's loss is of.
            shards: The ranks that share the tokens; None where there is only this one.
            model: The name of the model, for the error.

        Raises:
            UnsupportedModelError: The model has left out tokens since.
        """
        if self.top_k is None:
            return None
        index = self.top_k.index_BT
        if shards is not None:
            index = shards.cut(index, 1, IGNORE_INDEX)
        if index.shape != shape:
            raise UnsupportedModelError(
                f"{model} leaves out tokens before its loss, whose teacher has been asked of all of them",
                mend="name a model as teacher",
            )
        return replace(self.top_k, index_BT=index)

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
