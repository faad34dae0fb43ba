"""Calls that return per-token log-probabilities instead of a loss, on which any objective can be built.

The model runs as it does with labels, but computes no loss: the lazy logits of its head (``head``) are taken from its
output, and scored for the targets of the caller. So the tokens that are predicted need not be the next ones of the same
sequence, and a preference or a policy objective is ordinary PyTorch on the result. They are scored before the model's
call returns: where weights are shared between ranks they are whole only inside it, and wrappers of the model look for
tensors in what it returns.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from streamtune.engine.lazy_logits import LazyLogits, ScoreRequest
from streamtune.engine.losses import LogitsRequest
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import ArgumentError


@dataclass(frozen=True)
class TokenScores:
    """The scores that a streamed model gives to target tokens."""

    logprobs: Tensor
    """``[B, T]`` fp32 (fp64 for a model in fp64), differentiable; 0 where there is no target"""
    entropy: Tensor | None
    """``[B, T]`` of the distribution each target was drawn from, differentiable; None where it was not asked for"""
    router_loss: Tensor | None
    """The losses on the routers of a mixture of experts, to add to any objective; None where there are none"""


def token_scores_of(
    handle: StreamedModel, request: ScoreRequest, called: Any, input_ids: Tensor, arguments: dict[str, Any]
) -> TokenScores:
    """Compute the scores of :meth:`StreamHandle.logprobs` by a call of ``called``, the model or a wrapper of it."""
    _check(handle, request, input_ids)
    if request.branches is not None:
        arguments = {**arguments, **request.branches.arguments(input_ids)}
    with handle.scoring(request):
        found = called(input_ids=input_ids, **arguments)
    return TokenScores(found["logprobs"], found.get("entropy"), found.get("router_loss"))


def lazy_logits_of(
    handle: StreamedModel, request: LogitsRequest, called: Any, input_ids: Tensor, arguments: dict[str, Any]
) -> LazyLogits:
    """Return the logits of :meth:`StreamHandle.lazy_logits` by a call of ``called``."""
    _check(handle, request, input_ids)
    if request.branches is not None:
        arguments = {**arguments, **request.branches.arguments(input_ids)}
    with handle.scoring(request):
        logits: LazyLogits = called(input_ids=input_ids, **arguments)["logits"]
    return logits


def _check(handle: StreamedModel, request: ScoreRequest, input_ids: Tensor) -> None:
    targets, branches, temperature = request.targets, request.branches, request.temperature
    if not handle.layers:
        raise ArgumentError("the model is not streamed any more", mend="ask for log-probabilities before .remove()")
    if not handle.streams_head:
        raise ArgumentError(
            "no language-model head is streamed, so there is no promise of logits",
            mend="use stream(model, head=True) on a causal language model",
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
