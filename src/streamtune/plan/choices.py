"""Which schedules there are to choose from: every combination that is allowed, sized to the room there is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from streamtune.engine import Schedule
from streamtune.plan.estimate import Estimator, Figures

__all__ = ["Candidate", "Limits", "Space", "candidates"]

CHUNKS = (1024, 2048, 4096, 8192, 16384)
HEAD_CHUNKS = (256, 1024)
FEWEST_FOR_SEGMENTS = 4
"""Layers below which storing every second input saves nothing worth a forward."""


@dataclass(frozen=True)
class Limits:
    """Memory to plan with, in bytes, and the part of it that stays free.

    Attributes:
        device_bytes: Of the device, all that the step may hold on it, weights included.
        host_bytes: Of the machine, for what is offloaded.
        disk_bytes: Of the directory for offloading.
        margin: Part of each that is not planned with.
        shared: The device's memory is the machine's: a step on the CPU.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    margin: float = 0.05
    shared: bool = False

    @property
    def device(self) -> int:
        """Bytes of the device that are planned with."""
        return int((1 - self.margin) * self.device_bytes)

    @property
    def host(self) -> int:
        """Bytes of the machine that are planned with."""
        return int((1 - self.margin) * self.host_bytes)

    @property
    def disk(self) -> int:
        """Bytes of the disk that are planned with."""
        return int((1 - self.margin) * self.disk_bytes)

    def excess(self, device: float, host: float, disk: float) -> float:
        """By how many bytes the step does not fit, of the tier that lacks most; negative is what is left."""
        if self.shared:
            return max(device + host - self.device, disk - self.disk)
        return max(device - self.device, host - self.host, disk - self.disk)

    def filled(self, device: float, host: float, disk: float) -> float | None:
        """The part that a step takes of the tier it fills most; None if it needs one that is not there.

        Other than :meth:`excess` it tells steps apart that fit where a tier is not there, of which nothing is left.
        """
        pairs = [(device + host, self.device)] if self.shared else [(device, self.device), (host, self.host)]
        wanted = [(used, limit) for used, limit in [*pairs, (disk, self.disk)] if used > 0]
        return None if any(limit == 0 for _, limit in wanted) else max((u / limit for u, limit in wanted), default=0.0)


@dataclass(frozen=True)
class Candidate:
    """A schedule and its estimated figures."""

    schedule: Schedule
    figures: Figures

    def excess(self, limits: Limits) -> float:
        """See :meth:`Limits.excess`."""
        figures = self.figures
        return limits.excess(figures.device_bytes, figures.host_bytes, figures.disk_bytes)

    def tier_that_lacks(self, limits: Limits) -> str:
        """Where most is missing."""
        lacking = {
            "device": self.figures.device_bytes - limits.device,
            "host": -1.0 if limits.shared else self.figures.host_bytes - limits.host,
            "disk": self.figures.disk_bytes - limits.disk,
        }
        return max(lacking, key=lambda tier: lacking[tier])


