"""Compute the memory that one rank keeps allocated throughout a step: weights, gradients and optimizer state.

    engine          weights      gradients    optimizer state and, with DeepSpeed, weights in fp32
    none, ddp       whole        whole        whole                     (no fp32 copy of narrower weights)
    zero1           whole        whole        1 / W
    zero2           whole        1 / W        1 / W
    zero3           1 / W        1 / W        1 / W
    zero3_offload   1 / W        host         host
    fsdp            1 / W        1 / W        1 / W                     (in the dtype of the weights)

The scales of 4-bit weights are not sharded.

A rank also allocates gathered weights and reduction buffers. At stage 3 it gathers the weights of the running layer (a
leaf module, gathered once), of the embedding or the head while they run, and prefetched weights. While a layer's
forward is recomputed in the backward of another layer (``levels: 2``), the weights of both layers are gathered.
Gradients are reduced from buckets. The gradients that the engine returns for a layer are counted in the simulated step.

With ``zero3_offload`` a step also copies bytes between device and host, and its optimizer reads and writes host memory.
Let the model have P bytes of weights and n trained parameters of b bytes each. In a step of M micro-batches, with f
extra forwards without gradient, each of W ranks copies

    gradients    M x 2 b n / W       to the host after each micro-batch, and back to accumulate
                 4 n / W             in fp32, for the optimizer step
    weights      M x (2 + f) P / W   from the host, forward and backward; without ``offload_param`` instead b n / W
                                     once, the updated weights
                 M x r P_l / W       for r recomputed layer forwards, with P_l bytes of weights each

``DeepSpeedCPUAdam`` touches ``4 + 2 x (4 + s) + 4 + b`` bytes per parameter. It reads the gradient. It reads and writes
the fp32 weight and s bytes of state (8 for Adam in fp32). It reads the fp32 weight again and writes the b bytes of the
parameter. The copies overlap with the computation. The optimizer step does not overlap, because it waits for the last
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import first_differentiated_layer
from streamtune.engine.memory.placement import count_recomputed_layers
from streamtune.engine.offloaded_weights import offloaded_parameters
from streamtune.ops.devices import simulate_device_type
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.memory import model_bytes, quantization_scale_bytes, storage_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.trace import WORK, CellPlace, Trace
from streamtune.schedule import Schedule, WeightTier

if TYPE_CHECKING:
    from streamtune.plan.simulate.workload import Workload

FP32 = 4

PHASES = ("reference", "forward", "head", "backward", "again")
"""Phases in which weights are gathered; ``again`` is the recomputed forward of a layer during the backward."""


@dataclass(frozen=True)
class ResidentMemory:
    """Memory that one rank keeps allocated throughout a step, and the work of the optimizer step.

    Attributes:
        weights: Bytes of the weights on the device.
        gathered: Bytes of gathered weights by phase (:data:`PHASES`), without the rank's own shard.
        master: Bytes of the fp32 weights that the optimizer updates.
        state: Bytes of optimizer state.
        gradients: Bytes of all gradients.
        gradients_sharded: True if gradients are sharded and allocated from the start of the step.
        buckets: Bytes of the buckets from which gradients are reduced.
        temporary: Temporary bytes of the optimizer step.
        touched: Bytes that the optimizer step reads and writes on the device.
        host: Bytes of host memory, by memory term.
        host_touched: Bytes that the optimizer step reads and writes in host memory, after the backward.
        host_overlapped: Bytes that the optimizer step reads and writes in host memory during the backward.
        host_moved: Bytes copied between device and host.
    """

    weights: int
    gathered: dict[str, int]
    master: int
    state: int
    gradients: int
    gradients_sharded: bool
    buckets: int
    temporary: int
    touched: int
    host: dict[str, int]
    host_touched: int = 0
    host_moved: int = 0
    host_overlapped: int = 0

    @property
    def device_bytes(self) -> int:
        return self.weights + self.master + self.state + self.gradients + self.buckets

    @classmethod
    def from_model(cls, model: nn.Module, workload: Workload, weights_tier: WeightTier = "device") -> ResidentMemory:
        """Return the memory for a model on ``meta`` and a schedule with ``levels: 1`` and weights on
        ``weights_tier``."""
        if weights_tier == "host":
            return _resident_memory_with_host_weights(model, workload)
        cluster = workload.cluster
        scales = quantization_scale_bytes(model) if cluster.gathers_layers else 0
        weights, trained = cluster.rank_bytes(model_bytes(model) - scales, 3), trained_bytes(model)
        state, temporary, touched = _measure_optimizer_step(_optimizer_model(model, cluster), workload)
        state, temporary, touched = (cluster.rank_bytes(size, 1) for size in (state, temporary, touched))
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        master = cluster.rank_bytes(FP32 * count, 1) if cluster.keeps_fp32_weights and workload.make_optimizer else 0
        temporary += master  # the gradients of the step, in fp32
        if cluster.keeps_fp32_weights and cluster.zero_stage == 3:
            temporary = round(temporary * min(1.0, cluster.buckets.sub_group / max(1, cluster.rank_bytes(count, 3))))
        gradients, buckets = _gradient_bytes(model, workload, trained)
        if workload.step.gradients == "none":
            gradients = 0
        elif workload.frees_gradients:
            gradients = _largest_gradient_bytes(model, [p for p in model.parameters() if p.requires_grad])
        kept = {
            "weights": weights + scales,
            "master": master,
            "state": state,
            "gradients": gradients,
            "touched": touched,
        }
        host: dict[str, int] = {}
        host_touched = host_moved = 0
        if cluster.weights_on_host:
            host["weights"], kept["weights"] = weights, scales
        if cluster.optimizer_on_host:
            host |= {"fp32 weights": master, "optimizer": state, "gradients": master}
            own = cluster.rank_bytes(trained, 3)
            host_touched = master + 2 * (master + state) + master + own
            host_moved = workload.micro_batches * 2 * own + master
            if cluster.weights_on_host:
                forwards = 0.0 if workload.scored is None else workload.scored.forwards
                host_moved += round(workload.micro_batches * (2 + forwards) * weights)
            else:
                host_moved += own
            kept |= {"master": 0, "state": 0, "touched": 0, "gradients": 0}
            temporary = 0
        resident = cls(
            **kept,
            gathered=_gathered_bytes(model, cluster, 0),
            gradients_sharded=cluster.zero_stage >= 2,
            buckets=buckets,
            temporary=temporary,
            host=host,
            host_touched=host_touched,
            host_moved=host_moved,
        )
        if workload.step.states != "host" or workload.make_optimizer is None:
            return resident
        return resident.with_optimizer_on_host(model, workload, [p for p in model.parameters() if p.requires_grad])

    def with_optimizer_on_host(self, model: Any, workload: Workload, trained: Sequence[nn.Parameter]) -> ResidentMemory:
        """Return the memory if the optimizer of the weights ``trained`` runs on the host.

        For each weight, gradient and weight are copied to the host, and the updated weight is copied back. With
        ``optim_in_backward`` the optimizer overlaps with the backward, and gradients of two layers may wait for it.
        """
        size = sum(p.nbytes for p in trained)
        copies = 3 * size
        in_backward = workload.step.gradients == "layer"
        waits = workload.frees_gradients and workload.device_type == "cuda"
        touched = _adamw_touched_bytes(size, self.state) + copies
        host = {**self.host, "optimizer": self.host.get("optimizer", 0) + self.state}
        single_weight_workload = replace(workload, device_type="cpu", step=workload.step.with_step_in_backward())
        _, temporary, _ = _measure_optimizer_step(model, single_weight_workload)
        return replace(
            self,
            state=0,
            touched=0,
            temporary=0,
            buckets=self.buckets + (2 * _largest_gradient_bytes(model, trained) if waits else 0),
            host={**host, "stepped weight": 2 * max((p.nbytes for p in trained), default=0) + temporary},
            host_touched=self.host_touched + (0 if in_backward else touched),
            host_overlapped=self.host_overlapped + (touched if in_backward else 0),
            host_moved=self.host_moved + copies,
        )

    def adapted_to_schedule(self, model: nn.Module, workload: Workload, schedule: Schedule) -> ResidentMemory:
        """Return the memory of a step with ``schedule``, which may gather the weights of recomputed layers again."""
        cluster = workload.cluster
        if not cluster.gathers_layers or workload.mode != "stream":
            return self
        first = first_differentiated_layer(model)
        forwards = count_recomputed_layers(schedule, len(decoder_layers(model)), first)
        return replace(
            self,
            gathered=_gathered_bytes(model, cluster, max(forwards, default=0)),
            host_moved=self.host_moved + recopied_weight_bytes(model, workload, sum(forwards)),
        )


def recopied_weight_bytes(model: nn.Module, workload: Workload, extra_layer_forwards: int) -> int:
    """Return how many bytes of weights a step copies from the host for recomputed forwards; 0 without offload.

    ``extra_layer_forwards`` is the number of recomputed forwards, summed over the layers.
    """
    cluster = workload.cluster
    if not cluster.weights_on_host:
        return 0
    layer = cluster.rank_bytes(max(map(shardable_bytes, decoder_layers(model))), 3)
    return workload.micro_batches * extra_layer_forwards * layer


NORM_TOUCHED = 3
"""Number of times that a gradient is read or written for its norm (once) and for clipping (twice)."""


def _resident_memory_with_host_weights(model: Any, workload: Workload) -> ResidentMemory:
    """Return the memory of one device whose weights are offloaded to the host (``engine.weights``)."""
    waiting = offloaded_parameters(base_of(model), decoder_layers(model))
    away = [p for p in waiting if p.requires_grad]
    known = {id(p) for p in waiting}
    here = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    host = {"weights": storage_bytes(waiting)}
    trained = sum(p.nbytes for p in away)
    host_touched = overlapped = 0
    if workload.make_optimizer is not None and away:
        state, temporary, _ = _measure_optimizer_step(model, replace(workload, device_type="cpu"), away)
        host["optimizer"] = state
        if workload.step.gradients == "layer":
            freed = workload.frees_gradients
            host["gradients"] = (2 * _largest_gradient_bytes(model, away) if freed else trained) + temporary
            overlapped = _adamw_touched_bytes(trained, state) + trained  # and the norm
        else:
            host["gradients"] = trained + temporary
            host_touched = _adamw_touched_bytes(trained, state) + NORM_TOUCHED * trained
    elif away:
        host["gradients"] = trained
    state = temporary = touched = 0
    if here and workload.make_optimizer is not None:
        state, temporary, touched = _measure_optimizer_step(model, workload, here)
    resident = ResidentMemory(
        weights=model_bytes(model) - host["weights"],
        gathered=dict.fromkeys(PHASES, 0),
        master=0,
        state=state,
        gradients=sum(p.nbytes for p in here),
        gradients_sharded=False,
        buckets=0,
        temporary=temporary,
        touched=touched,
        host=host,
        host_touched=host_touched,
        host_overlapped=overlapped,
    )
    if not here or workload.step.states != "host" or workload.make_optimizer is None:
        return resident
    return resident.with_optimizer_on_host(model, workload, here)


def _adamw_touched_bytes(trained: int, state: int) -> int:
    return 3 * trained + 2 * state


def _largest_gradient_bytes(model: Any, trained: Sequence[nn.Parameter]) -> int:
    """Return the gradient bytes of the largest layer, or of the largest weight outside layers if it is larger."""
    known = {id(p) for p in trained}
    layers = [sum(p.nbytes for p in layer.parameters() if id(p) in known) for layer in decoder_layers(model)]
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    return max([*layers, *(p.nbytes for p in trained if id(p) not in inside)], default=0)


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's trained weights, which are also the bytes of its gradients."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def shardable_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights and buffers except quantisation scales, which ranks never shard."""
    return model_bytes(model) - quantization_scale_bytes(model)


