"""Parameters that several ranks share, of which each holds a part: ZeRO stage 3 and FSDP2.

Such a parameter is whole only inside a call of the module it belongs to: hooks around the call gather it before and let
go of it after, and do so again in the backward. What the engine computes with a weight is therefore inside that
module's call: a decoder layer's chunks are inside its ``forward``, the head's inside the head's.
"""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["is_sharded"]


def is_sharded(module: nn.Module) -> bool:
    """Whether a call of ``module`` gathers parameters of its own that are elsewhere otherwise."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):  # ZeRO stage 3
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is of its kind where nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
