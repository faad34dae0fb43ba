"""Simulate the memory and work of a training step from a model's configuration: the engine itself on ``meta`` tensors.

There is no second formula: the simulated step is the trained step, with tensors that have a shape and a lifetime and no
values. The memory that kernels take for themselves, which a dispatch mode cannot see, is added where it is known
(``costs.scratch_bytes``). Of layers that are alike and chunks that are alike a few are run, and the rest follows
(``extrapolate``); ``full=True`` runs them all.

Chunks of completions that share their prompts are not alike. If they are few, each is run; if they are many, one
ordinary row of as many tokens is run instead, in which every token is scored. It holds the same but for some masks and
copies. The work of its head and of its attention is scaled to the real number of targets and of pairs of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from streamtune.base.result_cache import cached_result
from streamtune.engine import decoder_layers
from streamtune.ops.devices import all_turns, simulating
from streamtune.optim import ZerothOrderSGD, perturbed
from streamtune.plan.simulate.extrapolate import (
    Cells,
    Combined,
    Shorter,
    UnlikeError,
    combined,
    kinds_of_layers,
    layout_of,
    with_a_period_more,
)
from streamtune.plan.simulate.memory import ACTIVATION, ATTENTION, FETCHED, GRADIENT, HEAD, INPUT, KEYS, OPTIMIZER
from streamtune.plan.simulate.partition import Holdings
from streamtune.plan.simulate.scored import Scored, Trees
from streamtune.plan.simulate.shard import RankShard, narrower, shard_of
from streamtune.plan.simulate.simulation_cache import describe_step, fact_of
from streamtune.plan.simulate.step import Step, fewer_layers, shortened, trace_step
from streamtune.plan.simulate.trace import COLUMNS, WORK
from streamtune.plan.simulate.workload import Workload
from streamtune.schedule import Schedule, WeightTier

MASTER = "master"

FEW = 24
"""Chunks of completions that are run one by one."""

TERMS = {
    "weights": "weights",
    "gathered": "gathered weights",
    FETCHED: "fetched weights",
    MASTER: "fp32 weights",
    "reference": "reference",
    GRADIENT: "gradients",
    OPTIMIZER: "optimizer",
    INPUT: "layer inputs",
    KEYS: "keys and values",
    ATTENTION: "attention outputs",
    ACTIVATION: "activations",
    HEAD: "head",
    "scratch": "kernel workspace",
}
"""Names of a moment's columns among the terms, in the order of terms."""


@dataclass(frozen=True)
class Work:
    """The operations of a step and the bytes it moves; their time depends on the device.

    Attributes:
        matmul_flops: Multiplications and additions of matrix products and convolutions.
        attention_flops: The same of fused attention.
        moved_bytes: Bytes copied to the host and back.
        disk_moved_bytes: Bytes written to disk and read.
        touched_bytes: Bytes read and written on the device by everything else, and by products that wait for them.
        operators: Number of operators that compute.
        host_touched_bytes: Bytes read and written by an optimizer in host memory, after the backward.
        host_overlapped_bytes: The same in the backward, while the device computes.
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
    """The peak memory of a step on the device and elsewhere, and its work.

    Attributes:
        peak_bytes: Bytes on the device.
        host_bytes, disk_bytes: Bytes elsewhere, at their own peaks.
        terms: Device bytes at the peak, by what they are.
        phase: The phase of the peak: ``reference``, ``forward``, ``head``, ``backward`` or ``optimizer``.
        phases: Device bytes at the peak of each phase.
        work: The work of the whole step.
        host_terms: Bytes on the host by what they are: ``layer inputs`` is all that is streamed there.
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
        """Bytes that the engine stores on the host for the backward: not weights, gradients or optimizer."""
        return sum(self.host_terms.get(name, 0) for name in ("layer inputs", KEYS))


def simulate(workload: Workload, schedule: Schedule, *, full: bool = False) -> Simulation:
    """Simulate the memory and work of a step of ``workload`` by ``schedule``.

    Args:
        workload: The step.
        schedule: The schedule by which it is streamed, unless it is a baseline.
        full: Run all layers and chunks, even if fewer give the same result.

    Raises:
        UnsupportedModelError: The model cannot be streamed, or its step depends on values other than integers.
    """
    if workload.keep and not full and (key := describe_step(workload, schedule)) is not None:
        fresh = replace(workload, keep=False)
        cached = cached_result("simulations", key, lambda: asdict(simulate(fresh, schedule)))
        return Simulation(**{**cached, "work": Work(**cached["work"])})
    model: Any = workload.make_model().train()
    shard = shard_of(model, workload.cluster)
    held_always = holdings_of(workload, schedule.weights)
    fixed = held_always.scheduled(model, workload, schedule)
    attempts = [(False, False)] if full else [(True, True), (True, False), (False, True), (False, False)]
    for layers, chunks in attempts:
        try:
            with narrower(model, shard.size), all_turns() if full else nullcontext():
                step = _traced(model, workload, shard, schedule, layers=layers, chunks=chunks)
            break
        except UnlikeError:  # steps of other lengths or depths run other operators
            continue
    found = _summed(model, workload, schedule, shard, fixed, step)
    if schedule.order == "chunk" and schedule.keep_kv == "host" and "layer inputs" in found.host_terms:
        terms = {KEYS if name == "layer inputs" else name: size for name, size in found.host_terms.items()}
        return replace(found, host_terms=terms)
    return found


