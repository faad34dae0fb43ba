"""The routers of a mixture of experts through the micro-batches of one optimizer step.

A step's loss on its routers (``streamtune.engine.routers``) is one number however the step is split, n_g tokens of n
in micro-batch g:

    micro     sum_g  n_g / n  (coefficient * balance_g + z_coefficient * z_g)      each balanced in itself
    global    coefficient * balance + z_coefficient * z                            of all n tokens together

A token weighs the same in every micro-batch, as it does in the cross entropy; padding weighs nothing. With one
micro-batch the two are equal, and are what ``transformers`` adds. With several, ``global`` costs one more forward of
each, without gradient: how often an expert is chosen in the whole step must be known before the first backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from streamtune.engine import StreamHandle
from streamtune.train.batch import MicroBatch, counted
from streamtune.train.world import World

__all__ = ["StepRouters"]


class StepRouters:
    """Sets the totals and weight of a streamed model's routers for each micro-batch of a step, and adds up their loss.

    Args:
        handle: What streams the model; None, or one without a loss on its routers: nothing is done here.
        batches: The micro-batches of the step.
        world: The ranks that share the step.
    """

    def __init__(
        self,
        handle: StreamHandle | None,
        batches: Sequence[MicroBatch],
        world: World = World(),  # noqa: B008 (frozen)
    ) -> None:
        self._watch = handle.routers if handle is not None and handle.routers.loss is not None else None
        self._handle, self._batches = handle, batches
        self._world = world
        self._tokens = sum(batch.num_tokens for batch in counted(batches))
        if self._watch is not None:
            self._tokens = world.count(self._tokens)
        self._totals: torch.Tensor | None = None
        self.aux_loss: float | None = None if self._watch is None else 0.0
        """The step's balance loss so far, not multiplied with its coefficient."""

    @property
    def need_counting(self) -> bool:
        """True if the step is balanced as a whole and has several parts."""
        loss = None if self._watch is None else self._watch.loss
        return loss is not None and loss.scope == "global" and len(self._batches) * self._world.size > 1

    def count(self, device: torch.device) -> None:
        """Count how often each expert is chosen in the whole step. The random state is left as it was."""
        assert self._handle is not None
        self._totals = self._handle.count_routes(self._calls(device))

    @contextmanager
    def micro_batch(self, batch: MicroBatch) -> Iterator[None]:
        """Set up the routers around the call and the backward of one micro-batch, which is on its device already."""
        if self._watch is None:
            yield
            return
        watch = self._watch
        watch.totals, watch.weight = self._totals, 0.0 if batch.filler else batch.num_tokens / self._tokens
        try:
            with watch.counting(batch.attention_mask):
                yield
        finally:
            watch.totals, watch.weight = None, 1.0
        assert watch.terms is not None, "a call with labels has said what its loss was made of"
        if not batch.filler:
            self.aux_loss = (self.aux_loss or 0.0) + watch.terms.balance.item()

    def _calls(self, device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield the arguments of each micro-batch's call; while they are used, its padding does not count."""
        assert self._watch is not None
        for batch in self._batches:
            moved = batch.to(device)
            with self._watch.counting(moved.attention_mask):
                yield moved.arguments
