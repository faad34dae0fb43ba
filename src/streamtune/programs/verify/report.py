"""Results of ``streamtune verify``, the rules that judge them, and their JSON document.

The true gradient is the gradient of plain autograd in a wider dtype than in training. Let g be the gradient of one
parameter, and G the gradient of all parameters together:

    e = ||g - g_truth|| / max(||g_truth||, 1e-3 ||G_truth||)            E = root mean square of e over the parameters

    exact     streamed in the wider dtype           e <= SAME[dtype]
    precise   streamed in the training dtype        e <= 1.5  e(plain) + NOISE[dtype]
                                                    E <= 1.25 E(plain) + NOISE[dtype] / 16

The first rule tests that both gradients are the same sum: in float64 and float32, rounding is too small to hide a
mistake. The second rule tests that streaming rounds no worse than plain autograd in the training dtype. A loss is
judged like a parameter, with a quarter of the absolute bounds, because it averages the errors of all tokens.

If no wider dtype can be used, the true gradient is plain autograd's in the training dtype. Then only the first rule
applies, with SAME of that dtype.

Some layers (delta rule, Mamba-2) compute in float32 and pass their state in float32, whatever the dtype of their input.
A float64 run with such a layer is judged by float32's bound.

In a model with experts, rounding alone may send a token to another expert, and the gradient then jumps. If gradients of
different dtypes are compared, or the dtype has 16 bits, only E is tested, and its bound is at least ROUTED.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from streamtune.base.adapters import is_adapter_name
from streamtune.ops.devices import to_float64
from streamtune.schedule import Schedule


@dataclass(frozen=True)
class VerifyRun:
    """Loss and gradient errors of one forward and backward.

    Attributes:
        schedule: Schedule of the streamed run; None for plain autograd.
        errors: {parameter name: relative error of its gradient}, for all trainable parameters.
        narrow_states: True if a layer passed its state between chunks in a narrower dtype than ``dtype``.
    """

    schedule: Schedule | None
    dtype: torch.dtype
    loss: float
    errors: dict[str, float]
    narrow_states: bool = False

    @property
    def overall(self) -> float:
        """Root mean square of the errors; each parameter counts once, whatever its size."""
        return math.hypot(*self.errors.values()) / math.sqrt(len(self.errors))


@dataclass(frozen=True)
class Finding:
    """An error of a streamed run, with plain autograd's error and the allowed error.

    Attributes:
        parameter: Name of the parameter; ``loss`` for the loss.
        overall: True if the error is the root mean square over all parameters; ``parameter`` then has the largest
            error.
    """

    parameter: str
    error: float
    torch_error: float
    allowed: float
    run: VerifyRun
    overall: bool = False

    @property
    def error_over_bound(self) -> float:
        """Error divided by the allowed error; above 1, verification fails."""
        if math.isinf(self.error):
            return math.inf
        return self.error / self.allowed

    @property
    def module(self) -> str:
        return module_of(self.parameter)

    def describe(self) -> str:
        """Return text like ``q_proj.weight has relative error 3.2e-01, allowed 2.0e-06 (float64, ...)``."""
        assert self.run.schedule is not None
        plain = f", plain autograd {self.torch_error:.1e}" if self.torch_error else ""
        kind = " has the largest error; root mean square of all parameters" if self.overall else " has relative error"
        how = f"{str(self.run.dtype).removeprefix('torch.')}, chunks of {self.run.schedule.chunk_size:,} tokens"
        bound = f"allowed {self.allowed:.1e}" if math.isfinite(self.allowed) else "no bound: a token may change experts"
        return f"{self.parameter}{kind} {self.error:.1e}, {bound}{plain} ({how})"

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of JSON values; infinity and NaN become None."""
        assert self.run.schedule is not None
        return {
            "parameter": self.parameter,
            "error": _json_number(self.error),
            "torch_error": _json_number(self.torch_error),
            "allowed": _json_number(self.allowed),
            "dtype": str(self.run.dtype).removeprefix("torch."),
            "chunk_size": self.run.schedule.chunk_size,
            "overall": self.overall,
        }


@dataclass(frozen=True)
class Loss:
    """Losses of a verification: by plain autograd, streamed, and by plain autograd in a wider dtype.

    Attributes:
        plain: Loss of plain autograd in the training dtype.
        streamed: Streamed loss in the training dtype, of the schedule whose loss differs most from ``plain``.
        truth: Loss of plain autograd in the wider dtype.
        worst: Finding about the streamed loss with the largest error relative to its bound.
    """

    plain: float
    streamed: float
    truth: float
    worst: Finding

    @property
    def difference(self) -> float:
        return self.streamed - self.plain


