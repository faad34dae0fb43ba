"""Requests of a call: another loss than the cross entropy, scores of target tokens, or the lazy logits themselves.

A scored call runs as one with labels, but computes no loss: the lazy logits of its head are taken from its output, and
scored for the targets of the caller. So the tokens that are predicted need not be the next ones of the same sequence,
and a preference or a policy objective is ordinary PyTorch on the result. Scoring happens inside the model's call, for
two reasons: sharded weights are gathered only there, and wrappers (DDP, DeepSpeed) scan the returned tensors.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceShards
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TokenLoss, TopKTeacher


@dataclass
class LossRequest:
    """Request of a call's loss, and what was measured beside it."""

    loss: TokenLoss
    weights: Tensor | None = None
    """Factor ``[B, T]`` on the loss of each target; None is 1."""
    teacher: LazyLogits | None = None
    """Logits of a teacher for the same tokens, from ``StreamHandle.lazy_logits``, if the loss has a divergence."""
    top_k: TopKTeacher | None = None
    """Likeliest tokens of a teacher at the targets of the call, in place of its logits."""
    measured: dict[str, Tensor] | None = None
    """Sums over the targets of the call, by the names of ``ops.MEASURED``, without gradient; None before the call."""

    def top_k_of(self, shape: torch.Size, shards: SequenceShards | None, model: str) -> TopKTeacher | None:
        """Return the likeliest tokens of a teacher for this rank's targets of that shape, or None."""
        if self.top_k is None:
            return None
        index = self.top_k.index_BT
        if shards is not None:
            index = shards.cut(index, 1, IGNORE_INDEX)
        if index.shape != shape:
            raise UnsupportedModelError(
                f"{model} leaves out tokens before its loss, whose teacher has been asked of all of them",
                fix="name a model as teacher",
            )
        return replace(self.top_k, index_BT=index)

    def weights_of(self, targets: Tensor, weights: Tensor | None, model: str) -> Tensor | None:
        """Return the weights on the device of the targets ``[...]``; the model must not have left out tokens since."""
        if weights is None:
            return None
        if weights.shape != targets.shape:
            raise UnsupportedModelError(
                f"{model} leaves out tokens before its loss, whose rows have weights",
                fix="remove the column loss_weight from the data",
            )
        return weights.to(targets.device)


@dataclass
class ScoreRequest:
    """Request of a scored call, and the router loss of that call."""

    targets: Tensor
    """``[B, T]``"""
    branches: Branches | None = None
    temperature: float = 1.0
    entropy: bool = False
    router_loss: Tensor | None = None
    shards: SequenceShards | None = None
    """Shards of which this rank has logits, if ranks share the sequence."""

    def compute(self, model: nn.Module, output: Any) -> dict[str, Tensor]:
        """Compute the scores of a call that returned ``output``: ``logprobs``, and ``entropy``, ``router_loss`` if any.

        Raises:
            UnsupportedModelError: It has no lazy logits of all tokens.
        """
        logits, targets = self.logits_of(model, output), self._own_targets()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs, entropy = logits.owner.scores(logits, targets.to(logits.hidden.device), entropy=self.entropy)
        if self.shards is not None:
            logprobs = self.shards.collect(logprobs)
            entropy = None if entropy is None else self.shards.collect(entropy)
        found = {"logprobs": logprobs, "entropy": entropy, "router_loss": self.router_loss}
        return {name: value for name, value in found.items() if value is not None}

    def logits_of(self, model: nn.Module, output: Any) -> LazyLogits:
        """Return the lazy logits of all tokens of a call that returned ``output``."""
        logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        if not isinstance(logits, LazyLogits) or logits.hidden.shape[:-1] != self._own_targets().shape:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not return the logits of all its tokens, so they cannot be scored"
            )
        return logits

    def _own_targets(self) -> Tensor:
        return self.targets if self.shards is None else self.shards.cut(self.targets, 1, IGNORE_INDEX)


@dataclass
class LogitsRequest(ScoreRequest):
    """Request of a call's lazy logits themselves, in place of scores."""

    def compute(self, model: nn.Module, output: Any) -> dict[str, Any]:
        """Return the lazy logits of this rank's tokens as ``logits``."""
        return {"logits": self.logits_of(model, output)}


@dataclass(frozen=True)
class TokenScores:
    """Scores that a streamed model gives to target tokens."""

    logprobs: Tensor
    """Log-probabilities ``[B, T]`` in fp32 (fp64 for a model in fp64), differentiable; 0 without a target."""
    entropy: Tensor | None
    """Entropy ``[B, T]`` of each target's distribution, differentiable; None if not requested."""
    router_loss: Tensor | None
    """Losses on the routers of a mixture of experts, to add to any objective; None without routers."""
