"""The input of the training loop: micro-batches, grouped into optimizer steps by a stream that can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from streamtune.base.model_facts import IGNORE_INDEX

if TYPE_CHECKING:
    from streamtune.engine import Branches
    from streamtune.ops import TopKTeacher

Batch = TypeVar("Batch", bound="MicroBatch")

"""The label of a position that is not trained on."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward, padded to one length; B rows, T positions.

    ``shift_labels[b, t]`` is the token that position t is to predict, or :data:`IGNORE_INDEX`: shifted already.
    """

    input_ids: Tensor
    """[B, T] int64"""
    attention_mask: Tensor
    """[B, T] int64, 0 on padding"""
    shift_labels: Tensor
    """[B, T] int64"""
    origins: tuple[str, ...]
    """Source of each row, ``file:row``: for messages."""
    position_ids: Tensor | None = None
    """[B, T] int64 from 0 in each of the rows packed into a sequence; None where a sequence is one row"""
    weights: Tensor | None = None
    """[B, T] floats, the factor of the loss of what position t is to predict; None where all are 1"""
    top_k: TopKTeacher | None = None
    """The likeliest tokens of a teacher at the positions that are trained on, from a file; they stay on the host"""
    filler: bool = False
    """It is computed because other ranks compute a batch of theirs, and counts nothing."""

    @property
    def num_targets(self) -> int:
        """Positions that are trained on: the loss is a mean over these."""
        return int((self.shift_labels != IGNORE_INDEX).sum())

    @property
    def target_weight(self) -> float:
        """The weights of all positions that are trained on: their number where none has another weight than 1."""
        if self.weights is None:
            return self.num_targets
        return float(self.weights[self.shift_labels != IGNORE_INDEX].double().sum())

    @property
    def num_tokens(self) -> int:
        """Input tokens, padding not counted."""
        return int(self.attention_mask.sum())

    @property
    def padded_left(self) -> bool:
        """True if padding stands before a token of its row. Padding behind it is hidden by causality alone."""
        return bool((self.attention_mask[:, 1:] > self.attention_mask[:, :-1]).any())

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model's call, without labels."""
        # Transformers separates packed rows by their positions, and looks at them only where no mask is given.
        packed = {} if self.position_ids is None else {"position_ids": self.position_ids}
        # No token sees padding behind it, and a mask it does not need would cost it the faster kernels.
        mask = self.attention_mask if self.padded_left else None
        return {"input_ids": self.input_ids, **packed, "attention_mask": mask, "use_cache": False}

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same batch on ``device``."""
        positions = None if self.position_ids is None else self.position_ids.to(device)
        weights = None if self.weights is None else self.weights.to(device)
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            shift_labels=self.shift_labels.to(device),
            position_ids=positions,
            weights=weights,
        )


@dataclass(frozen=True, kw_only=True)
class PrefixBatch(MicroBatch):
    """Rows that share their beginnings, in one sequence ``[1, T]``, trained on as each of them alone."""

    branches: Branches
    """The rows."""

    @property
    def arguments(self) -> dict[str, Any]:
        """See :class:`MicroBatch`."""
        return {"input_ids": self.input_ids, **self.branches.arguments(self.input_ids), "use_cache": False}


@dataclass(frozen=True, kw_only=True)
class TreeBatch(MicroBatch):
    """Completions of prompts: N of them, with K targets together, in one of two layouts.

    shared      one sequence ``[1, T]``: what rows begin with once, a prompt and perhaps more (``branches``)
    separate    a row for each completion ``[N, L]``, its prompt before it; padded on the right or on the left

    An objective gets the same from both: 1-D over K, ordered by completion and then by position. The target of a token
    that several completions begin with is there once for each, and its gradient is the sum of theirs.
    """

    place_K: Tensor  # noqa: N815
    """int64 ``[K]``: the place of each target in the positions ``[B, T]``, flattened"""
    row_K: Tensor  # noqa: N815
    """int64 ``[K]``, sorted: the completion of each target"""
    num_rows: int
    """N"""
    branches: Branches | None = None
    """Tokens that each token sees, where beginnings are shared"""

    @property
    def num_targets(self) -> int:
        """Targets of all completions, K."""
        return len(self.row_K)

    def ragged(self, x_BT: Tensor) -> Tensor:
        """Return the values at targets, ``[K]``, completion by completion. Differentiable."""
        return x_BT.flatten()[self.place_K]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``StreamHandle.logprobs``, without targets."""
        given = super().arguments
        return given if self.branches is None else {**given, "branches": self.branches}

    def to(self, device: torch.device) -> TreeBatch:
        """Return the same batch on ``device``."""
        names = ("input_ids", "attention_mask", "shift_labels", "place_K", "row_K", "position_ids")
        moved = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(self, **moved)


def counted(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches that count: all but those that are there only because of other ranks."""
    return [batch for batch in batches if not batch.filler]


class StepStream(Protocol):
    """An endless source of optimizer steps, epoch after epoch, whose position can be saved."""

    def next_step(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next optimizer step; fewer than usual at the end of an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another stream over the same rows."""
        ...
