"""Hooks on a sharded model: what they see with the streamed and the plain model under one engine, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

import streamtune
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import build
from tests.transparency import test_hooks as hooks

KINDS: dict[str, Any] = {
    hook.__name__: hook
    for hook in (
        hooks.tensor_hook,
        hooks.two_tensor_hooks,
        hooks.accumulator_hook,
        hooks.post_accumulate_hook,
        hooks.forward_hook,
        hooks.forward_pre_hook,
        hooks.full_backward_hook,
        hooks.backward_pre_hook,
    )
}
OF_PARAMETERS = [hook.__name__ for hook in hooks.PARAMETER_HOOKS]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return the hook calls of a plain and a streamed model, and the largest relative difference of what they saw.

    ``only_mine`` and ``only_theirs`` are the calls of either, where they differ on any rank.
    """
    if case.get("late"):
        return {"refused": _streamed_too_late(case)}
    seen = {streamed: _seen(case, streamed) for streamed in (False, True)}
    plain, ours = ([name for name, _ in found] for found in seen.values())
    apart = [_apart(mine, theirs) for (_, mine), (_, theirs) in zip(seen[True], seen[False], strict=False)]
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, {"plain": plain, "ours": ours, "apart": max(apart, default=0.0)})
    return {"ranks": every}


def _streamed_too_late(case: dict[str, Any]) -> str:
    """Return the error if the engine has gathered the model's modules before it is streamed."""
    model: Any = build("qwen3").train()
    runner = _wrapped(case["engine"], model)
    try:
        streamtune.stream(model)
    except UnsupportedModelError as error:
        return f"{error.what}; {error.fix}"
    finally:
        runner.destroy()
    return ""


def _apart(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).double().norm() / theirs.double().norm().clamp_min(1e-6))


def _seen(case: dict[str, Any], streamed: bool) -> list[tuple[str, Tensor]]:
    """Return what the hook saw in two micro-batches of this rank, and this rank's shard of every gradient."""
    model: Any = build("qwen3").train()
    schedule = streamtune.Schedule(chunk_size=case["chunk_size"], stream_grads=case.get("stream_grads", False))
    if streamed and case["engine"] == "zero3":  # which asks which modules it is to gather whole
        streamtune.stream(model, schedule=schedule)
    runner = _wrapped(case["engine"], model)
    found: list[tuple[str, Tensor]] = []
    KINDS[case["hook"]](model.get_submodule(case["place"]), found)
    if streamed and case["engine"] != "zero3":
        streamtune.stream(model, schedule=schedule)
    ids = torch.randint(1, 60, (2, 27), generator=torch.Generator().manual_seed(distributed.get_rank()))
    for row in ids[:, None]:
        loss = runner(input_ids=row, labels=row, use_cache=False).loss
        runner.backward(loss) if case["engine"] == "zero3" else loss.backward()
    found = [(name, _local(x)) for name, x in found]
    for name, parameter in model.named_parameters():
        found.append((name, _gradient(parameter)))
    if case["engine"] == "zero3":
        runner.destroy()
    return found


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _gradient(parameter: nn.Parameter) -> Tensor:
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter).clone()
    assert parameter.grad is not None
    return _local(parameter.grad).clone()


def _wrapped(engine: str, model: Any) -> Any:
    """Return the model as users of the engine wrap it."""
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if engine == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