@dataclass(frozen=True)
class ModuleRow:
    """The largest relative gradient errors of one kind of module, over its layers and all schedules.

    Attributes:
        module: Module name within a layer, or the last part of the name outside the layers.
        parameters: Number of trainable elements.
        exact_error: Largest error of streaming in a wider dtype than in training.
        error: Largest error of streaming in the training dtype.
        torch_error: Largest error of plain autograd in the training dtype.
    """

    module: str
    parameters: int
    exact_error: float
    error: float
    torch_error: float


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        exact: True if the errors of all gradients and of the loss are within their bounds.
        dtype: Training dtype, such as ``float32`` or ``bfloat16 autocast``.
        truth: Wider dtype of the true gradient; None if plain autograd in the training dtype took its place.
        why_no_truth: Wider dtypes that could not be used, each with the reason.
        attention: Attention implementation of plain autograd.
        routed: True if tokens are routed to experts; 16-bit dtypes then have other bounds.
        worst: Finding with the largest error relative to its bound.
        modules: Largest errors by kind of module.
        trained: Number of trainable tensors.
        filled: Number of all-zero matrices and vectors that held random values during the comparison.
        refusal: Reason why training would refuse a model that is not exact; empty if it would train.
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
        return {
            "exact": self.exact,
            "loss_difference": _json_number(self.loss.difference),
            "worst": self.worst.to_json(),
            "modules": [{k: _json_number(v) for k, v in asdict(row).items()} for row in self.modules],
            "loss": {
                "plain": _json_number(self.loss.plain),
                "streamed": _json_number(self.loss.streamed),
                "truth": _json_number(self.loss.truth),
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
                    "loss": _json_number(run.loss),
                    "worst_error": _json_number(max(run.errors.values())),
                    "overall_error": _json_number(run.overall),
                }
                for run in self.runs
            ],
        }


def module_of(parameter: str) -> str:
    """Return the name of a parameter's module within its layer, without adapter names, ``weight`` and ``bias``.

    >>> module_of("base_model.model.model.layers.3.self_attn.q_proj.lora_A.default.weight")
    'self_attn.q_proj'
    """
    parts = parameter.split(".")
    for wrapper in (index for index, part in enumerate(parts) if is_adapter_name(f".{part}.")):
        parts = parts[:wrapper]
        break
    else:
        parts = parts[:-1] if parts[-1] in ("weight", "bias") else parts
    layer = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    inside = parts[-1:] if layer is None else parts[layer + 1 :]
    return ".".join("*" if part.isdigit() else part for part in inside) or parameter


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


SAME = {torch.float64: 2e-6, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Allowed relative error of a streamed gradient in the same dtype as the true gradient, by dtype.

In float64, 2e-6 covers models that compute norms, rotary embeddings or routers in float32. The bounds of 16-bit dtypes
are used if no wider dtype can be used.
"""

NOISE = {torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Absolute error allowed beyond plain autograd's error, by dtype: in 16-bit dtypes, four times epsilon.

Streaming rounds at other places, and for a parameter with few entries the ratio of two such errors is random. In ten
model families with eight random weights and rows each, the largest excess over 1.5 e(plain) was two epsilon.
"""

ROUTED = {torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Minimum bound of the root mean square error if rounding may send tokens to other experts, by dtype."""


BLOCK = 1 << 24
"""Number of gradient entries compared at once: 128 MiB in float64."""


def judge_run(run: VerifyRun, plain: VerifyRun, *, is_same_function: bool, has_routers: bool) -> list[Finding]:
    """Return a finding for each parameter of a streamed run; if the root mean square is tested, also one for it.

    Args:
        plain: Plain autograd in the training dtype.
        is_same_function: True if the run has the dtype of the true gradient, in which plain autograd's error is 0.
        has_routers: True if the model routes tokens to experts.
    """
    jumps = has_routers and (not is_same_function or run.dtype.itemsize < 4)
    bound = max(SAME[run.dtype], SAME[torch.float32]) if run.narrow_states else SAME[run.dtype]
    findings = []
    for name, error in run.errors.items():
        own = 0.0 if is_same_function else plain.errors[name]
        allowed = bound if is_same_function else 1.5 * own + NOISE[run.dtype]
        findings.append(Finding(name, error, own, math.inf if jumps else allowed, run))
    if not is_same_function or jumps:
        own = 0.0 if is_same_function else plain.overall
        allowed = bound if is_same_function else 1.25 * own + NOISE[run.dtype] / 16
        furthest = max(run.errors, key=lambda name: run.errors[name])
        allowed = max(allowed, ROUTED[run.dtype]) if jumps else allowed
        findings.append(Finding(furthest, run.overall, own, allowed, run, overall=True))
    return findings


def judge_loss(run: VerifyRun, plain: VerifyRun, truth: float, *, is_same_function: bool, has_routers: bool) -> Finding:
    """Return the finding about the loss of a streamed run; ``truth`` is the true loss."""
    own = 0.0 if is_same_function else relative_to(abs(plain.loss - truth), abs(truth))
    bound = SAME[run.dtype] if is_same_function else NOISE[run.dtype]
    allowed = 1.5 * own + bound * (1.0 if has_routers and run.dtype.itemsize < 4 else 0.25)
    return Finding("loss", relative_to(abs(run.loss - truth), abs(truth)), own, allowed, run)


def relative_to(difference: float, total: float) -> float:
    """Return ``difference / total``; 0 if the difference is 0, infinity if it is not finite or ``total`` is 0."""
    if difference == 0:
        return 0.0
    return difference / total if total > 0 and math.isfinite(difference) else math.inf


def gradient_norm(grad: Tensor, subtracted: Tensor | None = None) -> float:
    """Return ``||grad - subtracted||`` in float64, computed block by block on the gradient's device."""
    flat, total = grad.detach().reshape(-1), 0.0
    if subtracted is not None and subtracted.numel() != flat.numel():  # the reference had no gradient: zero
        subtracted = None
    for start in range(0, flat.numel(), BLOCK):
        block = to_float64(flat[start : start + BLOCK])
        if subtracted is not None:
            block = block - subtracted.reshape(-1)[start : start + BLOCK].to(block.device, torch.float64)
        total += float(block.dot(block))
    return math.sqrt(total) if total == total else math.inf
