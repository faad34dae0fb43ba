"""Record a step on ``meta`` tensors: the live bytes at each moment, ordered by what the engine does.

The record, a :class:`Trace`, is divided into *cells*: one pass of a layer over one chunk, a layer's own backward, the
head, and the operators between them. A cell has one *moment* per operator that allocates bytes. So the moments of steps
of different length and depth can be compared one by one (``simulate.extrapolate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from streamtune.ops.devices import repetitions
from streamtune.plan.simulate.costs import (
    Cost,
    EmbeddingSums,
    Reach,
    attention_flops,
    bandwidth_bytes,
    copies_itself,
    cost_of,
    embedding_sums,
    has_scratch,
    product_flops,
    queries_and_keys,
    reach_of,
    scratch_bytes,
    touched_bytes,
)
from streamtune.plan.simulate.memory import ACTIVATION, HEAD, KINDS, LiveBytes
from streamtune.plan.simulate.meta_operators import (
    CONSTANTS,
    IntegerValues,
    ResultKind,
    Shapes,
    needs_values,
    result_kind_of,
)
from streamtune.plan.simulate.shard import WHOLE_ROW, RankShard

COLUMNS = (*KINDS, "scratch", "host", "disk")
"""Columns of a moment: live device bytes by kind, scratch bytes inside the operator, host bytes and disk bytes."""

WORK = ("matmul_flops", "attention_flops", "touched_bytes", "moved_bytes", "disk_moved_bytes", "operators")
MOVED = WORK.index("moved_bytes")


@dataclass(frozen=True, slots=True)
class _Rule:
    """The properties of an operator that follow from its schema.

    Attributes:
        func: The operator.
        cost: Kind of its cost.
        needs_values: True if it may need the values of its arguments.
        result: Kind of its result.
        reach: Which bytes it touches.
        scratch: True if its kernel may allocate scratch memory.
        fills: True if it fills a tensor with one number.
    """

    func: Any
    cost: Cost
    needs_values: bool
    result: ResultKind
    reach: Reach
    scratch: bool
    fills: bool


_RULES: dict[int, _Rule] = {}
"""Rules by the operator's id, because an operator's own hash is a slow Python function; a rule keeps it alive."""


def _rule_of(func: Any) -> _Rule:
    rule = _RULES[id(func)] = _Rule(
        func,
        cost_of(func),
        needs_values(func),
        result_kind_of(func),
        reach_of(func),
        has_scratch(func),
        func in CONSTANTS,
    )
    return rule


@dataclass(frozen=True)
class CellPlace:
    """The place of a cell in a step.

    Attributes:
        phase: ``reference`` (forward without gradient, head included), ``forward``, ``head`` or ``backward``.
        pass_name: Pass over the chunks, such as ``store`` or ``replay``; empty outside of chunks.
        layer: Index of the layer; None outside the layers (norms there have chunks too).
        chunk: Index of the chunk; None outside of chunks.
        turn: Number of earlier cells at the same place.
    """

    phase: str
    pass_name: str = ""
    layer: int | None = None
    chunk: int | None = None
    turn: int = 0


@dataclass
class Cell:
    """The operators, moments and work that were recorded at one place.

    Attributes:
        operators: Operator of each moment; None for the first moment, at which the cell begins.
        moments: One tuple of :data:`COLUMNS` per moment, in bytes.
        work: One sum for each name in :data:`WORK`.
        embedding: Sums of an embedding's gradient; None if the cell has no such operator.
    """

    operators: list[Any] = field(default_factory=list)
    moments: list[tuple[int, ...]] = field(default_factory=list)
    work: list[float] = field(default_factory=lambda: [0.0] * len(WORK))
    embedding: EmbeddingSums | None = None


EARLIER = "earlier"
"""Name of the pass in which gradients of earlier micro-batches are recorded."""

CHAIN_DONE = "finish"
"""Name of the last pass of a backward with ``order: chunk``."""


class Trace(LiveBytes):
    """A dispatch mode that records a step of a model on ``meta``.

    Args:
        model: Model on ``meta``.
        layers: Decoder layers of the model.
        device: Type of the simulated device.
        tiers: ``() -> (host bytes, disk bytes, bytes moved to and from the host, to and from the disk)``.
        shard: One rank's part of each row, if ranks share rows.
        unwraps: True to record operators on a wrapper tensor (such as quantised optimizer state) as the operators on
            its components.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        *,
        device: str,
        tiers: Callable[[], tuple[int, int, int, int]],
        shard: RankShard = WHOLE_ROW,
        unwraps: bool = False,
    ) -> None:
        super().__init__(model, layers, count_cpu=device == "cpu")
        self.unwraps = unwraps
        self.device, self.tiers, self.shard = device, tiers, shard
        self.integers, self.shapes = IntegerValues(), Shapes()
        self.cells: dict[CellPlace, Cell] = {}
        self._index = {id(layer): index for index, layer in enumerate(self._layers)}
        self._owners = {id(p): index for index, layer in enumerate(self._layers) for p in layer.parameters()}
        self._starts: dict[int, int] = {}
        self._moved = (0, 0)
        self._phase = "forward"
        self._cell = Cell()
        self.enter("forward")

    def __enter__(self) -> Trace:
        super().__enter__()
        self._hook(self._layers[-1].register_forward_hook(self._on_last_layer))
        return self

    def enter(self, phase: str, pass_name: str = "", layer: int | None = None, chunk: int | None = None) -> None:
        """Begin a cell, in which the following operators are recorded."""
        self._count_moved()
        turn = 0
        while (place := CellPlace(phase, pass_name, layer, chunk, turn)) in self.cells:
            turn += 1
        self._phase, self._cell = phase, Cell()
        self._place = place
        self.cells[place] = self._cell
        self.new_kind = HEAD if phase == "head" else ACTIVATION
        self._write(None, 0)

    def enter_earlier(self, parameter: Tensor) -> None:
        """Begin the cell for gradients of earlier micro-batches, for the layer that has ``parameter`` (or none)."""
        owner = self._owners.get(id(parameter))
        if (self._place.pass_name, self._place.layer) != (EARLIER, owner):
            self.enter("forward", EARLIER, owner)

    def finish(self) -> None:
        """End the record: add the bytes moved since the last cell began."""
        self._count_moved()

    def _count_moved(self) -> None:
        moved = self.tiers()[2:]
        for place, (now, before) in enumerate(zip(moved, self._moved, strict=True)):
            self._cell.work[MOVED + place] += now - before
        self._moved = (moved[0], moved[1])

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        layer_index, phase = self._index.get(id(layer)), self._phase
        if phase == "head" and layer_index is not None:
            phase = "backward"
        index = self._starts.setdefault(chunk.start, len(self._starts))
        self.enter(phase, pass_name, layer_index, index)

    def _on_layer_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self._phase in ("forward", "reference"):
            self.enter(self._phase, "whole", self._index[id(layer)])
        super()._on_layer_input(layer, args)

    def _on_last_layer(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._phase == "reference":
            self.enter("reference")
        elif self._phase == "forward":
            self.enter("head")

    def _on_gradient(self, parameter: Tensor) -> None:
        super()._on_gradient(parameter)
        if self._place.pass_name in (CHAIN_DONE, "gradients"):  # gradients of all layers arrive at once, unordered
            if self._place.pass_name == CHAIN_DONE:
                self.enter("backward", "gradients")
            return
        index = self._owners.get(id(parameter))
        if index is not None and (self._place.phase, self._place.layer) != ("backward", index):
            self.enter("backward", "whole", index)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's check for dynamo takes as long as an operator."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.unwraps and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the tensor's class then calls operators on its components, which this mode sees
        given = kwargs or {}
        rule = _RULES.get(id(func)) or _rule_of(func)
        cost = rule.cost
        answered, out = self.integers.evaluate_if_needed(func, args, given) if rule.needs_values else (False, None)
        if not answered:
            out = self.shapes.call(func, rule.result, args, given)
            if rule.fills or not (isinstance(out, Tensor) and out.dtype.is_floating_point):
                self.integers.follow(func, args, given, out)
            elif cost == "view" or copies_itself(func, args):
                return out
        before, times = self.total, repetitions()
        scratch = scratch_bytes(func, args, self.device) if rule.scratch else 0
        if scratch:
            self._cell.embedding = embedding_sums(func, args) or self._cell.embedding
        self._see(out)
        if cost == "product":
            flops = product_flops(func, args, given, out)
            self._cell.work[0] += times * flops
            self._cell.work[2] += times * bandwidth_bytes(func, flops, args, out, self.device)
        elif cost == "attention":
            self._cell.work[1] += times * self.shard.size * attention_flops(func, args)
            q, k = queries_and_keys(func, args)
            scratch += self.shard.exchange_bytes(q, k)
        elif cost == "other":
            self._cell.work[2] += times * touched_bytes(rule.reach, args, out)
        self._cell.work[5] += times * (cost != "view")
        if self.total > before or scratch:
            self._write(func, scratch)
        return out

    def _grown(self) -> None:
        """Do nothing: peaks are computed from the record."""

    def on_resize(self, x: Tensor) -> None:
        """Count a tensor's storage with its new size, and record a moment."""
        super().on_resize(x)
        self._write(None, 0)

    def _write(self, func: Any, scratch: int) -> None:
        host, disk, _, _ = self.tiers()
        self._cell.operators.append(func)
        self._cell.moments.append((*self.live.values(), scratch, host, disk))
