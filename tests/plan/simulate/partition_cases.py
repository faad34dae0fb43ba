"""Bytes that a rank really holds after two steps with each engine, compared with the plan, by memory term."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

import streamtune
from streamtune import train
from streamtune.engine import decoder_layers
from streamtune.models import ModelOptions, add_lora, build_meta_model
from streamtune.models.quantize import quantize
from streamtune.plan.simulate.cluster import Links
from streamtune.plan.simulate.memory import quantization_scale_bytes, storage_bytes
from streamtune.plan.simulate.partition import ResidentMemory, shardable_bytes
from streamtune.recipe import Recipe
from streamtune.run.cluster import RequestedRanks, cluster_of
from streamtune.run.plan import LongestStep, make_workload
from streamtune.run.ranks import make_backend
from tests.plan.simulate.cluster_kit import CONFIG

LENGTH = 96


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"planned": {term: bytes}, "held": {term: bytes}}`` of rank 0."""
    world = train.World(distributed.get_rank(), distributed.get_world_size())
    engine, dtype = case["engine"], case["dtype"]
    recipe = Recipe(
        model={"init": CONFIG},
        tokenizer={"train": {"vocab_size": 300}},
        datasets=[{"path": "none"}],
        max_length=LENGTH,
        dtype=dtype,
        deepspeed=engine if engine.startswith("zero") else None,
        fsdp=engine == "fsdp",
        finetuning_type=case.get("finetuning", "full"),
    )
    schedule = streamtune.Schedule(chunk_size=32, **case.get("schedule", {}))
    return {"planned": _planned(recipe, world, schedule), "held": _held(recipe, world, schedule)}


def _planned(recipe: Recipe, world: train.World, schedule: streamtune.Schedule) -> dict[str, int]:
    model = build_meta_model(CONFIG, ModelOptions(recipe.dtype, "nf4" if recipe.finetuning_type == "qlora" else None))
    with torch.device("meta"):
        model = _adapted(recipe, model)
    cluster = cluster_of(recipe, model, RequestedRanks(world.size, 1), Links())
    workload = make_workload(recipe, model, LongestStep(LENGTH), torch.device("cpu"), cluster)
    found = ResidentMemory.from_model(model, workload).adapted_to_schedule(model, workload, schedule)
    ahead = max(map(shardable_bytes, decoder_layers(model))) if recipe.fsdp else 0
    return {
        "weights": found.weights,
        "master": found.master,
        "state": found.state,
        "gradients": found.gradients,
        "gathered": max(found.gathered.values()) - (ahead - ahead // world.size),  # fetched, but no weight yet
    }


def _held(recipe: Recipe, world: train.World, schedule: streamtune.Schedule) -> dict[str, int]:
    torch.manual_seed(0)
    model: Any = build_meta_model(CONFIG, ModelOptions(recipe.dtype)).to_empty(device="cpu").train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are no parameters
    if recipe.finetuning_type == "qlora":
        quantize(model, "nf4", torch.device("cpu"))
    model = _adapted(recipe, model)
    scales = quantization_scale_bytes(model)
    handle = streamtune.stream(model, schedule=schedule)
    backend = make_backend(recipe, model, handle.layers, world)
    whole: list[int] = []
    for layer in handle.layers:  # runs with every chunk, forward and backward
        layer.mlp.register_forward_pre_hook(streamtune.chunkwise(lambda *_: whole.append(_gathered(model))))
    ids = torch.randint(3, 256, (1, LENGTH))
    gradients = 0
    for _ in range(2):
        for last in (False, True):
            with backend.micro_batch_context(last=last):
                backend.backward(backend.model(input_ids=ids, labels=ids).loss)
            gradients = max(gradients, _gradient_bytes(backend, model))
        backend.clip_gradients(recipe.max_grad_norm)
        backend.step(1e-4)
    found = {
        "weights": _bytes(getattr(p, "ds_tensor", p) for p in model.parameters()) + scales,
        "master": _bytes(_master(backend)),
        "state": _bytes(_state(backend)),
        "gradients": gradients,
        "gathered": max(whole),
    }
    backend.close()
    return found


def _adapted(recipe: Recipe, model: Any) -> Any:
    if recipe.finetuning_type == "full":
        return model
    return add_lora(model, r=32, alpha=64, dropout=0.0, target="all-linear", seed=0)


def _bytes(tensors: Iterable[Any]) -> int:
    return storage_bytes(x.to_local() if isinstance(x, DTensor) else x for x in tensors)


def _gathered(model: nn.Module) -> int:
    """Return the bytes of gathered weights, without the rank's own shard."""
    size = distributed.get_world_size()
    found = 0
    for p in model.parameters():
        if hasattr(p, "ds_id"):
            found += p.data.nbytes - p.data.nbytes // size if p.data.numel() == p.ds_numel else 0  # type: ignore[attr-defined]
        elif getattr(model, "_get_fsdp_state", None) and not isinstance(p, DTensor):  # whole while in use
            found += p.nbytes - p.nbytes // size
    return found


def _gradient_bytes(backend: Any, model: nn.Module) -> int:
    optimizer: Any = getattr(backend.model, "optimizer", None)
    if hasattr(optimizer, "grad_partitions_flat_buffer"):  # stage 3
        return _bytes([optimizer.grad_partitions_flat_buffer])
    if getattr(backend, "stage", 0) == 2:
        parts = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
        return max(_bytes(group) for group in parts if group is not None)
    return _bytes(p.grad for p in model.parameters() if p.grad is not None)


def _master(backend: Any) -> list[Tensor]:
    optimizer = getattr(backend.model, "optimizer", None)
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def _state(backend: Any) -> list[Tensor]:
    optimizer = getattr(backend.model, "optimizer", None)
    optimizer = getattr(optimizer, "optimizer", optimizer) or backend.optimizer
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
