"""The rule and the results of a verification, and the JSON document of them.

The rule compares the gradient g of each parameter, and G of all parameters together, with the truth:

    e = ||g - g_truth|| / max(||g_truth||, 1e-3 ||G_truth||)            E = root mean square of e over the parameters

    exact     streamed in the truth's dtype         e <= SAME[dtype]
    precise   streamed in the training dtype        e <= 1.5  e(plain) + NOISE[dtype]
                                                    E <= 1.25 E(plain) + NOISE[dtype] / 16

The first tests that it is the same sum: in float64 and float32, rounding is too small to hide a mistake. The second
tests that it is rounded as well as plain autograd in the training dtype. A loss is treated like a parameter, with a
quarter of either bound, because it averages the errors of all tokens.

Without a truth the plain run takes its place, and only the first rule applies, with the bound of that dtype.

A layer that passes its state in float32 whatever its input (delta rule, Mamba-2) computes in float32 too: in float64
it is held to float32's bound.

A model with experts may route a token elsewhere because of rounding alone: a jump, not noise. If its gradients are
compared with another dtype, or in a narrow dtype, only E is tested, with the bounds ROUTED.
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
        schedule: Schedule of streaming; None for plain autograd.
        errors: Error of every trainable parameter, against the truth.
        narrow_states: A layer passed its state between chunks in a narrower dtype than ``dtype``.
    """

    schedule: Schedule | None
    dtype: torch.dtype
    loss: float
    errors: dict[str, float]
    narrow_states: bool = False

    @property
    def overall(self) -> float:
        """Root mean square of the errors; each parameter counts once, however large its gradient."""
        return math.hypot(*self.errors.values()) / math.sqrt(len(self.errors))


@dataclass(frozen=True)
class Finding:
    """An error, with plain autograd's error and the error that the rule allows.

    Attributes:
        parameter: Name of the parameter; ``loss`` for the loss.
        overall: The error is of all parameters, and ``parameter`` is the furthest off.
    """

    parameter: str
    error: float
    torch_error: float
    allowed: float
    run: VerifyRun
    overall: bool = False

    @property
    def excess(self) -> float:
        """The error divided by the allowed error: above 1 is wrong."""
        if math.isinf(self.error):
            return math.inf
        return self.error / self.allowed

    @property
    def module(self) -> str:
        return module_of(self.parameter)

    def describe(self) -> str:
        """Return text like ``q_proj.weight is off by 3.2e-01, where 2.0e-06 is allowed (float64, chunks of 683)``."""
        assert self.run.schedule is not None
        own = f", plain autograd by {self.torch_error:.1e}" if self.torch_error else ""
        of = " is the furthest off; in the mean all are" if self.overall else " is"
        how = f"{str(self.run.dtype).removeprefix('torch.')}, chunks of {self.run.schedule.chunk_size:,}"
        bound = f"{self.allowed:.1e} is allowed" if math.isfinite(self.allowed) else "a token may change its expert"
        return f"{self.parameter}{of} off by {self.error:.1e}{own}, where {bound} ({how})"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; infinities and NaN become None."""
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
    """Losses in the training dtype, of plain autograd and of the schedule furthest from it; and the truth's."""

    plain: float
    streamed: float
    truth: float
    worst: Finding

    @property
    def difference(self) -> float:
        return self.streamed - self.plain


@dataclass(frozen=True)
class ModuleRow:
    """The largest error of any parameter of one kind of module, over its layers and all schedules.

    Attributes:
        module: Name within a layer, or of a module outside the layers.
        parameters: Number of trainable elements.
        exact_error: Error of streaming in the truth's dtype.
        error: Error of streaming in the training dtype.
        torch_error: Error of plain autograd in the training dtype.
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
        dtype: Training dtype: ``float32``, ``bfloat16 autocast``.
        truth: Dtype of the truth; None if the plain run took its place.
        why_no_truth: Wider dtypes that did not run, with the reasons.
        attention: Attention implementation of plain autograd.
        routed: Tokens are routed to experts: other rules for narrow dtypes.
        worst: The finding nearest to its bound, or furthest above it.
        trained: Number of trainable tensors.
        filled: Number of all-zero matrices that held random values meanwhile.
        refusal: Reason why training would refuse a model that is not exact; empty if it would not.
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
    """Return the name of a parameter's module within a layer, without adapter and ending.

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
"""Largest difference between two correct orders of summation. In float64, 2e-6 covers families that compute norms,
rotary embeddings or routers in float32. The narrow dtypes serve if there is no truth."""

NOISE = {torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Allowance beyond plain autograd's error. In narrow dtypes it is four times epsilon: streaming rounds at other places,
and for a parameter with few entries the ratio of two such errors is chance. (The most beyond 1.5 e(plain) in ten
families with eight draws of weights and rows each: two epsilon, of a query norm.)"""

ROUTED = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Bound of E where tokens may go to another expert."""


BLOCK = 1 << 24
"""Entries compared at once: 128 MiB in float64."""


def judge(run: VerifyRun, plain: VerifyRun, *, same: bool, routed: bool) -> list[Finding]:
    """Return the findings of a streamed run: for every parameter, and for all together.

    Args:
        run: The streamed run.
        plain: Plain autograd in the training dtype.
        same: The run has the truth's dtype, in which plain autograd has no error.
        routed: The model routes tokens to experts.
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
    """Return the finding of a streamed run's loss; arguments as for :func:`judge`."""
    own = 0.0 if same else ratio(abs(plain.loss - truth), abs(truth))
    bound = SAME[run.dtype] if same else NOISE[run.dtype]
    allowed = 1.5 * own + bound * (1.0 if routed and run.dtype.itemsize < 4 else 0.25)
    return Finding("loss", ratio(abs(run.loss - truth), abs(truth)), own, allowed, run)


def ratio(difference: float, whole: float) -> float:
    """Return ``difference / whole``: 0 if the difference is 0, infinity if it is not finite or ``whole`` is 0."""
    if difference == 0:
        return 0.0
    return difference / whole if whole > 0 and math.isfinite(difference) else math.inf


def norm_of(grad: Tensor, other: Tensor | None = None) -> float:
    """Return ``||grad - other||`` in float64, computed block by block on the gradient's device."""
    flat, total = grad.detach().reshape(-1), 0.0
    if other is not None and other.numel() != flat.numel():  # the reference had no gradient: zero
        other = None
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK].double()
        if other is not None:
            block = block - other.reshape(-1)[start : start + BLOCK].to(block.device, torch.float64)
        total += float(block.dot(block))
    return math.sqrt(total) if total == total else math.inf
