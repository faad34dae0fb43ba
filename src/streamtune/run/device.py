"""Choice of the device, settings of libraries, and ``streamtune.stream`` with the settings of a recipe."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

from streamtune.base.adapters import base_of
from streamtune.base.text import parse_size, show_size
from streamtune.engine import RouterLoss, SequenceParallel, StreamHandle, adds_balance_loss, balance_coefficient, stream
from streamtune.engine.memory.host import total_host_bytes
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops.devices import device_name, has_float64, is_available
from streamtune.plan.rates import peak_flops
from streamtune.recipe.keys.engine import EngineKeys, EngineSpec
from streamtune.recipe.keys.loss import RouterKeys
from streamtune.recipe.settings import ModelSettings
from streamtune.schedule import Schedule

TITLES = {"cuda": "CUDA", "xpu": "Intel (xpu)", "mps": "Apple (mps)"}


def choose_device(name: str) -> torch.device:
    """Return the device for a value of the recipe key ``device``; ``auto`` is CUDA if a CUDA device exists.

    Raises:
        ArgumentError: The recipe names an accelerator that does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not is_available(name):
        raise ArgumentError(
            f"there is no {TITLES[name]} device",
            where="device",
            fix="write device: cpu; `streamtune doctor` lists what is missing",
        )
    return torch.device(name)


def refuse_unsuitable_device(device: torch.device, objective: str, ranks: int) -> None:
    """Raise an ArgumentError if a run cannot use its device: several ranks on xpu or mps, or sums without float64."""
    if ranks > 1 and device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"the run has {ranks} ranks, and {TITLES[device.type]} devices train with one",
            where="device",
            fix="start one process, or write device: cpu",
        )
    if objective != "sft" and not has_float64(device):
        raise ArgumentError(
            f"'objective: {objective}' sums in float64, which this {TITLES[device.type]} device does not have",
            where="device",
            fix="write device: cpu",
        )


def check_host_memory(spec: EngineSpec) -> None:
    """Raise an ArgumentError if ``engine.host_memory`` exceeds the memory of the machine or its container."""
    total = total_host_bytes()
    if spec.host_memory == "auto" or parse_size(spec.host_memory, where="engine.host_memory") <= total:
        return
    raise ArgumentError(
        f"'host_memory: {spec.host_memory}' is more than the {show_size(total)} of this machine or its container",
        where="engine.host_memory",
        fix="delete the line to use the memory that is free at the start; `streamtune plan --host-memory` plans for "
        "another machine",
    )


def prepare_libraries(device: torch.device) -> None:
    """Turn off progress bars and warnings of libraries, and select an installed flash attention package for
    ``device``."""
    import transformers

    from streamtune.ops.attention.kernels import use_installed_flash

    use_installed_flash(device)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = (
        "1"  # read when datasets is imported, which only datasets on the hub need
    )
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\..*")
    # DeepSpeed calls collectives by their old names, and hooks modules whose inputs need no gradient.
    warnings.filterwarnings("ignore", message="not tested with")  # the command printed a note
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    # Saving a model imports deepspeed if it is installed, which then logs how it chose a device.
    os.environ.setdefault("DS_ACCELERATOR", device.type)


def make_schedule(spec: EngineSpec) -> Schedule:
    """Return the schedule that a recipe sets, with defaults for missing fields; nothing is planned.

    If ``device_layers`` is set without ``offload``, ``offload`` is ``disk`` if there is an ``offload_dir``, else
    ``host``.
    """
    fields = spec.schedule_fields()
    if fields.get("device_layers") and "offload" not in fields:
        fields["offload"] = "disk" if "offload_dir" in fields else "host"
    if fields.get("offload", "device") != "disk":
        fields.pop("offload_dir", None)
    return Schedule(**fields)


def make_router_loss(recipe: RouterKeys, model: Any) -> RouterLoss | None:
    """Return the router loss that the recipe or the model's configuration sets; None if neither does.

    Raises:
        ArgumentError: ``moe_balance`` is set, but the router loss is off.
        UnsupportedModelError: The model's configuration enables a balance loss but has no coefficient.
    """
    base = base_of(model)
    balance, z = recipe.router_aux_loss_coef, recipe.router_z_loss_coef
    has_own_loss = adds_balance_loss(base)
    if balance is None:
        balance = balance_coefficient(base) if has_own_loss else 0.0
    if balance or z or has_own_loss:  # a coefficient of 0 switches off the loss of the model's configuration
        return RouterLoss(balance, z, recipe.moe_balance)
    if recipe.moe_balance != "micro":
        raise ArgumentError(
            f"'moe_balance: {recipe.moe_balance}' has no effect: the router loss is off (router_aux_loss_coef is 0)",
            where="moe_balance",
            fix="set router_aux_loss_coef, such as 0.001, or delete the line",
        )
    return None


def stream_model(
    recipe: ModelSettings, model: Any, schedule: Schedule | None = None, ranks: SequenceParallel | None = None
) -> StreamHandle:
    """Call ``streamtune.stream`` with the recipe's settings, and return the handle.

    Args:
        recipe: Settings of the engine and of the router loss.
        model: Model, changed in place.
        schedule: Schedule from the planner; None: the recipe's schedule, with defaults.
        ranks: Ranks that share each sequence; None if each rank has its own sequences.
    """
    schedule, router_loss = schedule or make_schedule(recipe.engine), make_router_loss(recipe, model)
    handle = stream(model, schedule=schedule, sequence_parallel=ranks)
    if router_loss is None:
        return handle
    handle.remove()
    try:
        return stream(model, schedule=schedule, router_loss=router_loss, sequence_parallel=ranks)
    except UnsupportedModelError as error:  # the model itself streams: its routers are the problem
        keys = [key for key in ("router_aux_loss_coef", "router_z_loss_coef") if getattr(recipe, key)]
        if keys:
            error.where, error.fix = keys[0], f"delete {' and '.join(keys)}; the model trains without a router loss"
        raise


def compute_dtype(recipe: EngineKeys, model: Any) -> torch.dtype:
    """Return the dtype of the model's matrix products: the dtype of autocast, or of the weights without autocast."""
    dtype: torch.dtype = (
        base_of(model).dtype if recipe.autocast_dtype is None else getattr(torch, recipe.autocast_dtype)
    )
    return dtype


def known_peak_flops(recipe: EngineKeys, device: torch.device) -> float | None:
    """Return the peak FLOP/s that the recipe sets, or that the device's data sheet states; None if unknown."""
    if recipe.peak_flops is not None:
        return recipe.peak_flops
    return peak_flops(device_name(device)) if device.type == "cuda" else None
