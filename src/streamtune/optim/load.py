"""Load the state of an optimizer as it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["load_states"]


def load_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put the tensors of a state back in their own dtypes, on the devices of their weights.

    ``torch.optim.Optimizer.load_state_dict`` casts them to the dtype of the weight, which rounds moments in float32 and
    turns indices into floats.

    Args:
        optimizer: Over as many parameters, in the same groups.
        state_dict: As ``state_dict`` returns it.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state.clear()
    for number, parameter in zip(saved, own, strict=True):
        if entry := state_dict["state"].get(number):
            optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in entry.items()}


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    return value.detach().to(parameter.device, copy=True) if isinstance(value, torch.Tensor) else value
