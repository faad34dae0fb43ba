"""The DeepSpeed configuration of a run, from a preset or a JSON file.

    zero1          shards the optimizer states
    zero2          also shards gradients
    zero3          also shards weights
    zero3_offload  as zero3, with weights and optimizer states in host memory

The recipe sets the values that are ``auto``. If both the recipe and the file set a value, the values must be equal.
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
    # Without this section DeepSpeed disables autocast on a GPU. Gradients are reduced in the dtype of the weights.
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
    # By default up to a billion weights stay gathered from forward to backward: all weights of many models.
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_gather_16bit_weights_on_model_save": False,  # weights are written shard by shard
}
PRECISION_SECTIONS = {"bf16", "torch_autocast"}
"""Sections that a file gets from the presets if it does not have them."""
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
    """Return the configuration of a preset or JSON file, with all ``auto`` values replaced.

    Args:
        name: Name of a preset, or path of a JSON file.
        values: Values from the recipe by dotted key, such as ``{"bf16.enabled": True}``.
        where: Recipe key, for errors.

    Raises:
        ArgumentError: The file cannot be read, contradicts ``values``, has an ``auto`` that ``values`` lacks, sets an
            optimizer or scheduler, or has a ZeRO stage other than 1 to 3.
    """
    config = read_config(name, where=where)
    for missing in PRECISION_SECTIONS - config.keys():  # DeepSpeed would disable what the recipe sets
        config[missing] = copy.deepcopy(COMMON[missing])
    source = f"the preset {name}" if name in PRESETS else name
    for key, value in values.items():
        section, last = _find_section(config, key)
        if section is None:
            continue
        configured = section.get(last, AUTO)
        if configured == AUTO:
            section[last] = value
        elif configured != value:
            raise ArgumentError(
                f"{source} has {key}: {json.dumps(configured)}, but the recipe gives {json.dumps(value)}",
                where=where,
                fix=f'set "{key.rpartition(".")[2]}": "auto" in {source}, or change the recipe',
            )
    if auto_keys := list(_auto_keys(config)):
        raise ArgumentError(
            f'{source} has {auto_keys[0]}: "auto", for which the recipe has no value',
            where=where,
            fix=f"set its value in {source}",
        )
    for forbidden, article, key in (("optimizer", "an", "optim"), ("scheduler", "a", "lr_scheduler_type")):
        if forbidden in config:
            raise ArgumentError(
                f"{source} has {article} {forbidden}, but the recipe chooses it ({key})",
                where=where,
                fix=f"delete {forbidden!r} in {source}; the recipe sets {key}, learning_rate and warmup_steps",
            )
    if (stage := zero_stage(config)) not in (1, 2, 3):
        raise ArgumentError(
            f"{source} has ZeRO stage {stage}, expected 1, 2 or 3",
            where=where,
            fix="set stage 1, 2 or 3; for stage 0, delete the key deepspeed, and ranks train with DDP",
        )
    return config


def filled_auto_values(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``config`` that are ``auto`` in the preset or file ``name``, by dotted key."""
    values = {}
    for key in _auto_keys(read_config(name)):
        section, last = _find_section(dict(config), key)
        if section is not None:
            values[key] = section[last]
    return values


def read_config(name: str, *, where: str = "deepspeed") -> dict[str, Any]:
    """Return the configuration of a preset or JSON file; ``auto`` values are not replaced.

    Raises:
        ArgumentError: The file cannot be read, is not a JSON object, or contains a secret.
    """
    return copy.deepcopy(PRESETS[name]) if name in PRESETS else _read_file(name, where)


def zero_stage(config: Mapping[str, Any]) -> int:
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
    if (found := _find_secret(config)) is not None:
        kind, key = found
        lines = [number for number, line in enumerate(text.split("\n"), 1) if find_secret(line)]
        raise ArgumentError(
            f"'{redact(key)}' contains {kind}, but the DeepSpeed configuration is copied into every run",
            where=f"{name}:{lines[0]}" if lines else name,
            fix="remove it, and revoke it if others have seen it; trackers read their keys from the environment",
        )
    return config


def _find_secret(value: Any, path: str = "") -> tuple[str, str] | None:
    """Return kind and dotted key of the first token or password in a JSON value; None if there is none."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            place = f"{path}.{key}" if path else str(key)
            if kind := find_secret(str(key)):
                return kind, place
            if isinstance(item, str) and item not in ("", AUTO) and is_named_like_secret(str(key), item):
                return "a secret", place
            if found := _find_secret(item, place):
                return found
    elif isinstance(value, list):
        secrets = (_find_secret(item, f"{path}.{number}") for number, item in enumerate(value))
        return next(filter(None, secrets), None)
    elif isinstance(value, str) and (kind := find_secret(value)):
        return kind, path
    return None


def _find_section(config: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the dict that contains a dotted key (None if it is missing), and the last part of the key."""
    *path, last = key.split(".")
    section: Any = config
    for name in path:
        if not isinstance(section.get(name), dict):
            return None, last
        section = section[name]
    return section, last


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _auto_keys(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
