"""Train some columns of each weight: PaCA (Woo et al., arXiv 2503.01905).

    y = x (W + D)',   D is zero except in r random columns,   dL/dD[:, index] = (dL/dy)' x[:, index]

The layer computes one matmul, with the changed weight; LoRA computes two more in sequence. The backward needs only r
columns of the input. ``D`` is stored for the trained columns only, in the adapters' dtype. It is added to the weight
only during a matmul, so references, saves and merges read an unchanged base.

``D`` is ``B A``, where the rows of ``A`` are rows of the identity matrix. So the layer is saved as LoRA, and peft's
LoRA code does the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn.functional import linear

from streamtune.engine.hf_names import CONV1D, hf_internal
from streamtune.errors import ArgumentError
from streamtune.models.adapters.targets import is_unquantized, linear_layer_names
from streamtune.ops.fused import weight_gradient


class Columns(nn.Module):
    """Module in place of LoRA's ``A``: selects the input features that correspond to the trained columns of the weight.

    Attributes:
        index: Indices of the trained columns, int64 ``[r]``, ascending.
    """

    index: Tensor

    def __init__(self, index: Tensor, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(-1, self.index)


class PacaLinear(lora.Linear):
    """Linear layer that trains some columns of its weight; ``lora_B`` ``[out, r]`` is the change of these columns.

    The columns are drawn with torch's global generator when adapters are added.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, *, config: Any, **options: Any) -> None:
        # peft sets this key for peft's own layers, and saves it.
        config.fan_in_fan_out = isinstance(base_layer, hf_internal(CONV1D))
        super().__init__(base_layer, adapter_name, config=config, **options)

    def update_layer(self, adapter_name: str, r: int, *args: Any, **options: Any) -> None:
        """Add an adapter as peft does, with a :class:`Columns` in place of LoRA's ``A``."""
        super().update_layer(adapter_name, r, *args, **options)
        index = torch.randperm(self.in_features)[:r].sort().values
        self.lora_A[adapter_name] = Columns(index.to(self.get_base_layer().weight.device), self.in_features)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return the change of the weight in the weight's layout: ``[out, in]``, or ``[in, out]`` for ``Conv1D``."""
        columns, index = self.lora_B[adapter].weight, self.lora_A[adapter].index
        delta = columns.new_zeros(self.out_features, self.in_features).index_copy(1, index, columns)
        return delta.T if self.fan_in_fan_out else delta

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return ``x (W + D)' + b``, ``[..., out]``; D is the change of the trained columns."""
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **options)
        (name,) = self.active_adapters
        columns, index = self.lora_B[name].weight, self.lora_A[name].index
        return _LinearWithColumns.apply(x, columns, self.get_base_layer(), index, self.fan_in_fan_out)


class _LinearWithColumns(torch.autograd.Function):
    """``x (W + D)' + b`` with gradients for ``x`` and for the trained columns of the change ``D``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, base: Any, index: Tensor, is_transposed: bool) -> Tensor:
        ctx.is_transposed, ctx.dtype = is_transposed, x.dtype
        selected_x = x.index_select(-1, index) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(selected_x, columns, base.weight, index)
        with _add_columns(columns, base.weight, index, is_transposed) as whole:
            return linear(x, whole, base.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        selected_x, columns, weight, index = ctx.saved_tensors
        grad_x = grad_columns = None
        if ctx.needs_input_grad[0]:
            with _add_columns(columns, weight, index, ctx.is_transposed) as whole:
                grad_x = (grad @ whole.to(grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_nV, selected_nr = grad.reshape(-1, grad.shape[-1]), selected_x.reshape(-1, selected_x.shape[-1])
            grad_columns = weight_gradient(grad_nV, selected_nr.to(grad.dtype), columns.dtype)
        return grad_x, grad_columns, None, None, None


@contextmanager
def _add_columns(columns: Tensor, weight: Tensor, index: Tensor, is_transposed: bool) -> Iterator[Tensor]:
    """Context manager: add ``columns`` to the columns ``index`` of a weight, and yield the weight as ``[out, in]``.

    On exit the weight is restored. The change goes through ``.data``: autograd would reject an in-place change to a
    weight that it saved for another call. The change is safe, because each call computes with the same values.
    """
    whole = weight.data.T if is_transposed else weight.data
    before = whole.index_select(1, index)
    whole.index_copy_(1, index, (before + columns.detach()).to(whole.dtype))
    try:
        yield whole
    finally:
        whole.index_copy_(1, index, before)


def register_paca_layer(model: nn.Module, config: Any) -> None:
    """Register :class:`PacaLinear` in peft's ``config`` for linear layers; quantised layers raise an ArgumentError."""
    for name in linear_layer_names(model):
        if not is_unquantized(model.get_submodule(name).weight):
            raise ArgumentError(
                f"adapter_type: paca changes columns of the weight of {name}, which is quantised",
                where="adapter_type",
                fix="write adapter_type: lora, or use the unquantised checkpoint",
            )
    config._register_custom_module({nn.Linear: PacaLinear, hf_internal(CONV1D): PacaLinear})
