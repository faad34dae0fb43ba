"""Choose between fused kernels for linear cross entropy on CUDA and the loop of ``ops.head.cross_entropy`` (the sweep).

A candidate must be installed, sum as exactly as the sweep, and need no more memory. On the first full chunk, loss and
both gradients of the candidates are compared with the sweep; they must agree within the rounding of their dtype. The
fastest of these candidates and the sweep is used from then on. The sweep is always used on CPU, and for a head with a
bias, a softcap or any other function of the logits.

    torch              ``torch.nn.functional.linear_cross_entropy`` (2.13). Its loss has the dtype of the hidden states,
                       so it is a candidate only for fp32.
    cut-cross-entropy  Wijmans et al., arXiv 2411.09009; without its filter, which drops small gradients.
    Liger              Hsu et al., arXiv 2410.10989.

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
"""Summed loss of a chunk, gradient of its hidden states, and gradient of the weight."""

RUNS = 3
BOUNDS = {torch.bfloat16: (1e-3, 1e-2), torch.float32: (1e-5, 1e-5)}
"""Largest relative difference of (loss, gradients) from the sweep: twice the rounding of logits and gradients.

In float16 the sweep is used: the kernels compute gradients without a factor, and small ones would be zero.
"""


@dataclass(frozen=True)
class HeadShape:
    """Sizes and dtypes of a linear head, by which a fused kernel is chosen.

    ``wanted`` has a flag for each gradient to compute: of the hidden states, and of the weight.
    """

    tokens: int
    vocabulary: int
    hidden: int
    dtype: torch.dtype
    wanted: tuple[bool, bool]
    accumulate_dtype: torch.dtype

    @property
    def sums_in_wider_dtype(self) -> bool:
        """True if the weight's gradient is summed over chunks in a wider dtype than the weight's."""
        return torch.promote_types(self.accumulate_dtype, self.dtype) != self.dtype


@dataclass(frozen=True)
class HeadKernel:
    """A fused kernel for the cross entropy of a linear head.

    Args:
        name: Name in the log.
        loss: Differentiable function ``loss(h_nC, weight_VC, targets_n)`` that returns the summed loss, in fp32 or
            wider.
        exact_sum: True if the weight's gradient is summed in fp32 within a call and rounded once. If False, the kernel
            is a candidate only for a weight that is frozen or whose gradient is summed in the weight's dtype.
        workspace: Function that returns how many bytes a call allocates in addition to its inputs, the gradient of the
            hidden states and the sum of the weight's gradient.
    """

    name: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    exact_sum: bool
    workspace: Callable[[HeadShape], int]

    def is_eligible(self, shape: HeadShape) -> bool:
        """Return True if this kernel sums as exactly as torch's operators, and needs at most their memory."""
        exact = self.exact_sum or not (shape.wanted[1] and shape.sums_in_wider_dtype)
        return exact and self.workspace(shape) <= _sweep_workspace_bytes(shape)


def choose_head_kernel(
    hidden_nC: Tensor, weight_VC: Tensor, targets_n: Tensor, shape: HeadShape, sweep: Callable[[], Chunk]
) -> HeadKernel | None:
    """Return the fused kernel for chunks of this shape; None if torch's operators are faster or must be used.

    Args:
        hidden_nC, weight_VC: Hidden states of a chunk, and the weight, in the dtype in which the head computes.
        targets_n: Target token of each position.
        shape: Shape of a full chunk; no kernel is chosen on a smaller chunk.
        sweep: Function that computes this chunk with torch's operators, for comparison.
    """
    plain = type(weight_VC) in (Tensor, torch.nn.Parameter) and hidden_nC.dtype == weight_VC.dtype
    if not hidden_nC.is_cuda or not plain or not any(shape.wanted) or shape.dtype not in BOUNDS:
        return None
    key = (hidden_nC.device, shape)
    if key not in _chosen:
        if len(hidden_nC) < shape.tokens:
            return None
        _chosen[key] = _fastest_agreeing_kernel(head_candidates(), hidden_nC, weight_VC, targets_n, shape, sweep)
    return _chosen[key]


_chosen: dict[tuple[torch.device, HeadShape], HeadKernel | None] = {}


def _fastest_agreeing_kernel(
    candidates: Sequence[HeadKernel],
    hidden_nC: Tensor,
    weight_VC: Tensor,
    targets_n: Tensor,
    shape: HeadShape,
    sweep: Callable[[], Chunk],
) -> HeadKernel | None:
    best: HeadKernel | None = None
    try:
        best_seconds = median_time(sweep, hidden_nC.device, RUNS)
        for kernel in candidates:
            if kernel.is_eligible(shape) and agrees_with_loop(
                kernel, hidden_nC, weight_VC, targets_n, shape.wanted, sweep
            ):
                run = partial(run_head_kernel, kernel, hidden_nC, weight_VC, targets_n, shape.wanted)
                seconds = median_time(run, hidden_nC.device, RUNS)
                if seconds < best_seconds:
                    best, best_seconds = kernel, seconds
    except torch.OutOfMemoryError:  # the comparison allocates two gradients of the weight
        log.info("not enough device memory to compare fused heads; torch's operators are used")
    name = best.name if best else "streamed"
    log.info("head in %s, %d tokens, vocabulary of %d: %s", shape.dtype, shape.tokens, shape.vocabulary, name)
    return best


