"""Sharded 4-bit weights: the bits that a rank gathers, and the bytes it holds between calls."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import streamtune
from streamtune import models
from streamtune.models.quantize import quantize
from streamtune.run.ranks import make_backend
from streamtune.train import World
from tests.distributed.levels_cases import recipe_for
from tests.exactness.families import VOCAB, build


def run(case: dict[str, Any]) -> dict[str, Any]:
    """``same``: layers whose gathered packed weights have the bits they had whole; ``part``: of all bytes, this rank's.

    ``written`` is that of weights whose values, written out in a layer's call, are those of before.
    """
    model: Any = (
        build(case.get("family", "qwen3"), hidden_size=64, intermediate_size=128)
        .to(getattr(torch, case["dtype"]))
        .train()
    )
    quantize(model, "nf4", torch.device("cpu"))
    model = models.add_lora(model, r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
    whole = {name: copy.deepcopy(module) for name, module in _packed(model)}
    size = sum(module.weight.nbytes for module in whole.values())
    experts = {name: copy.deepcopy(x) for name, x in model.named_parameters() if isinstance(x, models.PackedExperts)}
    size += sum(x.packed_tensors()[0].nbytes for x in experts.values())
    handle = streamtune.stream(model, chunk_size=8)
    recipe = recipe_for(case["engine"], dtype=case["dtype"], finetuning_type="qlora")
    backend = make_backend(recipe, model, handle.layers, World(torch.distributed.get_rank(), 2))
    same, written = [], []
    for name, module in _packed(model):

        def compare(module: nn.Module, args: Any, name: str = name) -> None:
            was, now = whole[name].weight, module.weight
            same.append(torch.equal(_bytes(now.detach()), _bytes(was.detach())))
            eye = torch.eye(module.in_features, dtype=args[0].dtype)
            written.append(torch.equal(type(module).forward(module, eye), type(module).forward(whole[name], eye)))

        module.register_forward_pre_hook(streamtune.chunkwise(compare))
    for name in experts:

        def compare_experts(module: nn.Module, args: Any, name: str = name) -> None:
            was, now = experts[name], module._parameters.get(name.rpartition(".")[2])
            if now is None:  # peft parametrizes it for the call
                now = module.parametrizations[name.rpartition(".")[2]].original  # type: ignore[index, union-attr]
            same.append(torch.equal(_bytes(now.packed_tensors()[0]), _bytes(was.packed_tensors()[0])))
            written.append(torch.equal(now.dequantize(), was.dequantize()))

        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_forward_pre_hook(streamtune.chunkwise(compare_experts))
    ids = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        backend.backward(backend.model(input_ids=ids, labels=ids).loss)
        backend.clip_gradients(1.0)
        backend.step(1e-3)
    held = sum(_held(module.weight) for _, module in _packed(model))
    held += sum(_held(model.get_parameter(name)) for name in experts)
    backend.close()
    scales = _scales(whole) + sum(part.nbytes for x in experts.values() for part in x.packed_tensors()[1:3])
    return {"same": same, "written": written, "part": held / size, "scales": scales / size}


def _packed(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of bitsandbytes by name, without peft's wrappers."""
    return [(name, module) for name, module in model.named_modules() if type(module) is bitsandbytes.nn.Linear4bit]


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _held(weight: Any) -> int:
    """Return the bytes of a weight that this rank holds between calls."""
    if isinstance(weight, DTensor):
        return weight.to_local().nbytes
    return weight.ds_tensor.nbytes + (weight.data.nbytes if weight.ds_status.name == "AVAILABLE" else 0)


def _scales(modules: dict[str, Any]) -> int:
    states = [module.weight.quant_state for module in modules.values()]
    return sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