def holdings_of(workload: Workload, weights: WeightTier = "device") -> Holdings:
    """Return what device and host hold of a step whatever the length, with weights that wait in a tier."""
    model: Any = workload.make_model()
    forwards = None if workload.scored is None else workload.scored.forwards
    held = (
        "holdings", workload.cluster, workload.make_optimizer, workload.device_type, workload.micro_batches, forwards,
        weights, workload.step,
    )  # fmt: skip
    return fact_of(model, held, lambda: Holdings.of(model, workload, weights))


def _teacher_forward(workload: Workload, schedule: Schedule) -> int | None:
    """Return the device bytes at the peak of the teacher's forward, its weights included; None without a teacher.

    It is streamed with the chunks of the model; ranks that share sequences are assumed to have short ones. It is
    simulated with logits of a chunk, which a teacher's forward does not have: the result is not too small.
    """
    if workload.teacher is None or workload.teacher.make_model is None or workload.mode != "stream":
        return None
    model = workload.teacher.make_model()
    rows: Trees = ((0, (workload.shard_tokens,)),) * workload.rows
    chunks = Schedule(
        chunk_size=schedule.chunk_size, head_chunk_size=schedule.head_chunk_size, weights=schedule.weights
    )
    alone = Workload(
        make_model=lambda: model,
        length=workload.shard_tokens,
        batch_size=workload.rows,
        autocast=workload.autocast,
        device_type=workload.device_type,
        completions=lambda length, size: Scored(rows, share=False, forwards=1.0),
    )
    name = ("as a teacher", rows, workload.autocast, workload.device_type, chunks)
    return fact_of(model, name, lambda: simulate(alone, chunks).phases["reference"])


def _traced(
    model: Any, workload: Workload, shard: RankShard, schedule: Schedule, *, layers: bool, chunks: bool
) -> Combined:
    """Simulate forward and backward of one micro-batch, the last, on one rank."""
    streamed = workload.mode == "stream"
    scored, tokens = workload.scored, shard.tokens(workload.tokens)
    many = streamed and len(schedule.chunks(tokens)) > FEW
    alike = scored is not None and shard.size == 1 and not (chunks and many)
    with simulating(workload.device_type):
        layout = layout_of(model, schedule, tokens, streamed=streamed, layers=layers, chunks=chunks and not alike)
    kinds = kinds_of_layers(model, schedule if streamed else None)
    whole = Step(
        workload.mode,
        tokens,
        workload.rows,
        workload.micro_batches > 1 and workload.step.gradients != "none",
        workload.autocast,
        workload.device_type,
        scored=scored,
        alike=alike,
        shard=shard,
        frees_gradients=workload.frees_gradients,
        token_loss=workload.token_loss,
        teacher=workload.teacher,
        teacher_top_k=workload.teacher_top_k,
        perturb=_perturbed(workload, model),
    )
    parts: list[tuple[Shorter, Cells]] = []
    cells: Cells = {}
    for shorter in layout.steps(schedule, kinds):
        longer = None
        if shorter.longer is not None and (not streamed or schedule.order == "layer"):
            longer = with_a_period_more(cells, layout.middle(shorter.longer))
        if longer is None:
            step = whole
            if shorter.length != tokens:
                step = shortened(whole, shorter.length, shorter.schedule.head_chunk_size)
            with fewer_layers(model, shorter.layers):
                longer = trace_step(model, shorter.schedule, step).cells
        if shorter.longer is None:
            cells = longer
        parts.append((shorter, longer))
    found = combined(parts, layout.layers, layout.chunks, tokens)
    return found if scored is None else replace(found, work=_work_of(scored, found, alike))


def _perturbed(workload: Workload, model: Any) -> Callable[[Any], AbstractContextManager[None]] | None:
    """Return what perturbs the weights of the model, or of some of its layers, in a step without a backward."""
    if workload.step.gradients != "none" or workload.make_optimizer is None:
        return None
    optimizer = workload.make_optimizer(model)
    assert isinstance(optimizer, ZerothOrderSGD), "no other optimizer does without a backward"
    return lambda some: perturbed(optimizer, some, decoder_layers(some), 0, 1)


