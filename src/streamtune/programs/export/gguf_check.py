"""Compare a GGUF file with the exported model: every weight, logits, configuration and vocabulary.

A value may differ only by the rounding error of its type in the file. The logits must pass the rule of
:mod:`streamtune.programs.export.check`:

    R     logits of the exported model, in fp32                                        [tokens, vocabulary]
    N     logits with each weight changed at random by one rounding error of its type in the file
    M     logits with the weights of the file

The weights of the file replace the model's weights one layer at a time, so that memory never contains two models.

llama.cpp uses its own weight names, which the package ``gguf`` maps. It also transforms some weights: query and key
rows are permuted for RoPE, and 1 is added to some norm weights. ``transformers`` undoes this for known
architectures (``GgufFile.known``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import GGUF_KNOWN, GGUF_ORDER, GGUF_ORDERS, hf_internal
from streamtune.programs.export.check import (
    ALLOWED_LARGEST,
    ALLOWED_MEDIAN,
    FLOOR,
    ROUNDING_DRAWS,
    ComparedRow,
    Doing,
    relative_row_errors,
    row_logits,
)
from streamtune.programs.export.merge import computing_in_fp32

CONFIG_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}
"""Key of the GGUF metadata, without the architecture's name -> key of the model's configuration."""
SCALING_KEYS = {"linear": "rope.scaling.factor", "yarn": "rope.scaling.factor"}
"""Type of RoPE scaling -> key of its factor in the GGUF metadata."""
REORDERED_FRACTION = 0.05
"""Fraction of differing values above which the values of a weight may be in another order."""


@dataclass
class GgufComparison:
    """Differences between a GGUF file and the exported model."""

    path: str
    architecture: str
    types: dict[str, int]
    """Type of GGUF tensors -> number of tensors."""
    compared: int = 0
    """Number of weights compared element by element."""
    reordered: list[str] = field(default_factory=list)
    """Names of weights that have the same values in another order."""
    not_compared: list[str] = field(default_factory=list)
    """Names of tensors in the file that are not weights of the model, such as RoPE factors."""
    worst: str = ""
    """Name of the weight with the largest difference, relative to the rounding error of its type."""
    worst_part: float = 0.0
    """Largest difference of ``worst``, divided by the allowed rounding error; above 1 it is a problem."""
    median: float | None = None
    """Median over tokens of the relative error ``|M - R| / |R|``; None if logits were not compared."""
    largest: float | None = None
    allowed_median: float | None = None
    allowed_largest: float | None = None
    problems: list[str] = field(default_factory=list)
    """Descriptions of differences that rounding errors do not explain."""

    @property
    def passes(self) -> bool:
        return not self.problems


@torch.no_grad()
def compare_gguf(
    path: Path, model: Any, tokenizer: Any, rows: Sequence[ComparedRow], *, doing: Doing = lambda text: nullcontext()
) -> GgufComparison:
    """Compare a GGUF file with the exported model.

    Args:
        model: Exported model, in evaluation mode.
        rows: Rows whose logits are compared.
        doing: Called with a message before slow work; returns a context manager that shows the message.
    """
    file = GgufFile(path, model)
    kinds = [file.tensor_type_name(place) for place in file.tensors]
    found = GgufComparison(path.name, file.architecture, {kind: kinds.count(kind) for kind in sorted(set(kinds))})
    with doing("weights of the GGUF file"):
        _compare_weights(file, model, found)
    found.problems += [*_config_differences(file, model), *_vocabulary_differences(file, tokenizer)]
    if found.problems:
        return found
    with doing("logits of the GGUF file"):
        _compare_logits(file, model, rows, found)
    return found


def _compare_weights(file: GgufFile, model: nn.Module, comparison: GgufComparison) -> None:
    used: set[str] = set()
    for name, own in iterate_weights(model):
        tensor_names = file.tensor_names(name)
        used.update(tensor_names)
        if not tensor_names:
            comparison.problems.append(f"the weight {name} is missing")
            continue
        try:
            values, allowed = file.read_weight(name)
        except ValueError as error:
            comparison.problems.append(f"{name} is {error}")
            continue
        weight = own.detach().float().cpu()
        part = _relative_difference(values, weight, allowed)
        if not part <= 1 and not file.known and _is_reordered(values, weight, allowed):
            flat = _relative_difference(values.flatten().sort().values, weight.flatten().sort().values, allowed.max())
            if flat <= 1:
                comparison.reordered.append(name)
                continue
        comparison.compared += 1
        if not part <= comparison.worst_part:  # NaN as well
            comparison.worst, comparison.worst_part = name, part
        if not part <= 1:
            shape = "" if values.shape == weight.shape else f": its shape is {list(values.shape)}"
            comparison.problems.append(
                f"{name} differs by {part:.3g} times the rounding error of type "
                f"{file.tensor_type_name(tensor_names[0])}{shape}"
                + ("" if file.known else ", or llama.cpp stores it in an unknown form")
            )
    comparison.not_compared = sorted(file.tensors.keys() - used)


def _relative_difference(file_values: Tensor, model_values: Tensor, allowed: Tensor) -> float:
    """Return the largest difference, divided by its allowed value; infinity if the shapes differ."""
    if file_values.shape != model_values.shape:
        return float("inf")
    difference = (file_values - model_values).abs()
    return float(torch.where(difference == 0, 0.0, difference / allowed.clamp_min(1e-38)).max())


def _is_reordered(file_values: Tensor, model_values: Tensor, allowed: Tensor) -> bool:
    """Return True if so many values differ that they must be in another order."""
    if file_values.shape != model_values.shape:
        return file_values.numel() == model_values.numel()
    return float(((file_values - model_values).abs() > allowed).float().mean()) > REORDERED_FRACTION


def _config_differences(file: GgufFile, model: Any) -> list[str]:
    config = model.config.get_text_config(decoder=True)
    wrong = []
    for key, name in CONFIG_KEYS.items() if file.known else ():
        stored, own = file.metadata_value(f"{file.architecture}.{key}"), getattr(config, name, None)
        if not isinstance(stored, (int, float)) or not isinstance(own, (int, float)):
            continue  # a number for each layer, or none
        if abs(stored - own) > 1e-6 * abs(own):
            wrong.append(f"{key} is {stored}, but {name} of the model is {own}")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # layers with windows have another key or none
    base = rope.get("rope_theta")
    stored = file.metadata_value(f"{file.architecture}.rope.freq_base")
    if base is not None and abs((10000.0 if stored is None else stored) - base) > 1e-6 * base:
        wrong.append(f"rope.freq_base is {stored}, but rope_theta of the model is {base}")
    kind = rope.get("rope_type", "default")
    if kind in SCALING_KEYS and file.metadata_value(f"{file.architecture}.{SCALING_KEYS[kind]}") != rope.get("factor"):
        stored = file.metadata_value(f"{file.architecture}.{SCALING_KEYS[kind]}")
        wrong.append(f"{SCALING_KEYS[kind]} is {stored}, but the model's {kind} RoPE factor is {rope.get('factor')}")
    if kind == "llama3" and "rope_freqs.weight" not in file.tensors:
        wrong.append("rope_freqs.weight is missing, but the model uses Llama 3's RoPE scaling")
    return wrong


def _vocabulary_differences(file: GgufFile, tokenizer: Any) -> list[str]:
    if file.metadata_value("tokenizer.ggml.model") not in ("gpt2", "llama"):
        return []
    tokens: list[str] = file.metadata_value("tokenizer.ggml.tokens") or []
    added = tokenizer.get_added_vocab()
    others = [
        number
        for token, number in tokenizer.get_vocab().items()
        if token not in added and (number >= len(tokens) or tokens[number] != token)
    ]
    wrong = [f"{len(others)} tokens differ from the tokenizer's, such as {min(others)}"] if others else []
    for key, own in (("eos_token_id", tokenizer.eos_token_id), ("chat_template", tokenizer.chat_template)):
        stored = file.metadata_value(f"tokenizer.{'ggml.' if key.endswith('id') else ''}{key}")
        if isinstance(own, (int, str)) and stored != own:
            wrong.append(f"{key} differs from the tokenizer's" + (f": {stored}" if isinstance(own, int) else ""))
    return wrong


class _FileValues:
    """Weight change that sets each weight to the values of the GGUF file.

    With ``seed`` it instead changes each weight at random, by up to the rounding error of its type in the file.
    """

    def __init__(self, file: GgufFile, model: nn.Module, excluded_names: Sequence[str], seed: int | None) -> None:
        self._file, self._apart = file, set(excluded_names)
        self._drawn = None if seed is None else torch.Generator().manual_seed(seed)
        self._prefixes: dict[int, str] = {}
        for name, module in model.named_modules():
            self._prefixes.setdefault(id(module), f"{name}." if name else "")

    def changes_module(self, module: nn.Module) -> bool:
        return any(x is not None and x.is_floating_point() for x in module._parameters.values())

    def change_sizes(self, module: nn.Module) -> dict[str, Tensor]:
        found = {}
        for key, own in module._parameters.items():
            name = f"{self._prefixes[id(module)]}{key}"
            if (
                own is None or name in self._apart or not self._file.tensor_names(name)
            ):  # tied to a weight that the file has
                continue
            values, allowed = self._file.read_weight(name)
            if self._drawn is not None:
                values = own.float().cpu() + (2 * torch.rand(own.shape, generator=self._drawn) - 1) * allowed
            found[key] = values.to(own.device)
        return found

    def change_weight(self, weight: Tensor, size: Tensor) -> Tensor:
        return size


def _compare_logits(file: GgufFile, model: Any, rows: Sequence[ComparedRow], comparison: GgufComparison) -> None:
    with computing_in_fp32(model):
        logits = [row_logits(model, row) for row in rows]
    rounding_errors = torch.full((sum(each.shape[0] for each in logits),), FLOOR / ALLOWED_MEDIAN)
    for seed in range(ROUNDING_DRAWS):
        with computing_in_fp32(model, _FileValues(file, model, comparison.reordered, seed)):
            rounding_errors = torch.maximum(rounding_errors, relative_row_errors(model, rows, logits)[0])
    with computing_in_fp32(model, _FileValues(file, model, comparison.reordered, None)):
        errors, _ = relative_row_errors(model, rows, logits)
    comparison.median, comparison.largest = float(errors.median()), float(errors.max())
    comparison.allowed_median = ALLOWED_MEDIAN * float(rounding_errors.median())
    comparison.allowed_largest = ALLOWED_LARGEST * float(rounding_errors.max())
    if not (
        comparison.median <= comparison.allowed_median and comparison.largest <= comparison.allowed_largest
    ):  # NaN as well
        comparison.problems.append(
            f"the relative error of its logits per token: median {comparison.median:.1e} (allowed "
            f"{comparison.allowed_median:.1e}), largest {comparison.largest:.1e} (allowed "
            f"{comparison.allowed_largest:.1e})"
        )


# --- the file ---------------------------------------------------------------------------------------------------------


ROUNDINGS = {"F32": 2.0**-23, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Floating-point type -> half of the gap between neighbouring numbers, relative to the number."""
STEPS = {"Q8_0": (32, 0.6 / 127), "TQ1_0": (256, 0.51), "TQ2_0": (256, 0.51)}
"""Block-quantised type -> (block size, allowed error, relative to the largest weight of the block).

The error is half a quantisation step, plus the rounding of the scale to fp16.
"""
SUBNORMAL = {"F16": 2.0**-25, "BF16": 0.0, "F32": 0.0}
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Parameter of stacked experts -> GGUF tensors that store it."""


class GgufFile:
    """Tensors and metadata of a GGUF file; ``model`` is the exported model, without adapters."""

    def __init__(self, path: Path, model: Any) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self.tensors = {each.name: each for each in self._reader.tensors}
        self.architecture = str(self.metadata_value("general.architecture"))
        self.known = self.architecture in hf_internal(GGUF_KNOWN)
        """True if the order in which the file stores weights is known."""
        config = model.config.get_text_config(decoder=True)
        made = hf_internal(GGUF_ORDERS).get(self.architecture, hf_internal(GGUF_ORDER))
        self._order = made(config=config.to_dict()) if self.known else hf_internal(GGUF_ORDER)()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = config.num_hidden_layers
        self._names = (
            gguf.get_tensor_name_map(numbers[self.architecture], layers) if self.architecture in numbers else None
        )

    def metadata_value(self, key: str) -> Any:
        found = self._reader.fields.get(key)
        return None if found is None else found.contents()

    def tensor_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the GGUF tensors that store a parameter or its slices; empty if there are none."""
        if found := re.search(r"\blayers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)(_bias)?$", name):
            ending = "bias" if found[3] else "weight"
            parts = tuple(f"blk.{found[1]}.{part}.{ending}" for part in EXPERTS[found[2]])
            return parts if all(part in self.tensors for part in parts) else ()
        ending = next((each for each in (".weight", ".bias") if name.endswith(each)), "")
        stem = self._names.get_name(name.removesuffix(ending)) if self._names is not None else None
        options = [f"{stem}{each}" for each in ((ending,) if ending else ("", ".weight", ".bias"))]
        return tuple(each for each in options if each in self.tensors)[:1]

    def tensor_type_name(self, tensor_name: str) -> str:
        """Return the GGUF type of a tensor, such as ``Q8_0``."""
        return str(self.tensors[tensor_name].tensor_type.name)

    def read_weight(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the values that the file stores for a parameter, and the allowed rounding error of each value.

        Both tensors are fp32, in the order in which the model stores the parameter.

        Args:
            name: Name of a parameter that the file has.

        Raises:
            ValueError: The type of a tensor is not supported.
        """
        parts = [self._read_tensor(place) for place in self.tensor_names(name)]
        values, allowed = zip(*parts, strict=True)
        return (torch.cat(values, 1), torch.cat(allowed, 1)) if len(parts) > 1 else parts[0]

    def _read_tensor(self, tensor_name: str) -> tuple[Tensor, Tensor]:
        import gguf

        tensor = self.tensors[tensor_name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        allowed = _allowed_rounding(values, self.tensor_type_name(tensor_name))
        # Reordering may add a constant or take a logarithm, so transform the bounds as well.
        ends = [self._in_model_order(each, tensor_name) for each in (values, values + allowed, values - allowed)]
        width = np.maximum(np.abs(ends[1] - ends[0]), np.abs(ends[2] - ends[0])) + 2.0**-23 * np.abs(ends[0])
        return torch.from_numpy(ends[0]).float(), torch.from_numpy(width).float()

    def _in_model_order(self, values: np.ndarray, tensor_name: str) -> np.ndarray:
        """Undo llama.cpp's permutation of a weight; experts are not permuted."""
        if "_exps." in tensor_name:
            return values
        apart: dict[str, Any] = {"tensors": {}}
        done = self._order.process(weights=values, name=tensor_name, tensor_key_mapping={}, parsed_parameters=apart)
        found: np.ndarray = done.weights if done.name is not None else next(iter(apart["tensors"].values())).numpy()
        return np.ascontiguousarray(found)


def iterate_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each parameter and persistent buffer; tied parameters appear once."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)


def _allowed_rounding(values: np.ndarray, kind: str) -> np.ndarray:
    if kind in ROUNDINGS:
        return ROUNDINGS[kind] * np.abs(values) + SUBNORMAL[kind]
    if kind not in STEPS:
        raise ValueError(f"of type {kind}, whose rounding error is unknown")
    block, part = STEPS[kind]
    largest = np.abs(values.reshape(-1, block)).max(axis=1, keepdims=True)
    found: np.ndarray = np.broadcast_to(part * largest, (largest.shape[0], block)).reshape(values.shape)
    return found
