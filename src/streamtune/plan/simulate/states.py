"""The size of the states that layers carry from token to token, found by a step of a few tokens on ``meta``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import carries_states
from streamtune.engine.observe import observed
from streamtune.plan.simulate.step import Step, trace_step
from streamtune.schedule import Schedule

CHUNKS = 2


@dataclass(frozen=True)
class CarriedStates:
    """The states of all layers after one token.

    Attributes:
        layers: Number of layers that carry any.
        row_bytes: Bytes for each row.
    """

    layers: int
    row_bytes: int


def carried_states(model: Any, *, autocast: bool = False) -> CarriedStates:
    """Return the states of a model.

    Args:
        model: The model, on ``meta``; it is left as it was.
        autocast: It computes in bf16.
    """
    layers = sum(map(carries_states, decoder_layers(model)))
    if not layers:
        return CarriedStates(0, 0)
    sizes = _StateSizes()
    with observed(sizes):
        trace_step(model, Schedule(chunk_size=2), Step("stream", 2 * CHUNKS, autocast=autocast))
    return CarriedStates(layers, sizes.kept // CHUNKS)


class _StateSizes:
    """Adds up the bytes of the states that the engine keeps."""

    kept = 0

    def on_hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count states."""
        if kind == "state":
            self.kept += sum(tensor.nbytes for tensor in tensors)

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        """Do nothing: states are kept in the forward only."""

    def on_resize(self, x: Tensor) -> None:
        """Do nothing: a state has one size."""
