"""Requests to a model call: another loss than the cross-entropy, scores of target tokens, or the lazy logits.

A call with a :class:`ScoreRequest` runs like a call with labels, but computes no loss. Its targets need not be the next
tokens of the same sequence, and a preference or policy objective is ordinary PyTorch on the scores. Scoring happens
inside the model call, because sharded weights are gathered only there, and wrappers (DDP, DeepSpeed) scan the returned
tensors.

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
    """Asks a model call for another loss than the cross-entropy; the call stores sums for metrics in ``measured``."""

    loss: TokenLoss
    """Loss of each target."""
    weights: Tensor | None = None
    """Factor ``[B, T]`` on the loss of each target; None is 1."""
    teacher: LazyLogits | None = None
    """Logits of a distillation teacher for the same tokens, not computed yet (``StreamHandle.lazy_logits``)."""
    top_k: TopKTeacher | None = None
    """Recorded top-k tokens of a distillation teacher at the targets of the call, in place of ``teacher``."""
    measured: dict[str, Tensor] | None = None
    """Sums over the targets of the call, without gradient, by the names in ``ops.MEASURED``; None before the call."""

    def rank_top_k(self, shape: torch.Size, shards: SequenceShards | None, model: str) -> TopKTeacher | None:
        """Return the teacher's top-k tokens for this rank's targets of ``shape``; None if the request has none.

        Raises:
            UnsupportedModelError: ``model`` drops tokens before its loss.
        """
        if self.top_k is None:
            return None
        index = self.top_k.index_BT
        if shards is not None:
            index = shards.select_tokens(index, 1, IGNORE_INDEX)
        if index.shape != shape:
            raise UnsupportedModelError(
                f"{model} drops tokens before its loss, but the teacher's top-k tokens cover all tokens",
                fix="use a teacher model instead of recorded top-k tokens",
            )
        return replace(self.top_k, index_BT=index)

    def device_weights(self, targets: Tensor, weights: Tensor | None, model: str) -> Tensor | None:
        """Return the loss weights on the device of ``targets``; None if ``weights`` is None.

        Raises:
            UnsupportedModelError: The shapes differ, because the model named ``model`` drops tokens before its loss.
        """
        if weights is None:
            return None
        if weights.shape != targets.shape:
            raise UnsupportedModelError(
                f"{model} drops tokens before its loss, so loss weights cannot be applied",
                fix="remove the column loss_weight from the data",
            )
        return weights.to(targets.device)


@dataclass
class ScoreRequest:
    """Asks a model call for log-probabilities of ``targets``; the call stores its router loss in ``router_loss``."""

    targets: Tensor
    """Target ids ``[B, T]``; -100 at a position without a target."""
    branches: Branches | None = None
    """Layout of rows that share a prefix; None for other rows."""
    temperature: float = 1.0
    """Divisor of the logits."""
    entropy: bool = False
    """True computes entropies as well."""
    router_loss: Tensor | None = None
    """Router loss of the call, set by the call."""
    shards: SequenceShards | None = None
    """This rank's tokens of the call, if ranks share the sequence; set by the call."""

    def compute_result(self, model: nn.Module, output: Any) -> dict[str, Tensor]:
        """Return ``logprobs``, and ``entropy`` and ``router_loss`` if there are any, given the model's ``output``.

        Raises:
            UnsupportedModelError: ``output`` has no lazy logits of all tokens.
        """
        logits, targets = self.lazy_logits_in(model, output), self._rank_targets()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logprobs, entropy = logits.head.token_log_probs(logits, targets.to(logits.hidden.device), entropy=self.entropy)
        if self.shards is not None:
            logprobs = self.shards.gather_tokens(logprobs)
            entropy = None if entropy is None else self.shards.gather_tokens(entropy)
        scores = {"logprobs": logprobs, "entropy": entropy, "router_loss": self.router_loss}
        return {name: value for name, value in scores.items() if value is not None}

    def lazy_logits_in(self, model: nn.Module, output: Any) -> LazyLogits:
        """Return the lazy logits of all tokens in the model's ``output``.

        Raises:
            UnsupportedModelError: ``output`` has no lazy logits, or not of all tokens.
        """
        logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        if not isinstance(logits, LazyLogits) or logits.hidden.shape[:-1] != self._rank_targets().shape:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not return the logits of all tokens, so its tokens cannot be scored"
            )
        return logits

    def _rank_targets(self) -> Tensor:
        return self.targets if self.shards is None else self.shards.select_tokens(self.targets, 1, IGNORE_INDEX)


@dataclass
class LogitsRequest(ScoreRequest):
    """Asks a model call for its lazy logits instead of log-probabilities."""

    def compute_result(self, model: nn.Module, output: Any) -> dict[str, Any]:
        """Return ``{"logits": ...}``: the lazy logits of the tokens on this rank."""
        return {"logits": self.lazy_logits_in(model, output)}


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and entropies of target tokens from a streamed model."""

    logprobs: Tensor
    """Log-probabilities ``[B, T]``, fp32 (fp64 for an fp64 model), differentiable; 0 at positions without a target."""
    entropy: Tensor | None
    """Entropy ``[B, T]`` of the predicted distribution at each target, differentiable; 0 at positions without a target.
    None if it was not requested.
    """
    router_loss: Tensor | None
    """Router losses of a mixture of experts, to add to the objective; None if the call has none."""
