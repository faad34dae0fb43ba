"""Estimate bytes and work of hundreds of schedules from simulations of five.

A plain step, one with another chunk size, and one each that keeps keys and values, attention outputs, or a whole layer,
are simulated at the length that is planned for. A choice adds its difference from the plain step, and the differences
of several choices add up, because each keeps tensors of its own. In the chunk size c, bytes are linear, and work is ``a
+ b / c``: weights and the prefix are touched once a chunk. Where tensors are kept, and how many, is arithmetic.

Estimates serve to choose. The chosen schedule itself is simulated (``planner``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from streamtune.engine.memory.placement import extra_forwards, place_layers
from streamtune.plan.simulate.partition import moved_again
from streamtune.plan.simulate.simulate import Simulation, Work
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

Simulate = Callable[[Workload, Schedule], Simulation]

DEVICE, WORK, HOST, DISK = "device:", "work:", "host", "disk"
ATTENTION = f"{WORK}attention_flops"
FORWARD_SHARE = 2 / 9
"""Share of a forward in a step's attention, forward run twice: 2 and 2 products of a tile, 5 in the backward."""


IN_FLIGHT = 4
"""Chunks on the device of tensors kept elsewhere: on their way there, or fetched ahead."""

HEAD_COPIES = 2
"""Copies of a chunk's fp32 logits that a smaller head chunk makes smaller."""


@dataclass(frozen=True)
class Figures:
    """Bytes on the device by phase, bytes on host and disk, work: numbers that can be added and scaled, by name."""

    values: dict[str, float]

    @staticmethod
    def of(simulation: Simulation) -> Figures:
        work = {f"{WORK}{f.name}": float(getattr(simulation.work, f.name)) for f in fields(simulation.work)}
        phases = {f"{DEVICE}{name}": float(size) for name, size in simulation.phases.items()}
        return Figures({**phases, HOST: float(simulation.host_bytes), DISK: float(simulation.disk_bytes), **work})

    @property
    def device_bytes(self) -> float:
        return max(size for name, size in self.values.items() if name.startswith(DEVICE))

    @property
    def host_bytes(self) -> float:
        return self.values.get(HOST, 0.0)

    @property
    def disk_bytes(self) -> float:
        return self.values.get(DISK, 0.0)

    @property
    def work(self) -> Work:
        """The work of the step, in whole numbers of 0 or more."""
        return Work(**{f.name: max(0, round(self.values.get(f"{WORK}{f.name}", 0.0))) for f in fields(Work)})

    def plus(self, other: Figures, times: float = 1.0) -> Figures:
        """Return ``self + times * other``."""
        names = {*self.values, *other.values}
        return Figures({n: self.values.get(n, 0.0) + times * other.values.get(n, 0.0) for n in names})

    def room_for(self, more: Figures, limit: float) -> float:
        """Return how many times ``more`` fits on a device of ``limit`` bytes in addition to these figures."""
        times = float("inf")
        for name, size in self.values.items():
            step = more.values.get(name, 0.0)
            if name.startswith(DEVICE) and step > 0:
                times = min(times, (limit - size) / step)
        return times


