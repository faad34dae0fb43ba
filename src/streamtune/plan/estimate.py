"""Bytes and work of any schedule from simulations of five short steps.

At chunks of c tokens a step on T tokens holds, in each of its phases, ``m + s T + g c`` bytes, and does ``a + b T + d T/c``
of each kind of work, attention aside, whose pairs are ``p T^2 + q T``: weights are touched once a chunk, tokens once. Two
short lengths and a second chunk size give these numbers; two more steps tell what it adds to keep keys, values and
attention outputs, and to keep a layer whole. Where a tensor is kept is then arithmetic.

This is for choosing among hundreds. A schedule that is chosen is simulated whole before it is believed (``planner``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from streamtune.engine import Schedule
from streamtune.engine.placement import place_layers
from streamtune.plan.simulate import Simulation, Work, Workload

__all__ = ["Estimator", "Figures", "Simulate"]

Simulate = Callable[[Workload, Schedule], Simulation]

DEVICE, WORK, HOST, DISK = "device:", "work:", "host", "disk"
FORWARD, BACKWARD = f"{WORK}attention_flops", f"{WORK}attention_backward_flops"
KEPT_TERM = "attention outputs"
INPUT_TERM = "layer inputs"

IN_FLIGHT = 4
"""Chunks on the device of what is kept elsewhere: on their way there, or fetched ahead."""

HEAD_COPIES = 2
"""Copies of a chunk's logits in fp32 that a smaller head chunk makes smaller."""


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
        return self.values.get(HOST, 0.0)

    @property
    def disk_bytes(self) -> float:
        """Bytes in files."""
        return self.values.get(DISK, 0.0)

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


