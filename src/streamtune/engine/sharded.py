"""Parameters that several ranks share, of which each holds a part: ZeRO stage 3 and FSDP2.

Such a parameter is whole only inside a call of the module it belongs to: hooks around the call gather it before and let
go of it after, and do so again in the backward. What the engine computes with a weight is therefore inside that
module's call: a decoder layer's chunks are inside its ``forward``, the head's inside the head's.
"""

from __future__ import annotations

import sys

from torch import nn

from streamtune.errors import UnsupportedModelError

__all__ = ["FlatParametersError", "is_sharded"]


class FlatParametersError(UnsupportedModelError):
    """FSDP1 lays the parameters of many modules into one, and lends a module views of it for one call.

    Args:
        where: The class of the module.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters a layer only borrows for "
            "one call",
            where=where,
            mend="use FSDP2: torch.distributed.fsdp.fully_shard(layer), or fsdp_version: 2 of accelerate",
        )


def is_sharded(module: nn.Module) -> bool:
    """Whether a call of ``module`` gathers parameters of its own that are elsewhere otherwise."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):  # ZeRO stage 3
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is of its kind where nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
