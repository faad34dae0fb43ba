"""The memory that one rank holds throughout a step: weights, gradients and optimizer state, whole or sharded.

    engine          weights      gradients    optimizer state and, with DeepSpeed, weights in fp32
    none, ddp       whole        whole        whole                     (no fp32 copy of narrower weights)
    zero1           whole        whole        1 / W
    zero2           whole        1 / W        1 / W
    zero3           1 / W        1 / W        1 / W
    zero3_offload   1 / W        host         host
    fsdp            1 / W        1 / W        1 / W                     (in the dtype of the weights)

The scales of 4-bit weights are not sharded.

A rank also holds gathered weights and reduction buffers. At stage 3 it gathers the weights of the running layer (a leaf
module, gathered once), of the embedding or the head while they run, and prefetched weights. While a layer runs forward
again in the backward of another layer (``levels: 2``), the weights of both are gathered. Gradients are reduced from
buckets. The gradients that the engine returns for a layer are counted in the simulated step.

With ``zero3_offload`` a step also copies bytes between device and host, and its optimizer reads and writes host memory.
Let the model have P bytes of weights and n trained parameters of b bytes each. In a step of M micro-batches, with f
extra forwards without gradient, each of W ranks copies

    gradients    M x 2 b n / W       to the host after each micro-batch, and back to accumulate
                 4 n / W             in fp32, for the optimizer step
    weights      M x (2 + f) P / W   from the host, forward and backward; without ``offload_param`` instead b n / W
                                     once, the updated weights
                 M x a P_l / W       for a layers of P_l bytes each that run forward again

``DeepSpeedCPUAdam`` touches ``4 + 2 x (4 + s) + 4 + b`` bytes per parameter. It reads the gradient. It reads and writes
the weight and s bytes of state (8 for Adam in fp32). It reads the weight again and writes it in its own dtype. The
copies overlap with the computation. The optimizer step does not, because it waits for the last gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamtune.base.adapters import base_of
from streamtune.engine import decoder_layers
from streamtune.engine.memory.placement import extra_forwards
from streamtune.engine.waiting import offloaded_parameters
from streamtune.ops.devices import simulating
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.memory import distinct_bytes, held_bytes, scales_bytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.trace import WORK, CellPlace, Trace
from streamtune.schedule import Schedule, WeightTier

if TYPE_CHECKING:
    from streamtune.plan.simulate.workload import Workload

FP32 = 4

PHASES = ("reference", "forward", "head", "backward", "again")
"""Phases in which weights are gathered; ``again`` is a layer's extra forward during the backward."""