def _work_of(scored: Scored, step: Combined, alike: bool) -> dict[tuple[str, bool], list[float]]:
    """Return the work, scaled from an ordinary row to the completions, and by the reference's forwards."""
    targets, pairs = 1.0, 1.0
    if not alike:
        targets = scored.num_targets / (scored.rows * scored.length)
        pairs = scored.pairs / (scored.rows * (scored.length * (scored.length + 1) // 2))
    found = {}
    for (phase, inside), work in step.work.items():
        # Outside of the layers there are embeddings and norms beside the head, next to which they are nothing.
        share = (scored.forwards if phase == "reference" else 1.0) * (1.0 if inside else targets)
        found[phase, inside] = [share * each for each in work]
        found[phase, inside][WORK.index("attention_flops")] *= pairs
    return found


def _summed(
    model: Any, workload: Workload, schedule: Schedule, shard: RankShard, fixed: Holdings, step: Combined
) -> Simulation:
    """Add what is always held, and what ranks exchange, to the step that was run: peaks, terms at the largest, work."""
    peaks = _peaks(model, workload, schedule, shard, fixed, step)
    phase = max(peaks, key=lambda name: peaks[name][0])
    host = shard.keys_on_host(model, schedule, workload.tokens, workload.rows)
    host += max((int(moments[:, COLUMNS.index("host")].max()) for _, moments in step.cells), default=0)
    taught = workload.taught_bytes
    elsewhere = {**({"layer inputs": host} if host else {}), **fixed.host, **({"teacher": taught} if taught else {})}
    return Simulation(
        peak_bytes=peaks[phase][0],
        host_bytes=host + sum(fixed.host.values()) + taught,
        disk_bytes=max((int(moments[:, COLUMNS.index("disk")].max()) for _, moments in step.cells), default=0),
        terms=peaks[phase][1],
        phase=phase,
        phases={name: size for name, (size, _) in peaks.items()},
        work=_whole_work(workload, fixed, step),
        host_terms=elsewhere,
    )


def _peaks(
    model: Any, workload: Workload, schedule: Schedule, shard: RankShard, fixed: Holdings, step: Combined
) -> dict[str, tuple[int, dict[str, int]]]:
    """Return the bytes and the terms at the peak of each phase."""
    peaks: dict[str, tuple[int, dict[str, int]]] = {}
    beside = {"weights": fixed.weights, MASTER: fixed.master, OPTIMIZER: fixed.state}
    beside |= {"reference": workload.reference_bytes}
    beside[GRADIENT] = fixed.buckets + (fixed.gradients if fixed.divided else 0)
    tokens, rows, keys = workload.tokens, workload.rows, COLUMNS.index(KEYS)
    passing = {late: shard.passing_bytes(model, tokens, rows, backward=late) for late in (False, True)}
    for place, moments in step.cells:
        held = moments[:, : COLUMNS.index("host")].clone()
        if fixed.divided:
            held[:, COLUMNS.index(GRADIENT)] = 0
        held[:, keys] = (held[:, keys] * shard.copies).to(held.dtype)
        totals = held.sum(1)
        at = int(totals.argmax())
        again = place.phase == "backward" and place.pass_name == "store"
        constant = {**beside, "gathered": fixed.gathered["again" if again else place.phase]}
        constant[ACTIVATION] = shard.row_bytes(tokens, rows)
        constant[KEYS] = 0 if place.phase == "head" else passing[place.phase == "backward"]
        total = int(totals[at]) + sum(constant.values())
        if total > peaks.get(place.phase, (-1, {}))[0]:
            peaks[place.phase] = (total, _terms(held[at], constant))
    if (teacher := _teacher_forward(workload, schedule)) is not None:
        there = fixed.gradients if fixed.divided or workload.micro_batches > 1 else 0
        constant = {**beside, "reference": teacher, GRADIENT: fixed.buckets + there}
        peaks["reference"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    if workload.make_optimizer is not None:
        constant = {**beside, GRADIENT: fixed.buckets + fixed.gradients, ACTIVATION: fixed.temporary}
        peaks["optimizer"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    return peaks


def _whole_work(workload: Workload, fixed: Holdings, step: Combined) -> Work:
    """Return the work of all micro-batches, of a teacher and of the optimizer."""
    sums = (sum(each) for each in zip(*step.work.values(), strict=True))
    times = workload.micro_batches
    work = dict(zip(WORK, (round(each * times * workload.step.forwards) for each in sums), strict=True))
    if workload.teacher is not None:
        work["matmul_flops"] += workload.teacher.flops * workload.shard_tokens * workload.rows * times
    work["touched_bytes"] += fixed.touched
    work["moved_bytes"] += fixed.host_moved
    return Work(**work, host_touched_bytes=fixed.host_touched, host_overlapped_bytes=fixed.host_overlapped)


def _terms(moment: Tensor, constant: dict[str, int]) -> dict[str, int]:
    found = dict(zip(COLUMNS, moment.tolist(), strict=False))
    for name, size in constant.items():
        found[name] = found.get(name, 0) + size
    return {TERMS[name]: int(found[name]) for name in TERMS if found.get(name)}
