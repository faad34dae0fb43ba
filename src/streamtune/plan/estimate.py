"""Bytes and work of many schedules from simulations of few: what a choice adds is found out once, on short sequences.

The bytes a step holds in each of its phases grow with the sequence by a straight line (chunks do not grow, everything
else is kept for each token), and so does its work, but for attention, which is a square of it. And choices add up: what
keeping the attention outputs costs hardly depends on where the layer inputs are. So a schedule's figures at any length
are those of a reference plus what each departure from it adds, each a line through two short simulations.

This is for choosing. A chosen schedule is simulated whole before it is believed, see ``planner``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from streamtune.engine import Schedule
from streamtune.plan.simulate import Simulation, Work, Workload

__all__ = ["Estimator", "Figures"]

Simulate = Callable[[Workload, Schedule], Simulation]

DEVICE, WORK, HOST, DISK = "device:", "work:", "host", "disk"
SQUARES = frozenset({f"{WORK}attention_flops", f"{WORK}attention_backward_flops"})
"""What grows with the square of the length."""

SHORT, LONGER = 2, 4
"""Chunks of the two short sequences."""


@dataclass(frozen=True)
class Figures:
    """Bytes on the device by phase, bytes on host and disk, work: numbers that can be added and scaled, by name."""

    values: dict[str, float]

    @staticmethod
    def of(simulation: Simulation) -> Figures:
        """The figures of a simulated step."""
        work = {f"{WORK}{f.name}": float(getattr(simulation.work, f.name)) for f in fields(simulation.work)}
        phases = {f"{DEVICE}{name}": float(size) for name, size in simulation.phases.items()}
        return Figures({**phases, HOST: float(simulation.host_bytes), DISK: float(simulation.disk_bytes), **work})

    @property
    def device_bytes(self) -> float:
        """The peak over the phases."""
        return max(size for name, size in self.values.items() if name.startswith(DEVICE))

    @property
    def host_bytes(self) -> float:
        """Bytes in the machine's memory."""
        return self.values[HOST]

    @property
    def disk_bytes(self) -> float:
        """Bytes in files."""
        return self.values[DISK]

    @property
    def work(self) -> Work:
        """What the step computes and copies."""
        return Work(**{f.name: max(0, round(self.values.get(f"{WORK}{f.name}", 0.0))) for f in fields(Work)})

    def plus(self, other: Figures, times: float = 1.0) -> Figures:
        """``self + times * other``."""
        names = {*self.values, *other.values}
        return Figures({n: self.values.get(n, 0.0) + times * other.values.get(n, 0.0) for n in names})

    def room_for(self, more: Figures, limit: float) -> float:
        """How many times ``more`` fits beside these figures on a device of ``limit`` bytes."""
        times = float("inf")
        for name, size in self.values.items():
            step = more.values.get(name, 0.0)
            if name.startswith(DEVICE) and step > 0:
                times = min(times, (limit - size) / step)
        return times


def extrapolate(at: tuple[int, Figures], and_at: tuple[int, Figures], length: int) -> Figures:
    """The figures at ``length``: lines through two lengths, and for attention ``a T^2 + b T``."""
    (t1, f1), (t2, f2) = at, and_at
    if t1 == t2:
        return f1
    found: dict[str, float] = {}
    for name, first in f1.values.items():
        second = f2.values.get(name, 0.0)
        if name in SQUARES:
            slope = (second / t2 - first / t1) / (t2 - t1)
            found[name] = (first / t1 + slope * (length - t1)) * length
        else:
            found[name] = first + (second - first) / (t2 - t1) * (length - t1)
    return Figures(found)


@dataclass
class Estimator:
    """Figures of any schedule at any length, from short simulations that are made when they are first needed.

    Args:
        workload: What is trained; its length is not used.
        simulate: Simulates a step.
        reference: What every choice is measured against: on the device, one level, nothing kept.
    """

    workload: Workload
    simulate: Simulate
    reference: Schedule
    simulations: int = 0
    """How many were made."""
    _known: dict[tuple[Schedule, int], Figures] = field(default_factory=dict)

    def estimate(self, schedule: Schedule, length: int) -> Figures:
        """The figures of a schedule at a length."""
        ref = self.reference
        total = self._at(replace(ref, chunk_size=schedule.chunk_size), length)
        total = total.plus(self._added(length, head_chunk_size=schedule.head_chunk_size))
        total = total.plus(self.stored(schedule, length))
        for name in ("keep_kv", "keep_attention"):
            total = total.plus(self._added(length, **{name: getattr(schedule, name)}))
        if schedule.keep_layers:
            total = total.plus(self.of_a_kept_layer(length), schedule.keep_layers)
        if schedule.device_layers:
            total = total.plus(self.of_a_device_layer(schedule, length), schedule.device_layers)
        return total

    def stored(self, schedule: Schedule, length: int) -> Figures:
        """What it adds to store layer inputs, and the gradients that go with them, where and as often as it says."""
        names = ("offload", "levels", "segment_size", "stream_grads")
        chosen = {name: getattr(schedule, name) for name in names}
        return self._added(length, **chosen, offload_dir=schedule.offload_dir)

    def of_a_kept_layer(self, length: int) -> Figures:
        """What keeping one layer whole adds."""
        return self._added(length, keep_layers=1)

    def of_a_device_layer(self, schedule: Schedule, length: int) -> Figures:
        """What leaving the input of one layer on the device adds."""
        away: dict[str, Any] = {"offload": schedule.offload, "offload_dir": schedule.offload_dir}
        return self._added(length, **away, device_layers=1).plus(self._added(length, **away), -1.0)

    def _added(self, length: int, **choices: Any) -> Figures:
        changed = replace(self.reference, **choices)
        if changed == self.reference:
            return Figures({})
        return self._at(changed, length).plus(self._at(self.reference, length), -1.0)

    def _at(self, schedule: Schedule, length: int) -> Figures:
        """A schedule's figures at a length, through those at two short ones; a short length is simulated as it is."""
        short, longer = (min(length, count * schedule.chunk_size) for count in (SHORT, LONGER))
        return extrapolate((short, self._short(schedule, short)), (longer, self._short(schedule, longer)), length)

    def _short(self, schedule: Schedule, length: int) -> Figures:
        key = (schedule, length)
        if key not in self._known:
            self.simulations += 1
            self._known[key] = Figures.of(self.simulate(replace(self.workload, length=length), schedule))
        return self._known[key]