@dataclass(frozen=True)
class Holdings:
    """The memory that one rank holds throughout a step, and the cost of the optimizer step.

    Attributes:
        weights: Bytes of the weights on the device.
        gathered: Bytes of gathered weights by phase, without the rank's own shard; ``again`` is a layer that runs
            forward in the backward of another.
        master: Bytes of the fp32 weights that the optimizer updates.
        state: Bytes of optimizer state.
        gradients: Bytes of all gradients.
        divided: True if gradients are sharded and allocated from the start of the step.
        buckets: Bytes of the buckets from which gradients are reduced.
        temporary: Temporary bytes of the optimizer step.
        touched: Bytes that the optimizer step reads and writes on the device.
        host: Bytes of host memory, by memory term.
        host_touched: Bytes that the optimizer step reads and writes in host memory, after the backward.
        host_overlapped: Bytes that it reads and writes in host memory during the backward.
        host_moved: Bytes copied between device and host.
    """

    weights: int
    gathered: dict[str, int]
    master: int
    state: int
    gradients: int
    divided: bool
    buckets: int
    temporary: int
    touched: int
    host: dict[str, int]
    host_touched: int = 0
    host_moved: int = 0
    host_overlapped: int = 0

    @property
    def on_device(self) -> int:
        return self.weights + self.master + self.state + self.gradients + self.buckets

    @classmethod
    def of(cls, model: nn.Module, workload: Workload, weights_in: WeightTier = "device") -> Holdings:
        """Return the holdings for a model on ``meta``, with ``levels: 1`` and weights stored on ``weights_in``."""
        if weights_in == "host":
            return _holdings_with_host_weights(model, workload)
        cluster = workload.cluster
        scales = scales_bytes(model) if cluster.gathers_layers else 0
        weights, trained = cluster.divided(held_bytes(model) - scales, 3), trained_bytes(model)
        state, temporary, touched = _optimizer_step(_optimizer_model(model, cluster), workload)
        state, temporary, touched = (cluster.divided(size, 1) for size in (state, temporary, touched))
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        master = cluster.divided(FP32 * count, 1) if cluster.keeps_master and workload.make_optimizer else 0
        temporary += master  # the gradients of the step, in fp32
        if cluster.keeps_master and cluster.zero_stage == 3:
            temporary = round(temporary * min(1.0, cluster.buckets.sub_group / max(1, cluster.divided(count, 3))))
        gradients, buckets = _gradient_bytes(model, workload, trained)
        if workload.step.gradients == "none":
            gradients = 0
        elif workload.frees_gradients:
            gradients = _largest_gradients(model, [p for p in model.parameters() if p.requires_grad])
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
            own = cluster.divided(trained, 3)
            host_touched = master + 2 * (master + state) + master + own
            host_moved = workload.micro_batches * 2 * own + master
            if cluster.weights_on_host:
                forwards = 0.0 if workload.scored is None else workload.scored.forwards
                host_moved += round(workload.micro_batches * (2 + forwards) * weights)
            else:
                host_moved += own
            kept |= {"master": 0, "state": 0, "touched": 0, "gradients": 0}
            temporary = 0
        holdings = cls(
            **kept,
            gathered=_gathered_bytes(model, cluster, 0),
            divided=cluster.zero_stage >= 2,
            buckets=buckets,
            temporary=temporary,
            host=host,
            host_touched=host_touched,
            host_moved=host_moved,
        )
        if workload.step.states != "host" or workload.make_optimizer is None:
            return holdings
        return holdings.with_optimizer_on_host(model, workload, [p for p in model.parameters() if p.requires_grad])

    def with_optimizer_on_host(self, model: Any, workload: Workload, trained: Sequence[nn.Parameter]) -> Holdings:
        """Return the holdings if the optimizer of ``trained``, whose weights are on the device, is on the host.

        For each weight, gradient and weight are copied to the host, and the updated weight is copied back. With
        ``optim_in_backward`` this overlaps with the backward, and gradients of two layers may wait for it.
        """
        size = sum(p.nbytes for p in trained)
        copies = 3 * size
        in_backward = workload.step.gradients == "layer"
        waits = workload.frees_gradients and workload.device_type == "cuda"
        touched = _step_touched(size, self.state) + copies
        host = {**self.host, "optimizer": self.host.get("optimizer", 0) + self.state}
        a_weight_at_a_time = replace(workload, device_type="cpu", step=workload.step.with_step_in_backward())
        _, temporary, _ = _optimizer_step(model, a_weight_at_a_time)
        return replace(
            self,
            state=0,
            touched=0,
            temporary=0,
            buckets=self.buckets + (2 * _largest_gradients(model, trained) if waits else 0),
            host={**host, "stepped weight": 2 * max((p.nbytes for p in trained), default=0) + temporary},
            host_touched=self.host_touched + (0 if in_backward else touched),
            host_overlapped=self.host_overlapped + (touched if in_backward else 0),
            host_moved=self.host_moved + copies,
        )

    def with_schedule(self, model: nn.Module, workload: Workload, schedule: Schedule) -> Holdings:
        """Return the holdings of a streamed step with ``schedule``, which may gather layers again to recompute them."""
        cluster = workload.cluster
        if not cluster.gathers_layers or workload.mode != "stream":
            return self
        forwards = extra_forwards(schedule, len(decoder_layers(model)))
        return replace(
            self,
            gathered=_gathered_bytes(model, cluster, max(forwards, default=0)),
            host_moved=self.host_moved + recopied_bytes(model, workload, sum(forwards)),
        )


