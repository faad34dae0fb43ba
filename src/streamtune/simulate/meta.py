"""The shape of a model that exists: a copy on ``meta``, which takes no memory and can be run in its place."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["meta_copy"]

Model = TypeVar("Model", bound=nn.Module)


def meta_copy(model: Model) -> Model:
    """``model`` with every tensor on ``meta``: the same modules, shapes, dtypes and adapters, and none of the bytes.

    Args:
        model: Not streamed; left as it is.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _on_meta(tensor, isinstance(module._parameters.get(name), nn.Parameter))
    return copy.deepcopy(model, memo)


def _on_meta(tensor: Tensor, parameter: bool) -> Tensor:
    state = getattr(tensor, "quant_state", None)
    if state is not None:  # bitsandbytes: the scales go along
        packed = torch.empty_like(tensor.detach().as_subclass(Tensor), device="meta")
        kind: Any = type(tensor)
        return _with_state(kind(packed, requires_grad=tensor.requires_grad, bnb_quantized=True), tensor, state)
    if is_traceable_wrapper_subclass(tensor):
        moved = tensor.detach().to("meta")
    else:
        moved = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if parameter else moved


def _with_state(made: Any, tensor: Any, state: Any) -> Tensor:
    kept = {name: value for name, value in vars(tensor).items() if name not in ("quant_state", "module")}
    made.__dict__.update(kept, quant_state=_state_on_meta(state))
    return made


def _state_on_meta(state: Any) -> Any:
    made = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor) and value.dim():
            setattr(made, name, value.to("meta"))
        elif type(value) is type(state):
            setattr(made, name, _state_on_meta(value))
    return made
