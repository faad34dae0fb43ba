"""The launcher in front of another trainer's command (``accelerate launch``), and the launcher's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamtune.errors import RecipeError
from streamtune.recipe.yaml import read_yaml

from .conversion import Conversion

RANKS = ("num_processes", "nproc_per_node", "num_gpus")
MACHINES = ("num_machines", "nnodes", "num_nodes", "machine_rank", "node_rank", "main_process_ip", "main_process_port",
            "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "hostfile", "rdzv_conf",
            "same_network", "deepspeed_hostfile", "deepspeed_multinode_launcher")  # fmt: skip
OF_THE_TRAINER = ("gradient_accumulation_steps", "gradient_clipping")
"""Options that the Trainer's own arguments set; accelerate's are read where those are not given."""


def is_accelerate_config(fields: dict[str, Any]) -> bool:
    """Return True if a file is a configuration that ``accelerate config`` wrote, and no recipe."""
    return "compute_environment" in fields and "distributed_type" in fields


def take_launcher(conversion: Conversion) -> None:
    """Convert the options of the launcher, and what its configuration says; each gets a line."""
    options = {name: value for name, (value, _) in conversion.file.launcher.items()}
    for name, (value, line) in conversion.file.launcher.items():
        where = f"{conversion.file.path}:{line}"
        if name == "config_file":
            _take_config(conversion, str(value), where)
        else:
            _take(conversion, name, value, f"{name}: {value}", where, options)


def _take_config(conversion: Conversion, name: str, where: str) -> None:
    for base in (Path(), conversion.file.path.resolve().parent):
        if (path := base / Path(name).expanduser()).is_file():
            break
    else:
        why = "that file is not here: compare its mixed_precision, its DeepSpeed or FSDP and its processes"
        conversion.report(f"config_file: {name}", where, why, True)
        return
    try:
        fields, marks, _ = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, RecipeError) as error:
        conversion.report(f"config_file: {name}", where, f"it cannot be read: {error}", True)
        return
    conversion.report(f"config_file: {name}", where, "see its keys", None)
    for key, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, dict):
            for inner, inside in value.items():
                _take(conversion, inner, inside, f"{key}.{inner}: {inside}", marks.where(key, inner), value, key)
        else:
            _take(conversion, key, value, f"{key}: {value}", marks.where(key), fields)


def _take(
    conversion: Conversion, name: str, value: Any, theirs: str, where: str, beside: dict[str, Any], group: str = ""
) -> None:
    """Convert one option of a launcher, or one key of its configuration, with those that stand beside it."""
    ours = conversion.ours

    def write(key: str, ours_value: Any, note: str = "") -> None:
        if key in ours:
            conversion.report(theirs, where, f"'{key}' is given", None)
        else:
            conversion.write(key, ours_value, theirs, where, note)

    text = str(value).lower()
    if name in RANKS:
        conversion.report(theirs, where, f"`--nproc {value}` of the command", None)
    elif name == "mixed_precision":
        if text == "bf16":
            write("bf16", True)
        elif text in ("fp16", "fp8"):
            conversion.report(theirs, where, f"training in {text} is not here; write bf16: true", True)
        else:
            conversion.report(theirs, where, "off, as here", None)
    elif name == "zero_stage" and text in ("1", "2", "3"):
        places = [beside.get(f"offload_{part}_device") for part in ("optimizer", "param")]
        write("deepspeed", f"zero{value}" + ("_offload" if text == "3" and "cpu" in places else ""))
    elif name == "deepspeed_config_file" and value:
        write("deepspeed", value)
    elif name == "use_fsdp" or (name == "distributed_type" and text == "fsdp"):
        write("fsdp", True) if text != "false" else conversion.report(theirs, where, "off, as here", None)
    elif name in OF_THE_TRAINER:
        key = {"gradient_clipping": "max_grad_norm"}.get(name, name)
        if isinstance(value, bool | int | float) and not isinstance(value, bool):
            write(key, value)
        else:
            conversion.report(theirs, where, "the recipe says it", None)
    elif name in MACHINES:
        conversion.report(theirs, where, "`--nproc` starts one machine; docs/guide/many-gpus.md has several", None)
    elif name.startswith("parallelism_config") or group == "parallelism_config":
        off = text in ("1", "none", "false", "true", "0")
        conversion.report(theirs, where, "off" if off else "write sequence_parallel_size: N", None if off else False)
    else:
        conversion.report(theirs, where, "the launcher sets ranks and kernels up by itself here", None)
