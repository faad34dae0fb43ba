"""Compute the memory and work of a long step with many layers exactly, from short steps with few layers.

At a fixed chunk size every tensor of a step has a fixed size, or the size of a chunk, of the chunks before it or of the
sequence. So while layer l of L processes chunk c of D, the bytes of each kind are linear in L, l, D and c. Two rules
follow for layers, and likewise for chunks:

1. The bytes of the first and the last layers are extrapolated linearly from two short steps. One step has the fewest
   possible layers, the other step has one more.
2. The bytes of the layers between them are largest at one of the two ends, and their mean is the mean of the ends.

Layers may repeat in periods, such as sliding, sliding, full attention. A zone is a run of equal periods; layers whose
inputs are stored on the host and on the device are in different zones. The rules are checked:
:class:`StepsDifferError` is raised if two steps did not run the same operators.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.hf_names import LAYER_NUMBERS
from streamtune.engine.memory.disk import IN_FLIGHT
from streamtune.engine.memory.placement import best_segment_size, place_layers
from streamtune.ops.attention.attention import keys_per_block
from streamtune.plan.simulate.memory import KINDS
from streamtune.plan.simulate.shard import CHUNKED_ATTENTION, WINDOWS
from streamtune.plan.simulate.simulation_cache import all_modules, cached_model_property, model_configs
from streamtune.plan.simulate.trace import COLUMNS, EARLIER_GRADIENTS, WORK, Cell, CellPlace
from streamtune.schedule import Schedule

MIN_PERIODS = 5
"""Smallest number of periods of which some can be omitted: first, middle, last, an extra period, an omitted period."""

MAX_PERIOD = 64
"""Longest period that is searched for, in layers."""

COPIES = ("keep", "load", "refill", "load sums", "save sums")
"""Passes with ``order: chunk`` that copy a tensor in several parts."""

SCRATCH = COLUMNS.index("scratch")

Coordinates = tuple[Hashable, ...]


class StepsDifferError(Exception):
    """Two short steps differ, for example in their operators, so the whole step cannot be computed from them."""


@dataclass(frozen=True)
class Axis:
    """Items of a step: chunks, or repeating groups of layers. All but the first few and the last few are equal.

    A shorter step, which omits some of the equal items, is simulated in place of the whole step.

    Attributes:
        count: Number of items in the whole step.
        num_first: Number of items at the start that differ from all later items.
        num_last: Number of items at the end that differ from all earlier items.
        base: Number of items in the shorter step; None if no item is omitted.
    """

    count: int
    num_first: int = 1
    num_last: int = 1
    base: int | None = None

    @classmethod
    def with_omissions(cls, count: int, num_first: int = 1, num_last: int = 1) -> Axis:
        """Return an axis of ``count`` items, of which the shorter step omits as many as possible."""
        base = num_first + 1 + num_last
        return cls(count, num_first, num_last, base if count > base + 1 else None)

    def item_names(self, index: int, count: int) -> list[tuple[str, int]]:
        """Return the names of item ``index`` of ``count``. Items of different steps with the same name correspond."""
        if self.base is None or index < self.num_first:
            return [("start", index)]
        if index >= count - self.num_last:
            return [("end", count - index)]
        return [("first", 0)] * (index == self.num_first) + [("last", 0)] * (index == count - self.num_last - 1)

    def item_weight(self, name: tuple[str, int]) -> float:
        """Return the number of items of the whole step that the item with this name represents."""
        if self.base is None or name[0] in ("start", "end"):
            return 1.0
        return (self.count - self.num_first - self.num_last) / 2

    @property
    def num_omitted_items(self) -> int:
        return 0 if self.base is None else self.count - self.base


@dataclass(frozen=True)
class Zone:
    """Consecutive layers whose kinds repeat with a period, such as sliding, sliding, full attention.

    Attributes:
        start: Index of the first layer.
        period: Number of layers in a period.
        axis: Number of periods, and which of them a shorter step omits.
    """

    start: int
    period: int
    axis: Axis

    def layer_indices(self, with_extra_period: bool) -> list[int]:
        """Return the indices of the zone's layers that a shorter step runs; ``with_extra_period`` adds one period."""
        count = self.axis.count if self.axis.base is None else self.axis.base + with_extra_period
        return list(range(self.start, self.start + count * self.period))