class Estimator:
    """Figures of any schedule at any length.

    Args:
        workload: What is trained; its length only says how short the short steps have to be.
        layers: Decoder layers of the model.
        simulate: Simulates a step.
        grad_dtype: Of the schedules that are asked about.
        vocabulary: Entries of the head.
    """

    def __init__(
        self, workload: Workload, layers: int, simulate: Simulate, *, grad_dtype: str = "float32", vocabulary: int = 0
    ) -> None:
        self.layers, self.rows, self.vocabulary = layers, workload.batch_size, vocabulary
        self.head_chunk = min(1024, workload.length)
        chunk = self.chunk = max(16, min(1024, workload.length // 4))
        plain = Schedule(chunk, self.head_chunk, grad_dtype=grad_dtype)  # type: ignore[arg-type]

        def step(length: int, schedule: Schedule) -> Simulation:
            return simulate(replace(workload, length=length), schedule)

        short = step(2 * chunk, plain)
        kept = step(2 * chunk, replace(plain, keep_kv="device", keep_attention="device"))
        self._two, self._three = Figures.of(short), Figures.of(step(3 * chunk, plain))
        self._wide = Figures.of(step(4 * chunk, replace(plain, chunk_size=2 * chunk)))
        self._whole = Figures.of(step(2 * chunk, replace(plain, keep_layers=1))).plus(self._two, -1.0)
        self._kept = Figures.of(kept).plus(self._two, -1.0)
        self.simulations = 5
        tokens = 2 * chunk * layers
        self.input_bytes = _input_bytes(workload) * self.rows
        """Of a token's hidden states, in all rows."""
        self._output_bytes = kept.terms.get(KEPT_TERM, 0) / tokens

    # --- a schedule ---------------------------------------------------------------------------------------------------

    def estimate(self, schedule: Schedule, length: int) -> Figures:
        """The figures of a schedule at a length."""
        total = self.plain(schedule.chunk_size, length)
        if self.head_chunk > schedule.head_chunk_size:
            fewer = 4 * HEAD_COPIES * self.rows * self.vocabulary * (self.head_chunk - schedule.head_chunk_size)
            total = total.plus(Figures({f"{DEVICE}head": -fewer}))
        total = total.plus(self._inputs(schedule, length))
        share = (self.layers - min(schedule.keep_layers, self.layers)) / self.layers
        if schedule.keep_kv != "no":
            total = total.plus(self._somewhere(self._keys(length), str(schedule.keep_kv), schedule), share)
        if schedule.keep_attention != "no":
            total = total.plus(self._somewhere(self._outputs(length), schedule.keep_attention, schedule), share)
        return total.plus(self.of_a_kept_layer(length), schedule.keep_layers)

    def plain(self, chunk: int, length: int) -> Figures:
        """One level, everything stored on the device, nothing kept."""
        c, found = self.chunk, {}
        chunk = min(chunk, length)
        for name, two in self._two.values.items():
            three, wide = self._three.values.get(name, 0.0), self._wide.values.get(name, 0.0)
            if name in (FORWARD, BACKWARD):
                found[name] = _square(two, three, c, length)
            elif name.startswith(WORK):
                each = (wide - two) / (2 * c)  # of a token
                turn = (three - two) - c * each  # of a chunk
                found[name] = two - 2 * (c * each + turn) + each * length + turn * length / chunk
            else:
                slope = (three - two) / c
                width = (wide - two) / c - 2 * slope
                found[name] = two + slope * (length - 2 * c) + width * (chunk - c)
        return Figures(found)

    def of_a_kept_layer(self, length: int) -> Figures:
        """What it adds to keep one layer whole: bytes of every token, and no second forward."""
        ratio = length / (2 * self.chunk)
        scaled = {n: v * ratio * (ratio if n in (FORWARD, BACKWARD) else 1) for n, v in self._whole.values.items()}
        return Figures(scaled)

    def of_a_device_layer(self, schedule: Schedule, length: int) -> Figures:
        """What it adds to leave the input of one layer on the device."""
        return self._moved(self.input_bytes * length, schedule.offload, -1.0)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _inputs(self, schedule: Schedule, length: int) -> Figures:
        """Where layer inputs wait and how many of them, against all of them on the device."""
        each = self.input_bytes * length
        streamed = self.layers - min(schedule.keep_layers, self.layers)
        total = Figures({})
        if schedule.levels == 2:
            held = _most_held(schedule, self.layers)
            forward = self._forward(length, attention=schedule.keep_attention == "no")
            total = self._on_device(-(streamed - held) * each).plus(forward, (streamed - held) / self.layers)
            streamed = held
        if schedule.offload != "device":
            away = max(0, streamed - schedule.device_layers)
            total = total.plus(self._moved(away * each, schedule.offload))
            total = total.plus(self._on_device(IN_FLIGHT * self.input_bytes * min(length, schedule.chunk_size)))
        if schedule.stream_grads:  # the gradient of the output is gone chunk by chunk as that of the input comes
            total = total.plus(Figures({f"{DEVICE}backward": -each * (1 if schedule.offload == "device" else 2)}))
        return total

    def _forward(self, length: int, *, attention: bool) -> Figures:
        """One more forward of the layers: a fourth of a step's products; of attention what is not its backward."""
        work = self.plain(self.chunk, length).values
        forward = {name: work[name] / 4 for name in (f"{WORK}matmul_flops", f"{WORK}touched_bytes")}
        return Figures({**forward, FORWARD: work[FORWARD] / 2 if attention else 0.0})

    def _keys(self, length: int) -> Figures:
        """Keys and values kept on the device: everything that is not for the attention outputs."""
        names = {n: v for n, v in self._kept.values.items() if n not in (FORWARD, BACKWARD)}
        grown = Figures(names).plus(self._on_device(self._output_bytes * 2 * self.chunk * self.layers), -1.0)
        return Figures({n: v * length / (2 * self.chunk) for n, v in grown.values.items()})

    def _outputs(self, length: int) -> Figures:
        """Attention outputs kept on the device: attention runs forward once."""
        kept = self._on_device(self._output_bytes * length * self.layers)
        return kept.plus(Figures({FORWARD: -self.plain(self.chunk, length).values[FORWARD] / 2}))

    def _somewhere(self, kept: Figures, place: str, schedule: Schedule) -> Figures:
        """What is kept on the device, kept there or on the host."""
        if place == "device":
            return kept
        size = max(value for name, value in kept.values.items() if name.startswith(DEVICE))
        return kept.plus(self._moved(size, place))

    def _moved(self, size: float, place: str, times: float = 1.0) -> Figures:
        """``size`` bytes on host or disk that were on the device: copied there, and back."""
        name = f"{WORK}moved_bytes" if place == "host" else f"{WORK}disk_moved_bytes"
        away = Figures({HOST if place == "host" else DISK: size, name: 2 * size})
        return Figures({}).plus(self._on_device(-size), times).plus(away, times)

    def _on_device(self, size: float) -> Figures:
        """Bytes that are there in all phases but the optimizer's."""
        names = [name for name in self._two.values if name.startswith(DEVICE) and not name.endswith("optimizer")]
        return Figures(dict.fromkeys(names, size))


def _square(two: float, three: float, chunk: int, length: int) -> float:
    """``p T^2 + q T`` through what there is at 2 and at 3 chunks."""
    p = (three / (3 * chunk) - two / (2 * chunk)) / chunk
    return (two / (2 * chunk) + p * (length - 2 * chunk)) * length


def _most_held(schedule: Schedule, layers: int) -> int:
    """Layer inputs that are held at a time: those stored in the forward and those of the segment worked on."""
    places = place_layers(schedule, layers)
    stored = sum(place.begins and not place.whole for place in places)
    longest = current = 0
    for place in places:
        current = 0 if place.begins else current + 1
        longest = max(longest, current)
    return stored + longest


def _input_bytes(workload: Workload) -> int:
    """Bytes of one token's hidden states."""
    model = workload.make_model()
    embedding = getattr(model, "get_input_embeddings")().weight  # noqa: B009  not an nn.Module's own
    return int(embedding.shape[-1] * embedding.element_size())
