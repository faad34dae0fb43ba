"""The label of untrained tokens, and the device on which a model computes. Imports nothing of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORE_INDEX = -100
"""The label of a token that is not trained on; torch's and transformers' losses leave the same one out."""


def model_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: the device of the first weight that is not on the CPU, if any.

    Weights that wait on the host are on the CPU beside an accelerator.
    """
    first = next(model.parameters()).device
    if first.type != "cpu":
        return first
    return next((p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != "cpu"), first)
