"""Compute the figures of a long and deep step from short and shallow steps, exactly.

At a fixed chunk size everything a step holds is a tensor of a fixed size, of a chunk, of the prefix or of the sequence,
for each layer or for one. So at each moment of layer l of L on chunk c of D, the bytes of each kind are a polynomial of
degree one in each of L, l, D and c. Hence

    the first chunks (layers) and the last of a step with D (L) of them follow, moment by moment, from those of steps
    with as few as there can be, and one more;
    those between are largest at one of their two ends, and their mean is the mean of the two ends.

Layers are taken in periods (sliding, sliding, full), in zones of like periods (inputs on the host, then on the device).
Nothing is assumed about the moments: if two steps did not run the same operators, :class:`UnlikeError` is raised.
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

ENOUGH = 5
"""Periods from which some can be left out: first, between and last, one more in the longer step, and one."""

LONGEST_PERIOD = 64
"""Layers of the longest period that is looked for."""

COPIES = ("keep", "load", "refill", "load sums", "save sums")
"""Passes that copy piece by piece, in the order of chunks."""

SCRATCH = COLUMNS.index("scratch")

Coordinates = tuple[Hashable, ...]


class UnlikeError(Exception):
    """Two steps differ, as in the operators they ran, so that one cannot be computed from the other."""


@dataclass(frozen=True)
class Axis:
    """A sequence of items, such as chunks, that are alike except for the first few and the last.

    Attributes:
        count: Number of items.
        alone: Number of items at the start that are unlike all items after them.
        tail: Number of items at the end that are unlike all items before them.
        base: Number of items in the shorter step; None if no item is left out.
    """

    count: int
    alone: int = 1
    tail: int = 1
    base: int | None = None

    @classmethod
    def of(cls, count: int, alone: int = 1, tail: int = 1) -> Axis:
        """Return an axis that is shortened if that leaves anything out."""
        base = alone + 1 + tail
        return cls(count, alone, tail, base if count > base + 1 else None)

    def names(self, index: int, count: int) -> list[tuple[str, int]]:
        """Return the names of the ``index``-th of ``count`` items, which mean the same in a step with more items."""
        if self.base is None or index < self.alone:
            return [("start", index)]
        if index >= count - self.tail:
            return [("end", count - index)]
        return [("first", 0)] * (index == self.alone) + [("last", 0)] * (index == count - self.tail - 1)

    def weight(self, name: tuple[str, int]) -> float:
        """Return how many items of the whole step a name represents."""
        return 1.0 if self.base is None or name[0] in ("start", "end") else (self.count - self.alone - self.tail) / 2

    @property
    def beyond(self) -> int:
        """Number of items that the shorter step lacks."""
        return 0 if self.base is None else self.count - self.base


@dataclass(frozen=True)
class Zone:
    """Layers from ``start`` that repeat with a period; ``axis`` counts the periods."""

    start: int
    period: int
    axis: Axis

    def layers(self, longer: bool) -> list[int]:
        """Return the layers that a shorter step keeps: periods from the start, one more of them if ``longer``."""
        count = self.axis.count if self.axis.base is None else self.axis.base + longer
        return list(range(self.start, self.start + count * self.period))


def zones(kinds: Sequence[Hashable]) -> list[Zone]:
    """Divide layers, given the kind of each, into zones: from the start, each time the one that covers most layers."""
    found: list[Zone] = []
    at = 0
    while at < len(kinds):
        best, repeats = 1, 1
        for period in range(1, min(LONGEST_PERIOD, (len(kinds) - at) // ENOUGH) + 1):
            count = 1
            while kinds[at : at + period] == kinds[at + count * period : at + (count + 1) * period]:
                count += 1
            if count >= ENOUGH and count * period > best * repeats:
                best, repeats = period, count
        found.append(Zone(at, best, Axis.of(repeats)))
        at += best * repeats
    return found


@dataclass(frozen=True)
class Shorter:
    """A shorter step that is run for its share in the whole one.

    Attributes:
        layers: The layers it keeps.
        length: Its tokens.
        schedule: Its schedule.
        longer: The zone with a period more; None if no zone has.
        chunks: Number of its chunks.
        share: Factor of its figures.
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
    """The largest cells of the whole step, their moments ``[n, COLUMNS]``, and the work of all cells: a sum for each of
    ``WORK``, by phase and a flag that is True for the layers.
    """

    cells: list[tuple[CellPlace, Tensor]]
    work: dict[tuple[str, bool], list[float]]


def combined(parts: list[tuple[Shorter, Cells]], layers: list[Zone], chunks: Axis, length: int) -> Combined:
    """Combine shorter steps and their records into the one of ``length`` tokens; UnlikeError if operators differ."""
    named = [_named(shorter, cells, layers, chunks) for shorter, cells in parts]
    cells: list[tuple[CellPlace, Tensor]] = []
    work: dict[tuple[str, bool], list[float]] = {}
    if any(cells_of.keys() != named[0].keys() for cells_of in named):
        raise UnlikeError
    shares = [shorter.share for shorter, _ in parts]
    squares = [shorter.share * length / shorter.length for shorter, _ in parts]  # for what grows as its square
    for name, (place, _, weight) in named[0].items():
        alike = [cells_of[name][1] for cells_of in named]
        moments = _aligned(alike, loops=place.layer is None or place.pass_name in COPIES)
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
    """Bound the scratch of an embedding's gradient, which stops growing with the length at the vocabulary."""
    if (sums := alike[0].embedding) is not None:
        operators = min((cell.operators for cell in alike), key=len)
        column = zip(operators, moments[:, SCRATCH].tolist(), strict=True)
        moments[:, SCRATCH] = torch.tensor([sums.scratch_bytes(*moment) for moment in column])


