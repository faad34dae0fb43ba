"""Fused cross entropies of a linear head, and the choice of one in place of the streamed sweep on CUDA.

The streamed sweep of ``ops.head.cross_entropy`` is the reference. On a full chunk of the first step, every installed
candidate that sums as exactly and needs no more memory is compared to it (loss and both gradients, within the rounding
of their dtype), and the fastest that agrees is used from then on. A head with a bias, a softcap or any other map of the
logits uses the reference, and so does every head on CPU.

Candidates: ``torch.nn.functional.linear_cross_entropy`` (torch 2.13; it returns its loss in the dtype of the hidden
states, so that it is a candidate for fp32 alone), cut-cross-entropy (Wijmans et al., arXiv 2411.09009; without its
filter, which drops small gradients) and Liger (Hsu et al., arXiv 2410.10989).

Shape suffixes: n tokens of a chunk, V vocabulary, C hidden size.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from streamtune.ops.devices import median_time

log = logging.getLogger(__name__)

Chunk = tuple[Tensor, Tensor | None, Tensor | None]
"""Summed loss of a chunk, gradient of its hidden states, of the weight."""

RUNS = 3
BOUNDS = {torch.bfloat16: (1e-3, 1e-2), torch.float16: (1e-3, 2e-3), torch.float32: (1e-5, 1e-5)}
"""Largest relative error of loss and of gradients to the sweep's: the rounding of logits and gradients, twice."""


@dataclass(frozen=True)
class HeadShape:
    """The properties by which a kernel is chosen. ``wanted``: gradients of hidden states, of the weight."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: torch.dtype
    wanted: tuple[bool, bool]
    accumulate_dtype: torch.dtype

    @property
    def sums_wide(self) -> bool:
        """True if the gradient of the weight is summed in a wider dtype than the weight's."""
        return torch.promote_types(self.accumulate_dtype, self.dtype) != self.dtype


@dataclass(frozen=True)
class HeadKernel:
    """A fused head: ``loss(h_nC, weight_VC, targets_n)`` is the summed loss, differentiable, in fp32 or wider.

    Args:
        name: Name in the log.
        loss: The function.
        exact_sum: The gradient of the weight is summed in fp32 within a call and rounded once. If it is not, the
            kernel is a candidate only for a weight that is frozen or whose gradient is summed in its own dtype.
        workspace: Bytes besides its inputs, the gradient of the hidden states and the gradient sum of the weight.
    """

    name: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    exact_sum: bool
    workspace: Callable[[HeadShape], int]

    def fits(self, shape: HeadShape) -> bool:
        """Return True if its sum is as exact as the sweep's, and it needs no more memory."""
        exact = self.exact_sum or not (shape.wanted[1] and shape.sums_wide)
        return exact and self.workspace(shape) <= _sweep_workspace(shape)


def head_kernel(
    hidden_nC: Tensor, weight_VC: Tensor, targets_n: Tensor, shape: HeadShape, sweep: Callable[[], Chunk]
) -> HeadKernel | None:
    """Return the fused kernel for chunks like this one; None is the streamed sweep.

    Args:
        hidden_nC, weight_VC: A chunk's hidden states and the weight, in the dtype the head computes in.
        targets_n: Target token of each row.
        shape: Shape of a full chunk; no kernel is chosen on a smaller chunk.
        sweep: The streamed sweep on this chunk.
    """
    plain = type(weight_VC) in (Tensor, torch.nn.Parameter) and hidden_nC.dtype == weight_VC.dtype
    if not hidden_nC.is_cuda or not plain or not any(shape.wanted) or shape.dtype not in BOUNDS:
        return None
    key = (hidden_nC.device, shape)
    if key not in _chosen:
        if len(hidden_nC) < shape.tokens:
            return None
        _chosen[key] = _fastest(head_candidates(), hidden_nC, weight_VC, targets_n, shape, sweep)
    return _chosen[key]


_chosen: dict[tuple[torch.device, HeadShape], HeadKernel | None] = {}


def _fastest(
    candidates: Sequence[HeadKernel],
    hidden_nC: Tensor,
    weight_VC: Tensor,
    targets_n: Tensor,
    shape: HeadShape,
    sweep: Callable[[], Chunk],
) -> HeadKernel | None:
    """Return the fastest candidate that fits and agrees, None if it is not faster than the sweep."""
    best: HeadKernel | None = None
    try:
        least = median_time(sweep, hidden_nC.device, RUNS)
        for kernel in candidates:
            if kernel.fits(shape) and agrees_with_sweep(kernel, hidden_nC, weight_VC, targets_n, shape.wanted, sweep):
                run = partial(run_head, kernel, hidden_nC, weight_VC, targets_n, shape.wanted)
                needed = median_time(run, hidden_nC.device, RUNS)
                if needed < least:
                    best, least = kernel, needed
    except torch.OutOfMemoryError:  # the comparison holds both gradients of the weight: no room, no choice
        log.info("no room to compare fused heads on this device")
    name = best.name if best else "streamed"
    log.info("head %s, %d tokens of %d words: %s", shape.dtype, shape.tokens, shape.vocabulary, name)
    return best


