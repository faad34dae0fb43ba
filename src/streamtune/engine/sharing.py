"""Keys and values that later layers read as well (Gemma 3n, Gemma 4), as outputs and inputs of layers.

Such a model passes one dictionary to every layer. A layer that fills it makes its keys and values an output of its
autograd node, so that the gradients of all layers that read them arrive before its own backward. A layer that reads it
takes them as inputs. :class:`ChunkSharing` is the dictionary of one chunk of one layer.

Shape suffixes: B batch, G key/value heads, S tokens of prefix and chunk, D head dimension.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

from torch import Tensor

from streamtune.engine.cache import ChunkCache

__all__ = ["ChunkSharing", "SharedKey"]

SharedKey = tuple[str, Any, int]
"""Argument, entry and place (0 keys, 1 values) of a shared tensor."""


class ChunkSharing(UserDict):  # type: ignore[type-arg]
    """The shared entries that a chunk reads, ``[B, G, S, D]`` of its prefix and itself, and those it fills.

    Args:
        cache: The chunk's cache.
        whole: Keys and values of the whole sequence by entry, of the layers before.
    """

    def __init__(self, cache: ChunkCache, whole: dict[Any, tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.cache, self.whole = cache, whole
        self.filled: dict[Any, int] = {}
        """For each entry filled, which of the layer's key/value updates it holds."""

    def __contains__(self, key: object) -> bool:
        return key in self.whole

    def __getitem__(self, key: Any) -> tuple[Tensor, ...]:
        start, stop = self.cache.first_key, self.cache.chunk.stop
        return tuple(x.narrow(2, start, stop - start) for x in self.whole[key])

    def __setitem__(self, key: Any, item: Any) -> None:
        self.filled[key] = self.cache.updates - 1
