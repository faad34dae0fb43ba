"""Simulate the memory and work of a training step by running the real step on ``meta`` tensors.

Such tensors have a shape and a lifetime, but no values. A dispatch mode does not see the scratch memory of kernels, so
``costs.scratch_bytes`` adds the scratch memory of some kernels. Of equal layers and equal chunks only a few are run,
and the others are extrapolated (``extrapolate``); ``full=True`` runs all layers and chunks.

Chunks of completions that share a prompt are not equal. If the chunks are few, each chunk is run. If they are many, an
ordinary row with the same number of tokens is run instead, in which every token is scored. Its memory is the same,
except for some masks and copies. The work of its head and attention is scaled to the real number of targets and
query-key pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from streamtune.base.result_cache import cached_result
from streamtune.engine import decoder_layers
from streamtune.ops.devices import run_all_iterations, simulate_device_type
from streamtune.optim import ZerothOrderSGD, perturb_weights
from streamtune.plan.simulate.extrapolate import (
    Cells,
    Combined,
    ShorterStep,
    StepsDifferError,
    combine_steps,
    layer_kinds,
    make_step_layout,
    repeat_layer_period,
)
from streamtune.plan.simulate.memory import ACTIVATION, ATTENTION, FETCHED, GRADIENT, HEAD, INPUT, KEYS, OPTIMIZER
from streamtune.plan.simulate.partition import ResidentMemory
from streamtune.plan.simulate.scored import Scored, Trees
from streamtune.plan.simulate.shard import RankShard, narrow_windows, rank_shard
from streamtune.plan.simulate.simulation_cache import cached_model_property, step_cache_key
from streamtune.plan.simulate.step import Step, fewer_layers, shorten_step, trace_step
from streamtune.plan.simulate.trace import COLUMNS, WORK
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule, WeightTier

MASTER = "master"

MAX_CHUNKS_RUN = 24
"""Largest number of chunks for which a step that scores completions runs every chunk."""

TERMS = {
    "weights": "weights",
    "gathered": "gathered weights",
    FETCHED: "fetched weights",
    MASTER: "fp32 weights",
    "reference": "reference",
    "images": "images",
    GRADIENT: "gradients",
    OPTIMIZER: "optimizer",
    INPUT: "layer inputs",
    KEYS: "keys and values",
    ATTENTION: "attention outputs",
    ACTIVATION: "activations",
    HEAD: "head",
    "scratch": "kernel workspace",
}
"""Name of the memory term of each column of recorded bytes, in the order in which terms are listed."""


@dataclass(frozen=True)
class Work:
    """FLOPs of a step and the bytes it moves.

    Attributes:
        matmul_flops: FLOPs of matrix products and convolutions.
        attention_flops: FLOPs of fused attention.
        moved_bytes: Bytes copied to the host and back.
        disk_moved_bytes: Bytes written to disk and read back.
        touched_bytes: Bytes that other operators read and write on the device. For products of few rows,
            ``costs.bandwidth_bound_bytes`` is added.
        operators: Number of operators that compute.
        host_touched_bytes: Bytes that an optimizer reads and writes in host memory, after the backward.
        host_overlapped_bytes: Bytes that an optimizer reads and writes in host memory during the backward.
    """

    matmul_flops: int
    attention_flops: int
    moved_bytes: int
    disk_moved_bytes: int
    touched_bytes: int
    operators: int = 0
    host_touched_bytes: int = 0
    host_overlapped_bytes: int = 0


@dataclass(frozen=True)
class Simulation:
    """Peak memory of a step on each tier, and its work.

    Attributes:
        peak_bytes: Peak bytes on the device.
        host_bytes, disk_bytes: Peak bytes on host and disk; the peaks need not coincide.
        terms: Device bytes at the peak, by memory term.
        phase: Phase of the peak: ``images``, ``reference``, ``forward``, ``head``, ``backward`` or ``optimizer``.
        phases: Peak device bytes of each phase.
        work: Work of the whole step.
        host_terms: Host bytes by memory term; ``layer inputs`` includes all tensors that the engine offloads.
    """

    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    terms: dict[str, int]
    phase: str
    phases: dict[str, int]
    work: Work
    host_terms: dict[str, int] = field(default_factory=dict)

    @property
    def streamed_host_bytes(self) -> int:
        """Host bytes that the engine stores for the backward, without weights, gradients and optimizer state."""
        return sum(self.host_terms.get(name, 0) for name in ("layer inputs", KEYS))


def simulate(workload: Workload, schedule: Schedule, *, full: bool = False) -> Simulation:
    """Return the simulated memory and work of a step of ``workload`` with ``schedule``.

    Args:
        workload: Step to simulate.
        schedule: Schedule with which the step is streamed; ignored in the modes without streaming.
        full: True to run all layers and chunks, even if fewer give the same result.

    Raises:
        UnsupportedModelError: The model cannot be streamed, or its step depends on values other than integers.

    Example:
        >>> from streamtune.plan.simulate import Workload
        >>> from streamtune.schedule import Schedule
        >>> found = simulate(Workload(lambda: model, length=64, device_type="cpu"), Schedule(chunk_size=16))
        >>> found.peak_bytes > 0
        True
    """
    if workload.keep and not full and (key := step_cache_key(workload, schedule)) is not None:
        fresh = replace(workload, keep=False)
        cached = cached_result("simulations", key, lambda: asdict(simulate(fresh, schedule)))
        return Simulation(**{**cached, "work": Work(**cached["work"])})
    model: Any = workload.make_model().train()
    shard = rank_shard(model, workload.cluster)
    row_independent = resident_memory(workload, schedule.weights)
    resident = row_independent.adapted_to_schedule(model, workload, schedule)
    attempts = [(False, False)] if full else [(True, True), (True, False), (False, True), (False, False)]
    for layers, chunks in attempts:
        try:
            with narrow_windows(model, shard.size), run_all_iterations() if full else nullcontext():
                step = _trace_micro_batch(model, workload, shard, schedule, layers=layers, chunks=chunks)
            break
        except StepsDifferError:  # the shorter steps ran other operators: leave out less
            continue
    found = _add_fixed_memory(model, workload, schedule, shard, resident, step)
    if schedule.order == "chunk" and schedule.keep_kv == "host" and "layer inputs" in found.host_terms:
        terms = {KEYS if name == "layer inputs" else name: size for name, size in found.host_terms.items()}
        return replace(found, host_terms=terms)
    return found


def resident_memory(workload: Workload, weights_tier: WeightTier = "device") -> ResidentMemory:
    """Return the memory of a rank that does not depend on the row length; weights are stored on ``weights_tier``."""
    model: Any = workload.make_model()
    forwards = None if workload.scored is None else workload.scored.forwards
    held = (
        "holdings", workload.cluster, workload.make_optimizer, workload.device_type, workload.micro_batches, forwards,
        weights_tier, workload.step,
    )  # fmt: skip
    return cached_model_property(model, held, lambda: ResidentMemory.from_model(model, workload, weights_tier))


def _teacher_peak_bytes(workload: Workload, schedule: Schedule) -> int | None:
    """Return the peak device bytes of the teacher's forward, its weights included; None without a teacher.

    The forward is streamed with the same chunk sizes as the model. With sequence parallelism it is simulated on one
    rank's tokens. Logits of one chunk are counted although a teacher's forward has none, so the result is an upper
    bound.
    """
    if workload.teacher is None or workload.teacher.make_model is None or workload.mode != "stream":
        return None
    model = workload.teacher.make_model()
    rows: Trees = ((0, (workload.shard_tokens,)),) * workload.num_rows
    chunks = Schedule(
        chunk_size=schedule.chunk_size, head_chunk_size=schedule.head_chunk_size, weights=schedule.weights
    )
    teacher_workload = Workload(
        make_model=lambda: model,
        length=workload.shard_tokens,
        batch_size=workload.num_rows,
        autocast=workload.autocast,
        device_type=workload.device_type,
        completions=lambda length, size: Scored(rows, share=False, forwards=1.0),
    )
    name = ("as a teacher", rows, workload.autocast, workload.device_type, chunks)
    return cached_model_property(model, name, lambda: simulate(teacher_workload, chunks).phases["reference"])


def _trace_micro_batch(
    model: Any, workload: Workload, shard: RankShard, schedule: Schedule, *, layers: bool, chunks: bool
) -> Combined:
    """Return bytes and work of the forward and the backward of a step's last micro-batch, on one rank.

    ``layers`` and ``chunks`` allow leaving out equal layers and equal chunks.

    Raises:
        StepsDifferError: The shorter steps ran different operators.
    """
    streamed = workload.mode == "stream"
    scored, tokens = workload.scored, shard.shard_tokens(workload.num_tokens)
    has_many_chunks = streamed and len(schedule.chunks(tokens)) > MAX_CHUNKS_RUN
    uses_scored_layout = scored is not None and shard.size == 1 and not (chunks and has_many_chunks)
    with simulate_device_type(workload.device_type):
        layout = make_step_layout(
            model, schedule, tokens, streamed=streamed, layers=layers, chunks=chunks and not uses_scored_layout
        )
    kinds = layer_kinds(model, schedule if streamed else None)
    whole = Step(
        workload.mode,
        tokens,
        workload.num_rows,
        workload.micro_batches > 1 and workload.step.gradients != "none",
        workload.autocast,
        workload.device_type,
        scored=scored,
        uses_scored_layout=uses_scored_layout,
        shard=shard,
        frees_gradients=workload.frees_gradients,
        token_loss=workload.token_loss,
        teacher=workload.teacher,
        teacher_top_k=workload.teacher_top_k,
        perturb=_make_perturbation(workload, model),
    )
    parts: list[tuple[ShorterStep, Cells]] = []
    cells: Cells = {}
    for shorter in layout.shorter_steps(schedule, kinds):
        longer = None
        if shorter.longer is not None and (not streamed or schedule.order == "layer"):
            longer = repeat_layer_period(cells, layout.middle_period_layers(shorter.longer))
        if longer is None:
            step = whole
            if shorter.length != tokens:
                step = shorten_step(whole, shorter.length, shorter.schedule.head_chunk_size)
            with fewer_layers(model, shorter.layers):
                longer = trace_step(model, shorter.schedule, step).cells
        if shorter.longer is None:
            cells = longer
        parts.append((shorter, longer))
    found = combine_steps(parts, layout.layers, layout.chunks, tokens)
    return (
        found if scored is None else replace(found, work=_scale_work_to_completions(scored, found, uses_scored_layout))
    )


def _make_perturbation(workload: Workload, model: Any) -> Callable[[Any], AbstractContextManager[None]] | None:
    """Return a function that opens a context with perturbed weights, for zeroth-order steps; None for other steps."""
    if workload.step.gradients != "none" or workload.make_optimizer is None:
        return None
    optimizer = workload.make_optimizer(model)
    assert isinstance(optimizer, ZerothOrderSGD), "only ZerothOrderSGD works without a backward"
    return lambda perturbed_model: perturb_weights(optimizer, perturbed_model, decoder_layers(perturbed_model), 0, 1)


def _scale_work_to_completions(
    scored: Scored, step: Combined, uses_scored_layout: bool
) -> dict[tuple[str, bool], list[float]]:
    targets, pairs = 1.0, 1.0
    if not uses_scored_layout:
        targets = scored.num_targets / (scored.num_rows * scored.length)
        pairs = scored.num_unmasked_pairs / (scored.num_rows * (scored.length * (scored.length + 1) // 2))
    found = {}
    for (phase, inside), work in step.work.items():
        # Outside the layers the head does nearly all the work; embeddings and norms are negligible.
        share = (scored.forwards if phase == "reference" else 1.0) * (1.0 if inside else targets)
        found[phase, inside] = [share * each for each in work]
        found[phase, inside][WORK.index("attention_flops")] *= pairs
    return found


def _add_fixed_memory(
    model: Any, workload: Workload, schedule: Schedule, shard: RankShard, resident: ResidentMemory, step: Combined
) -> Simulation:
    """Return the simulation of the whole step: the sum of ``step``, resident memory and ring buffers."""
    peaks = _phase_peaks(model, workload, schedule, shard, resident, step)
    phase = max(peaks, key=lambda name: peaks[name][0])
    host = shard.replicated_host_kv_bytes(model, schedule, workload.num_tokens, workload.num_rows)
    host += max((int(moments[:, COLUMNS.index("host")].max()) for _, moments in step.cells), default=0)
    teacher = workload.saved_teacher_bytes
    host_terms = {**({"layer inputs": host} if host else {}), **resident.host}
    host_terms |= {"teacher": teacher} if teacher else {}
    return Simulation(
        peak_bytes=peaks[phase][0],
        host_bytes=host + sum(resident.host.values()) + teacher,
        disk_bytes=max((int(moments[:, COLUMNS.index("disk")].max()) for _, moments in step.cells), default=0),
        terms=peaks[phase][1],
        phase=phase,
        phases={name: size for name, (size, _) in peaks.items()},
        work=_step_work(workload, resident, step),
        host_terms=host_terms,
    )


def _phase_peaks(
    model: Any, workload: Workload, schedule: Schedule, shard: RankShard, resident: ResidentMemory, step: Combined
) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the peak device bytes of each phase, with the memory terms at that peak."""
    peaks: dict[str, tuple[int, dict[str, int]]] = {}
    constant_bytes = {"weights": resident.weights, MASTER: resident.master, OPTIMIZER: resident.state}
    constant_bytes |= {"reference": workload.reference_bytes}
    if workload.images is not None:
        constant_bytes["images"] = workload.images.held
    constant_bytes[GRADIENT] = resident.buckets + (resident.gradients if resident.gradients_sharded else 0)
    tokens, rows, keys = workload.num_tokens, workload.num_rows, COLUMNS.index(KEYS)
    ring_bytes = {late: shard.ring_buffer_bytes(model, tokens, rows, backward=late) for late in (False, True)}
    for place, moments in step.cells:
        held = moments[:, : COLUMNS.index("host")].clone()
        if resident.gradients_sharded:
            held[:, COLUMNS.index(GRADIENT)] = 0
        held[:, keys] = (held[:, keys] * shard.kv_copies).to(held.dtype)
        totals = held.sum(1)
        at = int(totals.argmax())
        again = place.phase == "backward" and place.pass_name == "store"
        constant = {**constant_bytes, "gathered": resident.gathered["again" if again else place.phase]}
        constant[ACTIVATION] = shard.other_ranks_input_bytes(tokens, rows)
        constant[KEYS] = 0 if place.phase == "head" else ring_bytes[place.phase == "backward"]
        total = int(totals[at]) + sum(constant.values())
        if total > peaks.get(place.phase, (-1, {}))[0]:
            peaks[place.phase] = (total, _sum_terms(held[at], constant))
    if workload.images is not None:
        there = resident.gradients if resident.gradients_sharded or workload.micro_batches > 1 else 0
        constant = {**constant_bytes, "images": workload.images.peak, GRADIENT: resident.buckets + there}
        peaks["images"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    if (teacher := _teacher_peak_bytes(workload, schedule)) is not None:
        there = resident.gradients if resident.gradients_sharded or workload.micro_batches > 1 else 0
        constant = {**constant_bytes, "reference": teacher, GRADIENT: resident.buckets + there}
        peaks["reference"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    if workload.make_optimizer is not None:
        constant = {**constant_bytes, GRADIENT: resident.buckets + resident.gradients, ACTIVATION: resident.temporary}
        peaks["optimizer"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    return peaks


def _step_work(workload: Workload, resident: ResidentMemory, step: Combined) -> Work:
    sums = (sum(each) for each in zip(*step.work.values(), strict=True))
    times = workload.micro_batches
    work = dict(zip(WORK, (round(each * times * workload.step.forwards) for each in sums), strict=True))
    if (images := workload.images) is not None:
        references = 0.0 if workload.scored is None else workload.scored.forwards
        forwards = times * (workload.step.forwards + references)
        for name, forward, backward in zip(WORK, images.forward, images.backward, strict=True):
            work[name] += round(forwards * forward + times * backward)
    if workload.teacher is not None:
        work["matmul_flops"] += workload.teacher.flops * workload.shard_tokens * workload.num_rows * times
    work["touched_bytes"] += resident.touched
    work["moved_bytes"] += resident.host_moved
    return Work(**work, host_touched_bytes=resident.host_touched, host_overlapped_bytes=resident.host_overlapped)


def _sum_terms(moment: Tensor, constant: dict[str, int]) -> dict[str, int]:
    found = dict(zip(COLUMNS, moment.tolist(), strict=False))
    for name, size in constant.items():
        found[name] = found.get(name, 0) + size
    return {TERMS[name]: int(found[name]) for name in TERMS if found.get(name)}