def run_head(
    kernel: HeadKernel, hidden_nC: Tensor, weight_VC: Tensor, targets_n: Tensor, wanted: tuple[bool, bool]
) -> Chunk:
    """Return the loss and the wanted gradients of one chunk."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip((hidden_nC, weight_VC), wanted, strict=True)]
    with torch.enable_grad():
        loss = kernel.loss(leaves[0], leaves[1], targets_n)
    grads = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))
    grad_hidden, grad_weight = (next(grads) if need else None for need in wanted)
    return loss.detach(), grad_hidden, grad_weight


def agrees_with_sweep(
    kernel: HeadKernel,
    hidden_nC: Tensor,
    weight_VC: Tensor,
    targets_n: Tensor,
    wanted: tuple[bool, bool],
    sweep: Callable[[], Chunk],
) -> bool:
    """Return True if loss and gradients are the sweep's within rounding; False for a kernel that fails to run."""
    try:
        got = run_head(kernel, hidden_nC, weight_VC, targets_n, wanted)
    except Exception as error:  # of a package that is not ours: a compiler's, a missing feature's, out of memory
        log.info("%s is not used: %s: %s", kernel.name, type(error).__name__, error)
        return False
    if got[0].dtype != torch.promote_types(hidden_nC.dtype, torch.float32):
        return False  # a sum of losses in half precision is off by up to 0.4%
    loss_bound, gradient_bound = BOUNDS[hidden_nC.dtype]
    pairs = zip(got, sweep(), (loss_bound, gradient_bound, gradient_bound), strict=True)
    return all(_near(g, w, bound) for g, w, bound in pairs)


def _near(got: Tensor | None, want: Tensor | None, bound: float) -> bool:
    if got is None or want is None:
        return got is want
    wide = torch.promote_types(want.dtype, torch.float32)
    return got.shape == want.shape and bool((got - want).norm(dtype=wide) <= bound * want.norm(dtype=wide))


def _sweep_workspace(shape: HeadShape) -> int:
    """Return how many bytes the logits take, and their probabilities in fp32 if the logits are in half precision."""
    size = shape.dtype.itemsize
    return shape.tokens * shape.vocabulary * (size + (4 if size < 4 else 0))


def _weight_gradient(shape: HeadShape, wide: bool) -> int:
    """Return how many bytes the gradient of a call's weight takes, and its sum in fp32 if the kernel keeps one."""
    size = shape.dtype.itemsize
    each = size + (4 if wide and size < 4 else 0)
    return shape.vocabulary * shape.hidden * each if shape.wanted[1] else 0


@lru_cache(maxsize=1)
def head_candidates() -> tuple[HeadKernel, ...]:
    """Return the installed fused heads."""
    found = (_of_torch(), _of_cut_cross_entropy(), _of_liger())
    return tuple(kernel for kernel in found if kernel is not None)


def _of_torch() -> HeadKernel | None:
    function: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        return None

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        whole = options(batch_chunk_size=len(h), chunking_method=None, acc_policy="compact")
        return function(h, weight, targets, reduction="sum", options=whole)

    def workspace(shape: HeadShape) -> int:
        return _sweep_workspace(shape) + _weight_gradient(shape, wide=False)

    return HeadKernel("torch linear_cross_entropy", loss, exact_sum=False, workspace=workspace)


def _of_cut_cross_entropy() -> HeadKernel | None:
    function = _imported("cut_cross_entropy", "linear_cross_entropy")
    if function is None or "accum_c_fp32" not in inspect.signature(function).parameters:
        return None  # before, both gradients were summed in the dtype of the weight, block by block

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return function(
            h, weight, targets, reduction="sum", filter_eps=None, accum_e_fp32=True, accum_c_fp32=True, impl="cce"
        )

    def workspace(shape: HeadShape) -> int:
        return shape.tokens * shape.hidden * 4 + _weight_gradient(shape, wide=True)

    return HeadKernel("cut-cross-entropy", loss, exact_sum=True, workspace=workspace)


def _of_liger() -> HeadKernel | None:
    function = _imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if function is None:
        return None
    wide: dict[str, Any] = {}
    if "accum_dtype" in inspect.signature(function).parameters:
        wide["accum_dtype"] = torch.float32

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = function(h, weight, targets, reduction="sum", **wide)
        return out if isinstance(out, Tensor) else out.loss

    def workspace(shape: HeadShape) -> int:
        share = -(-shape.vocabulary // shape.hidden)  # it cuts a call so that its logits are as large as its input
        rows = 1 << max(0, (-(-shape.tokens // share) - 1).bit_length())
        return rows * shape.vocabulary * shape.dtype.itemsize + _weight_gradient(shape, wide=bool(wide))

    return HeadKernel("liger", loss, exact_sum=bool(wide), workspace=workspace)


def _imported(module: str, name: str) -> Any:
    """Return a function of a package; None if the package is missing or does not load on this machine."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # whatever a package does while it is imported where its compiler or its device is missing
        return None
