"""Saving of optimizer states in slices: each rank writes its own slices, and any rank can read any slice.

A slice is a range of a flattened tensor. Ranks that shard the states have different slices of the same tensors. Offsets
are relative to the parameter, so a run can resume with another number of ranks or another way of sharding.

    optimizer-00001.safetensors         rank 0; "lm_head.weight/exp_avg@4096" has the values from offset 4096, flattened
    optimizer-r00003-00001.safetensors  rank 3
    slices.json                         {"lm_head.weight/exp_avg": {"shape": [..], "slices": [[0, 4096, FILE], ...]}}

A checkpoint of one device has whole tensors, named "lm_head.weight/exp_avg", and no ``slices.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamtune.errors import CheckpointError

INDEX = "slices.json"
MASTER = "master"
"""Key of fp32 master weights."""
FILE_BYTES = 2 << 30
"""Approximate size of one file, and of the values that are copied to the host at a time."""


class Slice(NamedTuple):
    """A range of one flattened tensor of the optimizer states."""

    parameter: str
    key: str
    """Name of the state, such as ``exp_avg``, or :data:`MASTER` for fp32 master weights."""
    shape: tuple[int, ...]
    """Shape of the whole tensor; ``()`` for a scalar."""
    offset: int
    """Offset in the flattened whole tensor."""
    values: Tensor
    """[n], on any device."""

    @property
    def name(self) -> str:
        return f"{self.parameter}/{self.key}"


Entry = tuple[str, tuple[int, ...], int, int, str]
"""Name, shape, offset, number of values, file."""


def write_slices(folder: Path, slices: Iterable[Slice], rank: int, *, has_whole_tensors: bool = False) -> list[Entry]:
    """Write this rank's slices; return (name, shape, offset, count, file) of each for the index.

    Args:
        folder: Folder of the files, which have about :data:`FILE_BYTES` bytes each.
        slices: Slices of this rank.
        rank: This rank.
        has_whole_tensors: True if each slice is a whole tensor, to write it in its shape without offset.
    """
    entries: list[Entry] = []
    pending: dict[str, Tensor] = {}
    number = 0

    def write_pending() -> None:
        nonlocal pending, number
        number += 1
        save_file(pending, folder / _slice_file_name(rank, number))
        pending = {}

    for part in slices:
        if not (has_whole_tensors or part.values.numel()):
            continue
        if pending and sum(tensor.nbytes for tensor in pending.values()) + part.values.nbytes > FILE_BYTES:
            write_pending()
        if has_whole_tensors:
            pending[part.name] = part.values.detach().cpu().contiguous().reshape(part.shape)
        else:  # a file cannot store tensors that share memory, as slices of one tensor do
            pending[f"{part.name}@{part.offset}"] = part.values.detach().to("cpu", copy=True).contiguous().flatten()
        entries.append((part.name, part.shape, part.offset, part.values.numel(), _slice_file_name(rank, number + 1)))
    if pending or rank == 0:  # every checkpoint has a first file, even if it is empty
        write_pending()
    return entries


def write_index(folder: Path, entries: Iterable[Entry]) -> None:
    """Write ``slices.json``, the index of the slices of all ranks.

    Raises:
        CheckpointError: Ranks disagree on a shape, or their slices do not cover a tensor exactly.
    """
    index: dict[str, dict[str, Any]] = {}
    for name, shape, offset, count, file in entries:
        entry = index.setdefault(name, {"shape": list(shape), "slices": []})
        if entry["shape"] != list(shape):
            raise CheckpointError(f"ranks disagree on the shape of {name}: {entry['shape']} and {list(shape)}")
        entry["slices"].append([offset, count, file])
    for name, entry in index.items():
        entry["slices"].sort()
        end = 0
        for offset, count, _ in entry["slices"]:
            if offset != end:
                raise CheckpointError(
                    f"slices of {name} have a gap or overlap: one ends at {end}, the next begins at {offset}"
                )
            end = offset + count
        if end != math.prod(entry["shape"]):
            raise CheckpointError(f"slices of {name} have only {end} of its {math.prod(entry['shape'])} values")
    (folder / INDEX).write_text(json.dumps(index, indent=0) + "\n", encoding="utf-8")


def _slice_file_name(rank: int, number: int) -> str:
    return f"optimizer-r{rank:05d}-{number:05d}.safetensors" if rank else f"optimizer-{number:05d}.safetensors"


class SliceReader:
    """Reads ranges of the optimizer states in a checkpoint.

    Args:
        folder: Folder of a verified checkpoint.
        only_masters: True to read only fp32 master weights.
    """

    def __init__(self, folder: Path, *, only_masters: bool = False) -> None:
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._slices: dict[str, list[tuple[int, int, str, str]]] = {}
        self._read_index(folder)
        if only_masters:
            self._shapes = {name: shape for name, shape in self._shapes.items() if name.endswith(f"/{MASTER}")}

    def _read_index(self, folder: Path) -> None:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self._shapes = {name: tuple(entry["shape"]) for name, entry in index.items()}
            self._slices = {
                name: [(offset, count, file, f"{name}@{offset}") for offset, count, file in entry["slices"]]
                for name, entry in index.items()
            }
            return
        for path in sorted(folder.glob("optimizer-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    shape = tuple(file.get_slice(name).get_shape())
                    self._shapes[name] = shape
                    self._slices[name] = [(0, math.prod(shape), path.name, name)]

    def state_keys(self, parameter: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self._shapes if name.rpartition("/")[0] == parameter]

    def parameter_names(self) -> set[str]:
        return {name.rpartition("/")[0] for name in self._shapes}

    def check_parameters(self, trained: Iterable[str]) -> None:
        """Raise a CheckpointError if the checkpoint has optimizer states of parameters that are not in ``trained``."""
        check_parameters_are_trained(self.parameter_names(), trained)

    def shape(self, parameter: str, key: str) -> tuple[int, ...]:
        """Return the shape of the state ``key`` (such as ``exp_avg``) of a parameter; ``()`` for a scalar."""
        return self._shapes[f"{parameter}/{key}"]

    def read(self, parameter: str, key: str, offset: int, count: int) -> Tensor:
        """Return ``count`` values from ``offset`` of the flattened state ``key``, as a CPU tensor ``[count]``.

        Raises:
            CheckpointError: Some of the values are missing.
        """
        name = f"{parameter}/{key}"
        parts: list[Tensor] = []
        for start, size, file, stored in self._slices.get(name, []):
            first, last = max(offset, start), min(offset + count, start + size)
            if first < last:
                parts.append(_read_range(self._folder / file, stored, first - start, last - start))
        if sum(len(part) for part in parts) != count:
            raise CheckpointError(f"{self._folder} lacks values of {name}", fix="use another checkpoint")
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def read_whole(self, parameter: str, key: str) -> Tensor:
        shape = self._shapes[f"{parameter}/{key}"]
        return self.read(parameter, key, 0, math.prod(shape)).reshape(shape)


def check_parameters_are_trained(saved: Iterable[str], trained: Iterable[str]) -> None:
    """Raise a CheckpointError if ``saved`` has parameter names that are not in ``trained``.

    The opposite is allowed: a parameter that was never updated, because steps were skipped or it had no gradient, has
    no state yet.
    """
    if untrained := sorted({*saved} - {*trained}):
        raise CheckpointError(
            f"the checkpoint's optimizer state is for another model: it has states of {len(untrained)} parameters that "
            f"this run does not train, such as {untrained[0]}",
            fix="start a new run with --resume never",
        )


def _read_range(path: Path, name: str, first: int, last: int) -> Tensor:
    """Return the values ``first`` to ``last`` (excluded) of the flattened tensor ``name`` in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        tensor_slice = file.get_slice(name)
        shape = tensor_slice.get_shape()
        if len(shape) == 0:
            values: Tensor = file.get_tensor(name)
            return values.reshape(1).clone()
        values_per_row = math.prod(shape[1:])
        if values_per_row == 0:
            return file.get_tensor(name).flatten().clone()
        start, stop = first // values_per_row, -(-last // values_per_row)
        rows: Tensor = tensor_slice[start:stop]
        return rows.flatten()[first - start * values_per_row : last - start * values_per_row].clone()


def slices_of_replicated_state(tensors: Mapping[str, Tensor], rank: int, size: int) -> Iterator[Slice]:
    """Yield the tensors that this rank writes, if every rank has all optimizer states.

    Args:
        tensors: Tensors by ``NAME/KEY`` (parameter name and state key), in the same order on every rank.
        rank: This rank.
        size: Number of ranks, each of which writes about as many bytes.
    """
    bytes_by_rank = [0] * size
    parameters: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        parameters.setdefault(name.rpartition("/")[0], []).append((name.rpartition("/")[2], tensor))
    for parameter, entries in parameters.items():
        writer = _least_loaded_rank(bytes_by_rank)
        bytes_by_rank[writer] += sum(tensor.nbytes for _, tensor in entries)
        if writer == rank:
            for key, tensor in entries:
                yield Slice(parameter, key, tuple(tensor.shape), 0, tensor.reshape(-1))


def _least_loaded_rank(bytes_by_rank: Sequence[int]) -> int:
    return min(range(len(bytes_by_rank)), key=lambda rank: bytes_by_rank[rank])