def recopied_bytes(model: nn.Module, workload: Workload, forwards: int) -> int:
    """Return the bytes that a step copies from the host for ``forwards`` extra layer forwards.

    0 if weights are not offloaded to the host.
    """
    cluster = workload.cluster
    if not cluster.weights_on_host:
        return 0
    layer = cluster.divided(max(map(divided_bytes, decoder_layers(model))), 3)
    return workload.micro_batches * forwards * layer


NORM_TOUCHED = 3
"""Number of times that a gradient is read or written for its norm (once) and for clipping (twice)."""


def _holdings_with_host_weights(model: Any, workload: Workload) -> Holdings:
    """Return the holdings of one device whose weights are offloaded to the host (``engine.weights``)."""
    waiting = offloaded_parameters(base_of(model), decoder_layers(model))
    away = [p for p in waiting if p.requires_grad]
    known = {id(p) for p in waiting}
    here = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    host = {"weights": distinct_bytes(waiting)}
    trained = sum(p.nbytes for p in away)
    host_touched = overlapped = 0
    if workload.make_optimizer is not None and away:
        state, temporary, _ = _optimizer_step(model, replace(workload, device_type="cpu"), away)
        host["optimizer"] = state
        if workload.step.gradients == "layer":
            freed = workload.frees_gradients
            host["gradients"] = (2 * _largest_gradients(model, away) if freed else trained) + temporary
            overlapped = _step_touched(trained, state) + trained  # and the norm
        else:
            host["gradients"] = trained + temporary
            host_touched = _step_touched(trained, state) + NORM_TOUCHED * trained
    elif away:
        host["gradients"] = trained
    state = temporary = touched = 0
    if here and workload.make_optimizer is not None:
        state, temporary, touched = _optimizer_step(model, workload, here)
    holdings = Holdings(
        weights=held_bytes(model) - host["weights"],
        gathered=dict.fromkeys(PHASES, 0),
        master=0,
        state=state,
        gradients=sum(p.nbytes for p in here),
        divided=False,
        buckets=0,
        temporary=temporary,
        touched=touched,
        host=host,
        host_touched=host_touched,
        host_overlapped=overlapped,
    )
    if not here or workload.step.states != "host" or workload.make_optimizer is None:
        return holdings
    return holdings.with_optimizer_on_host(model, workload, here)


def _step_touched(trained: int, state: int) -> int:
    """Return the bytes that AdamW touches: it reads gradients, weights and state, and writes weights and state."""
    return 3 * trained + 2 * state


def _largest_gradients(model: Any, trained: Sequence[nn.Parameter]) -> int:
    """Return the gradient bytes of the largest layer, or of the largest weight outside the layers if that is more."""
    known = {id(p) for p in trained}
    layers = [sum(p.nbytes for p in layer.parameters() if id(p) in known) for layer in decoder_layers(model)]
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    return max([*layers, *(p.nbytes for p in trained if id(p) not in inside)], default=0)


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's gradients: as many as its trained weights have."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def divided_bytes(model: nn.Module) -> int:
    """Return the bytes of weights and buffers that may be sharded: all but the scales of 4-bit weights."""
    return held_bytes(model) - scales_bytes(model)


def outside_bytes(model: nn.Module) -> list[int]:
    """Return the bytes of each parameter outside the decoder layers: embeddings, the head, norms."""
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    return [p.nbytes for p in model.parameters() if id(p) not in inside]


