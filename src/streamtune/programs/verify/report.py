"""The rule and the results of a verification, and the JSON document of them.

By the rule a streamed gradient counts as plain autograd's. For the gradient g of one parameter and G of all of them
together, against the truth,

    e = ||g - g_truth|| / max(||g_truth||, 1e-3 ||G_truth||)            E = root mean square of e over the parameters

    exact     streamed in the truth's dtype         e <= SAME[dtype]
    precise   streamed in the dtype of training     e <= 1.5  e(plain) + NOISE[dtype]
                                                    E <= 1.25 E(plain) + NOISE[dtype] / 16

The first tests that it is the same sum: in float64 and float32, rounding is too small to hide a mistake. The second
tests that it is rounded as well as plain autograd is in the dtype that is trained in. A loss is treated as a parameter
is, with a quarter of either bound, because it averages the errors of all tokens.

Without a truth the plain run takes its place, and only the first rule applies, with that dtype's bound.

A layer that passes on a state in float32 for an input of any dtype (delta rule, Mamba-2) computes it in float32 too:
there float64 is held to float32's bound.

A model that sends tokens to experts may send one elsewhere because of rounding alone: a jump, not noise. Where its
gradients are compared with those of another dtype, or in a narrow one, only E is tested, with the bounds ROUTED.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamtune.base.adapters import is_of_adapters
from streamtune.schedule import Schedule


@dataclass(frozen=True)
class VerifyRun:
    """One forward and backward.

    Attributes:
        schedule: The schedule it was streamed with; None for plain autograd.
        dtype: The dtype it was computed in.
        loss: Its loss.
        errors: Of every trainable parameter, against the truth.
        narrow_states: A layer passed its state from chunk to chunk in a narrower dtype than this one.
    """

    schedule: Schedule | None
    dtype: torch.dtype
    loss: float
    errors: dict[str, float]
    narrow_states: bool = False

    @property
    def overall(self) -> float:
        """The root mean square of the errors: each parameter counts once, however large its gradient is."""
        return math.hypot(*self.errors.values()) / math.sqrt(len(self.errors))


@dataclass(frozen=True)
class Finding:
    """An error, with plain autograd's own error and the error that the rule allows.

    Attributes:
        parameter: Name of the parameter; ``loss`` for the loss.
        overall: The errors are those of all parameters, and ``parameter`` is the one that is furthest off.
    """

    parameter: str
    error: float
    torch_error: float
    allowed: float
    run: VerifyRun
    overall: bool = False

    @property
    def excess(self) -> float:
        """The error divided by what is allowed: above 1 is wrong."""
        if math.isinf(self.error):
            return math.inf
        return self.error / self.allowed

    @property
    def module(self) -> str:
        """The kind of module the parameter belongs to."""
        return module_of(self.parameter)

    def describe(self) -> str:
        """Return ``q_proj.weight is off by 3.2e-01, where 2.0e-06 is allowed (float64, chunks of 683)`` or the like."""
        assert self.run.schedule is not None
        own = f", plain autograd by {self.torch_error:.1e}" if self.torch_error else ""
        of = " is the furthest off; in the mean all are" if self.overall else " is"
        how = f"{str(self.run.dtype).removeprefix('torch.')}, chunks of {self.run.schedule.chunk_size:,}"
        bound = f"{self.allowed:.1e} is allowed" if math.isfinite(self.allowed) else "a token may change its expert"
        return f"{self.parameter}{of} off by {self.error:.1e}{own}, where {bound} ({how})"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values: infinities and NaN become None."""
        assert self.run.schedule is not None
        return {
            "parameter": self.parameter,
            "error": _number(self.error),
            "torch_error": _number(self.torch_error),
            "allowed": _number(self.allowed),
            "dtype": str(self.run.dtype).removeprefix("torch."),
            "chunk_size": self.run.schedule.chunk_size,
            "overall": self.overall,
        }


@dataclass(frozen=True)
class Loss:
    """The losses in the training dtype, of plain autograd and of the schedule furthest from it, and the truth's."""

    plain: float
    streamed: float
    truth: float
    worst: Finding

    @property
    def difference(self) -> float:
        """The streamed loss minus the plain one."""
        return self.streamed - self.plain


@dataclass(frozen=True)
class ModuleRow:
    """The largest error of any parameter of one kind of module, over its layers and all schedules.

    Attributes:
        module: The name within a layer, or of a module outside of the layers.
        parameters: Number of trainable elements.
        exact_error: Streamed, in the truth's dtype.
        error: Streamed, in the dtype that is trained in.
        torch_error: Plain autograd's own in that dtype.
    """

    module: str
    parameters: int
    exact_error: float
    error: float
    torch_error: float


