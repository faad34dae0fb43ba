"""Record a step on ``meta`` tensors: live bytes after each allocation, by layer, chunk and pass of the engine.

The record, a :class:`Trace`, is divided into *cells*: one pass of a layer over one chunk, a layer's own backward, the
head, and the operators between them. A cell has one *moment* per operator that allocates bytes. So the moments of steps
of different length and depth can be compared one by one (``simulate.extrapolate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from streamtune.ops.devices import current_run_count
from streamtune.plan.simulate.costs import (
    Cost,
    EmbeddingSums,
    TouchedTensors,
    attention_flops,
    bandwidth_bound_bytes,
    cost_kind,
    embedding_sums,
    is_self_copy,
    may_allocate_scratch,
    product_flops,
    queries_and_keys,
    scratch_bytes,
    touched_bytes,
    touched_tensors,
)
from streamtune.plan.simulate.memory import ACTIVATION, HEAD, KINDS, LiveBytes
from streamtune.plan.simulate.meta_operators import (
    CONSTANTS,
    IntegerValues,
    ResultKind,
    ResultShapes,
    classify_result,
    needs_values,
)
from streamtune.plan.simulate.shard import WHOLE_ROW, RankShard

COLUMNS = (*KINDS, "scratch", "host", "disk")
"""Columns of a recorded moment: live device bytes by kind, scratch bytes of the operator, host bytes and disk bytes."""

WORK = ("matmul_flops", "attention_flops", "touched_bytes", "moved_bytes", "disk_moved_bytes", "operators")
MOVED = WORK.index("moved_bytes")


@dataclass(frozen=True, slots=True)
class _OperatorProperties:
    """Properties of an operator that follow from its schema.

    Attributes:
        func: The operator, referenced so that its id is not reused.
        cost: Kind of the operator's work.
        needs_values: True if the operator may need the values of its arguments.
        result: Kind of the result.
        touched_tensors: Tensors that the operator reads and writes.
        scratch: True if the kernel may allocate scratch memory.
        fills: True if the operator fills a tensor with one number.
    """

    func: Any
    cost: Cost
    needs_values: bool
    result: ResultKind
    touched_tensors: TouchedTensors
    scratch: bool
    fills: bool


_PROPERTIES: dict[int, _OperatorProperties] = {}
"""Properties by the id of the operator, because the hash of an operator is a slow Python function."""


def _compute_properties(func: Any) -> _OperatorProperties:
    properties = _PROPERTIES[id(func)] = _OperatorProperties(
        func,
        cost_kind(func),
        needs_values(func),
        classify_result(func),
        touched_tensors(func),
        may_allocate_scratch(func),
        func in CONSTANTS,
    )
    return properties


@dataclass(frozen=True)
class CellPlace:
    """Place of a cell in a step; a cell is one pass of a layer over one chunk, or the operators between such passes.

    Attributes:
        phase: Phase: ``reference`` (forward without gradient, head included), ``forward``, ``head`` or ``backward``.
        pass_name: Pass over the chunks, such as ``store`` or ``replay``; empty outside of chunks.
        layer: Index of the layer; None outside the layers (norms there have chunks too).
        chunk: Index of the chunk; None outside of chunks.
        turn: Number of earlier cells with the same phase, pass, layer and chunk.
    """

    phase: str
    pass_name: str = ""
    layer: int | None = None
    chunk: int | None = None
    turn: int = 0


@dataclass
class Cell:
    """Record of one pass of a layer over one chunk, or of the operators between such passes.

    Attributes:
        operators: Operator after which each of ``moments`` was recorded; None for the first, recorded at the beginning.
        moments: Bytes, one tuple of :data:`COLUMNS` for each operator that allocates memory.
        work: One sum for each name in :data:`WORK`.
        embedding: Sizes of the sums of an embedding's gradient; None if the cell has no such operator.
    """

    operators: list[Any] = field(default_factory=list)
    moments: list[tuple[int, ...]] = field(default_factory=list)
    work: list[float] = field(default_factory=lambda: [0.0] * len(WORK))
    embedding: EmbeddingSums | None = None


EARLIER_GRADIENTS = "earlier"
"""Name of the pass in which gradients of earlier micro-batches are recorded."""

CHAIN_DONE = "finish"
"""Name of the last pass of a backward with ``order: chunk``."""


class Trace(LiveBytes):
    """Dispatch mode that records the bytes and work of a step of a model on ``meta``, by layer, chunk and pass.

    Args:
        model: Model on ``meta``.
        layers: Decoder layers of the model.
        device: Type of the simulated device.
        tiers: Function that returns four sizes: bytes on host and disk, and bytes copied to and from host and disk.
        shard: One rank's part of each row, if ranks share rows.
        unwraps: True to record an operator on a wrapper tensor (such as quantised optimizer state) as operators on the
            tensor's components.
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
        self.integers, self.shapes = IntegerValues(), ResultShapes()
        self.cells: dict[CellPlace, Cell] = {}
        self._layer_indices = {id(layer): index for index, layer in enumerate(self._layers)}
        self._param_layers = {id(p): index for index, layer in enumerate(self._layers) for p in layer.parameters()}
        self._chunk_index_by_start: dict[int, int] = {}
        self._counted_moved = (0, 0)
        self._phase = "forward"
        self._cell = Cell()
        self.begin_cell("forward")

    def __enter__(self) -> Trace:
        super().__enter__()
        self._add_hook(self._layers[-1].register_forward_hook(self._on_last_layer))
        return self

    def begin_cell(self, phase: str, pass_name: str = "", layer: int | None = None, chunk: int | None = None) -> None:
        self._count_moved_bytes()
        turn = 0
        while (place := CellPlace(phase, pass_name, layer, chunk, turn)) in self.cells:
            turn += 1
        self._phase, self._cell = phase, Cell()
        self._place = place
        self.cells[place] = self._cell
        self.new_kind = HEAD if phase == "head" else ACTIVATION
        self._record_moment(None, 0)

    def begin_earlier_gradients(self, parameter: Tensor) -> None:
        """Begin a cell for gradients of earlier micro-batches, of ``parameter``'s layer, unless it has begun."""
        layer = self._param_layers.get(id(parameter))
        if (self._place.pass_name, self._place.layer) != (EARLIER_GRADIENTS, layer):
            self.begin_cell("forward", EARLIER_GRADIENTS, layer)

    def finish(self) -> None:
        """End the record: count the bytes copied to and from host and disk since the last cell began."""
        self._count_moved_bytes()

    def _count_moved_bytes(self) -> None:
        moved_now = self.tiers()[2:]
        for place, (now, before) in enumerate(zip(moved_now, self._counted_moved, strict=True)):
            self._cell.work[MOVED + place] += now - before
        self._counted_moved = (moved_now[0], moved_now[1])

    def on_chunk(self, layer: nn.Module, chunk: slice, pass_name: str) -> None:
        layer_index, phase = self._layer_indices.get(id(layer)), self._phase
        if phase == "head" and layer_index is not None:
            phase = "backward"
        index = self._chunk_index_by_start.setdefault(chunk.start, len(self._chunk_index_by_start))
        self.begin_cell(phase, pass_name, layer_index, index)

    def _on_layer_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self._phase in ("forward", "reference"):
            self.begin_cell(self._phase, "whole", self._layer_indices[id(layer)])
        super()._on_layer_input(layer, args)

    def _on_last_layer(self, layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._phase == "reference":
            self.begin_cell("reference")
        elif self._phase == "forward":
            self.begin_cell("head")

    def _on_gradient(self, parameter: Tensor) -> None:
        super()._on_gradient(parameter)
        if self._place.pass_name in (CHAIN_DONE, "gradients"):  # gradients of all layers arrive at once, unordered
            if self._place.pass_name == CHAIN_DONE:
                self.begin_cell("backward", "gradients")
            return
        index = self._param_layers.get(id(parameter))
        if index is not None and (self._place.phase, self._place.layer) != ("backward", index):
            self.begin_cell("backward", "whole", index)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch's own check for dynamo is slow."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.unwraps and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the tensor's class then calls operators on its components, which this mode sees
        given = kwargs or {}
        properties = _PROPERTIES.get(id(func)) or _compute_properties(func)
        cost = properties.cost
        answered, out = False, None
        if properties.needs_values:
            answered, out = self.integers.evaluate_if_needed(func, args, given)
        if not answered:
            out = self.shapes.call_operator(func, properties.result, args, given)
            if properties.fills or not (isinstance(out, Tensor) and out.dtype.is_floating_point):
                self.integers.attach_values(func, args, given, out)
            elif cost == "view" or is_self_copy(func, args):
                return out
        before, times = self.total, current_run_count()
        scratch = scratch_bytes(func, args, self.device) if properties.scratch else 0
        if scratch:
            self._cell.embedding = embedding_sums(func, args) or self._cell.embedding
        self._count_results(out)
        if cost == "product":
            flops = product_flops(func, args, given, out)
            self._cell.work[0] += times * flops
            self._cell.work[2] += times * bandwidth_bound_bytes(func, flops, args, out, self.device)
        elif cost == "attention":
            self._cell.work[1] += times * self.shard.size * attention_flops(func, args)
            q, k = queries_and_keys(func, args)
            scratch += self.shard.all_to_all_buffer_bytes(q, k)
        elif cost == "other":
            self._cell.work[2] += times * touched_bytes(properties.touched_tensors, args, out)
        self._cell.work[5] += times * (cost != "view")
        if self.total > before or scratch:
            self._record_moment(func, scratch)
        return out

    def _update_peak(self) -> None:
        pass  # peaks are computed from the record

    def on_resize(self, x: Tensor) -> None:
        super().on_resize(x)
        self._record_moment(None, 0)

    def _record_moment(self, func: Any, scratch: int) -> None:
        host, disk, _, _ = self.tiers()
        self._cell.operators.append(func)
        self._cell.moments.append((*self.live.values(), scratch, host, disk))
