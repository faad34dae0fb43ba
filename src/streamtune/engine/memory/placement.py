"""Placement of each layer's input by a schedule: the tier that stores it, or that it is computed again.

With one level every layer stores its input. With two, layers 0, k, 2k ... do; the backward of a segment first runs the
layers between forward once more and stores their inputs. In the order of chunks only the first layer's is stored: the
levels divide a chunk's layers (``engine.chain``). At most ceil(L / k) + k - 1 inputs are held at a time, fewest
for k near the square root of L (Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from streamtune.engine.memory.disk import DiskTier
from streamtune.engine.memory.host import Arena, Tally
from streamtune.engine.memory.tiers import DeviceTier, HostTier, Tier
from streamtune.schedule import Schedule
from streamtune.schedule import Tier as TierName


@dataclass(frozen=True)
class Placement:
    """Treatment of one layer's input until the backward.

    Attributes:
        whole: The layer is not streamed: it keeps all its activations.
        begins: The input is stored in the forward; else it is computed again from the input of the layer before.
        ends: No layer behind it is computed again from this layer's input.
        tier: Tier that stores the input.
    """

    whole: bool = False
    begins: bool = True
    ends: bool = True
    tier: TierName = "device"


def place_layers(schedule: Schedule, count: int) -> list[Placement]:
    """Return the placement of each of ``count`` layers, in order."""
    whole = min(schedule.keep_layers, count)
    streamed = count - whole
    size = (
        1 if schedule.levels == 1 or schedule.order == "chunk" else schedule.segment_size or best_segment_size(streamed)
    )
    placed = [_place(schedule, index, streamed, size) for index in range(streamed)]
    return placed + [Placement(whole=True)] * whole


def extra_forwards(schedule: Schedule, count: int) -> list[int]:
    """Return, for each segment of ``count`` layers, how many layers run forward once more in the backward."""
    found: list[int] = []
    for place in place_layers(schedule, count):
        if place.whole:
            continue
        if place.begins:
            found.append(0)
        else:
            found[-1] += 1
    return found


def _place(schedule: Schedule, index: int, count: int, size: int) -> Placement:
    """Return the placement of layer ``index`` of ``count`` streamed layers.

    The inputs that the backward needs first stay on the device. These are first a segment's own, which exist only while
    it is worked on, and then the stored ones from the last.
    """
    inner = index % size
    if inner:
        stays = inner >= size - schedule.device_layers
    else:
        stored_behind = -(-count // size) - index // size
        stays = stored_behind <= schedule.device_layers - (size - 1)
    ends = inner == size - 1 or index == count - 1
    return Placement(begins=inner == 0, ends=ends, tier="device" if stays else schedule.offload)


def best_segment_size(count: int) -> int:
    """Return the size of segments with which ``count`` layers hold the fewest inputs at a time."""
    return min(range(1, max(1, count) + 1), key=lambda size: -(-count // size) + size - 1)


class Tiers:
    """Host and disk memory of one streamed model.

    Attributes:
        host: Bytes held in the machine's memory, those on their way to or from a file among them.
        disk: Bytes held in the file.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.host, self.disk = Tally(), Tally()
        self.arena = Arena(self.host)
        self._made: dict[tuple[TierName, torch.device], Tier] = {}

    def reserve(self, host_bytes: int, device: torch.device) -> None:
        """Map ``host_bytes`` of the machine's memory before the first step, and lock them for an accelerator."""
        self.arena.reserve(host_bytes + host_bytes // 64, device)  # blocks are whole pages

    def of(self, name: TierName, device: torch.device) -> Tier:
        """Return the tier of that name for tensors of a device."""
        key = (name, device)
        if key not in self._made:
            self._made[key] = self._make(name, device)
        return self._made[key]

    def _make(self, name: TierName, device: torch.device) -> Tier:
        if name == "device":
            return DeviceTier()
        if name == "host":
            return HostTier(device, self.arena)
        assert self.schedule.offload_dir is not None
        return DiskTier(device, self.schedule.offload_dir, Arena(self.host), self.disk)

    def __reduce__(self) -> tuple[type[Tiers], tuple[Schedule]]:
        return Tiers, (self.schedule,)  # a copy has its own memory

    def close(self) -> None:
        """Drop memory and file; a call whose backward is still to come keeps what it has stored."""
        self._made, self.arena = {}, Arena(self.host)
