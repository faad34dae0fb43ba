"""What a training step holds and costs, from a model's configuration alone: the engine itself, run on ``meta`` tensors.

There is no second formula: the step that is simulated is the step that is trained, with tensors that have a shape and a
lifetime and no values. What a dispatch mode cannot see, the memory kernels take for themselves, is added where it is
known (``plan.work``).

Layers that are alike and chunks that are alike are walked a few times and the rest follows (``plan.extrapolate``);
``full=True`` walks them all.

Chunks of completions that share their prompts are not alike. Few of them are walked, each; where they are many, one
ordinary row of as many tokens stands for them, in which every token is scored. It holds what they hold but for some
masks and copies, and of its work that of the head and of attention is counted for as many targets and pairs of tokens
as there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.engine import Schedule, decoder_layers
from streamtune.errors import ArgumentError
from streamtune.plan.extrapolate import Combined, Part, UnlikeError, combined
from streamtune.plan.layout import kinds_of_layers, layout_of
from streamtune.plan.memory import ACTIVATION, ATTENTION, GRADIENT, HEAD, INPUT, KEYS, OPTIMIZER, held_bytes
from streamtune.plan.scored import Completions, Scored
from streamtune.plan.subject import Mode
from streamtune.plan.tape import COLUMNS, WORK, Place, Tape
from streamtune.plan.walk import Step, fewer_layers, shortened, walk

__all__ = ["Simulation", "Work", "Workload", "simulate"]

DEVICES = ("cpu", "cuda")

FEW = 24
"""Chunks of completions that are walked one by one."""

TERMS = {
    "weights": "weights",
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
"""What a column of a moment is called among the terms, in their order."""


@dataclass(frozen=True)
class Workload:
    """A step of training, whatever its schedule.

    Args:
        make_model: Builds the model on ``meta``: in its dtype, adapters attached, without weights.
        length: Tokens of a row; where completions are scored, of the longest with its prompt.
        batch_size: Rows of a micro-batch; where completions are scored, what ``completions`` takes for one.
        micro_batches: Of a step. With more than one the gradients of the first are there during the others.
        make_optimizer: Builds the optimizer of a model; None trains without one.
        autocast: Compute in bf16.
        mode: ``stream``, or a baseline: ``plain`` autograd, or ``checkpoint`` for every layer.
        zero_stage: What of a rank's is divided by ``ranks`` (ZeRO, arXiv 1910.02054): optimizer state (1), gradients
            (2), weights (3).
        ranks: Over how many devices.
        device_type: Whose kernels compute: ``cuda`` or ``cpu``.
        completions: What is scored at a length and batch size, where the loss is not on next tokens. A baseline has
            them apart.
        reference_bytes: Of weights that are held beside the model's and not trained.

    Raises:
        ArgumentError: A value is out of range.
    """

    make_model: Callable[[], nn.Module]
    length: int
    batch_size: int = 1
    micro_batches: int = 1
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    autocast: bool = False
    mode: Mode = "stream"
    zero_stage: int = 0
    ranks: int = 1
    device_type: str = "cuda"
    completions: Completions | None = None
    reference_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batches", "ranks"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        if self.length < 2:
            raise ArgumentError(f"a row of training has 2 tokens or more, not {self.length!r}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ArgumentError(f"zero_stage must be 0, 1, 2 or 3, not {self.zero_stage!r}")
        if self.device_type not in DEVICES:
            known = " or ".join(map(repr, DEVICES))
            raise ArgumentError(f"kernels of {self.device_type!r} are not known", mend=f"set device_type to {known}")

    @cached_property
    def scored(self) -> Scored | None:
        """What is scored; None where the loss is on next tokens."""
        if self.completions is None:
            return None
        scored = self.completions(self.length, self.batch_size)
        return scored if self.mode == "stream" else scored.apart()

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch_size if self.scored is None else self.scored.rows

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.length if self.scored is None else self.scored.length


@dataclass(frozen=True)
class Work:
    """What a step computes and moves; the time it takes is a matter of the device.

    Attributes:
        matmul_flops: Multiplications and additions of matrix products and convolutions.
        attention_flops: The same of fused attention.
        moved_bytes: Copied to the host and back.
        disk_moved_bytes: Written to disk and read.
        touched_bytes: Read and written on the device by everything else.
        operators: How many there are that compute.
    """

    matmul_flops: int
    attention_flops: int
    moved_bytes: int
    disk_moved_bytes: int
    touched_bytes: int
    operators: int = 0


@dataclass(frozen=True)
class Simulation:
    """What a step holds at the most, and where.

    Attributes:
        peak_bytes: On the device.
        host_bytes, disk_bytes: Elsewhere, at their own peaks.
        terms: Device bytes at the peak, by what they are.
        phase: When the peak is: ``reference``, ``forward``, ``head``, ``backward`` or ``optimizer``.
        phases: Device bytes at the peak of each phase.
        work: Of the whole step.
    """

    peak_bytes: int
    host_bytes: int
    disk_bytes: int
    terms: dict[str, int]
    phase: str
    phases: dict[str, int]
    work: Work


def simulate(workload: Workload, schedule: Schedule, *, full: bool = False) -> Simulation:
    """What a step of ``workload`` by ``schedule`` holds and costs.

    Args:
        workload: The step.
        schedule: How it is streamed; a baseline reads nothing of it.
        full: Walk all layers and chunks, even where fewer tell the same. Where chunks are left out, a length that is
            no multiple of their number counts as the next one that is.

    Raises:
        UnsupportedModelError: The model cannot be streamed, or its step depends on values other than integers.
    """
    model: Any = workload.make_model().train()
    fixed = _Fixed.of(model, workload)
    attempts = [(False, False)] if full else [(True, True), (True, False), (False, True), (False, False)]
    for layers, chunks in attempts:
        try:
            step = _walked(model, workload, schedule, layers=layers, chunks=chunks)
            break
        except UnlikeError:  # steps of other lengths or depths run other operators
            continue
    return _told(step, fixed, workload)


def _walked(model: Any, workload: Workload, schedule: Schedule, *, layers: bool, chunks: bool) -> Combined:
    """Forward and backward of one micro-batch, the last."""
    streamed = workload.mode == "stream"
    scored = workload.scored
    many = streamed and len(schedule.chunks(workload.tokens)) > FEW
    alike = scored is not None and not (chunks and many)
    layout = layout_of(model, schedule, workload.tokens, streamed=streamed, layers=layers, chunks=chunks and not alike)
    kinds = kinds_of_layers(model, schedule if streamed else None)
    whole = Step(
        workload.mode,
        workload.tokens,
        workload.rows,
        workload.micro_batches > 1,
        workload.autocast,
        workload.device_type,
        scored=scored,
        alike=alike,
    )
    parts = []
    for shorter in layout.steps(schedule, kinds):
        step = whole
        if shorter.length != workload.tokens:
            step = shortened(whole, shorter.length, shorter.schedule.head_chunk_size)
        with fewer_layers(model, shorter.layers):
            tape = walk(model, shorter.schedule, step)
        parts.append(Part(tape, shorter.longer, shorter.chunks, shorter.share))
    found = combined(parts, layout.layers, layout.chunks)
    return found if scored is None else replace(found, work=_work_of(scored, found, alike))


def _work_of(scored: Scored, step: Combined, alike: bool) -> dict[tuple[str, bool], list[float]]:
    """The work of completions: of a stand-in what is theirs, and of the reference as much as there is of it."""
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


@dataclass(frozen=True)
class _Fixed:
    """What is there all the time.

    Attributes:
        weights: Bytes of the weights on one rank.
        gathered: Of the weights that are whole for as long as they are used, by phase (ZeRO-3).
        state: Of the optimizer.
        gradients: When all are there.
        temporary: What an optimizer's step needs besides.
        touched: Bytes an optimizer's step reads and writes.
    """

    weights: int
    gathered: dict[str, int]
    state: int
    gradients: int
    temporary: int
    touched: int

    @classmethod
    def of(cls, model: nn.Module, workload: Workload) -> _Fixed:
        """For a model on ``meta``."""
        weights, layers = held_bytes(model), decoder_layers(model)
        sharded = workload.ranks if workload.zero_stage >= 3 else 1
        inner = max(held_bytes(layer) for layer in layers)
        inside = {id(p) for layer in layers for p in layer.parameters()}
        outer = max((p.nbytes for p in model.parameters() if id(p) not in inside), default=0)
        gathered = {"forward": max(inner, outer), "head": outer, "backward": max(inner, outer)}
        gathered["reference"] = gathered["forward"]
        state, temporary, touched = _optimizer_step(model, workload)
        return cls(
            -(-weights // sharded),
            {phase: size - size // sharded for phase, size in gathered.items()},
            state,
            _divided(sum(p.nbytes for p in model.parameters() if p.requires_grad), workload, 2),
            temporary,
            touched,
        )


def _optimizer_step(model: nn.Module, workload: Workload) -> tuple[int, int, int]:
    """Bytes of state on one rank, of temporaries, and bytes touched: a second step, when the state is there."""
    if workload.make_optimizer is None:
        return 0, 0, 0
    tape = Tape(model, decoder_layers(model), device=workload.device_type, tiers=lambda: (0, 0, 0, 0))
    optimizer = workload.make_optimizer(model)
    with tape:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        chosen = [(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups]
        # Which form a step takes is chosen by the device, and torch knows no form but the plain one for ``meta``.
        for group in optimizer.param_groups:
            group.update({key: False for key in ("foreach", "fused") if key in group})
        optimizer.step()
        for group, (foreach, fused) in zip(optimizer.param_groups, chosen, strict=True):
            on_device = foreach is None and not fused and workload.device_type == "cuda"
            group.update({"foreach": on_device or foreach} if "foreach" in group else {})
            group.update({"fused": fused} if "fused" in group else {})
        before = tape.total
        tape.enter("optimizer")
        optimizer.step()
    cell = tape.cells[Place("optimizer")]
    peak = max(sum(moment) for moment in cell.moments)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.grad = None
    state = _divided(before - gradients, workload, 1)
    return state, _divided(peak - before, workload, 1), _divided(cell.work[WORK.index("touched_bytes")], workload, 1)


def _divided(size: int, workload: Workload, stage: int) -> int:
    """Bytes on one rank of what is divided from a stage on."""
    return -(-size // workload.ranks) if workload.zero_stage >= stage else size


def _told(step: Combined, fixed: _Fixed, workload: Workload) -> Simulation:
    """The peaks of all phases, and the terms at the largest."""
    peaks: dict[str, tuple[int, dict[str, int]]] = {}
    host = disk = 0
    beside = {"reference": workload.reference_bytes} if workload.reference_bytes else {}
    for place, moments in step.cells:
        held = moments[:, : COLUMNS.index("host")].clone()
        gradient = COLUMNS.index(GRADIENT)
        if workload.zero_stage >= 2:
            held[:, gradient] = held[:, gradient] // workload.ranks
        totals = held.sum(1)
        at = int(totals.argmax())
        constant = {"weights": fixed.weights + fixed.gathered[place.phase], OPTIMIZER: fixed.state, **beside}
        total = int(totals[at]) + sum(constant.values())
        if total > peaks.get(place.phase, (-1, {}))[0]:
            peaks[place.phase] = (total, _terms(held[at], constant))
        host = max(host, int(moments[:, COLUMNS.index("host")].max()))
        disk = max(disk, int(moments[:, COLUMNS.index("disk")].max()))
    if workload.make_optimizer is not None:
        constant = {"weights": fixed.weights, OPTIMIZER: fixed.state, GRADIENT: fixed.gradients, **beside}
        constant[ACTIVATION] = fixed.temporary
        peaks["optimizer"] = (sum(constant.values()), {TERMS[k]: v for k, v in constant.items() if v})
    phase = max(peaks, key=lambda name: peaks[name][0])
    total, terms = peaks[phase]
    sums = (sum(each) for each in zip(*step.work.values(), strict=True))
    work = dict(zip(WORK, (round(each * workload.micro_batches) for each in sums), strict=True))
    work["touched_bytes"] += fixed.touched
    return Simulation(total, host, disk, terms, phase, {k: v[0] for k, v in peaks.items()}, Work(**work))


def _terms(moment: Tensor, constant: dict[str, int]) -> dict[str, int]:
    found = dict(zip(COLUMNS, moment.tolist(), strict=False))
    for name, size in constant.items():
        found[name] = found.get(name, 0) + size
    return {TERMS[name]: int(found[name]) for name in TERMS if found.get(name)}