def _named(
    shorter: Shorter, cells: Cells, layers: list[Zone], chunks: Axis
) -> dict[Coordinates, tuple[CellPlace, Cell, float]]:
    """Return cells by names that mean the same in all shorter steps, each with how many cells it stands for."""
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


def _aligned(cells: list[Cell], loops: bool) -> list[Tensor]:
    """Return the moments of cells, as many of each, so that equal indices are the same moment.

    If one cell has more, they must be iterations of a loop: the same operators before and after them.
    """
    if not loops and any(cell.operators != cells[0].operators for cell in cells):
        raise UnlikeError
    shortest = min(cells, key=lambda cell: len(cell.operators))
    count = len(shortest.operators)
    first, last = 0, count
    for cell in cells:
        before = _agreeing(shortest.operators, cell.operators)
        behind = _agreeing(shortest.operators[::-1], cell.operators[::-1])
        first, last = max(first, count - behind), min(last, before)
    if first > last:
        raise UnlikeError
    split = (first + last) // 2
    out = []
    for cell in cells:
        numbers = array("q", chain.from_iterable(cell.moments))  # which torch reads in a tenth of the time of a list's
        moments = torch.frombuffer(numbers, dtype=torch.int64).view(len(cell.moments), -1)
        out.append(torch.cat([moments[:split], moments[len(moments) - (count - split) :]]))
    return out


