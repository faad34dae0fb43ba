"""Simulations that are kept on disk, under a hash of everything they are made of: a second start simulates nothing.

The steps of a model are simulated by running the engine itself. So a result belongs to the code of this package, to the
versions of the libraries, to the structure of the model and to every option of the step; a model with code of its own,
with hooks or with quantised weights is simulated each time.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from streamtune.base.result_cache import hash_of, versions
from streamtune.plan.simulate.facts import all_modules, fact_of
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

_KNOWN_CODE = ("torch", "transformers", "peft", "streamtune")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def describe_step(workload: Workload, schedule: Schedule) -> str | None:
    """Return a hash of all that a simulation depends on; None where it cannot be known."""
    model = workload.make_model()
    structure = _describe_model(model)
    if structure is None:
        return None
    options = {
        field.name: repr(getattr(workload, field.name))
        for field in fields(workload)
        if field.name not in ("make_model", "make_optimizer", "completions", "keep")
    }
    facts = [
        structure, options, repr(workload.scored), repr(asdict(schedule)), _describe_optimizer(workload, model),
        versions(), str(torch.version.cuda),
        torch.are_deterministic_algorithms_enabled(), str(torch.get_default_dtype()),
    ]  # fmt: skip
    return hash_of(facts)


def _describe_model(model: nn.Module) -> Any:
    modules = all_modules(model)
    for module in modules:
        ours = type(module).__module__.partition(".")[0] in _KNOWN_CODE
        own = vars(module)
        if not ours or "forward" in own or any(own.get(name) for name in _HOOKS):
            return None
    structure = fact_of(model, "structure", lambda: _describe_structure(model))
    if structure is None:
        return None
    return [*structure, [place for place, module in enumerate(modules) if _is_checkpointed(module)]]


def _describe_structure(model: nn.Module) -> Any:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if any(type(tensor) not in (nn.Parameter, torch.Tensor) for _, tensor in tensors):
        return None
    config: Any = getattr(model, "config", None)
    return [
        type(model).__name__,
        repr(model),
        None if config is None else config.to_json_string(use_diff=False),
        str(getattr(config, "_attn_implementation", None)),
        [[name, list(each.shape), str(each.dtype), each.requires_grad] for name, each in tensors],
    ]


def _is_checkpointed(module: nn.Module) -> bool:
    return bool(vars(module).get("gradient_checkpointing", getattr(type(module), "gradient_checkpointing", False)))


def _describe_optimizer(workload: Workload, model: nn.Module) -> str | None:
    make = workload.make_optimizer
    if make is None:
        return None
    described: str = fact_of(model, ("description of the optimizer", make), lambda: _described(make(model)))
    return described


def _described(optimizer: torch.optim.Optimizer) -> str:
    groups = [
        [len(group["params"]), sorted((name, repr(value)) for name, value in group.items() if name != "params")]
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {groups}"
