"""The operations of a run's steps, and the rate of its device that they are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from streamtune import train
from streamtune.base.step_kind import PLAIN_STEP, StepKind
from streamtune.plan.budget import device_name
from streamtune.plan.rates import peak_flops_of
from streamtune.plan.simulate.flops import FlopCount, Span
from streamtune.recipe.schema import Recipe


class StepFlops:
    """Counts the operations of optimizer steps, as :mod:`streamtune.plan.simulate.flops` defines them.

    Args:
        model: With its adapters.
        step: The optimizer step.
    """

    def __init__(self, model: Any, step: StepKind = PLAIN_STEP) -> None:
        self.step = step
        self.count = FlopCount.of(model)

    def __call__(self, micro_batches: Sequence[train.MicroBatch]) -> int:
        """Return the operations of some micro-batches, which may be on a device."""
        return self.count.step((span for batch in micro_batches for span in _spans(batch)), self.step)


def _spans(batch: train.MicroBatch) -> Iterator[Span]:
    branches = getattr(batch, "branches", None)
    if branches is not None:
        for part in branches.table.parts:
            yield part.trunk_length, part.stop - part.start
    elif batch.position_ids is None:
        yield from ((0, length) for length in batch.attention_mask.sum(1).tolist())
    else:
        for mask, positions in zip(batch.attention_mask, batch.position_ids, strict=True):
            starts = [*(positions[mask.bool()] == 0).nonzero()[:, 0].tolist(), int(mask.sum())]
            yield from ((0, stop - start) for start, stop in pairwise(starts))


def peak_of(recipe: Recipe, device: torch.device) -> float | None:
    """Return the FLOP/s that the recipe gives, or those of the device's data sheet; None where neither is known."""
    if recipe.peak_flops is not None:
        return recipe.peak_flops
    return peak_flops_of(device_name(device)) if device.type == "cuda" else None
