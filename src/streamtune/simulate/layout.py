"""Find the layers and chunks of a step that are alike, and the shorter steps from which its figures follow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from streamtune.engine import decoder_layers
from streamtune.engine.memory.disk import IN_FLIGHT
from streamtune.engine.memory.placement import best_segment_size, place_layers
from streamtune.ops.attention.attention import KEY_BLOCK
from streamtune.schedule import Schedule
from streamtune.simulate.extrapolate import Axis, UnlikeError, Zone, zones
from streamtune.simulate.shard import SPANS, WINDOWS

__all__ = ["Shorter", "StepLayout", "kinds_of_layers", "layout_of"]

LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")


@dataclass(frozen=True)
class Shorter:
    """A shorter step that is run for its share in the whole one.

    Attributes:
        layers: The layers it keeps.
        length: Its tokens.
        schedule: Its schedule.
        longer: The zone with a period more; None if there is none.
        chunks: Number of its chunks.
        share: The factor of its figures.
    """

    layers: list[int]
    length: int
    schedule: Schedule
    longer: int | None
    chunks: int
    share: int


@dataclass(frozen=True)
class StepLayout:
    """Zones of layers, and chunks of ``size`` tokens."""

    layers: list[Zone]
    chunks: Axis
    size: int
    length: int

    def steps(self, schedule: Schedule, kinds: list[Hashable]) -> Iterator[Shorter]:
        """Yield the steps to run, the shortest first."""
        beyond = {number: zone.axis.beyond for number, zone in enumerate(self.layers) if zone.axis.beyond}
        whole, more = 1 - sum(beyond.values()), self.chunks.beyond
        rows = [(None, whole), *beyond.items()]
        for chunks, factor in ((self.chunks.base, 1 - more), (self.chunks.base, more)) if more else ((None, 1),):
            count = self.chunks.count if chunks is None else chunks + (factor == more)
            length = self.length if chunks is None else count * self.size
            for longer, share in rows:
                kept = [i for number, zone in enumerate(self.layers) for i in zone.layers(number == longer)]
                shorter = _schedule(schedule, self.size if more else schedule.chunk_size, kinds, kept)
                yield Shorter(kept, length, shorter, longer, count, share * factor)


def layout_of(model: Any, schedule: Schedule, length: int, *, streamed: bool, layers: bool, chunks: bool) -> StepLayout:
    """Return the layout by which a step of ``length`` tokens may be shortened.

    Args:
        model: The model.
        schedule: Its schedule.
        length: Tokens of a row.
        streamed: True if the step has chunks.
        layers: True if layers may be left out.
        chunks: True if chunks may be left out.
    """
    count = len(schedule.chunks(length)) if streamed else 1
    size = -(-length // count)
    kinds = kinds_of_layers(model, schedule if streamed else None)
    found = zones(kinds) if layers else [Zone(0, len(kinds), Axis(1))]
    axis = Axis(count)
    alone = _alone(model, size, length)
    if streamed and chunks and alone is not None:
        head = -(-3 * schedule.head_chunk_size // size) - 3  # at least three chunks of the head
        away = "host" in (schedule.keep_kv, schedule.keep_attention) or schedule.offload != "device"
        # While a chunk is worked on, the next one may be fetched: of the last two of a pass one has none, one is none.
        # The backward begins at the end, and its second chunk makes room for the sums.
        # On the way to a file a few chunks are held.
        alone += away + (IN_FLIGHT if schedule.offload == "disk" else 0)
        axis = Axis.of(count, max(alone, head), tail=2)
    return StepLayout(found, axis, size, length)


def kinds_of_layers(model: nn.Module, schedule: Schedule | None) -> list[Hashable]:
    """Return the kind of each layer: its modules, their sizes, their settings, its place in the schedule."""
    layers = decoder_layers(model)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    lists = [v for config in configs for v in vars(config).values() if isinstance(v, list) and len(v) == len(layers)]
    places = place_layers(schedule, len(layers)) if schedule is not None else [None] * len(layers)
    return [
        (_looks(layer), tuple(repr(each[index]) for each in lists), places[index]) for index, layer in enumerate(layers)
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
    """Return the number of chunks at the start that see fewer keys than later ones; None if chunks are not alike."""
    settings = [vars(m.config) for m in model.modules() if hasattr(m, "config")]

    def found(names: tuple[str, ...]) -> list[int]:
        return [v for s in settings for name in names if isinstance(v := s.get(name), int) and 0 < v < length]

    if found(SPANS):
        return None
    blocks = -(-KEY_BLOCK // size)  # until there is a whole block of keys before a chunk
    return max((-(-window // size) + 1 for window in found(WINDOWS)), default=blocks)


def _schedule(schedule: Schedule, size: int, kinds: list[Hashable], kept: list[int]) -> Schedule:
    """Return the schedule that places the layers kept as the whole schedule places the same layers.

    Raises:
        UnlikeError: There is none.
    """
    before = place_layers(schedule, len(kinds))
    wanted = [before[index] for index in kept]
    whole = sum(place.whole for place in wanted)
    changes: dict[str, Any] = {"chunk_size": size, "keep_layers": whole}
    if schedule.levels == 2:
        streamed = sum(not place.whole for place in before)
        changes["segment_size"] = schedule.segment_size or best_segment_size(max(1, streamed))
    for on_device in range(min(1, schedule.device_layers), min(schedule.device_layers, len(kept)) + 1):
        shorter = replace(schedule, **changes, device_layers=on_device)
        if place_layers(shorter, len(kept)) == wanted:
            return shorter
    raise UnlikeError
