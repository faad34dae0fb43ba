"""The DeepSpeed configuration of a recipe: a shipped preset, or a JSON file whose ``auto`` values the recipe fills in.

    zero1          shards the optimizer
    zero2          also shards gradients
    zero3          also shards weights; a decoder layer is gathered whole, once forward and once backward
    zero3_offload  as zero3, with weights and optimizer offloaded to the host

If both the recipe and the file have a value, the two must be equal.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from streamtune.base.paths import open_nonblocking
from streamtune.base.privacy import find_secret, is_named_like_secret, redact
from streamtune.errors import ArgumentError, did_you_mean

COMMON: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    # Without this section DeepSpeed disables autocast. Gradients are reduced in the dtype of the weights.
    "torch_autocast": {"enabled": "auto", "dtype": "bfloat16", "lower_precision_safe_modules": []},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 2**31 - 1,  # StreamTune shows progress itself
}
ZERO: dict[str, Any] = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
ZERO3: dict[str, Any] = {
    **ZERO,
    "stage": 3,
    # Small modules are not sharded, and the next layer is prefetched; decoder layers are far above both limits.
    "stage3_param_persistence_threshold": "auto",
    "stage3_prefetch_bucket_size": "auto",
    # By default a billion weights stay gathered from forward to backward, which is all weights of many models.
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_gather_16bit_weights_on_model_save": False,  # weights are written shard by shard
}
HOST = {"device": "cpu", "pin_memory": "auto"}

PRESETS: dict[str, dict[str, Any]] = {
    "zero1": {**COMMON, "zero_optimization": {**ZERO, "stage": 1}},
    "zero2": {**COMMON, "zero_optimization": {**ZERO, "stage": 2}},
    "zero3": {**COMMON, "zero_optimization": ZERO3},
    "zero3_offload": {
        **COMMON,
        "zero_optimization": {**ZERO3, "offload_optimizer": HOST, "offload_param": HOST},
        "zero_force_ds_cpu_optimizer": False,
    },
}
"""Preset configurations by their name in a recipe."""

AUTO = "auto"


def resolve_config(name: str, values: Mapping[str, Any], *, where: str = "deepspeed") -> dict[str, Any]:
    """Return the configuration of a preset or JSON file, with all ``auto`` values filled in.

    Args:
        name: Name of a preset, or path of a JSON file.
        values: Values of the recipe by dotted key, such as ``{"bf16.enabled": True}``.
        where: Recipe key, for errors.

    Raises:
        ArgumentError: The file cannot be read or contradicts the recipe. Or it has an ``auto`` that the recipe does not
            fill in, an optimizer, a scheduler, or a stage other than 1 to 3.
    """
    config = read_config(name, where=where)
    source = f"the preset {name}" if name in PRESETS else name
    for key, value in values.items():
        holder, last = _find_section(config, key)
        if holder is None:
            continue
        written = holder.get(last, AUTO)
        if written == AUTO:
            holder[last] = value
        elif written != value:
            raise ArgumentError(
                f"{source} has {key}: {json.dumps(written)}, but the recipe gives {json.dumps(value)}",
                where=where,
                fix=f'set "{key.rpartition(".")[2]}": "auto" there, or change the recipe',
            )
    if left := list(_auto_keys(config)):
        raise ArgumentError(
            f'{source} has {left[0]}: "auto", for which the recipe has no value', where=where, fix="set its value there"
        )
    for section, article, key in (("optimizer", "an", "optim"), ("scheduler", "a", "lr_scheduler_type")):
        if section in config:
            raise ArgumentError(
                f"{source} has {article} {section}, but the recipe chooses it ({key})",
                where=where,
                fix=f"delete {section!r} there; the recipe sets {key}, learning_rate and warmup_steps",
            )
    if (stage := stage_of(config)) not in (1, 2, 3):
        raise ArgumentError(
            f"{source} has ZeRO stage {stage}, expected 1, 2 or 3",
            where=where,
            fix="set stage 1, 2 or 3; for stage 0, delete the key deepspeed, and ranks train with DDP",
        )
    return config


def filled(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the resolved ``config``, by dotted key, that are ``auto`` in its preset or file."""
    values = {}
    for key in _auto_keys(read_config(name)):
        holder, last = _find_section(dict(config), key)
        if holder is not None:
            values[key] = holder[last]
    return values


def read_config(name: str, *, where: str = "deepspeed") -> dict[str, Any]:
    """Return the configuration of a preset or JSON file, with its ``auto`` values.

    Raises:
        ArgumentError: The file cannot be read, is not a JSON object, or contains a secret.
    """
    return copy.deepcopy(PRESETS[name]) if name in PRESETS else _read_file(name, where)


def stage_of(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _read_file(name: str, where: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    try:
        with open(path, "rb", opener=open_nonblocking) as file:  # does not block on a pipe
            text = file.read().decode("utf-8")
        config = json.loads(text)
    except FileNotFoundError:
        raise ArgumentError(
            f"there is no DeepSpeed configuration {name}",
            where=where,
            fix=did_you_mean(name, PRESETS) or f"use {', '.join(PRESETS)}, or the path of a JSON file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{name} cannot be read: {error}", where=where) from None
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name} is not JSON: {error.msg}", where=f"{name}:{error.lineno}") from None
    except RecursionError:
        raise ArgumentError(f"{name} is nested too deeply", where=where) from None
    if not isinstance(config, dict):
        raise ArgumentError(
            f"{name} must be a JSON object", where=where, fix='write an object: {"zero_optimization": {...}}'
        )
    if (found := _secret_in(config)) is not None:
        kind, key = found
        lines = [number for number, line in enumerate(text.splitlines(), 1) if find_secret(line)]
        raise ArgumentError(
            f"'{redact(key)}' contains {kind}, but the DeepSpeed configuration is copied into every run",
            where=f"{name}:{lines[0]}" if lines else name,
            fix="remove it, and revoke it if others have seen it; trackers read their keys from the environment",
        )
    return config


def _secret_in(value: Any, path: str = "") -> tuple[str, str] | None:
    """Return the kind and dotted key of the first token or password in a JSON value; None if there is none."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            place = f"{path}.{key}" if path else str(key)
            if kind := find_secret(str(key)):
                return kind, place
            if isinstance(item, str) and item not in ("", AUTO) and is_named_like_secret(str(key), item):
                return "a secret", place
            if found := _secret_in(item, place):
                return found
    elif isinstance(value, list):
        inside = (_secret_in(item, f"{path}.{number}") for number, item in enumerate(value))
        return next(filter(None, inside), None)
    elif isinstance(value, str) and (kind := find_secret(value)):
        return kind, path
    return None


def _find_section(config: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the section that contains a dotted key (None if it is missing), and the last part of the key."""
    *path, last = key.split(".")
    holder: Any = config
    for name in path:
        if not isinstance(holder.get(name), dict):
            return None, last
        holder = holder[name]
    return holder, last


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _auto_keys(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
