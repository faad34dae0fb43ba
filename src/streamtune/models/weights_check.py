"""Check loaded weights: shapes, number of layers, finite values and quantisation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamtune.base.adapters import is_adapter_name
from streamtune.errors import ArgumentError
from streamtune.models.config import config_keys_with_value, read_config_json
from streamtune.models.folder import READ_BACKEND

FLOAT_NAMES = ("F64", "F32", "F16", "BF16")
"""Names of floating-point dtypes in safetensors."""
NARROW_FLOATS = ("F8_", "F6_", "F4")
"""Beginnings of the names of floating-point dtypes with 8 bits or fewer."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PART = 1 << 22
DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Keys of configurations for the number of layers for multi-token prediction."""


def check_loading_report(name_or_path: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise an ArgumentError if weights are missing, have a wrong shape, or are in layers that the model lacks.

    ``report`` is the loading report of ``from_pretrained``.
    """
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, file_shape, config_shape = mismatched[0]
        raise make_shape_error(
            name_or_path, model.config, name, tuple(file_shape), tuple(config_shape), len(mismatched)
        )
    refuse_missing_weights(name_or_path, model, report["missing_keys"])
    refuse_unused_tensors(name_or_path, model, report["unexpected_keys"])


def refuse_missing_weights(name_or_path: str, model: Any, missing_names: Collection[str]) -> None:
    """Raise an ArgumentError if weights are missing: transformers would initialise them at random and continue."""
    if missing_names:
        names = sorted(missing_names)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has no weights for {len(names)} parameters of "
            f"{type(model).__name__}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}",
            where="model_name_or_path",
            fix="use a checkpoint of a causal language model",
        )


def refuse_unused_tensors(name_or_path: str, model: Any, unused_names: Collection[str]) -> None:
    """Raise an ArgumentError if a checkpoint has a tensor that belongs to a layer but would not be loaded.

    Examples are a bias of a layer without bias, a norm that the layer does not have with this configuration, adapters
    that were not merged, and scales of a quantisation. Tensors outside the model's layers are allowed, and tensors
    that the model class says it ignores.
    """
    ignored = re.compile("|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_unexpected or ("(?!)",)))
    unused_names = [name for name in unused_names if ignored.search(name) is None]
    refuse_unloaded_layers(name_or_path, model, unused_names)
    if getattr(model.config, "quantization_config", None) is not None:
        return
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."

    def belongs_to_layer(name: str) -> bool:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            path = ".".join(parts[:end])
            owner = modules.get(path) or modules.get(prefix + path) or modules.get(path.removeprefix(prefix))
            if owner is not None:
                # Old versions also saved masks and tables. These are not weights, and their modules exist.
                is_module_missing = (
                    end < len(parts) - 1 and parts[-1] == "weight" and any(map(str.isdigit, parts[:end]))
                )
                return is_module_missing or isinstance(getattr(owner, "weight", None), Tensor)
        return False

    lost = sorted(name for name in unused_names if belongs_to_layer(name))
    if lost:
        adapters = any(is_adapter_name(name) or ".base_layer." in name for name in lost)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has {lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}, "
            f"which {type(model).__name__} with this configuration would not load",
            where="model_name_or_path",
            fix="merge the adapters into the weights (peft: merge_and_unload()) and use the merged model"
            if adapters
            else "use the configuration that belongs to the weights, or a complete copy of the checkpoint",
        )


def write_untied_embeddings(model: Any) -> None:
    """Set ``tie_word_embeddings`` to False if the checkpoint has an embedding and another head, so they are not tied.

    Otherwise they would be tied when the embedding is enlarged, and by servers that load the saved model.
    """
    parameters, pairs = dict(model.named_parameters(remove_duplicate=False)), dict(model._tied_weights_keys or {})
    tied = [parameters[one] is parameters[other] for one, other in pairs.items() if {one, other} <= parameters.keys()]
    if not tied or any(tied):
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


def check_file_dtypes(name_or_path: str, config: Any) -> None:
    """Raise an ArgumentError for weights that are not floating-point, unless there is a quantization_config.

    Numbers of 8 bits or fewer are weights whatever their name, such as ``experts.gate_up_proj``.
    """
    folder = Path(name_or_path).expanduser()
    if getattr(config, "quantization_config", None) is not None or not folder.is_dir():
        return
    for path in sorted(filter(Path.is_file, folder.glob("*.safetensors"))):  # opening a pipe would block
        try:
            with safe_open(path, framework="pt") as file:
                kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):  # reading it reports the error
            continue
        wrong = next(
            (
                key
                for key, kind in kinds.items()
                if kind.startswith(NARROW_FLOATS) or (key.endswith(".weight") and kind not in FLOAT_NAMES)
            ),
            None,
        )
        if wrong is not None:
            raise ArgumentError(
                f"{wrong} has dtype {kinds[wrong]}; weights must be floating-point with 16 bits or more, unless "
                "config.json has a quantization_config",
                where=str(path),
                fix="use a complete copy of the checkpoint, with the quantization_config in its config.json",
            )


def refuse_unloaded_layers(name_or_path: str, model: Any, unused_names: Collection[str]) -> None:
    """Raise an ArgumentError for a checkpoint with more decoder layers than its ``num_hidden_layers``."""
    text = model.config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    drafts = [getattr(text, key, None) for key in DRAFT_LAYERS]
    if not isinstance(count, int) or any(isinstance(draft, int) and draft > 0 for draft in drafts):
        return
    prefix = rf"(?:{re.escape(model.base_model_prefix)}\.)?(?:\w+\.)?(?:layers|h|blocks|layer)\.(\d+)\."
    numbers = [int(match[1]) for match in (re.match(prefix, name) for name in unused_names) if match]
    if numbers and max(numbers) >= count:
        _, where = read_config_json(name_or_path)
        raise ArgumentError(
            f"the checkpoint '{name_or_path}' has weights of {max(numbers) + 1} layers, but its configuration has "
            f"num_hidden_layers: {count}; further layers would not be loaded",
            where=where("num_hidden_layers"),
            fix=f"set num_hidden_layers to {max(numbers) + 1}, or use a complete copy of the checkpoint",
        )


