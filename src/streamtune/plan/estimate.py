"""Estimate memory and work of hundreds of schedules from five simulated steps.

The steps have the planned length. The first step keeps nothing that can be recomputed, except layer inputs. Each other
step changes one choice: another chunk size, or keeping keys and values, attention outputs, or all activations of one
layer. The differences of several choices are added, because each choice keeps other tensors. For chunk size c, bytes
are linear in c, and work is ``a + b / c``, because weights and earlier keys are read once per chunk. All other figures
are computed from tensor sizes.

The estimates rank schedules. The planner then simulates the chosen schedule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from streamtune.engine.inspect_model import first_differentiated_layer
from streamtune.engine.memory.placement import count_recomputed_layers, place_differentiated_layers
from streamtune.plan.simulate.partition import recopied_weight_bytes
from streamtune.plan.simulate.simulate import Simulation, Work
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule

Simulate = Callable[[Workload, Schedule], Simulation]

DEVICE, WORK, HOST, DISK = "device:", "work:", "host", "disk"
ATTENTION = f"{WORK}attention_flops"
MATMUL_FORWARDS, ATTENTION_FORWARDS = 3, 3.5
"""Recomputed forward and backward of a layer, relative to its forward: matrix products, and attention FLOPs.

A forward of attention has 2 matrix products, its backward 5."""

IN_FLIGHT = 4
"""Number of chunks of an offloaded tensor that are on the device at a time: being copied out, or prefetched."""

HEAD_COPIES = 2
"""Number of fp32 copies of a head chunk's logits that are in memory at a time."""


@dataclass(frozen=True)
class StepCost:
    """Bytes and work of a step as named numbers, which can be added and scaled.

    ``values`` has device bytes as ``device:PHASE``, bytes of ``host`` and ``disk``, and the fields of :class:`Work` as
    ``work:FIELD``.
    """

    values: dict[str, float]

    @staticmethod
    def from_simulation(simulation: Simulation) -> StepCost:
        work = {f"{WORK}{f.name}": float(getattr(simulation.work, f.name)) for f in fields(simulation.work)}
        phases = {f"{DEVICE}{name}": float(size) for name, size in simulation.phases.items()}
        return StepCost({**phases, HOST: float(simulation.host_bytes), DISK: float(simulation.disk_bytes), **work})

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
        """Work of the step, rounded to integers of at least 0."""
        return Work(**{f.name: max(0, round(self.values.get(f"{WORK}{f.name}", 0.0))) for f in fields(Work)})

    def plus(self, other: StepCost, times: float = 1.0) -> StepCost:
        """Return ``self + times * other``."""
        names = {*self.values, *other.values}
        return StepCost({n: self.values.get(n, 0.0) + times * other.values.get(n, 0.0) for n in names})

    def max_additions(self, added: StepCost, limit: float) -> float:
        """Return how many times ``added`` can be added before the device bytes of any phase exceed ``limit``."""
        times = float("inf")
        for name, size in self.values.items():
            step = added.values.get(name, 0.0)
            if name.startswith(DEVICE) and step > 0:
                times = min(times, (limit - size) / step)
        return times


