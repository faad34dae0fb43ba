"""What a layer returns beside its hidden states, chunk by chunk: dropped, joined, or refused.

    None                           stays None
    attention weights              [B, H, T_i, S_i]: nobody asked for them (output_attentions is refused), None
    a choice of keys per token     integers [B, T_i, K_i]: joined along the tokens, for the next layer to read
    anything else                  refused

Shape suffixes: B batch, T tokens (T_i of the chunk), S keys, H heads, K chosen keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamtune.errors import UnsupportedModelError

__all__ = ["OtherOutputs"]


class OtherOutputs:
    """Collects them over the chunks of one forward and gives the layer's output its own form again.

    Args:
        name: The layer's class, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.wrap: type | None = None
        self.parts: list[list[Tensor]] = []

    def take(self, out: Any, chunk: slice, *, keep: bool) -> Tensor:
        """The hidden states of a chunk's output; what else is in it is remembered if ``keep``.

        Raises:
            UnsupportedModelError: Chunks of what else is in it cannot be joined.
        """
        if not isinstance(out, tuple | list):
            return out
        self.wrap, hidden, others = type(out), out[0], out[1:]
        if not keep:
            return hidden
        if chunk.start == 0:
            self.parts = [[] for _ in others]
        for parts, other in zip(self.parts, others, strict=True):
            if _is_choice(other, chunk):
                parts.append(other)
            elif other is not None and not _is_attention(other, chunk):
                raise UnsupportedModelError(
                    f"{self.name} returns more than hidden states; chunks of that cannot be joined"
                )
        return hidden

    def restore(self, z_out: Tensor) -> Any:
        """The whole sequence's output as the layer gives it."""
        return z_out if self.wrap is None else self.wrap([z_out, *map(_joined, self.parts)])


def _is_choice(value: Any, chunk: slice) -> bool:
    integers = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return integers and value.dim() == 3 and value.shape[1] == chunk.stop - chunk.start


def _is_attention(value: Any, chunk: slice) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.shape[2] == chunk.stop - chunk.start


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Along the tokens. An early chunk has fewer keys to choose from: its last choice is repeated, which adds none."""
    if not parts:
        return None
    width = max(part.shape[2] for part in parts)
    return torch.cat([torch.cat([p, p[:, :, -1:].expand(-1, -1, width - p.shape[2])], 2) for p in parts], 1)
