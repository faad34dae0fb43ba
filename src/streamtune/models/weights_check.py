"""Check loaded weights: sizes, number of layers, finite values and quantisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamtune.base.adapters import is_adapter_name
from streamtune.errors import ArgumentError
from streamtune.models.config import key_place, keys_of_size
from streamtune.models.folder import READ

FLOAT_NAMES = ("F64", "F32", "F16", "BF16")
"""Names of floating-point dtypes in safetensors."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PART = 1 << 22
DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of configurations for the number of layers that predict the token after the next."""


def check_report(name_or_path: str, model: Any, report: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights have wrong sizes, are missing, or belong to layers that the model lacks.

    ``report`` is the loading report of ``from_pretrained``.
    """
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, found, wanted = mismatched[0]
        raise size_error(name_or_path, model.config, name, tuple(found), tuple(wanted), len(mismatched))
    check_missing(name_or_path, model, report["missing_keys"])
    check_unused(name_or_path, model, report["unexpected_keys"])


def check_missing(name_or_path: str, model: Any, missing: Collection[str]) -> None:
    """Refuse a checkpoint that lacks weights: transformers would initialise them at random and continue."""
    if missing:
        names = sorted(missing)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has no weights for {len(names)} parameters of "
            f"{type(model).__name__}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
            where="model_name_or_path",
            fix="use a checkpoint of a causal language model",
        )


def check_unused(name_or_path: str, model: Any, unused: Collection[str]) -> None:
    """Refuse a checkpoint with tensors, ``unused``, that belong to a layer of the model but are not its parameters.

    Examples are a bias of a matrix that has none here, adapters that were not merged, and scales of a quantisation.
    Without them, the trained model would differ from the one in the files. Tensors of parts that the model does not
    have are allowed.
    """
    check_layers(name_or_path, model, unused)
    if getattr(model.config, "quantization_config", None) is not None:
        return
    named = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."

    def matrix_of(name: str) -> bool:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            owner = named.get(path) or named.get(prefix + path) or named.get(path.removeprefix(prefix))
            if owner is not None:
                return isinstance(getattr(owner, "weight", None), Tensor)
        return False

    lost = sorted(name for name in unused if matrix_of(name))
    if lost:
        adapters = any(is_adapter_name(name) or ".base_layer." in name for name in lost)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has {lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, "
            f"which {type(model).__name__} with this configuration would leave out",
            where="model_name_or_path",
            fix="merge the adapters into the weights (peft: merge_and_unload()) and use that folder"
            if adapters
            else "use the configuration that belongs to the weights, or a complete copy of the checkpoint",
        )


def check_dtypes(name_or_path: str, config: Any) -> None:
    """Refuse weights in a folder's safetensors that are not floating-point, unless config.json says quantised."""
    folder = Path(name_or_path).expanduser()
    if getattr(config, "quantization_config", None) is not None or not folder.is_dir():
        return
    for path in sorted(filter(Path.is_file, folder.glob("*.safetensors"))):  # opening a pipe would wait
        try:
            with safe_open(path, framework="pt") as file:
                kinds = {key: file.get_slice(key).get_dtype() for key in file.keys() if key.endswith(".weight")}  # noqa: SIM118
        except (OSError, SafetensorError):  # reading it reports the error
            continue
        wrong = next((key for key, kind in kinds.items() if kind not in FLOAT_NAMES), None)
        if wrong is not None:
            raise ArgumentError(
                f"{wrong} holds {kinds[wrong]}; weights must be floating-point with 16 bits or more, unless "
                "config.json has a quantization_config",
                where=str(path),
                fix="use a complete copy of the checkpoint, with the quantization_config in its config.json",
            )


def check_layers(name_or_path: str, model: Any, unused: Collection[str]) -> None:
    """Refuse a checkpoint with more decoder layers than its configuration says: the rest would not be loaded."""
    text = model.config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    drafts = [getattr(text, key, None) for key in DRAFT_LAYERS]
    if not isinstance(count, int) or any(isinstance(draft, int) and draft > 0 for draft in drafts):
        return
    prefix = rf"(?:{re.escape(model.base_model_prefix)}\.)?(?:\w+\.)?(?:layers|h|blocks|layer)\.(\d+)\."
    numbers = [int(match[1]) for match in (re.match(prefix, name) for name in unused) if match]
    if numbers and max(numbers) >= count:
        _, where = key_place(name_or_path)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has weights of {max(numbers) + 1} layers, but its configuration says "
            f"{count}: the rest would be left out",
            where=where("num_hidden_layers"),
            fix=f"set num_hidden_layers to {max(numbers) + 1}, or use a complete copy of the checkpoint",
        )


