"""Read a GGUF file: its values by the names that the weights have in the model, and how far a rounding may move them.

llama.cpp has names of its own, which the package ``gguf`` knows, and stores some weights in another order: rows of
rotary heads, norms with one added. ``transformers`` reads the architectures of :data:`~GgufFile.known` and undoes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from streamtune.engine.hf_names import GGUF_KNOWN, GGUF_ORDER, GGUF_ORDERS, inside

ROUNDINGS = {"F32": 2.0**-23, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Of types without blocks: half of the gap between neighbouring numbers, relative to the number."""
STEPS = {"Q8_0": (32, 0.6 / 127), "TQ1_0": (256, 0.51), "TQ2_0": (256, 0.51)}
"""Of types with blocks: weights in a block, and what one may be off, relative to the largest of its block: half a step,
and the rounding of the scale, which is in fp16."""
SUBNORMAL = {"F16": 2.0**-25, "BF16": 0.0, "F32": 0.0}
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
"""Stacked experts in the model, and in the file."""


class GgufFile:
    """The tensors and the facts of a file that a model was converted to.

    Args:
        path: The file.
        model: The model that it was made of, without adapters.
    """

    def __init__(self, path: Path, model: Any) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self.tensors = {each.name: each for each in self._reader.tensors}
        self.architecture = str(self.fact("general.architecture"))
        self.known = self.architecture in inside(GGUF_KNOWN)
        """True if the order in which its weights are stored is known, so that each number has one place."""
        config = model.config.get_text_config(decoder=True)
        made = inside(GGUF_ORDERS).get(self.architecture, inside(GGUF_ORDER))
        self._order = made(config=config.to_dict()) if self.known else inside(GGUF_ORDER)()
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        layers = config.num_hidden_layers
        self._names = (
            gguf.get_tensor_name_map(numbers[self.architecture], layers) if self.architecture in numbers else None
        )

    def fact(self, key: str) -> Any:
        """Return a value of the file's metadata, or None."""
        found = self._reader.fields.get(key)
        return None if found is None else found.contents()

    def places(self, name: str) -> tuple[str, ...]:
        """Return the names in the file of one weight of the model: several are parts of it; none where it is not there.

        Args:
            name: As ``named_parameters`` has it.
        """
        if found := re.search(r"\blayers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)(_bias)?$", name):
            ending = "bias" if found[3] else "weight"
            parts = tuple(f"blk.{found[1]}.{part}.{ending}" for part in EXPERTS[found[2]])
            return parts if all(part in self.tensors for part in parts) else ()
        ending = next((each for each in (".weight", ".bias") if name.endswith(each)), "")
        stem = self._names.get_name(name.removesuffix(ending)) if self._names is not None else None
        options = [f"{stem}{each}" for each in ((ending,) if ending else ("", ".weight", ".bias"))]
        return tuple(each for each in options if each in self.tensors)[:1]

    def type_of(self, place: str) -> str:
        """Return the type of a tensor of the file, such as ``Q8_0``."""
        return str(self.tensors[place].tensor_type.name)

    def values(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a weight as the model has it, and how far a rounding may have moved each of its numbers; fp32.

        Args:
            name: Of the model, with at least one place.

        Raises:
            ValueError: Its type is none that the converter writes.
        """
        parts = [self._read(place) for place in self.places(name)]
        values, allowed = zip(*parts, strict=True)
        return (torch.cat(values, 1), torch.cat(allowed, 1)) if len(parts) > 1 else parts[0]

    def _read(self, place: str) -> tuple[Tensor, Tensor]:
        import gguf

        tensor = self.tensors[place]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        allowed = _allowed(values, self.type_of(place))
        # What adds or takes logarithms moves the bounds otherwise than the values.
        ends = [self._in_order(each, place) for each in (values, values + allowed, values - allowed)]
        width = np.maximum(np.abs(ends[1] - ends[0]), np.abs(ends[2] - ends[0])) + 2.0**-23 * np.abs(ends[0])
        return torch.from_numpy(ends[0]).float(), torch.from_numpy(width).float()

    def _in_order(self, values: np.ndarray, place: str) -> np.ndarray:
        """Return the values in the order of the model; those of experts are in it."""
        if "_exps." in place:
            return values
        apart: dict[str, Any] = {"tensors": {}}
        done = self._order.process(weights=values, name=place, tensor_key_mapping={}, parsed_parameters=apart)
        found: np.ndarray = done.weights if done.name is not None else next(iter(apart["tensors"].values())).numpy()
        return np.ascontiguousarray(found)


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the saved buffers of a model, of those that are tied the first."""
    yield from model.named_parameters()
    saved = model.state_dict().keys()
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)


def _allowed(values: np.ndarray, kind: str) -> np.ndarray:
    if kind in ROUNDINGS:
        return ROUNDINGS[kind] * np.abs(values) + SUBNORMAL[kind]
    if kind not in STEPS:
        raise ValueError(f"a tensor of type {kind}, whose rounding is not known here")
    block, part = STEPS[kind]
    largest = np.abs(values.reshape(-1, block)).max(axis=1, keepdims=True)
    found: np.ndarray = np.broadcast_to(part * largest, (largest.shape[0], block)).reshape(values.shape)
    return found
