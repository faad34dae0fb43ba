"""Placement of each layer's input under a schedule: stored in a tier, or recomputed.

With ``levels: 1`` every layer stores its input. With ``levels: 2`` layers 0, k, 2k ... store their inputs. The backward
of a segment first runs the layers in between forward again and stores their inputs. At most ceil(L / k) + k - 1 inputs
are stored at a time. This number is smallest for k near the square root of L (Chen et al., Training Deep Nets with
Sublinear Memory Cost, arXiv 1604.06174). With ``order: chunk`` only the first layer's input is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from streamtune.engine.memory.disk import DiskTier
from streamtune.engine.memory.host import Arena, Tally
from streamtune.engine.memory.tiers import DeviceTier, HostTier, Tier
from streamtune.schedule import Schedule
from streamtune.schedule import Tier as TierName


@dataclass(frozen=True)
class Placement:
    """Storage of one layer's input until the backward.

    Layers form segments. The input of a segment's first layer is stored; the backward recomputes the inputs of its
    other layers.

    Attributes:
        unstreamed: True if the layer runs on the whole sequence at once and keeps all its activations.
        begins_segment: True if the layer is the first of a segment.
        ends_segment: True if the layer is the last of a segment.
        tier: Memory that stores the input: ``device``, ``host`` or ``disk``.
    """

    unstreamed: bool = False
    begins_segment: bool = True
    ends_segment: bool = True
    tier: TierName = "device"


def place_layers(schedule: Schedule, layer_count: int) -> list[Placement]:
    """Return the :class:`Placement` of each of a model's ``layer_count`` layers, in order."""
    unstreamed = min(schedule.keep_layers, layer_count)
    streamed = layer_count - unstreamed
    size = (
        1 if schedule.levels == 1 or schedule.order == "chunk" else schedule.segment_size or best_segment_size(streamed)
    )
    placed = [_placement(schedule, index, streamed, size) for index in range(streamed)]
    return placed + [Placement(unstreamed=True)] * unstreamed


def place_differentiated_layers(schedule: Schedule, layer_count: int, first: int) -> list[Placement]:
    """Return the :class:`Placement` of each layer that the backward reaches, from layer ``first`` on.

    Layers below are frozen and store nothing. So layer ``first`` stores its input, wherever its segment begins.
    """
    places = place_layers(schedule, layer_count)[first:]
    return [replace(places[0], begins_segment=True), *places[1:]] if places else []


def count_recomputed_layers(schedule: Schedule, layer_count: int, first: int = 0) -> list[int]:
    """Return, for each segment of ``layer_count`` layers, how many layers the backward runs forward once more.

    The backward ends at layer ``first``.
    """
    extra: list[int] = []
    for place in place_differentiated_layers(schedule, layer_count, first):
        if place.unstreamed:
            continue
        if place.begins_segment:
            extra.append(0)
        else:
            extra[-1] += 1
    return extra


def _placement(schedule: Schedule, index: int, layer_count: int, segment_size: int) -> Placement:
    """Return the placement of layer ``index`` of ``layer_count`` streamed layers.

    The ``device_layers`` inputs that the backward reads first stay on the device: the last recomputed inputs of a
    segment, then the stored inputs of the last segments.
    """
    index_in_segment = index % segment_size
    if index_in_segment:
        stays = index_in_segment >= segment_size - schedule.device_layers
    else:
        stored_behind = -(-layer_count // segment_size) - index // segment_size
        stays = stored_behind <= schedule.device_layers - (segment_size - 1)
    ends_segment = index_in_segment == segment_size - 1 or index == layer_count - 1
    return Placement(
        begins_segment=index_in_segment == 0, ends_segment=ends_segment, tier="device" if stays else schedule.offload
    )


def best_segment_size(layer_count: int, first: int = 0) -> int:
    """Return the number of layers per segment for which the fewest of ``layer_count`` inputs are stored at once.

    Layers below ``first`` are frozen and store nothing.
    """
    sizes = range(1, max(1, layer_count - first) + 1)
    return min(sizes, key=lambda size: -(-layer_count // size) - first // size + size - 1)


class Tiers:
    """The storage tiers (device, host memory, file) of one streamed model, and their byte counts.

    Attributes:
        host: Counter of the bytes in host memory, including blocks on their way to or from the file.
        disk: Counter of the bytes in the file.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.host, self.disk = Tally(), Tally()
        self.arena = Arena(self.host)
        self._tiers: dict[tuple[TierName, torch.device], Tier] = {}

    def reserve(self, host_bytes: int, device: torch.device) -> None:
        """Map ``host_bytes`` of host memory before the first step; they are pinned if ``device`` is an accelerator."""
        self.arena.reserve(host_bytes + host_bytes // 64, device)  # blocks are whole pages

    def get_tier(self, name: TierName, device: torch.device) -> Tier:
        """Return the storage tier ``name`` for tensors on ``device``, created at the first call."""
        key = (name, device)
        if key not in self._tiers:
            self._tiers[key] = self._create_tier(name, device)
        return self._tiers[key]

    def _create_tier(self, name: TierName, device: torch.device) -> Tier:
        if name == "device":
            return DeviceTier()
        if name == "host":
            return HostTier(device, self.arena)
        assert self.schedule.offload_dir is not None
        directory = Path(self.schedule.offload_dir).expanduser()
        return DiskTier(device, str(directory), Arena(self.host), self.disk)

    def __reduce__(self) -> tuple[type[Tiers], tuple[Schedule]]:
        return Tiers, (self.schedule,)  # a copy has its own memory

    def close(self) -> None:
        """Release the host memory and the file. Calls whose backward has not run keep their stored tensors."""
        self._tiers, self.arena = {}, Arena(self.host)
