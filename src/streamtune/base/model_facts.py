"""The label of tokens that are not trained on, and the device and the decoder of a model. Imports nothing from this
package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def decoder_of(model: Any) -> Any:
    """Return the part of a model of ``transformers`` that computes hidden states, or the model if it has no head.

    ``base_model_prefix`` names this part, except in text models of a multimodal family (Llama 4). There it is the only
    submodule with a configuration of its own.
    """
    named = getattr(model, model.base_model_prefix, None)
    return named if named is not None else next((part for part in model.children() if hasattr(part, "config")), model)
