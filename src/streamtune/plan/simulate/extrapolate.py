"""Compute the figures of a long, deep step exactly from short, shallow steps.

At a fixed chunk size every tensor of a step has a fixed size, or the size of a chunk, of the prefix or of the sequence,
for one layer or for each. Take a moment of layer l of L on chunk c of D. The bytes of each kind are then linear in each
of L, l, D and c. Two rules follow.

1. Two short steps give the first and the last chunks (layers) of a long step, moment by moment. One has the fewest
   possible chunks (layers), the other has one more.
2. The chunks (layers) between are largest at one of their two ends, and their mean is the mean of the two ends.

Layers repeat in periods (such as sliding, sliding, full). A zone is a run of equal periods (such as inputs on the host,
then on the device). Moments are checked, not assumed: if two steps did not run the same operators,
:class:`UnlikeError` is raised.
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
from streamtune.ops.attention.attention import key_block
from streamtune.plan.simulate.memory import KINDS
from streamtune.plan.simulate.shard import SPANS, WINDOWS
from streamtune.plan.simulate.simulation_cache import all_modules, configs_of, fact_of
from streamtune.plan.simulate.trace import COLUMNS, EARLIER, WORK, Cell, CellPlace
from streamtune.schedule import Schedule

LEAST_PERIODS = 5
"""Smallest number of periods of which some can be left out: first, middle and last, one more in the longer step, and at
least one to leave out.
"""

LONGEST_PERIOD = 64
"""Longest period that is searched for, in layers."""

COPIES = ("keep", "load", "refill", "load sums", "save sums")
"""Passes with ``order: chunk`` that copy a tensor in several parts."""

SCRATCH = COLUMNS.index("scratch")

Coordinates = tuple[Hashable, ...]


class UnlikeError(Exception):
    """Two steps differ, for example in their operators, so the whole step cannot be computed from them."""


@dataclass(frozen=True)
class Axis:
    """A sequence of items (chunks or periods) that are alike, except for the first few and the last few.

    Attributes:
        count: Number of items in the whole step.
        alone: Number of items at the start that differ from all items after them.
        tail: Number of items at the end that differ from all items before them.
        base: Number of items in the shorter step; None if no item is left out.
    """

    count: int
    alone: int = 1
    tail: int = 1
    base: int | None = None

    @classmethod
    def of(cls, count: int, alone: int = 1, tail: int = 1) -> Axis:
        """Return an axis of ``count`` items, shortened if any item can be left out."""
        base = alone + 1 + tail
        return cls(count, alone, tail, base if count > base + 1 else None)

    def names(self, index: int, count: int) -> list[tuple[str, int]]:
        """Return the names of item ``index`` of ``count``; a name has the same meaning in a step with more items."""
        if self.base is None or index < self.alone:
            return [("start", index)]
        if index >= count - self.tail:
            return [("end", count - index)]
        return [("first", 0)] * (index == self.alone) + [("last", 0)] * (index == count - self.tail - 1)

    def weight(self, name: tuple[str, int]) -> float:
        """Return how many items of the whole step the item of this name represents."""
        return 1.0 if self.base is None or name[0] in ("start", "end") else (self.count - self.alone - self.tail) / 2

    @property
    def beyond(self) -> int:
        """Number of items that the shorter step leaves out."""
        return 0 if self.base is None else self.count - self.base


@dataclass(frozen=True)
class Zone:
    """A run of layers that repeat with a period.

    Attributes:
        start: Index of its first layer.
        period: Number of layers in a period.
        axis: Axis of the periods.
    """

    start: int
    period: int
    axis: Axis

    def layers(self, longer: bool) -> list[int]:
        """Return the indices of the layers that a shorter step runs; ``longer`` adds one period."""
        count = self.axis.count if self.axis.base is None else self.axis.base + longer
        return list(range(self.start, self.start + count * self.period))


def zones(kinds: Sequence[Hashable]) -> list[Zone]:
    """Return the zones of layers of these kinds: from the start, each zone is the one that covers the most layers."""
    found: list[Zone] = []
    at = 0
    while at < len(kinds):
        best, repeats = 1, 1
        for period in range(1, min(LONGEST_PERIOD, (len(kinds) - at) // LEAST_PERIODS) + 1):
            count = 1
            while kinds[at : at + period] == kinds[at + count * period : at + (count + 1) * period]:
                count += 1
            if count >= LEAST_PERIODS and count * period > best * repeats:
                best, repeats = period, count
        found.append(Zone(at, best, Axis.of(repeats)))
        at += best * repeats
    return found


@dataclass(frozen=True)
class ShorterStep:
    """A shorter step; the figures of the whole step are a weighted sum of the shorter steps' figures.

    Attributes:
        layers: Indices of the layers that it runs.
        length: Number of tokens.
        schedule: Schedule of the step.
        longer: Index of the zone with one more period; None if no zone has one.
        chunks: Number of chunks.
        share: Weight of its figures in the sum; may be negative.
    """

    layers: list[int]
    length: int
    schedule: Schedule
    longer: int | None
    chunks: int
    share: int


Cells = Mapping[CellPlace, Cell]


@dataclass(frozen=True)
class Combined:
    """The figures of the whole step, computed from shorter steps.

    Attributes:
        cells: Places of the largest cells, with their moments ``[n, COLUMNS]``.
        work: Work of all cells, one sum per name in ``WORK``. The key is the phase, and True for work in layers.
    """

    cells: list[tuple[CellPlace, Tensor]]
    work: dict[tuple[str, bool], list[float]]


def combine_steps(parts: list[tuple[ShorterStep, Cells]], layers: list[Zone], chunks: Axis, length: int) -> Combined:
    """Return the figures of the step with ``length`` tokens, combined from the records of shorter steps.

    Raises:
        UnlikeError: The shorter steps did not run the same operators.
    """
    named = [_name_cells(shorter, cells, layers, chunks) for shorter, cells in parts]
    cells: list[tuple[CellPlace, Tensor]] = []
    work: dict[tuple[str, bool], list[float]] = {}
    if any(cells_of.keys() != named[0].keys() for cells_of in named):
        raise UnlikeError
    shares = [shorter.share for shorter, _ in parts]
    squares = [shorter.share * length / shorter.length for shorter, _ in parts]  # for work quadratic in the length
    for name, (place, _, weight) in named[0].items():
        alike = [cells_of[name][1] for cells_of in named]
        moments = _align_moments(alike, loops=place.layer is None or place.pass_name in COPIES)
        total = sum(share * each for share, each in zip(shares, moments, strict=True))
        assert isinstance(total, Tensor)
        _bound_scratch(total, alike)
        cells.append((place, total))
        inside = place.layer is not None and place.pass_name != EARLIER
        sums = work.setdefault((place.phase, inside), [0.0] * len(WORK))
        for kind in range(len(WORK)):
            factors = squares if place.pass_name == "whole" and WORK[kind] == "attention_flops" else shares
            sums[kind] += weight * sum(share * cell.work[kind] for share, cell in zip(factors, alike, strict=True))
    return Combined(cells, work)


def _bound_scratch(moments: Tensor, alike: list[Cell]) -> None:
    """Bound the scratch bytes of an embedding's gradient: they grow with the length only up to the vocabulary size."""
    if (sums := alike[0].embedding) is not None:
        operators = min((cell.operators for cell in alike), key=len)
        column = zip(operators, moments[:, SCRATCH].tolist(), strict=True)
        moments[:, SCRATCH] = torch.tensor([sums.scratch_bytes(*moment) for moment in column])


