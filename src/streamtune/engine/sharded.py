"""Parameters that several ranks share, of which each holds a part: ZeRO stage 3 and FSDP2.

Such a parameter is whole only inside a call of the module it belongs to: hooks around the call gather it before and
free it after, and do so again in the backward. What the engine computes with a weight is therefore inside that
module's call: a decoder layer's chunks are inside its ``forward``, the head's inside the head's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import UnsupportedModelError

__all__ = ["FlatParametersError", "gather_whole", "is_sharded", "need_gradient", "ungather_whole"]

LEAF = "_z3_leaf"
"""The flag by which ``deepspeed.utils.set_z3_leaf_modules`` marks a module that is gathered whole around its call."""


class FlatParametersError(UnsupportedModelError):
    """FSDP1 joins the parameters of many modules in one, and gives a module views of it for one call only.

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
    """Return True if a call of ``module`` gathers parameters of its own that are on other ranks otherwise."""
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):  # ZeRO stage 3
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is of its kind where nobody imported it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gather_whole(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Have ZeRO stage 3 gather a layer whole around its call, and not each module inside of it.

    Chunks run inside of one call of the layer, and again in one call of its backward. ``deepspeed.initialize`` reads
    the flag; without DeepSpeed it has no effect.

    Returns:
        The layers that were not flagged before, for :func:`ungather_whole`.

    Raises:
        UnsupportedModelError: DeepSpeed has put its hooks inside of a layer already.
    """
    flagged: list[nn.Module] = []
    for layer in layers:
        if getattr(layer, LEAF, False):
            continue
        if any(_gathers(module) for module in layer.modules() if module is not layer):
            ungather_whole(flagged)
            raise UnsupportedModelError(
                "deepspeed.initialize() (ZeRO stage 3) gathers the modules inside of each layer one by one, and chunks "
                "need the layer whole",
                where=type(layer).__name__,
                mend="call streamtune.stream(model) before deepspeed.initialize() and before the trainer that calls it",
            )
        setattr(layer, LEAF, True)
        flagged.append(layer)
    return flagged


def need_gradient(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the hidden states of a trained layer require a gradient under ZeRO stage 3, as a forward pre-hook.

    DeepSpeed's backward hooks of a layer are attached to its first input: if that needs no gradient (adapters over a
    frozen embedding), it frees the weights before the layer's backward.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not torch.is_grad_enabled() or not isinstance(hidden, Tensor) or hidden.requires_grad:
        return None
    parameters = list(layer.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters) or not any(p.requires_grad for p in parameters):
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def ungather_whole(flagged: Iterable[nn.Module]) -> None:
    """Remove the flag, except from layers that DeepSpeed already gathers by it."""
    for layer in flagged:
        if hasattr(layer, LEAF) and not any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            delattr(layer, LEAF)


def _gathers(module: nn.Module) -> bool:
    return any(
        str(getattr(hook, "__module__", "")).startswith("deepspeed.runtime.zero")
        for hook in module._forward_pre_hooks.values()
    )
