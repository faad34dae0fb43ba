"""Compare the streamed gradient with plain autograd's gradient, on one model and one batch.

The same batch goes through the same model several times:

    truth     plain autograd in a wider dtype than training: float64 for float32, float32 for bfloat16
    exact     streamed in the wider dtype, once for each schedule: is the gradient the same sum?
    precise   plain and streamed in the training dtype, each against the truth: is the rounding error as small?

``report.py`` defines which errors are allowed.

The model is in evaluation mode. With dropout or router jitter, a chunk would draw other random numbers than a whole
sequence, and the gradients would be equal in distribution only.

Memory: weights are converted to the wider dtype in place and back, which restores every bit. Only the true gradients
are stored, in host memory: 4 or 8 bytes for each trainable weight. Every other gradient is compared and freed as soon
as the backward has computed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from streamtune.base.model_facts import model_device
from streamtune.engine import StreamHandle, stream
from streamtune.errors import ArgumentError, NonFiniteError, StreamTuneError, UnsupportedModelError
from streamtune.ops.devices import has_float64
from streamtune.programs.verify.report import (
    SAME,
    Loss,
    ModuleRow,
    VerifyReport,
    VerifyRun,
    gradient_norm,
    judge_loss,
    judge_run,
    module_of,
    relative_to,
)
from streamtune.programs.verify.restore import (
    computing_wide_loss,
    has_experts,
    prepared_for_comparison,
    using_attention,
    why_not_widened,
    widening_weights,
)
from streamtune.schedule import Schedule
from streamtune.train.loss_scale import INITIAL_SCALE

SMALL = 64
"""Maximum size of the smallest chunks, in tokens."""

LossOf = Callable[[nn.Module, str | None], Tensor]
"""Function ``(model, autocast_dtype)`` that returns the scalar loss of the batch, under autocast unless the dtype is
None."""


class Losses(Protocol):
    """Interface that computes the loss of one batch by plain autograd and streamed.

    The streamed batch may have another layout: packed rows, or completions with a shared prompt.
    """

    def plain_loss(self, model: nn.Module, autocast_dtype: str | None, /) -> Tensor:
        """Return the loss that plain autograd computes."""
        ...

    def streamed_loss(self, handle: StreamHandle, /) -> LossOf:
        """Return a function that computes the loss of the streamed model."""
        ...


@dataclass(frozen=True)
class Comparison:
    """The model, the batch and the schedules to compare.

    Attributes:
        model: Causal language model, with or without adapters, not streamed.
        schedules: Schedules to stream with, one after another.
        dtype: Dtype to which narrower weights are converted; None keeps all dtypes.
        autocast_dtype: Dtype of autocast in training, ``bfloat16`` or ``float16``; None: no autocast.
        why_too_large: Function from a wider dtype to the reason why its gradients do not fit in memory; empty if they
            fit.
        notify: Callback for the name of each run.
    """

    model: nn.Module
    losses: Losses
    schedules: Sequence[Schedule]
    dtype: torch.dtype | None = None
    autocast_dtype: str | None = None
    why_too_large: Callable[[torch.dtype], str] = lambda dtype: ""
    notify: Callable[[str], None] = lambda message: None


def verify_schedules(length: int, recipe_schedule: Schedule) -> list[Schedule]:
    """Return schedules that split ``length`` tokens into chunks, each schedule into a different number of chunks.

    The first is ``recipe_schedule``, if its chunks are shorter than ``length``. Then come halves, thirds, fifths or
    sevenths (the last chunk is shorter if possible), and small chunks. ``keep_kv`` alternates, and ``head_chunk_size``
    differs.

    Raises:
        ArgumentError: ``length`` is below 4: two chunks of two tokens are the minimum.
    """
    if length < 4:
        raise ArgumentError(f"{length} token(s) cannot be split into chunks", where="max_length", fix="use longer rows")
    parts = next((count for count in (3, 5, 7) if length % count), 3)  # a last chunk shorter than the others
    sizes = {-(-length // 2): length, -(-length // parts): -(-length // 5), max(1, min(SMALL, length // 8)): 7}
    chosen = [recipe_schedule] if recipe_schedule.chunk_size < length else []
    for number, (size, head) in enumerate(sizes.items()):
        keep_kv = (recipe_schedule.keep_kv == "no") == bool(number % 2)
        chosen.append(replace(recipe_schedule, chunk_size=size, head_chunk_size=head, keep_kv=keep_kv))
    found: dict[int, Schedule] = {}
    for schedule in chosen:
        found.setdefault(len(schedule.chunks(length)), schedule)
    return list(found.values())


def compare_gradients(comparison: Comparison) -> VerifyReport:
    """Compare the streamed gradient with plain autograd's, and restore the model afterwards.

    Raises:
        ArgumentError: The model has no trainable parameter.
        UnsupportedModelError: The model cannot be streamed.
        NonFiniteError: The loss or the gradient of plain autograd is not finite.
    """
    model = comparison.model
    if not any(p.requires_grad for p in model.parameters()):
        raise ArgumentError("the model has no trainable parameter, so there is no gradient to compare")
    stream(model, schedule=comparison.schedules[0]).remove()  # refuses unsupported models before anything is computed
    with prepared_for_comparison(model) as filled, widening_weights(model, comparison.dtype):
        report = _compare_attentions(comparison)
        refusal = "" if report.exact else _preflight_error(model, comparison.schedules[0])
        return replace(report, filled=filled, refusal=refusal)


def _compare_attentions(comparison: Comparison) -> VerifyReport:
    """Compare with the model's attention implementation; if it fails or gradients differ, with eager attention too.

    An implementation without softcap or attention sinks raises an error or ignores them. If it ignores them, plain
    autograd computes another function than the streamed model. If both implementations give the same gradients,
    attention is not the reason for the difference, and the first result is returned.
    """
    with using_attention(comparison.model, None) as own:
        runs = _Runs(comparison)
        try:
            report = replace(runs.run(), attention=own)
        except (StreamTuneError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:
            if own == "eager":
                raise
            with using_attention(comparison.model, "eager") as name:
                return replace(_Runs(comparison).run(), attention=name)
    if report.exact or own == "eager":
        return report
    with using_attention(comparison.model, "eager") as name:
        eager_runs = _Runs(comparison)
        try:
            if eager_runs.is_same_function(runs):
                return report
            eager = replace(eager_runs.run(), attention=name)
        except Exception:  # no memory, or unknown to the model
            return report
    return eager if eager.exact else report


def _preflight_error(model: nn.Module, schedule: Schedule) -> str:
    """Return the error of the check before training, which names the layer that differs; empty if the check passes."""
    with stream(model, schedule=schedule) as handle:
        try:
            handle.check()
        except UnsupportedModelError as error:
            return f"{error.what} ({error.where})" if error.where else error.what
    return ""


@dataclass
class _Truth:
    """Loss and gradients of plain autograd in the widest dtype that runs; all runs are compared with them."""

    dtype: torch.dtype
    loss: float
    grads: dict[str, Tensor]
    norms: dict[str, float]

    @property
    def total_norm(self) -> float:
        return math.hypot(*self.norms.values())

    def error_scale(self, name: str) -> float:
        """Return ``max(||g||, 1e-3 ||G||)``: g is the gradient of the parameter ``name``, G of all parameters."""
        return max(self.norms[name], 1e-3 * self.total_norm)


class _Runs:
    """All forward-backward runs of a verification with one attention implementation."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.model, self.autocast_dtype = comparison, comparison.model, comparison.autocast_dtype
        self.names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.routed = has_experts(self.model)
        weights = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        narrowest = min(weights, key=lambda dtype: dtype.itemsize)
        self.computed = getattr(torch, self.autocast_dtype) if self.autocast_dtype else narrowest
        self.loss_scale = 1.0
        self.why_no_truth = ""
        self.runs_started = self.total = 0

    def run(self) -> VerifyReport:
        if self.autocast_dtype == "float16":
            self._choose_loss_scale()
        truth, runs = self._find_truth()
        if truth is None:
            truth = self._plain_gradients(self.autocast_dtype, self.computed)
            runs = [self._run_of_truth(truth)]
        else:
            runs.append(self._compare_run(truth, None, self.autocast_dtype, self.computed))
        runs += self._streamed_runs(truth, self.autocast_dtype, self.computed)
        self.plain_result = (truth.dtype, truth.loss, truth.norms)
        return self._make_report(truth, runs)

    def _choose_loss_scale(self) -> None:
        """Set the loss scale of float16 runs, as training finds it: the largest at which no gradient overflows."""
        is_finite = False

        def check_gradient(name: str, grad: Tensor) -> None:
            nonlocal is_finite
            is_finite = is_finite and bool(grad.isfinite().all())

        self.loss_scale = 2 * INITIAL_SCALE
        while not is_finite and self.loss_scale > 1:
            self.loss_scale, is_finite = self.loss_scale / 2, True
            self._backward(self.comparison.losses.plain_loss, self.autocast_dtype, check_gradient)

    def is_same_function(self, other: _Runs) -> bool:
        """Return True if plain autograd has the same loss and gradient norms as in ``other``, a finished comparison."""
        dtype, loss, norms = other.plain_result
        with widening_weights(self.model, dtype):
            found = self._plain_gradients(self.autocast_dtype if dtype == self.computed else None, dtype)
        self.runs_started = 0
        gaps = [relative_to(abs(norm - norms[name]), found.error_scale(name)) for name, norm in found.norms.items()]
        return max(*gaps, relative_to(abs(found.loss - loss), abs(loss))) <= SAME[dtype]

    def _find_truth(self) -> tuple[_Truth | None, list[VerifyRun]]:
        """Return the true gradients in the widest dtype that runs, and the runs in it; ``(None, [])`` if none runs."""
        wider = [torch.float64] if self.computed == torch.float32 or self.routed else []
        wider += [torch.float32] if self.computed.itemsize < 4 else []
        for dtype in wider if self.computed != torch.float64 else []:
            reason = why_not_widened(self.model) or self.comparison.why_too_large(dtype)
            if dtype == torch.float64 and not has_float64(model_device(self.model)):
                reason = "the device has no float64"
            if not reason:
                with widening_weights(self.model, dtype):
                    try:
                        truth = self._plain_gradients(None, dtype)
                    except StreamTuneError:
                        raise
                    except Exception as error:  # no kernel for this dtype, or no memory
                        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                        self.runs_started = 0
                    else:
                        return truth, [self._run_of_truth(truth), *self._streamed_runs(truth, None, dtype)]
            self.why_no_truth = "; ".join(filter(None, [self.why_no_truth, f"{_dtype_name(dtype)}: {reason}"]))
        return None, []

    def _run_of_truth(self, truth: _Truth) -> VerifyRun:
        """Return the true gradients as a run; every error is 0."""
        return VerifyRun(None, truth.dtype, truth.loss, dict.fromkeys(self.names, 0.0))

    def _plain_gradients(self, autocast_dtype: str | None, dtype: torch.dtype) -> _Truth:
        self._notify_run(f"{self._run_label(autocast_dtype, dtype)}, plain autograd", is_wide=dtype != self.computed)
        grads = {name: torch.zeros(0) for name in self.names}
        norms = dict.fromkeys(self.names, 0.0)

        def store_gradient(name: str, grad: Tensor) -> None:
            grads[name], norms[name] = grad.to("cpu", copy=True), gradient_norm(grad)

        with computing_wide_loss(self.model):
            loss = self._backward(self.comparison.losses.plain_loss, autocast_dtype, store_gradient)
        truth = _Truth(dtype, loss, grads, norms)
        if not math.isfinite(loss + truth.total_norm):
            raise NonFiniteError(
                f"plain autograd gives a loss of {loss} and a gradient of norm {truth.total_norm} in "
                f"{self._run_label(autocast_dtype, dtype)}, so there is nothing to compare",
                fix="check the weights and the first rows of the data",
            )
        return truth

    def _streamed_runs(self, truth: _Truth, autocast_dtype: str | None, dtype: torch.dtype) -> list[VerifyRun]:
        return [self._compare_run(truth, schedule, autocast_dtype, dtype) for schedule in self.comparison.schedules]

    def _compare_run(
        self, truth: _Truth, schedule: Schedule | None, autocast_dtype: str | None, dtype: torch.dtype
    ) -> VerifyRun:
        """Run forward and backward once; compare and free each gradient as soon as it is computed."""
        how = "plain autograd" if schedule is None else f"streamed in chunks of {schedule.chunk_size:,}"
        self._notify_run(f"{self._run_label(autocast_dtype, dtype)}, {how}", is_wide=True)
        differences = dict(truth.norms)  # without a gradient, the whole gradient of the truth is the difference

        def add_difference(name: str, grad: Tensor) -> None:
            differences[name] = gradient_norm(grad, truth.grads[name])

        narrow = False
        if schedule is None:
            loss = self._backward(self.comparison.losses.plain_loss, autocast_dtype, add_difference)
        else:
            with stream(self.model, schedule=schedule) as handle:
                try:
                    loss = self._backward(self.comparison.losses.streamed_loss(handle), autocast_dtype, add_difference)
                except (StreamTuneError, torch.OutOfMemoryError, MemoryError):
                    raise
                except Exception:
                    handle.check()  # names the layer that does not run in chunks
                    raise
                narrow = any(layer.forward.narrow_states for layer in handle.layers)  # type: ignore[attr-defined]
        errors = {name: relative_to(difference, truth.error_scale(name)) for name, difference in differences.items()}
        return VerifyRun(schedule, dtype, loss, errors, narrow_states=narrow)

    def _backward(
        self, loss_of: LossOf, autocast_dtype: str | None, use_gradient: Callable[[str, Tensor], None]
    ) -> float:
        """Run forward and backward, pass each computed gradient to ``use_gradient`` and free it; return the loss."""

        scale = self.loss_scale if autocast_dtype == "float16" else 1.0

        def move_gradient(name: str, parameter: Tensor) -> None:
            if parameter.grad is not None:
                use_gradient(name, parameter.grad if scale == 1.0 else parameter.grad / scale)
            parameter.grad = None

        hooks = [p.register_post_accumulate_grad_hook(partial(move_gradient, name)) for name, p in self.names.items()]
        try:
            loss = loss_of(self.model, autocast_dtype)
            value = float(loss.detach())
            (loss * scale).backward()
            return value
        finally:
            for hook in hooks:
                hook.remove()

    def _notify_run(self, what: str, is_wide: bool) -> None:
        if not self.runs_started:
            self.total = (1 + len(self.comparison.schedules)) * (2 if is_wide else 1)
        self.runs_started += 1
        self.comparison.notify(f"{what} ({self.runs_started} of {self.total})")

    def _run_label(self, autocast_dtype: str | None, dtype: torch.dtype) -> str:
        return f"{_dtype_name(dtype)} autocast" if autocast_dtype else _dtype_name(dtype)

    def _make_report(self, truth: _Truth, runs: list[VerifyRun]) -> VerifyReport:
        plain = next(run for run in reversed(runs) if run.schedule is None)
        findings, losses = [], []
        for run in (run for run in runs if run.schedule is not None):
            same = run.dtype == truth.dtype
            findings += judge_run(run, plain, is_same_function=same, has_routers=self.routed)
            losses.append(judge_loss(run, plain, truth.loss, is_same_function=same, has_routers=self.routed))
        worst = max(findings, key=lambda each: (each.error_over_bound > 1, not each.overall, each.error_over_bound))
        worst_loss = max(losses, key=lambda each: each.error_over_bound)
        trained = [run for run in runs if run.schedule is not None and run.dtype == plain.dtype]
        streamed = max(trained, key=lambda run: abs(run.loss - plain.loss))
        return VerifyReport(
            exact=worst.error_over_bound <= 1 and worst_loss.error_over_bound <= 1,
            dtype=self._run_label(self.autocast_dtype, self.computed),
            truth=_dtype_name(truth.dtype) if truth.dtype != self.computed else None,
            why_no_truth=self.why_no_truth,
            attention="",
            routed=self.routed,
            loss=Loss(plain.loss, streamed.loss, truth.loss, worst_loss),
            worst=worst,
            modules=self._module_rows(runs, plain, truth),
            runs=runs,
            trained=len(self.names),
        )

    def _module_rows(self, runs: list[VerifyRun], plain: VerifyRun, truth: _Truth) -> list[ModuleRow]:
        """Return a row for each kind of module, with the largest errors of its parameters over all schedules."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(module_of(name), []).append(name)

        def largest_error(names: list[str], dtype: torch.dtype) -> float:
            chosen = [run for run in runs if run.schedule is not None and run.dtype == dtype]
            return max(run.errors[name] for run in chosen for name in names)

        return [
            ModuleRow(
                module=module,
                parameters=sum(self.names[name].numel() for name in names),
                exact_error=largest_error(names, truth.dtype),
                error=largest_error(names, plain.dtype),
                torch_error=max(plain.errors[name] for name in names),
            )
            for module, names in groups.items()
        ]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