@dataclass(frozen=True)
class Space:
    """What may be chosen.

    Args:
        layers: Decoder layers of the model.
        length: Tokens of a row, or of a rank's strip of it.
        limits: The memory; a tier without any is not used.
        fixed: Fields of the schedule that are given.
        two_levels: Whether layer inputs may be computed again.
    """

    layers: int
    length: int
    limits: Limits
    fixed: Mapping[str, Any]
    two_levels: bool = True

    def options(self, name: str) -> tuple[Any, ...]:
        """The values of a field that are tried, the thriftiest in device memory among them."""
        if name in self.fixed:
            return (self.fixed[name],)
        host = not self.limits.shared and self.limits.host_bytes > 0
        disk = self.fixed.get("offload_dir") is not None and self.limits.disk_bytes > 0
        match name:
            case "chunk_size":
                return _up_to(CHUNKS, self.length)
            case "head_chunk_size":
                return _up_to(HEAD_CHUNKS, self.length)
            case "offload":
                away = (*(["host"] if host else []), *(["disk"] if disk else []))
                return away if self.fixed.get("device_layers") and away else ("device", *away)
            case "levels":
                if self.fixed.get("segment_size"):
                    return (2,)
                return (1, 2) if self.two_levels and self.layers >= FEWEST_FOR_SEGMENTS else (1,)
            case "keep_kv" | "keep_attention":
                return ("no", "device", "host") if host else ("no", "device")
            case "stream_grads":
                return (False, True)
        raise KeyError(name)

    def combinations(self) -> Iterator[Schedule]:
        """Every allowed combination, but for the layers that stay on the device or are kept whole."""
        names = ("chunk_size", "head_chunk_size", "offload", "levels", "keep_kv", "keep_attention", "stream_grads")
        for values in product(*(self.options(name) for name in names)):
            chosen = dict(zip(names, values, strict=True))
            chosen["grad_dtype"] = self.fixed.get("grad_dtype", "float32")
            if chosen["offload"] == "disk":
                chosen["offload_dir"] = self.fixed["offload_dir"]
            if chosen["levels"] == 2:
                chosen["segment_size"] = self.fixed.get("segment_size")
            if self.fixed.get("device_layers") and chosen["offload"] == "device":
                continue
            yield Schedule(**chosen)


def candidates(space: Space, estimator: Estimator, limits: Limits) -> Iterator[Candidate]:
    """Every schedule worth a thought, with its estimate. One that does not fit ``limits`` is among them, for the error.

    Spare memory of the device is filled: by layers kept whole, which saves their recomputation, or by layer inputs that
    need not go away.
    """
    for schedule in space.combinations():
        plain = Candidate(schedule, estimator.estimate(schedule))
        sized = [] if space.fixed.get("device_layers") else [plain]
        if schedule.offload != "device" and (schedule.levels == 1 or not sized):
            sized += _with_device_layers(plain, space, estimator, limits)
        for candidate in sized:
            yield from _with_kept_layers(candidate, space, estimator, limits)


def _with_device_layers(
    candidate: Candidate, space: Space, estimator: Estimator, limits: Limits
) -> Iterator[Candidate]:
    """As many layer inputs on the device as it holds, and as few as the host asks for."""
    schedule, figures = candidate.schedule, candidate.figures
    each = estimator.of_a_device_layer(schedule)
    most = math.floor(min(space.layers, figures.room_for(each, limits.device)))
    lacking, relief = figures.host_bytes - limits.host, -each.host_bytes
    if schedule.offload == "disk":
        lacking, relief = figures.disk_bytes - limits.disk, -each.disk_bytes
    least = math.ceil(lacking / relief) if lacking > 0 and relief > 0 else 0
    counts = {least, most} if "device_layers" not in space.fixed else {space.fixed["device_layers"]}
    for count in sorted(counts):
        if 0 < count <= space.layers:
            yield Candidate(replace(schedule, device_layers=count), figures.plus(each, count))


def _with_kept_layers(candidate: Candidate, space: Space, estimator: Estimator, limits: Limits) -> Iterator[Candidate]:
    """The candidate as it is, and with as many layers kept whole as the device holds."""
    schedule, figures = candidate.schedule, candidate.figures
    wanted = space.fixed.get("keep_layers")
    if wanted == 0 or (wanted is None and schedule.levels == 2):  # two levels spend what keeping layers saves
        yield candidate
        return
    each = estimator.of_a_kept_layer
    room = figures.room_for(each, limits.device - (figures.host_bytes if limits.shared else 0))
    counts = {0, max(0, math.floor(min(space.layers, room)))} if wanted is None else {wanted}
    for count in sorted(counts):
        kept = replace(schedule, keep_layers=count) if count else schedule
        yield Candidate(kept, figures.plus(each, count))


def _up_to(sizes: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The sizes below ``length``, and the first that covers it."""
    below = [size for size in sizes if size < length]
    return tuple(sizes[: len(below) + 1])
