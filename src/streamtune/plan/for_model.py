"""The planner for a model in hand, without a recipe: what ``Schedule.plan`` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError
from streamtune.plan.budget import Limits, free_device_bytes, free_disk_bytes
from streamtune.plan.calibrate import load_rates
from streamtune.plan.devices import nearest_device
from streamtune.plan.planner import choose
from streamtune.plan.rates import sheet_rates
from streamtune.schedule import Schedule
from streamtune.simulate.memory import held_bytes
from streamtune.simulate.meta import meta_copy
from streamtune.simulate.workload import Workload
from streamtune.sizes import parse_size

__all__ = ["plan_schedule"]


def plan_schedule(
    model: nn.Module,
    *,
    max_length: int,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    batch_size: int = 1,
    accumulated: bool = False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    autocast: bool = False,
    margin: float = 0.05,
    **fixed: Any,
) -> Schedule:
    """See :meth:`streamtune.Schedule.plan`."""
    device = next(model.parameters()).device
    if any("forward" in module.__dict__ for module in model.modules()):
        raise ArgumentError("the model is streamed already", mend="plan before stream(model), or .remove() it first")
    unknown = sorted(set(fixed) - set(Schedule.__dataclass_fields__))
    if unknown:
        raise ArgumentError(f"a schedule has no {unknown[0]!r}", mend=", ".join(Schedule.__dataclass_fields__))
    planned_for = "cpu" if device.type == "cpu" else "cuda"  # a model on meta is planned for an accelerator
    given = _bytes(device_memory, "device_memory")
    if device.type == "meta" and given is None:
        raise ArgumentError("a model on meta has no device", mend="say device_memory='80GiB'")
    device_bytes = given if given is not None else _found(device) + held_bytes(model)
    host_bytes = _bytes(host_memory, "host_memory")
    offload_dir = fixed.get("offload_dir")
    limits = Limits(
        device_bytes=device_bytes,
        host_bytes=usable_host_bytes() if host_bytes is None else host_bytes,
        disk_bytes=free_disk_bytes(offload_dir) if offload_dir is not None else 0,
        margin=margin,
        shared=planned_for == "cpu",
    )
    dtype = torch.bfloat16 if autocast else next(p.dtype for p in model.parameters() if p.is_floating_point())
    rates = sheet_rates(nearest_device(device_bytes)) if device.type == "meta" else load_rates(device, dtype)
    shape = model if device.type == "meta" else meta_copy(model)
    workload = Workload(
        make_model=lambda: shape,
        length=max_length,
        batch_size=batch_size,
        micro_batches=2 if accumulated else 1,
        make_optimizer=optimizer or _adamw,
        autocast=autocast,
        device_type=planned_for,
    )
    return choose(workload, limits, rates, fixed=fixed).schedule


def _found(device: torch.device) -> int:
    return usable_host_bytes() if device.type == "cpu" else free_device_bytes(device)


def _bytes(size: int | str | None, name: str) -> int | None:
    return parse_size(size, where=name) if isinstance(size, str) else size


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
