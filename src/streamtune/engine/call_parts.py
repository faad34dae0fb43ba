"""Outputs of a layer call, cut and joined along the sequence; keys and values that layers share."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor

from streamtune.engine.cache import ChunkCache
from streamtune.engine.vjp import Along
from streamtune.errors import UnsupportedModelError


class LayerOutputs:
    """Splits a layer's output on each chunk into tensors, and rebuilds the output for the whole sequence."""

    def __init__(self, name: str, hidden_sequence_dim: Along) -> None:
        self.name, self.hidden_sequence_dim = name, hidden_sequence_dim
        self.wrap: type | None = None
        self.along: list[Along] = []
        """Sequence dimension of each output."""
        self.form: list[int | list[Tensor] | None] = []
        """For each item that the layer returns: its index in the output tensors, or the key indices that each chunk
        selected.
        """

    def chunk_tensors(self, out: Any, chunk: slice, *, keep: bool) -> list[Tensor]:
        """Return the tensors in a layer's output on a chunk; with ``keep`` also record indices of selected keys."""
        self.wrap = type(out) if isinstance(out, tuple | list) else None
        items = list(out) if isinstance(out, tuple | list) else [out]
        if chunk.start == 0 and keep:
            self.form = [None] * len(items)
        outputs: list[Tensor] = []
        self.along = []
        for place, item in enumerate(items):
            along = self.hidden_sequence_dim if place == 0 else 1
            if place and (item is None or _is_attention_weights(item, chunk)):
                continue
            if place and _is_key_indices(item, chunk):
                if keep:
                    self.form[place] = [*(self.form[place] or []), item]  # type: ignore[misc]
            elif _follows_sequence(item, along, chunk):
                self.form[place] = len(outputs)
                outputs.append(item)
                self.along.append(along)
            else:
                raise UnsupportedModelError(
                    f"{self.name} returns item {place} of type {type(item).__name__}, whose chunks cannot be joined"
                )
        return outputs

    def rebuild_output(self, outputs: list[Tensor]) -> Any:
        """Return the layer's output (a tensor, tuple or list), given its tensors for the whole sequence."""
        items = [outputs[part] if isinstance(part, int) else _join_key_indices(part) for part in self.form]
        return items[0] if self.wrap is None else self.wrap(items)


def _follows_sequence(value: Any, along: Along, chunk: slice) -> bool:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return floating and along is not None and value.dim() > along and value.shape[along] == chunk.stop - chunk.start


def _is_key_indices(value: Any, chunk: slice) -> bool:
    integers = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return integers and value.dim() == 3 and value.shape[1] == chunk.stop - chunk.start


def _is_attention_weights(value: Any, chunk: slice) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.shape[2] == chunk.stop - chunk.start


def _join_key_indices(parts: list[Tensor] | None) -> Tensor | None:
    """Join the chunks' indices of selected keys ``[B, T_i, K_i]`` along the tokens; None if there are none.

    An early chunk has fewer keys to select from. Its last index is repeated, which selects no further key.
    """
    if not parts:
        return None
    width = max(part.shape[2] for part in parts)
    return torch.cat([torch.cat([p, p[:, :, -1:].expand(-1, -1, width - p.shape[2])], 2) for p in parts], 1)


SharedKey = tuple[str, Any, int]
"""Name (argument, dictionary key, place) of a tensor in a dictionary that layers share; keys have place 0, values 1."""


class ChunkSharing(UserDict):  # type: ignore[type-arg]
    """Dictionary of the keys and values that layers share, cut to the keys ``[B, G, S, D]`` that one chunk sees.

    ``full_kv`` has the keys and values of the whole sequence that earlier layers computed.
    """

    def __init__(self, cache: ChunkCache, full_kv: dict[Any, tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.cache, self.full_kv = cache, full_kv
        self.entry_updates: dict[Any, int] = {}
        """Index of the cache update that computed each entry which the layer adds."""

    def __contains__(self, key: object) -> bool:
        return key in self.full_kv

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        start, stop = self.cache.first_key, self.cache.chunk.stop
        return tuple(x.narrow(2, start, stop - start) for x in self.full_kv[key])

    def __setitem__(self, key: Any, item: Any) -> None:
        self.entry_updates[key] = self.cache.updates - 1