class Estimator:
    """Estimates bytes and work of a training step with any schedule.

    Args:
        workload: Training step without its schedule.
        layers: Number of decoder layers of the model.
        simulate: Function that simulates a step.
        chunks: Chunk sizes of the schedules to estimate.
        head_chunk: Largest head chunk size of the schedules to estimate.
        common_fields: Fields that have the same value in every schedule.
    """

    def __init__(
        self,
        workload: Workload,
        layers: int,
        simulate: Simulate,
        *,
        chunks: Sequence[int],
        head_chunk: int,
        common_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers, self.rows, self.length = layers, workload.num_rows, workload.shard_tokens
        self.chunk, self.wide_chunk = chunks[min(1, len(chunks) - 1)], chunks[min(3, len(chunks) - 1)]
        self.head_chunk = head_chunk
        plain = Schedule(self.chunk, head_chunk, **(common_fields or {}))
        self.plain_cost = StepCost.from_simulation(simulate(workload, plain))
        self.simulations = 1

        def simulate_added_cost(**choice: Any) -> StepCost:
            self.simulations += 1
            return StepCost.from_simulation(simulate(workload, replace(plain, **choice))).plus(self.plain_cost, -1.0)

        self._wide_cost = (
            simulate_added_cost(chunk_size=self.wide_chunk) if self.wide_chunk != self.chunk else StepCost({})
        )
        self._kv_cost = simulate_added_cost(keep_kv="device")
        self._attention_cost = simulate_added_cost(keep_attention="device")
        self.kept_layer_cost = simulate_added_cost(keep_layers=1) if plain.weights == "device" else StepCost({})
        """Bytes and work that are added by keeping all activations of one layer."""
        self.forwards = 0.0 if workload.scored is None else workload.scored.forwards
        model: Any = workload.make_model()
        self._first = first_differentiated_layer(model)
        self._differentiated = layers - self._first
        """Number of layers with a backward; only they store inputs, keys, values or activations."""
        embedding: Tensor = model.get_input_embeddings().weight
        self._recopied_cost = StepCost({f"{WORK}moved_bytes": float(recopied_weight_bytes(model, workload, 1))})
        """Work of copying the weights of one recomputed layer from the host; 0 if weights are on the device."""
        self.vocabulary = embedding.shape[0]
        element = 2 if plain.fetch_dtype == "bfloat16" else embedding.element_size()
        self.input_bytes = embedding.shape[1] * element * self.rows * self.length
        """Bytes of one layer's input on one rank."""

    # --- a schedule ---------------------------------------------------------------------------------------------------

    def estimate(self, schedule: Schedule) -> StepCost:
        total = self._plain_cost(schedule.chunk_size)
        if self.head_chunk > schedule.head_chunk_size:
            fewer = 4 * HEAD_COPIES * self.rows * self.vocabulary * (self.head_chunk - schedule.head_chunk_size)
            total = total.plus(StepCost({f"{DEVICE}head": -fewer}))
        total = total.plus(self._layer_input_cost(schedule))
        unstreamed = min(schedule.keep_layers, self._differentiated)
        share = (self._differentiated - unstreamed) / max(1, self._differentiated)
        for kept, tier in ((self._kv_cost, schedule.keep_kv), (self._attention_cost, schedule.keep_attention)):
            if tier != "no":
                total = total.plus(self._kept_tensors_cost(kept, str(tier)), share)
        return total.plus(self.kept_layer_cost, unstreamed)

    def device_layer_cost(self, schedule: Schedule) -> StepCost:
        return self._offload_cost(self.input_bytes, schedule.offload, -1.0)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _plain_cost(self, chunk: int) -> StepCost:
        """Return the cost of a step that stores all layer inputs on the device and keeps nothing else."""
        if self.wide_chunk == self.chunk:
            return self.plain_cost
        chunk = min(chunk, self.length)
        bytes_ratio = (chunk - self.chunk) / (self.wide_chunk - self.chunk)
        work_ratio = (1 / chunk - 1 / self.chunk) / (1 / self.wide_chunk - 1 / self.chunk)
        more = {n: v * (work_ratio if n.startswith(WORK) else bytes_ratio) for n, v in self._wide_cost.values.items()}
        return self.plain_cost.plus(StepCost(more))

    def _layer_input_cost(self, schedule: Schedule) -> StepCost:
        """Return the extra cost of storing layer inputs as in ``schedule`` instead of all on the device."""
        each = self.input_bytes
        streamed = self._differentiated - min(schedule.keep_layers, self._differentiated)
        total = StepCost({})
        if schedule.levels == 2:
            held = min(streamed, _max_stored_inputs(schedule, self.layers, self._first))
            forward = self._extra_forward_cost(attention=schedule.keep_attention == "no")
            total = self._device_bytes_cost(-(streamed - held) * each).plus(forward, streamed - held)
            total = total.plus(self._recopied_cost, sum(count_recomputed_layers(schedule, self.layers, self._first)))
            streamed = held
        if schedule.offload != "device":
            # The gradient passed between layers is offloaded too, unless it can replace a stored input.
            away = max(0, streamed - schedule.device_layers) + (schedule.device_layers == 0)
            extra_reads = 1 if schedule.keep_kv == "no" else 0  # recomputing keys and values reads the inputs once more
            total = total.plus(self._offload_cost(away * each, schedule.offload, extra_reads=extra_reads))
            total = total.plus(self._device_bytes_cost(IN_FLIGHT * each * min(1.0, schedule.chunk_size / self.length)))
        if schedule.stream_grads:  # each chunk's output gradient is freed when its input gradient is computed
            total = total.plus(StepCost({f"{DEVICE}backward": -each * (1 if schedule.offload == "device" else 2)}))
        return total

    def _extra_forward_cost(self, *, attention: bool) -> StepCost:
        """Return the work of one more forward of one layer, without attention if ``attention`` is False.

        A step runs each layer forward once, and once more for each reference forward. For a layer with a backward, it
        also recomputes the forward and computes gradients: 3 times the forward's matrix products, 3.5 times its
        attention FLOPs.
        """
        work = self.plain_cost.values
        forwards = self.layers * (1 + self.forwards)
        names = (f"{WORK}matmul_flops", f"{WORK}touched_bytes")
        forward = {name: work[name] / (forwards + MATMUL_FORWARDS * self._differentiated) for name in names}
        share = 1 / (forwards + ATTENTION_FORWARDS * self._differentiated)
        return StepCost({**forward, ATTENTION: work[ATTENTION] * share if attention else 0.0})

    def _kept_tensors_cost(self, kept: StepCost, tier: str) -> StepCost:
        """Return the cost of keeping tensors on ``tier``; ``kept`` is the cost of keeping them on the device."""
        if tier == "device":
            return kept
        size = max(value for name, value in kept.values.items() if name.startswith(DEVICE))
        return kept.plus(self._offload_cost(size, tier))

    def _offload_cost(self, size: float, tier: str, times: float = 1.0, *, extra_reads: int = 0) -> StepCost:
        """Return the cost of storing ``size`` bytes on host or disk instead of the device, multiplied by ``times``.

        The bytes are copied out once, and back ``1 + extra_reads`` times.
        """
        name = f"{WORK}moved_bytes" if tier == "host" else f"{WORK}disk_moved_bytes"
        away = StepCost({HOST if tier == "host" else DISK: size, name: (2 + extra_reads) * size})
        return StepCost({}).plus(self._device_bytes_cost(-size), times).plus(away, times)

    def _device_bytes_cost(self, size: float) -> StepCost:
        """Return the cost of keeping ``size`` bytes on the device in every phase except the optimizer step."""
        names = [n for n in self.plain_cost.values if n.startswith(DEVICE) and not n.endswith("optimizer")]
        return StepCost(dict.fromkeys(names, size))


def _max_stored_inputs(schedule: Schedule, layers: int, first: int) -> int:
    """Return the peak number of layer inputs in memory: all that the forward stores, plus the inputs of one segment."""
    places = place_differentiated_layers(schedule, layers, first)
    stored = sum(place.begins_segment and not place.unstreamed for place in places)
    longest = current = 0
    for place in places:
        current = 0 if place.begins_segment else current + 1
        longest = max(longest, current)
    return stored + longest