def _name_cells(
    shorter: ShorterStep, cells: Cells, layers: list[Zone], chunks: Axis
) -> dict[Coordinates, tuple[CellPlace, Cell, float]]:
    """Return cells by names that have the same meaning in all shorter steps.

    Each comes with its place and with the number of cells of the whole step that it represents.
    """
    found: dict[Coordinates, tuple[CellPlace, Cell, float]] = {}
    where = [
        (number, zone, index)
        for number, zone in enumerate(layers)
        for index in range(len(zone.layers(number == shorter.longer)))
    ]
    for place, cell in cells.items():
        layer_names: list[tuple[Coordinates, float]] = [((), 1.0)]
        if place.layer is not None:
            number, zone, index = where[place.layer]
            count = len(zone.layers(number == shorter.longer)) // zone.period
            layer_names = [
                ((number, name, index % zone.period), zone.axis.weight(name))
                for name in zone.axis.names(index // zone.period, count)
            ]
        chunk_names: list[tuple[Coordinates, float]] = [((), 1.0)]
        if place.chunk is not None:
            chunk_names = [(name, chunks.weight(name)) for name in chunks.names(place.chunk, shorter.chunks)]
        for layer, layer_weight in layer_names:
            for chunk, chunk_weight in chunk_names:
                name = (place.phase, place.pass_name, place.turn, layer, chunk)
                found[name] = (place, cell, layer_weight * chunk_weight)
    return found


def _align_moments(cells: list[Cell], loops: bool) -> list[Tensor]:
    """Return the moments of each cell, cut to equal length so that equal indices are the same moment.

    If a cell has more moments than another, they must be iterations of a loop (``loops``), with the same operators
    before and after them.

    Raises:
        UnlikeError: The operators of the cells differ.
    """
    if not loops and any(cell.operators != cells[0].operators for cell in cells):
        raise UnlikeError
    shortest = min(cells, key=lambda cell: len(cell.operators))
    count = len(shortest.operators)
    first, last = 0, count
    for cell in cells:
        before = _count_equal(shortest.operators, cell.operators)
        behind = _count_equal(shortest.operators[::-1], cell.operators[::-1])
        first, last = max(first, count - behind), min(last, before)
    if first > last:
        raise UnlikeError
    split = (first + last) // 2
    out = []
    for cell in cells:
        numbers = array("q", chain.from_iterable(cell.moments))  # torch reads an array ten times faster than a list
        moments = torch.frombuffer(numbers, dtype=torch.int64).view(len(cell.moments), -1)
        out.append(torch.cat([moments[:split], moments[len(moments) - (count - split) :]]))
    return out


def _count_equal(one: list[Any], other: list[Any]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True)
class StepLayout:
    """The division of a step into zones of layers and into chunks, some of which can be left out.

    Attributes:
        layers: Zones of the layers.
        chunks: Axis of the chunks.
        size: Tokens of a chunk, except the last two, which share the rest of the row.
        length: Tokens of the row.
    """

    layers: list[Zone]
    chunks: Axis
    size: int
    length: int

    def middle(self, number: int) -> range:
        """Return the layers, by index in the shorter step, of the period that the longer step runs twice.

        Args:
            number: Index of the zone.
        """
        zone = self.layers[number]
        before = sum(len(each.layers(longer=False)) for each in self.layers[:number])
        first = before + zone.axis.alone * zone.period
        return range(first, first + zone.period)

    def steps(self, schedule: Schedule, kinds: list[Hashable]) -> Iterator[ShorterStep]:
        """Yield the shorter steps to run, the shortest first."""
        beyond = {number: zone.axis.beyond for number, zone in enumerate(self.layers) if zone.axis.beyond}
        whole, more = 1 - sum(beyond.values()), self.chunks.beyond
        rows = [(None, whole), *beyond.items()]
        for chunks, factor in ((self.chunks.base, 1 - more), (self.chunks.base, more)) if more else ((None, 1),):
            count = self.chunks.count if chunks is None else chunks + (factor == more)
            length = self.length - (self.chunks.count - count) * self.size
            for longer, share in rows:
                kept = [i for number, zone in enumerate(self.layers) for i in zone.layers(number == longer)]
                shorter = _shorten_schedule(schedule, kinds, kept)
                yield ShorterStep(kept, length, shorter, longer, count, share * factor)


def layout_of(model: Any, schedule: Schedule, length: int, *, streamed: bool, layers: bool, chunks: bool) -> StepLayout:
    """Return the layout of a step: which layers and chunks can be left out.

    Args:
        model: Model that the step trains.
        schedule: Schedule of the step.
        length: Number of tokens of a row.
        streamed: True if the step is streamed; otherwise it has one chunk.
        layers: True if layers may be left out.
        chunks: True if chunks may be left out.
    """
    chunks_of = schedule.chunks(length) if streamed else [slice(0, length)]
    count, size = len(chunks_of), chunks_of[0].stop
    kinds = kinds_of_layers(model, schedule if streamed else None)
    found = zones(kinds) if layers else [Zone(0, len(kinds), Axis(1))]
    axis = Axis(count)
    alone = _count_unlike_chunks(model, size, length)
    if streamed and chunks and alone is not None:
        head = -(-3 * schedule.head_chunk_size // size) - 2  # at least three chunks of the head
        away = "host" in (schedule.keep_kv, schedule.keep_attention) or schedule.offload != "device"
        # While a chunk is computed, the next one may be fetched, so the last two chunks of a pass differ from the rest.
        # The backward begins at the end, and its second chunk allocates the sums.
        # A few chunks are in flight to a file. The copy of a chunk may last until the next chunk is done.
        alone += away + (IN_FLIGHT if schedule.offload == "disk" else 0)
        tail = 2 + away
        if chunks_of[-1].stop - chunks_of[-1].start != size:  # the last two are shorter; their copies overlap
            tail += IN_FLIGHT if schedule.offload == "disk" else away or schedule.stream_grads
        axis = Axis.of(count, max(alone, head), tail=tail)
    return StepLayout(found, axis, size, length)


def kinds_of_layers(model: nn.Module, schedule: Schedule | None) -> list[Hashable]:
    """Return the kind of each layer: a number for its structure, and its placement in the schedule (None: none)."""
    looks = fact_of(model, "looks of layers", lambda: _structure_numbers(model))
    places = place_layers(schedule, len(looks)) if schedule is not None else [None] * len(looks)
    return list(zip(looks, places, strict=True))


def _structure_numbers(model: nn.Module) -> list[int]:
    """Return a number for each layer; layers with equal modules, sizes and settings have the same number."""
    layers = decoder_layers(model)
    configs = configs_of(all_modules(model))
    lists = [v for config in configs for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault((_structure(layer), tuple(repr(each[index]) for each in lists)), len(numbers))
        for index, layer in enumerate(layers)
    ]


def _structure(layer: nn.Module) -> Hashable:
    looks: list[Hashable] = []
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
        looks.append((name, type(module), settings, tensors))
    return tuple(looks)


def _count_unlike_chunks(model: nn.Module, size: int, length: int) -> int | None:
    """Return how many chunks at the start see fewer keys than later chunks; None if later chunks are not alike."""
    settings = [vars(config) for config in configs_of(all_modules(model))]

    def found(names: tuple[str, ...]) -> list[int]:
        return [v for s in settings for name in names if isinstance(v := s.get(name), int) and 0 < v < length]

    if found(SPANS):
        return None
    blocks = -(-key_block(size, torch.device("meta")) // size)  # chunks that a block of keys covers
    return max((-(-window // size) + 1 for window in found(WINDOWS)), default=blocks)


def _shorten_schedule(schedule: Schedule, kinds: list[Hashable], kept: list[int]) -> Schedule:
    """Return a schedule that places the layers ``kept`` as the schedule of the whole step does.

    Raises:
        UnlikeError: No schedule does.
    """
    before = place_layers(schedule, len(kinds))
    wanted = [before[index] for index in kept]
    whole = sum(place.unstreamed for place in wanted)
    changes: dict[str, Any] = {"keep_layers": whole}
    if schedule.levels == 2 and schedule.order == "layer":
        streamed = sum(not place.unstreamed for place in before)
        changes["segment_size"] = schedule.segment_size or best_segment_size(max(1, streamed))
    for on_device in range(min(1, schedule.device_layers), min(schedule.device_layers, len(kept)) + 1):
        shorter = replace(schedule, **changes, device_layers=on_device)
        if place_layers(shorter, len(kept)) == wanted:
            return shorter
    raise UnlikeError


STAYS = [name in (*KINDS, "host", "disk") for name in COLUMNS]
"""One flag per column of a moment: True if its bytes stay allocated after the operator."""

Bytes = tuple[int, ...]
Run = list[tuple[CellPlace, Cell]]


def repeat_period(cells: Mapping[CellPlace, Cell], middle: range) -> dict[CellPlace, Cell] | None:
    """Return the cells of a step in which the period ``middle`` of layers runs twice; None if that step has to be run.

    The layers of a zone are alike, except in its first and last period, and a step visits them in order, forward and
    backward. So the longer step does the same as the shorter step, but runs the middle period twice. The period's cells
    are repeated. All later bytes are higher by what one visit of the period adds.

    Args:
        cells: Cells of a step, in the order in which they began.
        middle: Layers of a period that has layers before and after it.
    """
    runs: list[Run] = [list(run) for _, run in groupby(cells.items(), key=lambda item: item[0].layer in middle)]
    found: dict[CellPlace, Cell] = {}
    shift: Bytes = (0,) * len(COLUMNS)
    for index, run in enumerate(runs):
        if run[0][0].layer not in middle:
            found |= _shift_cells(run, shift, middle.stop, len(middle))
            continue
        before = _first_layer(item for other in reversed(runs[:index]) for item in reversed(other))
        behind = _first_layer(item for other in runs[index + 1 :] for item in other)
        if before is None or behind is None or (before < middle.start) == (behind < middle.start):
            return None
        upward = before < behind
        found |= _shift_cells(run, shift, middle.start, 0 if upward else len(middle))
        begin, end = run[0][1].moments[0], runs[index + 1][0][1].moments[0]
        passed = (now - then if stays else 0 for now, then, stays in zip(end, begin, STAYS, strict=True))
        shift = tuple(map(add, shift, passed))
        found |= _shift_cells(run, shift, middle.start, len(middle) if upward else 0)
    return found


def _first_layer(cells: Iterable[tuple[CellPlace, Cell]]) -> int | None:
    return next((place.layer for place, _ in cells if place.layer is not None), None)


def _shift_cells(run: Run, shift: Bytes, first: int, more: int) -> Iterator[tuple[CellPlace, Cell]]:
    """Yield cells with ``shift`` added to their bytes, and ``more`` added to layer numbers from ``first`` on."""
    for place, cell in run:
        number = place.layer
        moved = replace(place, layer=number + more) if number is not None and number >= first else place
        moments = [tuple(map(add, moment, shift)) for moment in cell.moments] if any(shift) else cell.moments
        yield moved, replace(cell, moments=moments)