def bytes_outside_layers(model: nn.Module) -> list[int]:
    """Return the bytes of each parameter outside the decoder layers: embeddings, the head, norms."""
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    return [p.nbytes for p in model.parameters() if id(p) not in inside]


def _gathered_bytes(model: nn.Module, cluster: Cluster, recomputed_layers: int) -> dict[str, int]:
    """Return the bytes of gathered weights by phase, without the rank's own shard.

    ``recomputed_layers`` is the largest number of layers in a segment whose forward is recomputed.
    """
    if not cluster.gathers_layers:
        return dict.fromkeys(PHASES, 0)
    layers, outside = decoder_layers(model), bytes_outside_layers(model)
    inner, outer = max(map(shardable_bytes, layers)), max(outside, default=0)
    if cluster.engine == "fsdp":  # the root's weights stay gathered, and the next layer is prefetched
        root = sum(outside)
        sizes = {"forward": 2 * inner + root, "head": root, "backward": 2 * inner + root}
        # The prefetched layer is the last layer of the segment.
        sizes["again"] = sizes["backward"] + (inner if recomputed_layers > 1 else 0)
    else:
        element = next(model.parameters()).element_size()
        reuse = element * cluster.buckets.reuse
        kept = _bytes_kept_gathered(inner, outer, len(layers), reuse)
        ahead = element * cluster.buckets.prefetch
        # Layers that stay gathered from their recomputed forward to their backward.
        segment = min(recomputed_layers, -(-reuse // (2 * inner))) * inner
        forward = max(inner + ahead, outer, kept)
        sizes = {"forward": forward, "head": outer + kept}
        sizes["backward"] = max(outer, max(inner + segment, kept) + ahead)
        running = inner + max(inner, segment)
        sizes["again"] = max(outer, max(running, kept) + ahead) if recomputed_layers else sizes["backward"]
    sizes["reference"] = sizes["forward"]
    return {phase: sizes[phase] - sizes[phase] // cluster.ranks for phase in PHASES}


def _bytes_kept_gathered(layer_bytes: int, head_bytes: int, num_layers: int, reuse_distance: int) -> int:
    """Return the bytes of the last layers that DeepSpeed keeps gathered after their forward.

    DeepSpeed keeps a layer if fewer bytes than the reuse distance are used before the layer's backward. The head and
    each later layer count twice, forward and backward.
    """
    if 2 * head_bytes >= reuse_distance:
        return 0
    return min(num_layers, (reuse_distance // 2 - head_bytes) // max(1, layer_bytes) + 1) * layer_bytes


def _gradient_bytes(model: nn.Module, workload: Workload, trained: int) -> tuple[int, int]:
    cluster, buckets = workload.cluster, 0
    if cluster.engine == "fsdp":
        buckets = max(sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in decoder_layers(model))
    elif cluster.keeps_fp32_weights:
        element = max((p.element_size() for p in model.parameters() if p.requires_grad), default=0)
        buckets = min(element * cluster.buckets.reduce, trained) * cluster.buckets.buffers
    return cluster.rank_bytes(trained, 2), buckets


def _optimizer_model(model: nn.Module, cluster: Cluster) -> nn.Module:
    """Return the model whose weights the optimizer updates: with DeepSpeed a copy with trained weights in fp32."""
    if not cluster.keeps_fp32_weights:
        return model
    fp32_model = meta_copy(model)
    for parameter in fp32_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return fp32_model


def _measure_optimizer_step(
    model: nn.Module, workload: Workload, stepped_weights: Sequence[nn.Parameter] | None = None
) -> tuple[int, int, int]:
    """Return the bytes of optimizer state, temporary bytes, and touched bytes of an optimizer step.

    A second step is measured, in which the state exists. With ``optim_in_backward`` weights are updated one at a time,
    so only the largest temporaries of one weight count. ``stepped_weights`` have a gradient; None: all trained weights.
    """
    if workload.make_optimizer is None:
        return 0, 0, 0
    layers, device = decoder_layers(model), workload.device_type
    trace = Trace(model, layers, device=device, tiers=lambda: (0, 0, 0, 0), unwraps=True)
    optimizer: Any = workload.make_optimizer(model)
    every = [p for p in model.parameters() if p.requires_grad] if stepped_weights is None else list(stepped_weights)
    trained = [] if workload.step.gradients == "none" else every
    with trace, simulate_device_type(device):
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        chosen = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
        # torch chooses foreach and fused by the device; for ``meta`` it supports neither.
        for group in optimizer.param_groups:
            group.update({key: False for key in ("foreach", "fused") if key in group})
        optimizer.step()
        for group, (foreach, fused) in zip(optimizer.param_groups, chosen, strict=True):
            on_device = foreach is None and not fused and device == "cuda"
            group.update({"foreach": on_device or foreach} if "foreach" in group else {})
            group.update({"fused": fused} if "fused" in group else {})
        for state in optimizer.state.values():  # no dispatch mode sees lookup tables made by torch.tensor
            trace.count_tensors(*(value for value in state.values() if isinstance(value, torch.Tensor)))
        before = trace.total
        trace.begin_cell("optimizer")
        optimizer.step()
        cell = trace.cells[CellPlace("optimizer")]
        temporary = _peak_bytes(trace, "optimizer") - before
        if workload.step.gradients == "layer":
            temporary = max(
                (_measure_weight_step(trace, optimizer, p, trained) for p in _distinct_weights(optimizer)),
                default=0,
            )
    gradients = sum(p.nbytes for p in trained)
    for parameter in model.parameters():
        parameter.grad = None
    return before - gradients, temporary, round(cell.work[WORK.index("touched_bytes")])


def _peak_bytes(trace: Trace, phase: str) -> int:
    return max(sum(moment) for moment in trace.cells[CellPlace(phase)].moments)


def _distinct_weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    found: dict[tuple[int, torch.Size, torch.dtype], nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            found.setdefault((number, parameter.shape, parameter.dtype), parameter)
    return list(found.values())


def _measure_weight_step(trace: Trace, optimizer: Any, weight: nn.Parameter, trained: Sequence[nn.Parameter]) -> int:
    if weight.grad is None:
        return 0
    held = [(p, p.grad) for p in trained if p is not weight]
    for parameter, _ in held:
        parameter.grad = None
    before = trace.total
    phase = f"step of {id(weight)}"
    trace.begin_cell(phase)
    optimizer.step()
    for parameter, gradient in held:
        parameter.grad = gradient
    return _peak_bytes(trace, phase) - before
