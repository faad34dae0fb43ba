"""An optimizer's state as named tensors: ``PARAMETER/KEY``, such as ``lm_head.weight/exp_avg``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.errors import CheckpointError

__all__ = ["load_optimizer_tensors", "optimizer_tensors"]


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state by parameter name, which survives a reordering of the optimizer's groups. Nothing is copied."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the state back.

    Raises:
        CheckpointError: It belongs to a model with other parameters.
    """
    by_parameter: dict[str, dict[str, Any]] = defaultdict(dict)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        by_parameter[name][key] = value
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    if differing := sorted(by_parameter.keys() ^ set(order)):
        raise CheckpointError(
            f"the optimizer's state in the checkpoint belongs to another model: {len(differing)} parameters differ, "
            f"among them {differing[0]}",
            mend="start anew with --resume never",
        )
    # torch numbers the parameters in the order of the groups, and knows on which device each entry belongs.
    state = {index: by_parameter[name] for index, name in enumerate(order)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