class Estimator:
    """Estimates the figures of any schedule of one workload.

    Args:
        workload: The step that is trained.
        layers: Number of decoder layers of the model.
        simulate: Simulates a step.
        chunks: Chunk sizes that will be estimated.
        head_chunk: Head chunk size of the simulated steps; the largest that will be estimated.
        given: Fields of the schedules that are not chosen.
    """

    def __init__(
        self,
        workload: Workload,
        layers: int,
        simulate: Simulate,
        *,
        chunks: Sequence[int],
        head_chunk: int,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers, self.rows, self.length = layers, workload.rows, workload.shard_tokens
        self.chunk, self.wide = chunks[min(1, len(chunks) - 1)], chunks[min(3, len(chunks) - 1)]
        self.head_chunk = head_chunk
        plain = Schedule(self.chunk, head_chunk, **(given or {}))
        self.plainest = Figures.of(simulate(workload, plain))
        self.simulations = 1

        def added(**choice: Any) -> Figures:
            self.simulations += 1
            return Figures.of(simulate(workload, replace(plain, **choice))).plus(self.plainest, -1.0)

        self._wider = added(chunk_size=self.wide) if self.wide != self.chunk else Figures({})
        self._keys = added(keep_kv="device")
        self._outputs = added(keep_attention="device")
        self.of_a_kept_layer = added(keep_layers=1) if plain.weights == "device" else Figures({})
        """Figures that keeping one layer whole adds."""
        self.forwards = 0.0 if workload.scored is None else workload.scored.forwards
        model: Any = workload.make_model()
        embedding: Tensor = model.get_input_embeddings().weight
        self._gathered_again = Figures({f"{WORK}moved_bytes": float(moved_again(model, workload, 1))})
        """Copies from the host of one extra forward, if the weights wait there."""
        self.vocabulary = embedding.shape[0]
        element = 2 if plain.fetch_dtype == "bfloat16" else embedding.element_size()
        self.input_bytes = embedding.shape[1] * element * self.rows * self.length
        """Bytes of one layer's input, on one rank."""

    # --- a schedule ---------------------------------------------------------------------------------------------------

    def estimate(self, schedule: Schedule) -> Figures:
        total = self._plain(schedule.chunk_size)
        if self.head_chunk > schedule.head_chunk_size:
            fewer = 4 * HEAD_COPIES * self.rows * self.vocabulary * (self.head_chunk - schedule.head_chunk_size)
            total = total.plus(Figures({f"{DEVICE}head": -fewer}))
        total = total.plus(self._inputs(schedule))
        share = (self.layers - min(schedule.keep_layers, self.layers)) / self.layers
        for kept, place in ((self._keys, schedule.keep_kv), (self._outputs, schedule.keep_attention)):
            if place != "no":
                total = total.plus(self._somewhere(kept, str(place)), share)
        return total.plus(self.of_a_kept_layer, schedule.keep_layers)

    def of_a_device_layer(self, schedule: Schedule) -> Figures:
        return self._moved(self.input_bytes, schedule.offload, -1.0)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _plain(self, chunk: int) -> Figures:
        """Return the figures with another chunk size: one level, all layer inputs on the device, nothing kept."""
        if self.wide == self.chunk:
            return self.plainest
        chunk = min(chunk, self.length)
        along = (chunk - self.chunk) / (self.wide - self.chunk)
        turns = (1 / chunk - 1 / self.chunk) / (1 / self.wide - 1 / self.chunk)
        more = {n: v * (turns if n.startswith(WORK) else along) for n, v in self._wider.values.items()}
        return self.plainest.plus(Figures(more))

    def _inputs(self, schedule: Schedule) -> Figures:
        """Return what storing layer inputs by the schedule adds, compared with all of them on the device."""
        each = self.input_bytes
        streamed = self.layers - min(schedule.keep_layers, self.layers)
        total = Figures({})
        if schedule.levels == 2:
            held = min(streamed, _most_held(schedule, self.layers))
            forward = self._forward(attention=schedule.keep_attention == "no")
            total = self._on_device(-(streamed - held) * each).plus(forward, (streamed - held) / self.layers)
            total = total.plus(self._gathered_again, sum(extra_forwards(schedule, self.layers)))
            streamed = held
        if schedule.offload != "device":
            # The gradient that is handed on waits there too, unless it takes the place of an input that stayed.
            away = max(0, streamed - schedule.device_layers) + (schedule.device_layers == 0)
            again = 1 if schedule.keep_kv == "no" else 0  # the projection of keys and values reads inputs once more
            total = total.plus(self._moved(away * each, schedule.offload, again=again))
            total = total.plus(self._on_device(IN_FLIGHT * each * min(1.0, schedule.chunk_size / self.length)))
        if schedule.stream_grads:  # the gradient of the output goes chunk by chunk as that of the input comes
            total = total.plus(Figures({f"{DEVICE}backward": -each * (1 if schedule.offload == "device" else 2)}))
        return total

    def _forward(self, *, attention: bool) -> Figures:
        """Return the work of another forward of the layers: a fourth of a step's products, two ninths of its attention;
        a smaller share if a reference runs forward as well.
        """
        work = self.plainest.values
        forward = {name: work[name] / (4 + self.forwards) for name in (f"{WORK}matmul_flops", f"{WORK}touched_bytes")}
        share = FORWARD_SHARE / (1 + FORWARD_SHARE * self.forwards)
        return Figures({**forward, ATTENTION: work[ATTENTION] * share if attention else 0.0})

    def _somewhere(self, kept: Figures, place: str) -> Figures:
        """Return the figures of tensors kept at ``place``, from the figures of the same tensors on the device."""
        if place == "device":
            return kept
        size = max(value for name, value in kept.values.items() if name.startswith(DEVICE))
        return kept.plus(self._moved(size, place))

    def _moved(self, size: float, place: str, times: float = 1.0, *, again: int = 0) -> Figures:
        """Return what moving ``size`` bytes from device to host or disk adds: copies there, back and ``again`` more."""
        name = f"{WORK}moved_bytes" if place == "host" else f"{WORK}disk_moved_bytes"
        away = Figures({HOST if place == "host" else DISK: size, name: (2 + again) * size})
        return Figures({}).plus(self._on_device(-size), times).plus(away, times)

    def _on_device(self, size: float) -> Figures:
        """Return the figures of bytes that are on the device in all phases but the optimizer's."""
        names = [n for n in self.plainest.values if n.startswith(DEVICE) and not n.endswith("optimizer")]
        return Figures(dict.fromkeys(names, size))


def _most_held(schedule: Schedule, layers: int) -> int:
    """Return the number of layer inputs held at a time: inputs stored in the forward, and one segment's inputs."""
    places = place_layers(schedule, layers)
    stored = sum(place.begins and not place.whole for place in places)
    longest = current = 0
    for place in places:
        current = 0 if place.begins else current + 1
        longest = max(longest, current)
    return stored + longest
