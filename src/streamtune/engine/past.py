"""Tokens before a call: keys and values of a cache that was filled earlier, or that an adapter computes.

Prefix tuning (Li and Liang, arXiv 2101.00190) trains such keys and values; a prompt that was read under
``torch.no_grad()`` leaves them without a gradient. Either way they are the beginning of every chunk's prefix: the
layer's keys are ``[past | sequence]``, and the sum over chunks of dK, dV of the past is its gradient.

Shape suffixes: B batch, G key/value heads, P tokens before the call, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor, nn

from streamtune.errors import ArgumentError, UnsupportedModelError

__all__ = ["Past", "refuse_past"]


@dataclass(frozen=True)
class Past:
    """Keys and values ``[B, G, P, D]`` of the tokens before a call, for one layer.

    Args:
        keys, values: The tensors of the cache.
        versions: The version counter of each (its changes in place) at the time of the call.
        layer_idx: The number by which the layer asks its cache for them.
    """

    keys: Tensor
    values: Tensor
    versions: tuple[int, int]
    layer_idx: int

    @property
    def length(self) -> int:
        """Number of tokens P."""
        return self.keys.shape[2]

    @classmethod
    def of(cls, layer: nn.Module, cache: Any) -> Past:
        """Read a layer's part of a filled cache.

        Raises:
            UnsupportedModelError: The cache holds something else for the layer, or not all P tokens.
        """
        name, length = type(layer).__name__, int(cache.get_seq_length())
        layers = getattr(cache, "layers", ())
        places = {i for module in layer.modules() if isinstance(i := getattr(module, "layer_idx", None), int)}
        place = places.pop() if len(places) == 1 else len(layers)
        own = layers[place] if place < len(layers) else None
        keys, values = getattr(own, "keys", None), getattr(own, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.dim() != 4:
            refuse_past(f"a {type(cache).__name__} does not hold keys and values by this layer's number", name)
        if keys.shape[2] != length:
            refuse_past(f"of {length} tokens it holds {keys.shape[2]} keys (a sliding or static cache)", name)
        return cls(keys, values, (_version(keys), _version(values)), place)

    def detached(self) -> Past:
        """Return the same keys and values without their graph."""
        return replace(self, keys=self.keys.detach(), values=self.values.detach())

    def check(self) -> None:
        """Refuse to compute with a cache that was written to since the forward.

        Raises:
            ArgumentError: It was written to.
        """
        if (_version(self.keys), _version(self.values)) != self.versions:
            raise ArgumentError(
                "the cache that was passed was changed in place between the forward and its backward, and both "
                "compute with it",
                mend="call loss.backward() first, or pass a copy of the cache",
            )


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def refuse_past(why: str, where: str) -> NoReturn:
    """Refuse a filled cache, for the reason given.

    Raises:
        UnsupportedModelError: Always.
    """
    raise UnsupportedModelError(
        f"a cache was passed while gradients are on, and {why}",
        where=where,
        mend="pass the whole sequence without past_key_values, or call the model under torch.no_grad()",
    )
