"""The rule by which a streamed gradient counts as plain autograd's, its bounds, and the reasons for them.

For the gradient g of one parameter and G of all of them together, against the truth,

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

import torch
from torch import Tensor

from streamtune.verify.report import Finding, VerifyRun

__all__ = ["NOISE", "ROUTED", "SAME", "judge", "judge_loss", "norm_of", "ratio"]

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