def _gathered_bytes(model: nn.Module, cluster: Cluster, again: int) -> dict[str, int]:
    """Return the bytes of gathered weights by phase, without the rank's own shard.

    Args:
        model: Model on ``meta``.
        cluster: Devices and engine.
        again: Largest number of layers in a segment that run forward again.
    """
    if not cluster.gathers_layers:
        return dict.fromkeys(PHASES, 0)
    layers, outside = decoder_layers(model), outside_bytes(model)
    inner, outer = max(map(divided_bytes, layers)), max(outside, default=0)
    if cluster.engine == "fsdp":  # the root's weights stay gathered from the forward on, and the next layer is fetched
        root = sum(outside)
        sizes = {"forward": 2 * inner + root, "head": root, "backward": 2 * inner + root}
        sizes["again"] = sizes["backward"] + (inner if again > 1 else 0)  # the segment's last layer is the fetched one
    else:
        element = next(model.parameters()).element_size()
        reuse = element * cluster.buckets.reuse
        kept = _kept_for_reuse(inner, outer, len(layers), reuse)
        ahead = element * cluster.buckets.prefetch
        segment = min(again, -(-reuse // (2 * inner))) * inner  # kept from their extra forward to their backward
        forward = max(inner + ahead, outer, kept)
        sizes = {"forward": forward, "head": outer + kept}
        sizes["backward"] = max(outer, max(inner + segment, kept) + ahead)
        sizes["again"] = max(outer, max(inner + max(inner, segment), kept) + ahead) if again else sizes["backward"]
    sizes["reference"] = sizes["forward"]
    return {phase: sizes[phase] - sizes[phase] // cluster.ranks for phase in PHASES}


def _kept_for_reuse(layer: int, head: int, count: int, reuse: int) -> int:
    """Return the bytes of the last layers that DeepSpeed keeps gathered after their forward.

    Between a layer's forward and its backward, the head and each later layer run twice, which must stay below the reuse
    distance ``reuse``, in bytes.
    """
    kept = 0 if 2 * head >= reuse else min(count, (reuse // 2 - head) // max(1, layer) + 1)
    return kept * layer


def _gradient_bytes(model: nn.Module, workload: Workload, trained: int) -> tuple[int, int]:
    """Return the bytes of a rank's gradients, and of the buckets from which gradients are reduced."""
    cluster, buckets = workload.cluster, 0
    if cluster.engine == "fsdp":
        buckets = max(sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in decoder_layers(model))
    elif cluster.keeps_master:
        element = max((p.element_size() for p in model.parameters() if p.requires_grad), default=0)
        buckets = min(element * cluster.buckets.reduce, trained) * cluster.buckets.buffers
    return cluster.divided(trained, 2), buckets


def _optimizer_model(model: nn.Module, cluster: Cluster) -> nn.Module:
    """Return the model whose weights the optimizer updates: with DeepSpeed a copy with trained weights in fp32."""
    if not cluster.keeps_master:
        return model
    wide = meta_copy(model)
    for parameter in wide.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wide


def _optimizer_step(
    model: nn.Module, workload: Workload, stepped: Sequence[nn.Parameter] | None = None
) -> tuple[int, int, int]:
    """Return three sizes of a second optimizer step, in bytes: state, temporaries, and bytes touched.

    In a second step the state exists. With ``optim_in_backward`` weights are updated one at a time, so only the largest
    temporaries of one weight count.

    Args:
        model: Model on ``meta``.
        workload: Step to train.
        stepped: Weights that have a gradient; None is all trained weights.
    """
    if workload.make_optimizer is None:
        return 0, 0, 0
    layers, device = decoder_layers(model), workload.device_type
    trace = Trace(model, layers, device=device, tiers=lambda: (0, 0, 0, 0), unwraps=True)
    optimizer: Any = workload.make_optimizer(model)
    every = [p for p in model.parameters() if p.requires_grad] if stepped is None else list(stepped)
    trained = [] if workload.step.gradients == "none" else every
    with trace, simulating(device):
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
        for state in optimizer.state.values():  # lookup tables are made by torch.tensor, which no dispatch mode sees
            trace.meet(*(value for value in state.values() if isinstance(value, torch.Tensor)))
        before = trace.total
        trace.enter("optimizer")
        optimizer.step()
        cell = trace.cells[CellPlace("optimizer")]
        temporary = _peak_bytes(trace, "optimizer") - before
        if workload.step.gradients == "layer":
            temporary = max(
                (_step_one_weight(trace, optimizer, p, trained) for p in _distinct_weights(optimizer)), default=0
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


def _step_one_weight(trace: Trace, optimizer: Any, alone: nn.Parameter, trained: Sequence[nn.Parameter]) -> int:
    if alone.grad is None:
        return 0
    held = [(p, p.grad) for p in trained if p is not alone]
    for parameter, _ in held:
        parameter.grad = None
    before = trace.total
    phase = f"step of {id(alone)}"
    trace.enter(phase)
    optimizer.step()
    for parameter, gradient in held:
        parameter.grad = gradient
    return _peak_bytes(trace, phase) - before
