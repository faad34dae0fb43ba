"""One device whose optimizer trains one block of the weights at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from streamtune.optim import BlockAdamW
from streamtune.train.backend import LocalBackend
from streamtune.train.slices import SliceReader


class BlockBackend(LocalBackend):
    """One device, which holds all weights and the gradients and moments of a block.

    A checkpoint has the steps taken, which tell the block, and its moments; none where the block has just begun.

    Args:
        module: The model; the optimizer says which of its weights require a gradient.
        optimizer: Over its parameters.
    """

    optimizer: BlockAdamW

    def __init__(self, module: nn.Module, optimizer: BlockAdamW) -> None:
        super().__init__(module, optimizer)

    def state(self) -> dict[str, Any]:
        """See :class:`Backend`."""
        return {"steps_taken": self.optimizer.steps_taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See :class:`Backend`."""
        self.optimizer.go_to(state["steps_taken"])

    def load_slices(self, saved: SliceReader) -> None:
        """See :class:`Backend`."""
        if saved.parameters():
            super().load_slices(saved)
