"""Do the ranks of a group, each with its shards, compute what one of them computes alone?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from streamtune.engine.layer import StreamedForward
from streamtune.engine.memory.placement import Placement
from streamtune.engine.preflight.common import BOUND, borrowed, compared_dtype, distance, trial_batch
from streamtune.engine.streamed_model import StreamedModel
from streamtune.errors import UnsupportedModelError
from streamtune.schedule import Schedule

__all__ = ["check_shared"]

SHORT = Schedule(chunk_size=3, head_chunk_size=5)


def check_shared(handle: StreamedModel) -> None:
    """Compare a loss, and the gradient of the first layer that is trained, with those of this rank alone.

    All ranks of the group call it together.

    Args:
        handle: What ``stream(model, sequence_parallel=...)`` returned.

    Raises:
        UnsupportedModelError: They differ; the model is left as it was.
    """
    ranks = handle.sequence_parallel
    assert ranks is not None
    layer = next((layer for layer in handle.layers if any(p.requires_grad for p in layer.parameters())), None)
    wanted = [] if layer is None else [p for p in layer.parameters() if p.requires_grad]
    with borrowed(handle), _short_chunks(handle), handle.routers.silenced():
        found = _loss_and_gradient(handle, wanted)
        for tensor in found[1:]:
            dist.all_reduce(tensor, group=ranks.group)
        try:
            handle.sequence_parallel = None
            alone = _loss_and_gradient(handle, wanted)
        finally:
            handle.sequence_parallel = ranks
    bound = max(BOUND[compared_dtype(tensor, handle.layers[-1])] for tensor in alone)
    whole = torch.cat([tensor.flatten() for tensor in found[1:]]) if wanted else torch.zeros(0)
    pairs = [("loss", found[0], alone[0])]
    if wanted:
        pairs.append((f"gradient of {type(layer).__name__}", whole, torch.cat([x.flatten() for x in alone[1:]])))
    for what, value, reference in pairs:
        if not (error := distance(value, reference, None)) <= bound:
            raise UnsupportedModelError(
                f"{type(handle.model).__name__} is another model when {ranks.size} ranks share its sequence: the "
                f"{what} differs by {error:.1e} (rounding explains {bound:.0e})",
                mend="set sequence_parallel_size: 1",
            )


def _loss_and_gradient(handle: StreamedModel, wanted: Sequence[Tensor]) -> list[Tensor]:
    loss = handle.model(**trial_batch(handle.model)).loss
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    return [
        loss.detach(),
        *(torch.zeros_like(p) if grad is None else grad.contiguous() for p, grad in zip(wanted, grads, strict=True)),
    ]


@contextmanager
def _short_chunks(handle: StreamedModel) -> Iterator[None]:
    """Chunks so short that the trial has several, and nothing kept."""
    forwards = [forward for layer in handle.layers if isinstance(forward := layer.forward, StreamedForward)]
    schedule, before = handle.schedule, [(forward.schedule, forward.place) for forward in forwards]
    try:
        handle.schedule = SHORT
        for forward in forwards:
            forward.schedule, forward.place = SHORT, Placement()
        yield
    finally:
        handle.schedule = schedule
        for forward, (its, place) in zip(forwards, before, strict=True):
            forward.schedule, forward.place = its, place
