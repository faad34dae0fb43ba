"""The label of tokens that are not trained on, and the device of a model. Imports nothing from this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

IGNORE_INDEX = -100
"""Label of a token that is not trained on; the losses of torch and transformers ignore it too."""


def model_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: the first device of its weights other than the CPU, else the CPU.

    A model with offloaded weights has weights on the CPU, but computes on an accelerator.
    """
    first = next(model.parameters()).device
    if first.type != "cpu":
        return first
    return next((p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != "cpu"), first)
