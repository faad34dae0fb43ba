"""Compute a lower bound of a step's memory, without a simulation.

A step needs at least its fixed memory (weights, gradients, optimizer states) and the tensors that it stores for the
backward. These are layer inputs with ``order: layer``, and keys, values and their gradients with ``order: chunk``. If
this bound exceeds the memory limits, the step does not fit, and it need not be simulated. Activations, the head and
copies in flight are not in the bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import caches_keys, first_differentiated_layer
from streamtune.engine.memory.placement import place_differentiated_layers
from streamtune.plan.budget import Limits
from streamtune.plan.simulate.partition import ResidentMemory
from streamtune.plan.simulate.shard import CHUNKED_ATTENTION, WINDOWS, count_heads
from streamtune.plan.simulate.simulate import resident_memory
from streamtune.plan.simulate.simulation_cache import all_modules, model_configs
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule, Tier, WeightTier

OTHER_HEAD_COUNTS = {"multi_query", "num_kv_heads", "attn_config", "new_decoder_architecture"}
"""Configuration keys that change the number of key/value heads without ``num_key_value_heads``."""

NARROW = 2
"""Smallest number of bytes of a number that is stored for the backward."""


@dataclass(frozen=True)
class LeastBytes:
    """Bytes that a step needs at least, under the names that :class:`~streamtune.plan.simulate.Simulation` uses.

    Attributes:
        peak_bytes: Bytes on the device.
        host_bytes, disk_bytes: Bytes on host and disk.
        terms: Device bytes by memory term.
        host_terms: Host bytes by memory term.
        phase: Phase with the most stored tensors.
    """

    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    terms: dict[str, int]
    host_terms: dict[str, int] = field(default_factory=dict)
    phase: str = "backward"

    def excess_bytes(self, limits: Limits) -> float:
        """Return the most bytes by which the bound exceeds the limit of any tier; 0 or less if the step may fit."""
        return limits.excess_bytes(self.peak_bytes, self.host_bytes, self.disk_bytes)


class LowerBound:
    """Lower bounds of the memory of a workload's steps, for any schedule and row length.

    Args:
        workload: Step to train; its length is not used.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        model: Any = workload.make_model()
        layers = decoder_layers(model)
        self.layers = len(layers)
        self._first = first_differentiated_layer(model)
        """Index of the first layer that the backward reaches; the layers below store nothing."""
        embedding: Tensor = model.get_input_embeddings().weight
        self._hidden, self._element = embedding.shape[1], embedding.element_size()
        self._key_values_per_token = _key_values_per_token(model)
        self._resident: dict[WeightTier, ResidentMemory] = {}

    def least_bytes(self, schedule: Schedule, length: int) -> LeastBytes:
        """Return the bytes that a step on rows of ``length`` tokens needs at least.

        Sharded gradients and the gradients of earlier micro-batches exist during the whole backward. Other gradients
        are counted in the optimizer step only, in which no layer input is stored.
        """
        workload = replace(self._workload, length=length)
        if schedule.weights not in self._resident:
            self._resident[schedule.weights] = resident_memory(workload, schedule.weights)
        resident = self._resident[schedule.weights]
        terms = {
            "weights": resident.weights,
            "fp32 weights": resident.master,
            "reference": workload.reference_bytes,
            "optimizer": resident.state,
        }
        stored = self._stored_bytes(workload, schedule)
        name = "layer inputs" if schedule.order == "layer" else "keys and values"
        phases = {"backward": {**terms, "gradients": resident.buckets, name: stored["device"]}}
        if resident.gradients_sharded or workload.micro_batches > 1:
            phases["backward"]["gradients"] += resident.gradients
        if workload.make_optimizer is not None:
            phases["optimizer"] = {**terms, "gradients": resident.buckets + resident.gradients}
        phase = max(phases, key=lambda each: sum(phases[each].values()))
        host_terms = {**resident.host, **({name: stored["host"]} if stored["host"] else {})}
        return LeastBytes(
            peak_bytes=sum(phases[phase].values()),
            host_bytes=sum(host_terms.values()),
            disk_bytes=stored["disk"],
            terms={name: size for name, size in phases[phase].items() if size},
            host_terms=host_terms,
            phase=phase,
        )

    def _stored_bytes(self, workload: Workload, schedule: Schedule) -> dict[Tier, int]:
        """Return the bytes of tensors that are stored for the backward of the last layer or segment, by tier."""
        stored: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
        if workload.step.gradients == "none":
            return stored
        tokens = workload.num_rows * workload.shard_tokens
        if schedule.order == "chunk":
            streamed = max(0, self.layers - schedule.keep_layers - self._first)
            values = self._key_values_per_token * streamed
            before_last = tokens - workload.num_rows * min(schedule.chunk_size, workload.shard_tokens)
            sum_element = 4 if schedule.grad_dtype == "float32" else NARROW
            if schedule.keep_kv == "host":  # the last chunk's keys and values stay on the device
                stored["host"] = values * (NARROW + sum_element) * before_last
            else:
                stored["device"] = values * (NARROW * tokens + sum_element * before_last)
            return stored
        for tier, count in _count_stored_inputs(schedule, self.layers, self._first).items():
            stored[tier] = count * self.input_bytes(schedule, tokens)
        return stored

    def input_bytes(self, schedule: Schedule, tokens: int) -> int:
        """Return the bytes of one layer's input for ``tokens`` tokens."""
        return self._hidden * (2 if schedule.fetch_dtype == "bfloat16" else self._element) * tokens


@lru_cache(maxsize=4096)
def _count_stored_inputs(schedule: Schedule, layers: int, first: int) -> dict[Tier, int]:
    """Return how many layer inputs are stored before the backward of the last layer or segment, by tier."""
    streamed = [place for place in place_differentiated_layers(schedule, layers, first) if not place.unstreamed]
    last_segment = max((index for index, place in enumerate(streamed) if place.begins_segment), default=0)
    return Counter(place.tier for index, place in enumerate(streamed) if place.begins_segment or index > last_segment)


def _key_values_per_token(model: nn.Module) -> int:
    """Return how many numbers each layer's keys and values have per token; 0 unless all layers keep the whole row's."""
    settings = [vars(config) for config in model_configs(all_modules(model))]
    if any(isinstance(s.get(name), int) and s[name] > 0 for s in settings for name in (*WINDOWS, *CHUNKED_ATTENTION)):
        return 0
    if not all(map(caches_keys, decoder_layers(model))):
        return 0
    if any(not s.get("num_key_value_heads") and OTHER_HEAD_COUNTS & s.keys() for s in settings):
        return 0
    heads = count_heads(model)
    return heads.keys * (heads.key_dim + heads.value_dim)
