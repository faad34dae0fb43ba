"""A call that asks for per-token log-probabilities instead of a loss: the seam any objective is built on.

The model runs as it does with labels, but nobody computes a loss: the promise its head made (``head``) is taken from
its output and redeemed for the targets of the caller. So the tokens that are predicted need not be the next ones of
the same sequence, and a preference or a policy objective is ordinary PyTorch on what comes back.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from streamtune.engine.branches import Branches
from streamtune.engine.head import LazyLogits
from streamtune.engine.strips import Strips
from streamtune.errors import ArgumentError, UnsupportedModelError

if TYPE_CHECKING:
    from streamtune.engine.stream import StreamHandle

__all__ = ["Scored", "TokenScores", "token_scores_of"]


@dataclass
class Scored:
    """What a call that is scored is told, and what it tells."""

    branches: Branches | None = None
    router_loss: Tensor | None = None
    strips: Strips | None = None


@dataclass(frozen=True)
class TokenScores:
    """What a streamed model says of target tokens."""

    logprobs: Tensor
    """``[B, T]`` fp32 (fp64 for a model in fp64), differentiable; 0 where there is no target"""
    entropy: Tensor | None
    """``[B, T]`` of the distribution each target was drawn from, differentiable; None where it was not asked for"""
    router_loss: Tensor | None
    """What the losses on the routers of a mixture of experts add to any objective; None where there are none"""


def token_scores_of(
    handle: StreamHandle,
    input_ids: Tensor,
    targets: Tensor,
    *,
    branches: Branches | None,
    entropy: bool,
    temperature: float,
    model: nn.Module | None,
    arguments: dict[str, Any],
) -> TokenScores:
    """:meth:`StreamHandle.logprobs`."""
    _check(handle, input_ids, targets, branches, temperature)
    if branches is not None:
        arguments = {**arguments, **branches.arguments(input_ids)}
    called: Any = handle.model if model is None else model
    with handle.scoring(branches) as scored:
        output = called(input_ids=input_ids, **arguments)
    logits = output[0] if isinstance(output, tuple) else output.logits
    strips = scored.strips
    if strips is not None:
        targets = strips.cut(targets, 1, -100)
    if not isinstance(logits, LazyLogits) or logits.hidden.shape[:-1] != targets.shape:
        raise UnsupportedModelError(
            f"{type(handle.model).__name__} does not return the logits of all its tokens, so they cannot be scored"
        )
    if temperature != 1.0:
        logits = logits / temperature
    logprobs, entropies = logits.owner.scores(logits, targets.to(logits.hidden.device), entropy=entropy)
    if strips is not None:
        logprobs = strips.collect(logprobs)
        entropies = None if entropies is None else strips.collect(entropies)
    return TokenScores(logprobs, entropies, scored.router_loss)


def _check(
    handle: StreamHandle, input_ids: Tensor, targets: Tensor, branches: Branches | None, temperature: float
) -> None:
    if not handle.layers:
        raise ArgumentError("the model is not streamed any more", mend="ask for log-probabilities before .remove()")
    if not handle.streams_head:
        raise ArgumentError(
            "the head is not streamed, so there is no promise of logits", mend="use stream(model, head=True)"
        )
    if input_ids.shape != targets.shape or input_ids.dim() != 2:
        raise ArgumentError(
            f"input_ids {tuple(input_ids.shape)} and targets {tuple(targets.shape)} must both be [B, T]",
            mend="shift the targets: position t predicts targets[:, t], -100 where it predicts nothing",
        )
    if not temperature > 0:
        raise ArgumentError(f"temperature must be more than 0, not {temperature!r}")
    if branches is not None and tuple(input_ids.shape) != (1, branches.length):
        raise ArgumentError(
            f"the branches are a sequence of {branches.length} tokens, the batch is {tuple(input_ids.shape)}",
            mend="lay all trees end to end in one row of input_ids",
        )