def _agreeing(one: list[Any], other: list[Any]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b:
            return index
    return min(len(one), len(other))


@dataclass(frozen=True)
class StepLayout:
    """Zones of layers, and chunks of ``size`` tokens except the last two, which share the rest of ``length``."""

    layers: list[Zone]
    chunks: Axis
    size: int
    length: int

    def middle(self, number: int) -> range:
        """Return the period of a zone that comes twice in the longer step, by its places in the shorter one."""
        zone = self.layers[number]
        before = sum(len(each.layers(longer=False)) for each in self.layers[:number])
        first = before + zone.axis.alone * zone.period
        return range(first, first + zone.period)

    def steps(self, schedule: Schedule, kinds: list[Hashable]) -> Iterator[Shorter]:
        """Yield the steps to run, the shortest first."""
        beyond = {number: zone.axis.beyond for number, zone in enumerate(self.layers) if zone.axis.beyond}
        whole, more = 1 - sum(beyond.values()), self.chunks.beyond
        rows = [(None, whole), *beyond.items()]
        for chunks, factor in ((self.chunks.base, 1 - more), (self.chunks.base, more)) if more else ((None, 1),):
            count = self.chunks.count if chunks is None else chunks + (factor == more)
            length = self.length - (self.chunks.count - count) * self.size
            for longer, share in rows:
                kept = [i for number, zone in enumerate(self.layers) for i in zone.layers(number == longer)]
                shorter = _schedule(schedule, kinds, kept)
                yield Shorter(kept, length, shorter, longer, count, share * factor)


def layout_of(model: Any, schedule: Schedule, length: int, *, streamed: bool, layers: bool, chunks: bool) -> StepLayout:
    """Return the layout by which a step of ``length`` tokens may be shortened.

    Args:
        model: The model.
        schedule: Schedule of the step.
        length: Tokens of a row.
        streamed: True if the step has chunks.
        layers: True if layers may be left out.
        chunks: True if chunks may be left out.
    """
    chunks_of = schedule.chunks(length) if streamed else [slice(0, length)]
    count, size = len(chunks_of), chunks_of[0].stop
    kinds = kinds_of_layers(model, schedule if streamed else None)
    found = zones(kinds) if layers else [Zone(0, len(kinds), Axis(1))]
    axis = Axis(count)
    alone = _alone(model, size, length)
    if streamed and chunks and alone is not None:
        head = -(-3 * schedule.head_chunk_size // size) - 2  # at least three chunks of the head
        away = "host" in (schedule.keep_kv, schedule.keep_attention) or schedule.offload != "device"
        # While a chunk is worked on, the next one may be fetched: of the last two of a pass one has none, one is none.
        # The backward begins at the end, and its second chunk makes room for the sums.
        # On the way to a file a few chunks are held. A copy of a chunk may last until the next is done.
        alone += away + (IN_FLIGHT if schedule.offload == "disk" else 0)
        tail = 2 + away
        if chunks_of[-1].stop - chunks_of[-1].start != size:  # the last two are shorter, and copied with chunks before
            tail += IN_FLIGHT if schedule.offload == "disk" else away or schedule.stream_grads
        axis = Axis.of(count, max(alone, head), tail=tail)
    return StepLayout(found, axis, size, length)


def kinds_of_layers(model: nn.Module, schedule: Schedule | None) -> list[Hashable]:
    """Return the kind of each layer: its modules, their sizes, their settings, its place in the schedule."""
    looks = fact_of(model, "looks of layers", lambda: _looks_of(model))
    places = place_layers(schedule, len(looks)) if schedule is not None else [None] * len(looks)
    return list(zip(looks, places, strict=True))


def _looks_of(model: nn.Module) -> list[int]:
    """Return a number for each layer, equal for layers that differ only in their place in the schedule."""
    layers = decoder_layers(model)
    configs = configs_of(all_modules(model))
    lists = [v for config in configs for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    numbers: dict[Hashable, int] = {}
    return [
        numbers.setdefault((_looks(layer), tuple(repr(each[index]) for each in lists)), len(numbers))
        for index, layer in enumerate(layers)
    ]


def _looks(layer: nn.Module) -> Hashable:
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


def _alone(model: nn.Module, size: int, length: int) -> int | None:
    """Return how many chunks at the start see fewer keys than later ones; None if chunks are not alike."""
    settings = [vars(config) for config in configs_of(all_modules(model))]

    def found(names: tuple[str, ...]) -> list[int]:
        return [v for s in settings for name in names if isinstance(v := s.get(name), int) and 0 < v < length]

    if found(SPANS):
        return None
    blocks = -(-key_block(size, torch.device("meta")) // size)  # until there is a whole block of keys before a chunk
    return max((-(-window // size) + 1 for window in found(WINDOWS)), default=blocks)


def _schedule(schedule: Schedule, kinds: list[Hashable], kept: list[int]) -> Schedule:
    """Return the schedule that places the kept layers as the whole one does; UnlikeError if none does."""
    before = place_layers(schedule, len(kinds))
    wanted = [before[index] for index in kept]
    whole = sum(place.whole for place in wanted)
    changes: dict[str, Any] = {"keep_layers": whole}
    if schedule.levels == 2 and schedule.order == "layer":
        streamed = sum(not place.whole for place in before)
        changes["segment_size"] = schedule.segment_size or best_segment_size(max(1, streamed))
    for on_device in range(min(1, schedule.device_layers), min(schedule.device_layers, len(kept)) + 1):
        shorter = replace(schedule, **changes, device_layers=on_device)
        if place_layers(shorter, len(kept)) == wanted:
            return shorter
    raise UnlikeError


STAYS = [name in (*KINDS, "host", "disk") for name in COLUMNS]
"""For each column of a moment, True if its bytes outlive the operator."""

Bytes = tuple[int, ...]
Run = list[tuple[CellPlace, Cell]]


def with_a_period_more(cells: Mapping[CellPlace, Cell], middle: range) -> dict[CellPlace, Cell] | None:
    """Return the cells of the step in which the period ``middle`` of layers comes twice; None if it has to be run.

    Layers of a zone are alike except in its first and last period, and a step goes through them one after another,
    forward and backward. So the longer step does what the shorter one does, and the middle period twice. Its cells are
    repeated, with all bytes higher by what passing through the period adds, and so are the bytes of all cells that
    follow.

    Args:
        cells: The cells of a step, in the order in which they began.
        middle: The layers of a period that has layers before and after it.
    """
    runs: list[Run] = [list(run) for _, run in groupby(cells.items(), key=lambda item: item[0].layer in middle)]
    found: dict[CellPlace, Cell] = {}
    shift: Bytes = (0,) * len(COLUMNS)
    for index, run in enumerate(runs):
        if run[0][0].layer not in middle:
            found |= _shifted(run, shift, middle.stop, len(middle))
            continue
        before = _first_layer(item for other in reversed(runs[:index]) for item in reversed(other))
        behind = _first_layer(item for other in runs[index + 1 :] for item in other)
        if before is None or behind is None or (before < middle.start) == (behind < middle.start):
            return None
        upward = before < behind
        found |= _shifted(run, shift, middle.start, 0 if upward else len(middle))
        begin, end = run[0][1].moments[0], runs[index + 1][0][1].moments[0]
        passed = (now - then if stays else 0 for now, then, stays in zip(end, begin, STAYS, strict=True))
        shift = tuple(map(add, shift, passed))
        found |= _shifted(run, shift, middle.start, len(middle) if upward else 0)
    return found


def _first_layer(cells: Iterable[tuple[CellPlace, Cell]]) -> int | None:
    return next((place.layer for place, _ in cells if place.layer is not None), None)


def _shifted(run: Run, shift: Bytes, first: int, more: int) -> Iterator[tuple[CellPlace, Cell]]:
    """Yield cells with all bytes higher by ``shift``, and the numbers of layers from ``first`` on by ``more``."""
    for place, cell in run:
        number = place.layer
        moved = replace(place, layer=number + more) if number is not None and number >= first else place
        moments = [tuple(map(add, moment, shift)) for moment in cell.moments] if any(shift) else cell.moments
        yield moved, replace(cell, moments=moments)
