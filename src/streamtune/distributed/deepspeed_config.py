"""The DeepSpeed configuration of a recipe: shipped presets, or a file whose ``auto`` values the recipe fills.

    zero1          optimizer sharded
    zero2          gradients too
    zero3          weights too: a decoder layer is gathered whole, once forward and once backward
    zero3_offload  weights and optimizer are kept on the host

If both the recipe and a file have a value, the two must agree: a run trains by the numbers of its recipe.
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
    # DeepSpeed turns off an autocast that it does not know. Gradients are sent in the dtype of the weights.
    "torch_autocast": {"enabled": "auto", "dtype": "bfloat16", "lower_precision_safe_modules": []},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 2**31 - 1,  # the progress line is ours
}
ZERO: dict[str, Any] = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
ZERO3: dict[str, Any] = {
    **ZERO,
    "stage": 3,
    # A decoder layer is one leaf module, far above both limits: small modules stay whole, the next layer is fetched.
    "stage3_param_persistence_threshold": "auto",
    "stage3_prefetch_bucket_size": "auto",
    # By default a billion weights stay gathered from forward to backward: for many models all of them.
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
"""Name in a recipe -> configuration."""

AUTO = "auto"


def resolve_config(name: str, values: Mapping[str, Any], *, where: str = "deepspeed") -> dict[str, Any]:
    """Return the configuration of a preset or a JSON file with nothing left to fill in.

    ``values`` from the recipe are named by dotted keys: ``{"bf16.enabled": True, ...}``. A configuration is refused
    that contradicts the recipe, leaves ``auto`` where the recipe has no value, names an optimizer or a scheduler, or
    asks for another stage than 1 to 3.
    """
    config = read_config(name, where=where)
    source = f"the preset {name}" if name in PRESETS else name
    for key, value in values.items():
        holder, last = _holder(config, key)
        if holder is None:
            continue
        written = holder.get(last, AUTO)
        if written == AUTO:
            holder[last] = value
        elif written != value:
            raise ArgumentError(
                f"{source} says {key}: {json.dumps(written)}, and the recipe makes it {json.dumps(value)}",
                where=where,
                fix=f'write "{key.rpartition(".")[2]}": "auto" there, or change the recipe',
            )
    if left := list(_autos(config)):
        raise ArgumentError(
            f'{source} leaves {left[0]} "auto", which the recipe does not know', where=where, fix="write its value"
        )
    for section, article, key in (("optimizer", "an", "optim"), ("scheduler", "a", "lr_scheduler_type")):
        if section in config:
            raise ArgumentError(
                f"{source} names {article} {section}, and the recipe has one ({key})",
                where=where,
                fix=f"delete {section!r} there; {key}, learning_rate and warmup_steps of the recipe say it",
            )
    if (stage := stage_of(config)) not in (1, 2, 3):
        raise ArgumentError(
            f"{source} asks for ZeRO stage {stage}",
            where=where,
            fix="write stage 1, 2 or 3; without the key deepspeed, several ranks train by DDP, which is stage 0",
        )
    return config


def filled(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the resolved ``config`` that are ``auto`` in its preset or file, by dotted key."""
    values = {}
    for key in _autos(read_config(name)):
        holder, last = _holder(dict(config), key)
        if holder is not None:
            values[key] = holder[last]
    return values


def read_config(name: str, *, where: str = "deepspeed") -> dict[str, Any]:
    """Return a preset or the JSON object of a file, as it is written."""
    return copy.deepcopy(PRESETS[name]) if name in PRESETS else _read(name, where)


def stage_of(config: Mapping[str, Any]) -> int:
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _read(name: str, where: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    try:
        with open(path, "rb", opener=open_nonblocking) as file:  # a pipe has nothing to read
            text = file.read().decode("utf-8")
        config = json.loads(text)
    except FileNotFoundError:
        raise ArgumentError(
            f"there is no DeepSpeed configuration {name}",
            where=where,
            fix=did_you_mean(name, PRESETS) or f"write {', '.join(PRESETS)}, or the path of a JSON file",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{name} cannot be read: {error}", where=where) from None
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{name} is no JSON: {error.msg}", where=f"{name}:{error.lineno}") from None
    except RecursionError:
        raise ArgumentError(f"{name} is nested too deep", where=where) from None
    if not isinstance(config, dict):
        raise ArgumentError(f"{name} holds no JSON object", where=where, fix='write {"zero_optimization": {...}}')
    if (found := _secret_in(config)) is not None:
        kind, key = found
        lines = [number for number, line in enumerate(text.splitlines(), 1) if find_secret(line)]
        raise ArgumentError(
            f"'{redact(key)}' holds {kind}, and the configuration of DeepSpeed is copied into every run",
            where=f"{name}:{lines[0]}" if lines else name,
            fix="take it out, and change it if others have seen it; trackers read their keys from the environment",
        )
    return config


def _secret_in(value: Any, path: str = "") -> tuple[str, str] | None:
    """Return the kind of the first token or password in JSON values and its dotted key; None without."""
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


def _holder(config: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the section that holds a dotted key, None if it is missing, and the last part of the key."""
    *path, last = key.split(".")
    holder: Any = config
    for name in path:
        if not isinstance(holder.get(name), dict):
            return None, last
        holder = holder[name]
    return holder, last


def _autos(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
