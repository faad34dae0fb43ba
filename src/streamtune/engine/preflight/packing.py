"""A numerical preflight for packing: does this very model keep the rows of a packed sequence apart?

A model is told of packed rows by positions that restart and by nothing else. Whether it listens cannot be read off its
signature: one that adds a bias by distance (ALiBi), carries a state past a row's end or numbers positions itself takes
the same arguments and lets rows meet. So a few short rows go through the streamed model together, and each layer is
handed the very same inputs again, a row at a time. What it adds to its input must be the same.

    meets:  ||z - z_row|| > bound * ||z_row - z_in|| + eps * ||z_row||       (z_row - z_in is what the layer adds)

In a narrow dtype a router may choose another expert because of rounding alone, for a token here and there. A row that
meets the one before it shows it at its first token, in every row: there the median over the rows decides.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from streamtune.engine.balance import not_balanced
from streamtune.engine.layer import StreamedForward
from streamtune.engine.preflight.borrow import borrowed
from streamtune.engine.preflight.difference import BOUND, compared_dtype, norm_of
from streamtune.engine.preflight.trial import SCHEDULE, trial_batch
from streamtune.engine.rows import CallFacts, PackedRows
from streamtune.errors import ArgumentError, StreamTuneError, UnsupportedModelError

if TYPE_CHECKING:
    from streamtune.engine.stream import StreamHandle

__all__ = ["check_packing"]

ROWS = (9, 2, 13, 3, 11, 10)
"""Tokens of the rows of the trial: chunks end inside some, and several lie inside one chunk."""
MEND = "set packing: false"


@dataclass
class _Seen:
    """One call of a layer in the packed walk: ``[1, T, C]`` in and out."""

    index: int
    z_in: Tensor
    z_out: Tensor


def check_packing(handle: StreamHandle) -> None:
    """Compare packed rows with the same rows alone, layer by layer, on a few random tokens; costs seven short forwards.

    Random state, training flags and the model are left as they were, also when it fails.

    Args:
        handle: What ``stream(model)`` returned.

    Raises:
        ArgumentError: The handle was removed.
        UnsupportedModelError: The model does not keep packed rows apart; says which layer, and by how much.
    """
    if not handle.layers:
        raise ArgumentError("the model is not streamed any more", mend="check before .remove()")
    with borrowed(handle), torch.no_grad():
        _Trial(handle).run()


class _Trial:
    def __init__(self, handle: StreamHandle) -> None:
        self.model: Any = handle.model
        self.layers, self.own = handle.layers, handle.own_attention
        self.facts = CallFacts()
        self.ids = trial_batch(self.model)["input_ids"].flatten()[: sum(ROWS)][None]
        self.seen: list[_Seen] = []
        self.calls = 0
        self.row = slice(0, 0)
        self.errors: dict[tuple[int, str], list[float]] = {}

    def run(self) -> None:
        """Raise if rows meet."""
        positions = torch.cat([torch.arange(length) for length in ROWS])[None].to(self.ids.device)
        packed = self._walk(self._record, self.ids, positions)
        ends = [0]
        for length in ROWS:
            ends.append(ends[-1] + length)
        for start, stop in pairwise(ends):
            self.calls, self.row = 0, slice(start, stop)
            alone = self._walk(self._compare, self.ids[:, self.row], positions[:, self.row])
            self._note(len(self.layers), "logits", packed[:, self.row], alone, torch.zeros_like(alone))
        self._judge()

    def _walk(self, step: Callable[..., Any], ids: Tensor, positions: Tensor) -> Tensor:
        """One forward with ``step`` in each layer's place: the logits."""
        for index, layer in enumerate(self.layers):
            layer.forward = _Step(index, layer, step)
        self.facts.rows = PackedRows.of(positions)
        taken = inspect.signature(type(self.model).forward).parameters
        given = {"position_ids": positions} if "position_ids" in taken else {}  # the rest is in the facts
        try:
            more = {"use_cache": False, **not_balanced(self.model)}
            out = self.model.forward(input_ids=ids, **given, **more)
        except (StreamTuneError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self._name} does not take packed rows ({type(error).__name__}: {error})", mend=MEND
            ) from error
        logits: Tensor = out[0] if isinstance(out, tuple) else out.logits
        return logits

    def _record(self, index: int, bound: inspect.BoundArguments) -> Any:
        out = StreamedForward(self.layers[index], SCHEDULE, self.own, facts=self.facts)(*bound.args[1:], **bound.kwargs)
        self.seen.append(_Seen(index, bound.arguments[_hidden_name(bound)], _first(out)))
        return out

    def _compare(self, index: int, bound: inspect.BoundArguments) -> Any:
        call = self.seen[self.calls] if self.calls < len(self.seen) else None
        if call is None or call.index != index:
            raise UnsupportedModelError(f"{self._name} calls other layers when rows are packed", mend=MEND)
        self.calls += 1
        name, z_in = _hidden_name(bound), call.z_in[:, self.row]
        if self.calls == 1:  # positions that are learnt are added here, before any layer
            given = bound.arguments[name]
            self._note(index, "input", z_in, given, torch.zeros_like(given))
        bound.arguments[name] = z_in
        out = StreamedForward(self.layers[index], SCHEDULE, self.own, facts=self.facts)(*bound.args[1:], **bound.kwargs)
        z_out = call.z_out[:, self.row]
        self._note(index, "output", z_out, _first(out), z_in)
        return type(out)([z_out, *out[1:]]) if isinstance(out, tuple | list) else z_out

    def _note(self, index: int, what: str, packed: Tensor, alone: Tensor, z_in: Tensor) -> None:
        """The error of one row, relative to what rounding explains: all of it, or its first token in a narrow dtype."""
        dtype = self._dtype(index, alone)
        if torch.finfo(dtype).bits < 32:
            packed, alone, z_in = packed[:, :1], alone[:, :1], z_in[:, :1]
        explained = BOUND[dtype] * norm_of(alone, z_in) + torch.finfo(dtype).eps * norm_of(alone)
        error = norm_of(packed, alone)
        self.errors.setdefault((index, what), []).append(error / explained if explained > 0 else float(error > 0))

    def _judge(self) -> None:
        for (index, what), errors in self.errors.items():
            behind = errors[1:]  # the first row has none before it
            narrow = torch.finfo(self._dtype(index, self.seen[0].z_out)).bits < 32
            error = statistics.median(behind) if narrow else max(behind)
            if not error <= 1:
                layer = index < len(self.layers)
                kind = type(self.layers[index]).__name__ if layer else "the head"
                raise UnsupportedModelError(
                    f"{self._name} does not keep packed rows apart: the {what} of {kind} for a row changes with the "
                    f"rows before it, {error:.0f} times as much as rounding explains",
                    where=f"layer {index} of {len(self.layers)} ({kind})" if layer else f"the head of {self._name}",
                    mend=MEND,
                )

    def _dtype(self, index: int, z: Tensor) -> torch.dtype:
        """What the bound of a layer's tensor goes by; the head's is that of the last layer."""
        return compared_dtype(z, self.layers[min(index, len(self.layers) - 1)])

    @property
    def _name(self) -> str:
        return type(self.model).__name__


class _Step:
    """Stands in a layer's ``forward`` for one walk."""

    def __init__(self, index: int, layer: nn.Module, step: Callable[..., Any]) -> None:
        self.index, self.layer, self.step = index, layer, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(type(self.layer).forward)
        return self.step(self.index, signature.bind(self.layer, *args, **kwargs))


def _hidden_name(bound: inspect.BoundArguments) -> str:
    return list(bound.arguments)[1]


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple | list) else out