@dataclass(frozen=True)
class VerifyReport:
    """The results of a verification.

    Attributes:
        exact: The verdict.
        dtype: The dtype that is trained in: ``float32``, ``bfloat16 autocast``.
        truth: Dtype of the truth; None where the plain run took its place.
        why_no_truth: The wider dtypes that could not be the truth's, with the reasons.
        attention: The attention implementation of plain autograd.
        routed: Tokens are sent to experts: other rules for narrow dtypes.
        loss: The losses.
        worst: The finding nearest to its bound, or furthest above it.
        modules: By kind of module.
        runs: All runs.
        trained: Number of trainable parameters (tensors).
        filled: Number of matrices of zeros that held random values during the comparison.
        refusal: The reason why ``sft`` would not train the model, if it is not exact and ``sft`` would refuse it.
    """

    exact: bool
    dtype: str
    truth: str | None
    why_no_truth: str
    attention: str
    routed: bool
    loss: Loss
    worst: Finding
    modules: list[ModuleRow]
    runs: list[VerifyRun] = field(repr=False)
    trained: int
    filled: int = 0
    refusal: str = ""

    @property
    def schedules(self) -> list[Schedule]:
        """Each schedule once, in order."""
        return list(dict.fromkeys(run.schedule for run in self.runs if run.schedule is not None))

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``streamtune verify --json``."""
        return {
            "exact": self.exact,
            "loss_difference": _number(self.loss.difference),
            "worst": self.worst.to_json(),
            "modules": [{k: _number(v) for k, v in asdict(row).items()} for row in self.modules],
            "loss": {
                "plain": _number(self.loss.plain),
                "streamed": _number(self.loss.streamed),
                "truth": _number(self.loss.truth),
                "worst": self.loss.worst.to_json(),
            },
            "dtype": self.dtype,
            "truth": self.truth,
            "why_no_truth": self.why_no_truth or None,
            "attention": self.attention,
            "routed": self.routed,
            "filled": self.filled,
            "refusal": self.refusal or None,
            "runs": [
                {
                    "schedule": asdict(run.schedule) if run.schedule else None,
                    "dtype": str(run.dtype).removeprefix("torch."),
                    "loss": _number(run.loss),
                    "worst_error": _number(max(run.errors.values())),
                    "overall_error": _number(run.overall),
                }
                for run in self.runs
            ],
        }


def module_of(parameter: str) -> str:
    """Return the kind of module of a parameter: its name within a layer, without the adapter's part and the ending.

    >>> module_of("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight")
    'self_attn.q_proj'
    """
    parts = parameter.split(".")
    for wrapper in (index for index, part in enumerate(parts) if is_of_adapters(f".{part}.")):
        parts = parts[:wrapper]
        break
    else:
        parts = parts[:-1] if parts[-1] in ("weight", "bias") else parts
    layer = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    inside = parts[-1:] if layer is None else parts[layer + 1 :]
    return ".".join("*" if part.isdigit() else part for part in inside) or parameter


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


SAME = {torch.float64: 2e-6, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference between two correct orders of summation. float64: some families compute norms, rotations or
routers in float32 whatever their weights are, and 2e-6 covers what that leaves. The narrow ones serve where there is no
truth."""

NOISE = {torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""By how much more than plain autograd's an error may come out in this dtype. For the narrow ones four times their
epsilon: the two round at other places, and for a parameter of few entries the ratio of two such errors is chance. (The
most beyond 1.5 e(plain) in ten families with eight draws of weights and rows each: two epsilon, of a query norm.)"""

ROUTED = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""The part of E that is due to tokens which went to another expert."""


BLOCK = 1 << 24
"""Entries compared at once: 128 MiB in float64."""


def judge(run: VerifyRun, plain: VerifyRun, *, same: bool, routed: bool) -> list[Finding]:
    """Return the errors of a streamed run with what is allowed: every parameter's, and their mean over all.

    Args:
        run: The streamed run.
        plain: Plain autograd in the dtype that is trained in.
        same: The run is in the truth's dtype, so plain autograd has no error there.
        routed: The model sends tokens to experts.
    """
    jumps = routed and (not same or run.dtype.itemsize < 4)
    bound = max(SAME[run.dtype], SAME[torch.float32]) if run.narrow_states else SAME[run.dtype]
    findings = []
    for name, error in run.errors.items():
        own = 0.0 if same else plain.errors[name]
        allowed = bound if same else 1.5 * own + NOISE[run.dtype]
        findings.append(Finding(name, error, own, math.inf if jumps else allowed, run))
    if not same or jumps:
        own = 0.0 if same else plain.overall
        allowed = bound if same else 1.25 * own + NOISE[run.dtype] / 16
        furthest = max(run.errors, key=lambda name: run.errors[name])
        allowed = max(allowed, ROUTED[run.dtype]) if jumps else allowed
        findings.append(Finding(furthest, run.overall, own, allowed, run, overall=True))
    return findings


def judge_loss(run: VerifyRun, plain: VerifyRun, truth: float, *, same: bool, routed: bool) -> Finding:
    """Return the relative error of a streamed run's loss, with what is allowed; arguments as of :func:`judge`."""
    own = 0.0 if same else ratio(abs(plain.loss - truth), abs(truth))
    bound = SAME[run.dtype] if same else NOISE[run.dtype]
    allowed = 1.5 * own + bound * (1.0 if routed and run.dtype.itemsize < 4 else 0.25)
    return Finding("loss", ratio(abs(run.loss - truth), abs(truth)), own, allowed, run)


def ratio(difference: float, whole: float) -> float:
    """Return ``difference / whole``; infinity if ``difference`` is not finite or ``whole`` is 0, unless both are 0."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) else math.inf


def norm_of(grad: Tensor, other: Tensor | None = None) -> float:
    """Return ``||grad - other||`` in float64, computed block by block on the gradient's device."""
    flat, total = grad.detach().reshape(-1), 0.0
    if other is not None and other.numel() != flat.numel():  # the reference had no gradient here: zero
        other = None
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK].double()
        if other is not None:
            block = block - other.reshape(-1)[start : start + BLOCK].to(block.device, torch.float64)
        total += float(block.dot(block))
    return math.sqrt(total) if total == total else math.inf
