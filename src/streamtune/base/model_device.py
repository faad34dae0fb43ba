"""The device on which a model computes, where some of its weights may wait on the host.

This module is a leaf: it imports nothing of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: that of its first weight which is not on the CPU, if there is one.

    Weights that wait on the host are on the CPU beside an accelerator.
    """
    first = next(model.parameters()).device
    if first.type != "cpu":
        return first
    return next((p.device for p in (*model.parameters(), *model.buffers()) if p.device.type != "cpu"), first)