def size_error(
    name_or_path: str, config: Any, name: str, found: tuple[int, ...], wanted: tuple[int, ...], others: int = 1
) -> ArgumentError:
    """Return an error for weights that do not fit a configuration; it names them and the key that gives their size."""
    keys, where = key_place(name_or_path)
    sizes = [b for a, b in zip(found, wanted, strict=False) if a != b] if len(found) == len(wanted) else []
    near = [(key, size) for size in sizes for key in keys_of_size(config, size)]
    named, size = next(((key, size) for key, size in near if key in keys), ("", 0))
    more = f" (and {others - 1} more)" if others > 1 else ""
    says = f"its configuration asks for {_shape(wanted)}"
    if named:
        says += f" ('{named}: {size}')"
    return ArgumentError(
        f"the weights of '{name_or_path}' do not fit its configuration: {name} is {_shape(found)} in the files, but "
        f"{says}{more}",
        where=where(named),
        fix="undo the change to config.json, or use a complete copy of the checkpoint",
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "one number"


def check_quantised(name_or_path: str, config: Any, wanted: str | None, device: str) -> None:
    """Refuse a checkpoint whose weights are quantised in a way that cannot be trained here.

    ``wanted`` is the quantisation of frozen layers in the recipe, ``nf4`` or ``int8``, or None.

    Raises:
        ArgumentError: The quantization_config has no ``quant_method``; or, on the CPU, the method needs an accelerator
            or ``wanted`` is None.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    keys = settings if isinstance(settings, Mapping) else getattr(settings, "to_dict", lambda: {})()
    _, where = key_place(name_or_path)
    method = keys.get("quant_method")
    method = getattr(method, "value", method)
    if not isinstance(method, str) or not method:
        raise ArgumentError(
            f"the configuration of '{name_or_path}' has a quantization_config without a quant_method",
            where=where("quantization_config"),
            fix="remove it if the weights are not quantised, or use a complete copy of the checkpoint",
        )
    if not device.startswith("cpu") or (wanted is not None and method in CPU_METHODS):
        return
    fix = "use the unquantised checkpoint" + (
        f", or write finetuning_type: qlora and quantization: {CPU_METHODS[method]}" if method in CPU_METHODS else ""
    )
    raise ArgumentError(
        f"the weights of '{name_or_path}' are already quantised ({method}), which the CPU cannot train",
        where=where("quantization_config"),
        fix=fix,
    )


CPU_METHODS = {"bitsandbytes": "nf4", "torchao": "int8"}
"""Quantisations that also run on the CPU: the name in a recipe by the ``quant_method`` in a checkpoint."""


# --- numbers ----------------------------------------------------------------------------------------------------------


def check_finite(model: Any, name_or_path: str = "", where: str = "model_name_or_path") -> None:
    """Refuse weights with NaN or infinity: no loss can be computed with them.

    The error names the tensor and its file in the folder ``name_or_path``; without a file, ``where``.
    """
    for name, parameter in model.named_parameters():
        if not is_finite(parameter.detach()):
            file, tensor, values = _in_files(name_or_path) or (None, name, parameter.detach())
            raise not_finite(tensor, values, where if file is None else str(file))


def not_finite(name: str, values: Tensor, where: str) -> ArgumentError:
    """Return an error for a tensor with NaN or infinity; it says how many values are not finite."""
    flat = values.flatten()
    nan, inf = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
    held = " and ".join(f"{count:,} {what}" for count, what in ((nan, "NaN"), (inf, "infinite")) if count)
    return ArgumentError(
        f"the weights are not finite: {name} holds {held} among its {flat.numel():,} values",
        where=where,
        fix="use a checkpoint saved before its training diverged, or another copy",
    )


def is_finite(values: Tensor) -> bool:
    """Return True if all values are finite. Each value is tested only if their sum is not finite."""
    plain = type(values) in (Tensor, torch.nn.Parameter)  # quantised weights have other classes
    if not plain or values.dtype not in FLOATS or values.device.type == "meta":
        return True
    if bool(torch.isfinite(values.sum(dtype=None if values.dtype == torch.float64 else torch.float32))):
        return True
    return all(bool(torch.isfinite(part).all()) for part in values.flatten().split(PART))


def _in_files(name_or_path: str) -> tuple[Path, str, Tensor] | None:
    """Return the first tensor in a folder's safetensors that is not finite, with its file; None if all are finite."""
    folder = Path(name_or_path).expanduser() if name_or_path else None
    paths: Iterable[Path] = sorted(folder.glob("*.safetensors")) if folder is not None and folder.is_dir() else ()
    for path in filter(Path.is_file, paths):
        try:
            with safe_open(path, framework="pt", backend=READ) as file:
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    values = file.get_tensor(key)
                    if not is_finite(values):
                        return path, key, values
        except (OSError, SafetensorError):
            continue
    return None
