"""First values of LoRA, and the constant adapter that takes away what the adapters start from.

``pissa``, ``olora`` and ``lora_ga`` of their papers take the part ``B0 A0`` that the adapters start from away from the
base, which then is another model in every checkpoint, as a reference, and to every reader of the adapters. Here the
base stays, and ``- B0 A0`` is a second, constant adapter: the same function of the trained ``A`` and ``B``, without the
rounding of the base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from streamtune.base.adapters import AdapterSpec
from streamtune.errors import ArgumentError
from streamtune.models.adapters.targets import is_whole, low_rank_layers

START = "start"
"""Name of the constant adapter."""
CONSTANT = (f"lora_A.{START}.weight", f"lora_B.{START}.weight")


def start_from_weights(adapted: Any, spec: AdapterSpec) -> None:
    """Start LoRA from the leading part of each weight.

    Raises:
        ArgumentError: The weights are quantised.
    """
    for name, layer in low_rank_layers(adapted):
        weight = layer.get_base_layer().weight
        if weight.device.type == "meta":
            continue
        if not is_whole(weight):
            raise ArgumentError(
                f"adapter_type: {spec.kind} starts from the weight of {name}, which is quantised",
                where="adapter_type",
                mend="write finetuning_type: lora, or adapter_type: lora",
            )
        weight = weight.detach().float()
        weight = weight.T if layer.fan_in_fan_out else weight  # [out, in]
        rank, scale = layer.r["default"], layer.scaling["default"]
        set_start(layer, *LEADING_PARTS[spec.kind](weight, rank, scale))


def _by_svd(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = sqrt(S) V^T`` and ``B = U sqrt(S)`` of the largest singular values (PiSSA)."""
    u, s, v = torch.svd_lowrank(weight, q=min(2 * rank, *weight.shape), niter=8)
    root = (s[:rank] / scale).sqrt()
    return root[:, None] * v[:, :rank].T, u[:, :rank] * root


def _by_qr(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return ``A = R`` and ``B = Q`` (OLoRA)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank] / scale**0.5, q[:, :rank] / scale**0.5


LEADING_PARTS: Mapping[str, Callable[[Tensor, int, float], tuple[Tensor, Tensor]]] = {"pissa": _by_svd, "olora": _by_qr}
"""Kind that starts from weights -> ``A`` and ``B`` of a weight ``[out, in]``, a rank and a scale."""


def set_start(layer: Any, down: Tensor, up: Tensor) -> None:
    """Start the adapters of a layer from ``A0`` ``[r, in]`` and ``B0`` ``[out, r]``, and take ``B0 A0`` away again."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(down)
    b.copy_(up)
    layer.lora_A[START].weight.copy_(a)
    layer.lora_B[START].weight.copy_(-b)


def started_values(adapted: Any) -> Iterator[Tensor]:
    """Yield all that :func:`set_start` writes into, layer by layer."""
    for _, layer in low_rank_layers(adapted):
        for parts in (layer.lora_A, layer.lora_B):
            yield from (parts[name].weight for name in ("default", START))


def add_start(adapted: Any) -> None:
    """Add the constant adapter. Its values are buffers: peft makes parameters of active adapters trainable."""
    plain = copy.deepcopy(adapted.peft_config["default"])
    plain.lora_dropout, plain.modules_to_save, plain.trainable_token_indices = 0.0, None, None
    adapted.add_adapter(START, plain)
    for _, layer in low_rank_layers(adapted):
        for part in (layer.lora_A[START], layer.lora_B[START]):
            values = part.weight.detach()
            del part.weight
            part.register_buffer("weight", values)
        layer.set_adapter(["default", START])
    del adapted.peft_config[START]  # it is a part of the other one, in all that reads configurations