def make_shape_error(
    name_or_path: str,
    config: Any,
    name: str,
    file_shape: tuple[int, ...],
    config_shape: tuple[int, ...],
    error_count: int = 1,
) -> ArgumentError:
    """Return the error for a weight whose shape contradicts the configuration; it names the key that sets the shape."""
    keys, where = read_config_json(name_or_path)
    same_dims = len(file_shape) == len(config_shape)
    sizes = [b for a, b in zip(file_shape, config_shape, strict=False) if a != b and same_dims]
    candidates = [(key, size) for size in sizes for key in config_keys_with_value(config, size)]
    written_key, size = next(((key, size) for key, size in candidates if key in keys), ("", 0))
    more_errors = f" (and {error_count - 1} more)" if error_count > 1 else ""
    expectation = f"its configuration requires {_shape_text(config_shape)}"
    if written_key:
        expectation += f" ('{written_key}: {size}')"
    return ArgumentError(
        f"the weights of '{name_or_path}' do not fit its configuration: {name} is {_shape_text(file_shape)} in the "
        f"files, but {expectation}{more_errors}",
        where=where(written_key),
        fix="undo the change to config.json, or use a complete copy of the checkpoint",
    )


def _shape_text(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "one number"


def check_quantization_trainable(name_or_path: str, config: Any, recipe_quantization: str | None, device: str) -> None:
    """Raise an ArgumentError for a checkpoint that is already quantised and cannot be trained on ``device``.

    ``recipe_quantization`` is the quantisation of frozen layers in the recipe, ``nf4`` or ``int8``, or None.

    Raises:
        ArgumentError: The quantization_config has no ``quant_method``; or, on the CPU, the method needs an accelerator
            or ``recipe_quantization`` is None.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    keys = settings if isinstance(settings, Mapping) else getattr(settings, "to_dict", lambda: {})()
    _, where = read_config_json(name_or_path)
    method = keys.get("quant_method")
    method = getattr(method, "value", method)
    if not isinstance(method, str) or not method:
        raise ArgumentError(
            f"the configuration of '{name_or_path}' has a quantization_config without a quant_method",
            where=where("quantization_config"),
            fix="remove it if the weights are not quantised, or use a complete copy of the checkpoint",
        )
    if not device.startswith("cpu") or (recipe_quantization is not None and method in CPU_METHODS):
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


def check_weights_finite(model: Any, name_or_path: str = "", where: str = "model_name_or_path") -> None:
    """Raise an ArgumentError for weights or saved buffers with NaN or infinity: no loss can be computed with them.

    The error names the tensor, and its file in the folder ``name_or_path`` or, without a file, ``where``.
    """
    for name, tensor_in_model in chain(model.named_parameters(), _saved_buffers(model)):
        if not is_finite(tensor_in_model.detach()):
            file, tensor, values = _first_nonfinite_tensor(name_or_path) or (None, name, tensor_in_model.detach())
            if file is None and values.dtype == torch.float16 and not bool(values.isnan().any()):
                raise ArgumentError(
                    f"{tensor} has {int(values.isinf().sum()):,} values above 65,504, the largest number of float16",
                    where=where,
                    fix="write dtype: float32, or bf16: true in place of fp16 on a device that has bfloat16",
                )
            raise make_not_finite_error(tensor, values, where if file is None else str(file))


def _saved_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}", buffer


def make_not_finite_error(name: str, values: Tensor, where: str) -> ArgumentError:
    flat = values.flatten()
    nan, inf = int(torch.isnan(flat).sum()), int(torch.isinf(flat).sum())
    counts = " and ".join(f"{count:,} {what}" for count, what in ((nan, "NaN"), (inf, "infinite")) if count)
    return ArgumentError(
        f"the weights are not finite: {name} contains {counts} among its {flat.numel():,} values",
        where=where,
        fix="use a checkpoint saved before its training diverged, or another copy",
    )


def is_finite(values: Tensor) -> bool:
    """Return True if all values are finite, or if the tensor is not tested.

    Quantised weights, integers and tensors on ``meta`` are not tested. Each value is tested only if the sum of the
    values is not finite, which saves time.
    """
    plain = type(values) in (Tensor, torch.nn.Parameter)  # quantised weights have other classes
    if not plain or values.dtype not in FLOATS or values.device.type == "meta":
        return True
    if bool(torch.isfinite(values.sum(dtype=None if values.dtype == torch.float64 else torch.float32))):
        return True
    return all(bool(torch.isfinite(part).all()) for part in values.flatten().split(PART))


def _first_nonfinite_tensor(name_or_path: str) -> tuple[Path, str, Tensor] | None:
    folder = Path(name_or_path).expanduser() if name_or_path else None
    paths: Iterable[Path] = sorted(folder.glob("*.safetensors")) if folder is not None and folder.is_dir() else ()
    for path in filter(Path.is_file, paths):
        try:
            with safe_open(path, framework="pt", backend=READ_BACKEND) as file:
                for key in file.keys():  # noqa: SIM118 - it is not a mapping
                    values = file.get_tensor(key)
                    if not is_finite(values):
                        return path, key, values
        except (OSError, SafetensorError):
            continue
    return None