def find_layer_zones(kinds: Sequence[Hashable]) -> list[Zone]:
    """Divide layers into runs in which their kinds repeat; each run has the period that covers the most layers."""
    found: list[Zone] = []
    at = 0
    while at < len(kinds):
        best, repeats = 1, 1
        for period in range(1, min(MAX_PERIOD, (len(kinds) - at) // MIN_PERIODS) + 1):
            count = 1
            while kinds[at : at + period] == kinds[at + count * period : at + (count + 1) * period]:
                count += 1
            if count >= MIN_PERIODS and count * period > best * repeats:
                best, repeats = period, count
        found.append(Zone(at, best, Axis.with_omissions(repeats)))
        at += best * repeats
    return found


@dataclass(frozen=True)
class ShorterStep:
    """Step with fewer layers or chunks; bytes and work of the whole step are weighted sums over shorter steps.

    Attributes:
        layers: Indices of the layers that the shorter step runs.
        length: Number of tokens.
        schedule: Schedule of the step.
        longer: Index of the zone that has one more period than in the shortest step; None if no zone has one.
        chunks: Number of chunks.
        weight: Weight in the sums; may be negative.
    """

    layers: list[int]
    length: int
    schedule: Schedule
    longer: int | None
    chunks: int
    weight: int


Cells = Mapping[CellPlace, Cell]


@dataclass(frozen=True)
class Combined:
    """Bytes and work of the whole step, computed from shorter steps.

    Attributes:
        cells: Place and bytes ``[n, COLUMNS]`` (one row per allocation) of each cell that may have the peak. A cell is
            one pass of a layer over a chunk, or the operators between such passes.
        work: Mapping from (phase, True for work in layers) to the work, one sum per name in ``WORK``.
    """

    cells: list[tuple[CellPlace, Tensor]]
    work: dict[tuple[str, bool], list[float]]


def combine_steps(steps: list[tuple[ShorterStep, Cells]], zones: list[Zone], chunks: Axis, length: int) -> Combined:
    """Return bytes and work of the step with ``length`` tokens, combined from the records of shorter steps.

    Raises:
        StepsDifferError: The shorter steps did not run the same operators.
    """
    named = [_cells_by_name(shorter, cells, zones, chunks) for shorter, cells in steps]
    cells: list[tuple[CellPlace, Tensor]] = []
    work: dict[tuple[str, bool], list[float]] = {}
    if any(cells_of.keys() != named[0].keys() for cells_of in named):
        raise StepsDifferError
    shares = [shorter.weight for shorter, _ in steps]
    squares = [shorter.weight * length / shorter.length for shorter, _ in steps]  # for work quadratic in the length
    for name, (place, _, weight) in named[0].items():
        alike = [cells_of[name][1] for cells_of in named]
        moments = _align_moments(alike, loops=place.layer is None or place.pass_name in COPIES)
        total = sum(share * each for share, each in zip(shares, moments, strict=True))
        assert isinstance(total, Tensor)
        _bound_embedding_scratch(total, alike)
        cells.append((place, total))
        inside = place.layer is not None and place.pass_name != EARLIER_GRADIENTS
        sums = work.setdefault((place.phase, inside), [0.0] * len(WORK))
        for kind in range(len(WORK)):
            factors = squares if place.pass_name == "whole" and WORK[kind] == "attention_flops" else shares
            sums[kind] += weight * sum(share * cell.work[kind] for share, cell in zip(factors, alike, strict=True))
    return Combined(cells, work)


def _bound_embedding_scratch(moments: Tensor, cells: list[Cell]) -> None:
    """Reduce the scratch bytes in ``moments`` in place to the upper bound of an embedding's backward."""
    if (sums := cells[0].embedding) is not None:
        operators = min((cell.operators for cell in cells), key=len)
        column = zip(operators, moments[:, SCRATCH].tolist(), strict=True)
        moments[:, SCRATCH] = torch.tensor([sums.bound_scratch_bytes(*moment) for moment in column])


def _cells_by_name(
    shorter: ShorterStep, cells: Cells, zones: list[Zone], chunks: Axis
) -> dict[Coordinates, tuple[CellPlace, Cell, float]]:
    """Return (place, cell, weight) of each cell, by a name that stands for the same cell in all shorter steps.

    ``weight`` is the number of cells of the whole step that the cell represents.
    """
    found: dict[Coordinates, tuple[CellPlace, Cell, float]] = {}
    where = [
        (number, zone, index)
        for number, zone in enumerate(zones)
        for index in range(len(zone.layer_indices(number == shorter.longer)))
    ]
    for place, cell in cells.items():
        layer_names: list[tuple[Coordinates, float]] = [((), 1.0)]
        if place.layer is not None:
            number, zone, index = where[place.layer]
            count = len(zone.layer_indices(number == shorter.longer)) // zone.period
            layer_names = [
                ((number, name, index % zone.period), zone.axis.item_weight(name))
                for name in zone.axis.item_names(index // zone.period, count)
            ]
        chunk_names: list[tuple[Coordinates, float]] = [((), 1.0)]
        if place.chunk is not None:
            chunk_names = [(name, chunks.item_weight(name)) for name in chunks.item_names(place.chunk, shorter.chunks)]
        for layer, layer_weight in layer_names:
            for chunk, chunk_weight in chunk_names:
                name = (place.phase, place.pass_name, place.turn, layer, chunk)
                found[name] = (place, cell, layer_weight * chunk_weight)
    return found


def _align_moments(cells: list[Cell], loops: bool) -> list[Tensor]:
    """Return the byte counts of each cell, ``[n, COLUMNS]``, with row i of all cells recorded at the same operator.

    If a cell ran more operators than another cell, the additional rows must be iterations of a loop (``loops``), with
    the same operators before and after. These rows are left out.

    Raises:
        StepsDifferError: The operators of the cells differ.
    """
    if not loops and any(cell.operators != cells[0].operators for cell in cells):
        raise StepsDifferError
    shortest = min(cells, key=lambda cell: len(cell.operators))
    count = len(shortest.operators)
    first, last = 0, count
    for cell in cells:
        before = _common_prefix_length(shortest.operators, cell.operators)
        behind = _common_prefix_length(shortest.operators[::-1], cell.operators[::-1])
        first, last = max(first, count - behind), min(last, before)
    if first > last:
        raise StepsDifferError
    split = (first + last) // 2
    out = []
    for cell in cells:
        numbers = array("q", chain.from_iterable(cell.moments))  # torch reads an array ten times faster than a list
        moments = torch.frombuffer(numbers, dtype=torch.int64).view(len(cell.moments), -1)
        out.append(torch.cat([moments[:split], moments[len(moments) - (count - split) :]]))
    return out


def _common_prefix_length(one: list[Any], other: list[Any]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True)
class StepLayout:
    """Layers and chunks of a step, and which of them a shorter step omits.

    Attributes:
        layers: Zones of the layers: runs of layers whose kinds repeat with a period.
        chunks: Number of chunks, and which of them are omitted.
        size: Tokens per chunk; the last two chunks split the remaining tokens.
        length: Number of tokens of the row.
    """

    layers: list[Zone]
    chunks: Axis
    size: int
    length: int

    def middle_period_layers(self, zone_index: int) -> range:
        """Return the indices, in the shorter step, of the layers of a zone that the longer step runs twice."""
        zone = self.layers[zone_index]
        before = sum(len(each.layer_indices(with_extra_period=False)) for each in self.layers[:zone_index])
        first = before + zone.axis.num_first * zone.period
        return range(first, first + zone.period)

    def shorter_steps(self, schedule: Schedule, kinds: list[Hashable]) -> Iterator[ShorterStep]:
        """Yield the shorter steps to run, the shortest first."""
        omitted_periods = {
            n: zone.axis.num_omitted_items for n, zone in enumerate(self.layers) if zone.axis.num_omitted_items
        }
        whole, more = 1 - sum(omitted_periods.values()), self.chunks.num_omitted_items
        rows = [(None, whole), *omitted_periods.items()]
        for chunks, factor in ((self.chunks.base, 1 - more), (self.chunks.base, more)) if more else ((None, 1),):
            count = self.chunks.count if chunks is None else chunks + (factor == more)
            length = self.length - (self.chunks.count - count) * self.size
            for longer, share in rows:
                kept = [i for number, zone in enumerate(self.layers) for i in zone.layer_indices(number == longer)]
                shorter = _shorten_schedule(schedule, kinds, kept)
                yield ShorterStep(kept, length, shorter, longer, count, share * factor)


def make_step_layout(
    model: Any, schedule: Schedule, length: int, *, streamed: bool, layers: bool, chunks: bool
) -> StepLayout:
    """Return how a step is divided into layers and chunks, and which of them a shorter step can omit.

    ``layers`` and ``chunks`` are True if layers or chunks may be omitted. If ``streamed`` is False, the whole row is
    one chunk.
    """
    chunks_of = schedule.chunks(length) if streamed else [slice(0, length)]
    count, size = len(chunks_of), chunks_of[0].stop
    kinds = layer_kinds(model, schedule if streamed else None)
    found = find_layer_zones(kinds) if layers else [Zone(0, len(kinds), Axis(1))]
    axis = Axis(count)
    num_first = _count_special_first_chunks(model, size, length)
    if streamed and chunks and num_first is not None:
        head = -(-3 * schedule.head_chunk_size // size) - 2  # at least three chunks of the head
        is_offloaded = "host" in (schedule.keep_kv, schedule.keep_attention) or schedule.offload != "device"
        # While a chunk is computed, the next chunk may be prefetched, so the last two chunks of a pass differ.
        # The backward begins at the end, and its second chunk allocates the sums of gradients.
        # A few chunks are in flight to a file. The copy of a chunk may last until the next chunk is done.
        num_first += is_offloaded + (IN_FLIGHT if schedule.offload == "disk" else 0)
        num_last = 2 + is_offloaded
        if chunks_of[-1].stop - chunks_of[-1].start != size:  # the last two chunks are shorter; their copies overlap
            num_last += IN_FLIGHT if schedule.offload == "disk" else is_offloaded or schedule.stream_grads
        axis = Axis.with_omissions(count, max(num_first, head), num_last=num_last)
    return StepLayout(found, axis, size, length)


def layer_kinds(model: nn.Module, schedule: Schedule | None) -> list[Hashable]:
    """Return each layer's kind: a number for its structure, and where its tensors are stored (None: no schedule)."""
    structures = cached_model_property(model, "structures of layers", lambda: _layer_structure_numbers(model))
    places = place_layers(schedule, len(structures)) if schedule is not None else [None] * len(structures)
    return list(zip(structures, places, strict=True))


def _layer_structure_numbers(model: nn.Module) -> list[int]:
    """Return a number for each layer; layers with equal modules, sizes and settings have the same number."""
    layers = decoder_layers(model)
    configs = model_configs(all_modules(model))
    lists = [v for config in configs for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault((_layer_structure(layer), tuple(repr(each[index]) for each in lists)), len(numbers))
        for index, layer in enumerate(layers)
    ]


def _layer_structure(layer: nn.Module) -> Hashable:
    structures: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, int | float | str) and key not in LAYER_NUMBERS
        )
        tensors = tuple(
            (key, tuple(x.shape), x.dtype, x.requires_grad)
            for key, x in (*module._parameters.items(), *module._buffers.items())
            if x is not None
        )
        structures.append((name, type(module), settings, tensors))
    return tuple(structures)


def _count_special_first_chunks(model: nn.Module, size: int, length: int) -> int | None:
    """Return how many chunks at the start attend to fewer keys than all later chunks; None if later ones differ."""
    settings = [vars(config) for config in model_configs(all_modules(model))]

    def window_sizes(names: tuple[str, ...]) -> list[int]:
        return [v for s in settings for name in names if isinstance(v := s.get(name), int) and 0 < v < length]

    if window_sizes(CHUNKED_ATTENTION):
        return None
    blocks = -(-keys_per_block(size, torch.device("meta")) // size)  # chunks that a block of keys covers
    return max((-(-window // size) + 1 for window in window_sizes(WINDOWS)), default=blocks)


def _shorten_schedule(schedule: Schedule, kinds: list[Hashable], layer_indices: list[int]) -> Schedule:
    """Return a schedule for only ``layer_indices`` that stores their tensors on the same tiers as ``schedule``.

    Raises:
        StepsDifferError: No such schedule exists.
    """
    before = place_layers(schedule, len(kinds))
    wanted = [before[index] for index in layer_indices]
    whole = sum(place.unstreamed for place in wanted)
    changes: dict[str, Any] = {"keep_layers": whole}
    if schedule.levels == 2 and schedule.order == "layer":
        streamed = sum(not place.unstreamed for place in before)
        changes["segment_size"] = schedule.segment_size or best_segment_size(max(1, streamed))
    for on_device in range(min(1, schedule.device_layers), min(schedule.device_layers, len(layer_indices)) + 1):
        shorter = replace(schedule, **changes, device_layers=on_device)
        if place_layers(shorter, len(layer_indices)) == wanted:
            return shorter
    raise StepsDifferError


STAYS_ALLOCATED = [name in (*KINDS, "host", "disk") for name in COLUMNS]
"""One flag per column of a moment: True if its bytes stay allocated after the operator."""

Bytes = tuple[int, ...]
Run = list[tuple[CellPlace, Cell]]


def repeat_layer_period(cells: Mapping[CellPlace, Cell], middle: range) -> dict[CellPlace, Cell] | None:
    """Return the cells of a step in which the layers ``middle`` run twice; None if this longer step has to be run.

    The layers of a zone are equal, except in its first and last period, and a step visits them in order, forward and
    backward. So the longer step equals the shorter step with the cells of ``middle`` repeated. Each visit of the period
    allocates a number of bytes, which are added to all later byte counts.

    Args:
        cells: Cells of a step (one pass of a layer over a chunk each), in the order in which they began.
        middle: Layers of a period that has layers before and after it.
    """
    runs: list[Run] = [list(run) for _, run in groupby(cells.items(), key=lambda item: item[0].layer in middle)]
    found: dict[CellPlace, Cell] = {}
    shift: Bytes = (0,) * len(COLUMNS)
    for index, run in enumerate(runs):
        if run[0][0].layer not in middle:
            found |= _shift_cells(run, shift, middle.stop, len(middle))
            continue
        before = _first_layer_index(item for other in reversed(runs[:index]) for item in reversed(other))
        behind = _first_layer_index(item for other in runs[index + 1 :] for item in other)
        if before is None or behind is None or (before < middle.start) == (behind < middle.start):
            return None
        upward = before < behind
        found |= _shift_cells(run, shift, middle.start, 0 if upward else len(middle))
        begin, end = run[0][1].moments[0], runs[index + 1][0][1].moments[0]
        passed = (now - then if stays else 0 for now, then, stays in zip(end, begin, STAYS_ALLOCATED, strict=True))
        shift = tuple(map(add, shift, passed))
        found |= _shift_cells(run, shift, middle.start, len(middle) if upward else 0)
    return found


def _first_layer_index(cells: Iterable[tuple[CellPlace, Cell]]) -> int | None:
    return next((place.layer for place, _ in cells if place.layer is not None), None)


def _shift_cells(run: Run, added_bytes: Bytes, first_layer: int, added_layers: int) -> Iterator[tuple[CellPlace, Cell]]:
    """Yield the cells with ``added_bytes`` added to their bytes.

    Layer numbers of at least ``first_layer`` are raised by ``added_layers``.
    """
    for place, cell in run:
        number = place.layer
        moved = replace(place, layer=number + added_layers) if number is not None and number >= first_layer else place
        moments = cell.moments
        if any(added_bytes):
            moments = [tuple(map(add, moment, added_bytes)) for moment in moments]
        yield moved, replace(cell, moments=moments)