def run_head_kernel(
    kernel: HeadKernel, hidden_nC: Tensor, weight_VC: Tensor, targets_n: Tensor, wanted: tuple[bool, bool]
) -> Chunk:
    """Return the loss of a chunk and its wanted gradients of (hidden states, weight), computed by a fused kernel."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip((hidden_nC, weight_VC), wanted, strict=True)]
    with torch.enable_grad():
        loss = kernel.loss(leaves[0], leaves[1], targets_n)
    grads = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))
    grad_hidden, grad_weight = (next(grads) if need else None for need in wanted)
    return loss.detach(), grad_hidden, grad_weight


def agrees_with_loop(
    kernel: HeadKernel,
    hidden_nC: Tensor,
    weight_VC: Tensor,
    targets_n: Tensor,
    wanted: tuple[bool, bool],
    sweep: Callable[[], Chunk],
) -> bool:
    """Return True if a kernel's loss and gradients agree with the results of ``sweep``; False if the kernel raises."""
    try:
        got = run_head_kernel(kernel, hidden_nC, weight_VC, targets_n, wanted)
    except Exception as error:  # another package may raise anything: compiler, missing feature, out of memory
        log.info("%s is not used: %s: %s", kernel.name, type(error).__name__, error)
        return False
    if got[0].dtype != torch.promote_types(hidden_nC.dtype, torch.float32):
        return False  # a sum of losses in half precision is off by up to 0.4%
    loss_bound, gradient_bound = BOUNDS[hidden_nC.dtype]
    pairs = zip(got, sweep(), (loss_bound, gradient_bound, gradient_bound), strict=True)
    return all(_is_close(g, w, bound) for g, w, bound in pairs)


def _is_close(got: Tensor | None, want: Tensor | None, bound: float) -> bool:
    if got is None or want is None:
        return got is want
    wide = torch.promote_types(want.dtype, torch.float32)
    return got.shape == want.shape and bool((got - want).norm(dtype=wide) <= bound * want.norm(dtype=wide))


def _sweep_workspace_bytes(shape: HeadShape) -> int:
    size = shape.dtype.itemsize
    return shape.tokens * shape.vocabulary * (size + (4 if size < 4 else 0))


def _weight_gradient_bytes(shape: HeadShape, wide: bool) -> int:
    size = shape.dtype.itemsize
    element_bytes = size + (4 if wide and size < 4 else 0)
    return shape.vocabulary * shape.hidden * element_bytes if shape.wanted[1] else 0


@lru_cache(maxsize=1)
def head_candidates() -> tuple[HeadKernel, ...]:
    """Return the fused linear cross entropy kernels of all installed packages."""
    found = (_torch_kernel(), _cut_cross_entropy_kernel(), _liger_kernel())
    return tuple(kernel for kernel in found if kernel is not None)


def _torch_kernel() -> HeadKernel | None:
    function: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        return None

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        whole = options(batch_chunk_size=len(h), chunking_method=None, acc_policy="compact")
        return function(h, weight, targets, reduction="sum", options=whole)

    def workspace(shape: HeadShape) -> int:
        return _sweep_workspace_bytes(shape) + _weight_gradient_bytes(shape, wide=False)

    return HeadKernel("torch linear_cross_entropy", loss, exact_sum=False, workspace=workspace)


def _cut_cross_entropy_kernel() -> HeadKernel | None:
    function = _import_function("cut_cross_entropy", "linear_cross_entropy")
    if function is None or "accum_c_fp32" not in inspect.signature(function).parameters:
        return None  # older versions sum both gradients in the weight's dtype, block by block

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return function(
            h, weight, targets, reduction="sum", filter_eps=None, accum_e_fp32=True, accum_c_fp32=True, impl="cce"
        )

    def workspace(shape: HeadShape) -> int:
        return shape.tokens * shape.hidden * 4 + _weight_gradient_bytes(shape, wide=True)

    return HeadKernel("cut-cross-entropy", loss, exact_sum=True, workspace=workspace)


def _liger_kernel() -> HeadKernel | None:
    function = _import_function("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if function is None:
        return None
    wide: dict[str, Any] = {}
    if "accum_dtype" in inspect.signature(function).parameters:
        wide["accum_dtype"] = torch.float32

    def loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = function(h, weight, targets, reduction="sum", **wide)
        return out if isinstance(out, Tensor) else out.loss

    def workspace(shape: HeadShape) -> int:
        share = -(-shape.vocabulary // shape.hidden)  # Liger splits a call so that its logits are as large as its input
        rows = 1 << max(0, (-(-shape.tokens // share) - 1).bit_length())
        return rows * shape.vocabulary * shape.dtype.itemsize + _weight_gradient_bytes(shape, wide=bool(wide))

    return HeadKernel("liger", loss, exact_sum=bool(wide), workspace=workspace)


def _import_function(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # importing may raise anything if the package's compiler or device is missing
        return None
