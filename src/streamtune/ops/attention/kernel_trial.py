"""Interface of fused attention kernels, the memory layouts that they can read, and the tests that select a kernel.

A kernel is used only if its results on small random problems agree with the attention formula in fp64. The problems
include the log-sum-exp of a softmax over more keys. The fastest such kernel is chosen.

The ATen operators below ``scaled_dot_product_attention`` are called directly, without its check of strides. On a CPU
they assume that the channels of a head are adjacent in memory, and fail if tokens overlap. On CUDA they read 16 bytes
at a time from any address. A dimension of stride zero, such as heads that share keys, is read correctly.

Shape suffixes as in ``ops.attention.attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from streamtune.ops.devices import kernel_device_type, median_time

RUNS = 5
"""Number of timed runs of a kernel after a warm-up run; their median is used."""
MARGIN = 0.95
"""A later kernel in a list is preferred only if its time is below this fraction of the best earlier time."""
TIMED = ((2048, 16384), (2048, 6144))
"""(queries, keys) of the timed problems: a chunk of 2048 tokens over prefixes of two lengths."""
CALLS_OF_SHAPE = 1000
"""Assumed number of calls with one shape, by which the time of the first call is divided."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Parameters of the attention scores ``scale * q k^T + bias``.

    Args:
        scale: Factor of ``q k^T``.
        causal: True if no query sees a later key; then the numbers of queries and keys are equal.
        bias: Additive mask ``[B or 1, 1, T, S]``, or None.
    """

    scale: float
    causal: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class ScoreRule:
    """Scale, softcap and dropout of the attention scores ``q k^T``.

    Args:
        scale: Factor of the scores, usually ``D ** -0.5``.
        softcap: Constant c of ``c * tanh(score / c)``, which replaces the score (Gemma 2).
        dropout: Probability that an attention weight is dropped.
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0


Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

Forward = Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores], Grads]


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel: forward, backward, and the inputs that they accept.

    Attributes:
        name: Name in logs and warnings.
        forward: ``forward(q, k, v, scores) -> (o, lse)`` with q and o ``[B, H, T, D]``, k and v ``[B, G, S, D]`` (G
            divides H), and lse ``[B, H, T]`` in fp32 (fp64 for fp64 inputs).
        backward: ``backward(grad_o, q, k, v, o, lse, scores) -> (grad_q, grad_k, grad_v)``. ``o`` and ``lse`` may come
            from a softmax over more keys than k and v have.
        takes_bias: True if the kernel accepts an additive mask.
        longest: Largest number of queries and of keys in a call.
        grain: Divisor of the numbers of queries and keys. It is large if the kernel needs a set-up for each new shape,
            so that few shapes occur.
    """

    name: str
    forward: Forward
    backward: Backward
    takes_bias: bool
    longest: int = 1 << 30
    grain: int = 1

    def accepts_lengths(self, queries: int, keys: int) -> bool:
        """Return True if both numbers are multiples of ``grain``."""
        return queries % self.grain == 0 and keys % self.grain == 0


@dataclass(frozen=True)
class AttentionHeadCounts:
    """Number of query heads, number of key/value heads (``groups``) and head size, for which a kernel is chosen."""

    queries: int
    groups: int
    size: int


class ViewKernel(Protocol):
    """Interface: a kernel that computes the attention under a whole :class:`MaskView` in one call."""

    @property
    def name(self) -> str:
        """Name of the kernel in logs and warnings."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return output ``[B, H, T, D]`` and log-sum-exp ``[B, H, T]``, which is -inf for a query that sees no key."""

    def backward(self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> Grads:
        """Return the gradients of q, k and v.

        ``o`` and ``lse`` may be of a softmax over more keys. A query whose ``lse`` is +inf contributes nothing.
        """


# --- layouts ----------------------------------------------------------------------------------------------------------

VECTOR = 16
"""Number of bytes that a CUDA kernel reads at a time."""


def call_kernel(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call an ATen attention operator; tensors whose memory layout it cannot read are copied first."""
    return operator(
        *(make_readable(x) if isinstance(x, Tensor) else x for x in arguments),
        **{name: make_readable(x) if isinstance(x, Tensor) else x for name, x in options.items()},
    )


def make_readable(x: Tensor) -> Tensor:
    """Return ``x`` if attention kernels can read its memory layout, else a contiguous copy.

    Elements of the last dimension (channels of a head, or keys of a mask) must be adjacent in memory and, on CUDA,
    aligned to 16 bytes.
    """
    if x.dim() < 2 or (_has_adjacent_channels(x) and (kernel_device_type(x.device) != "cuda" or _is_aligned(x))):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _token_strides(x: Tensor) -> list[int]:
    return [step for length, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if length > 1]


def _has_adjacent_channels(x: Tensor) -> bool:
    channels = x.shape[-1]
    return channels <= 1 or (x.stride(-1) == 1 and all(step == 0 or step >= channels for step in _token_strides(x)))


def _is_aligned(x: Tensor) -> bool:
    """Return False if the rows of ``x`` are not aligned to 16 bytes, but would be aligned in a contiguous copy."""
    size = x.element_size()
    if x.shape[-1] * size % VECTOR:
        return True
    return x.data_ptr() % VECTOR == 0 and all(step * size % VECTOR == 0 for step in _token_strides(x))


ODD_LAYOUTS = ("channels apart", "every other channel", "odd offset", "expanded", "overlapping")
"""Unusual memory layouts of a tensor ``[B, H, T, D]``, which projections, slices and gradients may have."""


def copy_to_odd_layout(x: Tensor, layout: str) -> Tensor:
    """Return a copy of ``x`` ``[B, H, T, D]`` with an unusual memory layout, one of :data:`ODD_LAYOUTS`.

    Two layouts change the values: ``expanded`` repeats the first batch row, and in ``overlapping`` tokens share values.
    """
    if layout == "channels apart":  # all heads of one channel are adjacent: a projection laid out ``(d h)``
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    if layout == "every other channel":
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1).flatten(-2)[..., ::2]
    if layout == "odd offset":
        return torch.cat([x.new_full((3,), torch.nan), x.flatten()])[3:].view(x.shape)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    assert layout == "overlapping"
    return x.flatten().as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1, 1))


# --- the trial --------------------------------------------------------------------------------------------------------


def agrees_with_formula(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, biased: bool = False
) -> bool:
    """Return True if an attention kernel agrees with the attention formula in fp64 on small random problems.

    The problems have one or several query heads per key head, several key blocks of the kernel, and a causal mask;
    ``biased`` adds an additive mask. The backward gets the log-sum-exp of a softmax over more keys. Each tensor is also
    tested in each of :data:`ODD_LAYOUTS`.
    """
    sizes = [(2, 2, 40, 72, False), (2, 2, 40, 40, True), (4, 2, 136, 200, False), (4, 1, 136, 136, True)]
    if (grain := kernel.grain) > 1:  # one ungrouped and one grouped problem only: each shape needs a setup
        sizes = [(2, 2, grain, 2 * grain, False), (4, 1, grain, grain, True)]
    shapes = [_ProblemShape(*size) for size in sizes]
    # Each of the four tensors has each of the odd layouts once, in problems of one shape.
    turns = [ODD_LAYOUTS[turn:] + ODD_LAYOUTS[:turn] for turn in range(len(ODD_LAYOUTS))]
    tried = [(shape, None) for shape in shapes] + [(shapes[0], turn) for turn in turns]
    with torch.no_grad():
        try:
            return all(
                _Problem(device, dtype, head_dim, shape, layouts).kernel_agrees(kernel, biased)
                for shape, layouts in tried
            )
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            # The kernel is missing or has another signature. torch's out-of-memory error is also a RuntimeError: a
            # kernel that could not be tested is not used.
            return False


class _ProblemShape(NamedTuple):
    heads: int
    groups: int
    queries: int
    keys: int
    causal: bool


class _Problem:
    """Random attention inputs with given memory layouts, and the attention formula's results for them in fp64."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        shape: _ProblemShape,
        layouts: Sequence[str] | None,
    ) -> None:
        heads, groups, queries, keys, causal = shape
        self.generator = torch.Generator(device).manual_seed(0)
        self.device, self.dtype, self.causal, self.scale = device, dtype, causal, head_dim**-0.5
        # Queries and keys of a packed row are slices of a sequence; a projection puts a token's heads side by side.
        self.q, self.grad = (
            self._random_tensor(heads, queries, head_dim),
            self._random_tensor(heads, queries, head_dim, token_major=True),
        )
        self.k, self.v = (
            self._random_tensor(groups, keys, head_dim, token_major=True),
            self._random_tensor(groups, keys, head_dim),
        )
        if layouts is not None:
            self.q, self.k, self.v, self.grad = (
                copy_to_odd_layout(x, layout)
                for x, layout in zip((self.q, self.k, self.v, self.grad), layouts, strict=False)
            )

    def _random_tensor(self, num_heads: int, length: int, head_dim: int, token_major: bool = False) -> Tensor:
        if token_major:
            x = draw_token_major(self.generator, self.dtype, 2, num_heads, length + 8, head_dim)
        else:
            x = torch.randn(
                (2, num_heads, length + 8, head_dim), generator=self.generator, device=self.device, dtype=self.dtype
            )
        return x[:, :, 3 : 3 + length]

    def _random_mask(self) -> Tensor:
        shape = (2, 1, self.q.shape[2], self.k.shape[2])
        hidden = torch.rand(shape, generator=self.generator, device=self.device) < 0.3
        hidden[:, :, -1] = True
        low = torch.finfo(self.dtype).min / 4
        return torch.zeros(shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, low)

    def kernel_agrees(self, kernel: Kernel, biased: bool) -> bool:
        bias = self._random_mask() if biased and not self.causal else None
        s = self._scores(bias)
        own_lse = s.logsumexp(-1)
        lse = own_lse + 0.5  # as if further keys took part in the softmax
        blind = torch.zeros_like(lse, dtype=torch.bool)
        if bias is not None:
            blind[:, :, -1] = True  # the last query sees no key: an infinite lse excludes it from the backward
            lse = lse.masked_fill(blind, float("inf"))
        o, want = self._output_and_gradients(s, lse)
        scores = Scores(self.scale, self.causal, bias)
        got_o, got_lse = kernel.forward(self.q, self.k, self.v, scores)
        placed = torch.nn.functional.pad(o.to(self.dtype), (0, 0, 3, 5))[:, :, 3 : 3 + o.shape[2]]
        wide = torch.promote_types(self.dtype, torch.float32)
        got = kernel.backward(self.grad, self.q, self.k, self.v, placed, lse.to(wide), scores)
        seen = ~blind
        pairs = [(got_o[seen], (s.softmax(-1) @ self._repeat_groups(self.v))[seen]), (got_lse[seen], own_lse[seen])]
        pairs += list(zip(got, want, strict=True))
        return all(g.shape == w.shape and is_close(g, w, self.dtype) for g, w in pairs)

    def _repeat_groups(self, x_BGSD: Tensor) -> Tensor:
        return x_BGSD.double().repeat_interleave(self.q.shape[1] // x_BGSD.shape[1], dim=1)

    def _scores(self, bias: Tensor | None) -> Tensor:
        s = self.q.double() @ self._repeat_groups(self.k).mT * self.scale
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=self.device).triu(1), -torch.inf)
        return s if bias is None else s + bias.double()

    def _output_and_gradients(self, s: Tensor, lse: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        grad, groups = self.grad.double(), (self.k.shape[1], -1)
        p = (s - lse[..., None]).exp()
        o = p @ self._repeat_groups(self.v)
        delta = (grad * o).sum(-1, keepdim=True)
        ds = p * (grad @ self._repeat_groups(self.v).mT - delta) * self.scale
        dk, dv = ((x.mT @ y).unflatten(1, groups).sum(2) for x, y in ((ds, self.q.double()), (p, grad)))
        return o, (ds @ self._repeat_groups(self.k), dk, dv)


def is_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the relative error of ``got`` in norm is at most 1e-4, or 3e-2 for a half-precision ``dtype``."""
    bound = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    return bool((got.double() - want).norm() <= bound * want.norm())


def draw_token_major(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a random tensor ``[B, H, T, D]``; the heads of a token are adjacent in memory, as after a projection."""
    batch, heads, length, size = shape
    x = torch.randn((batch, length, heads, size), generator=generator, device=generator.device, dtype=dtype)
    return x.transpose(1, 2)


def view_kernel_agrees(
    kernel: ViewKernel, tensors: Sequence[Tensor], visible: Tensor, scale: float, softcap: float | None = None
) -> bool:
    """Return True if a kernel agrees with the attention formula in fp64; the backward's log-sum-exp includes a sink.

    Args:
        kernel: Kernel to check.
        tensors: Tensors q, k, v and the gradient of the output.
        visible: Boolean mask, True if a query sees a key; broadcasts to ``[B, H, T, S]``.
        scale, softcap: Arguments of ``prefix_attention``.
    """
    q, k, v, grad = tensors
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in exact[1:])
    s = exact[0] @ wide_k.mT * scale
    s = s if softcap is None else softcap * (s / softcap).tanh()
    s = s.masked_fill(~visible, -torch.inf)
    lse = torch.logaddexp(s.logsumexp(-1), torch.zeros((), dtype=torch.float64, device=q.device))  # a sink of zero
    o = (s - lse[..., None]).exp() @ wide_v
    want = torch.autograd.grad(o, exact, grad.double())
    own_o, own_lse = kernel.forward(q, k, v, for_backward=True)
    got = kernel.backward(grad, q, k, v, o.detach().to(q.dtype), lse.detach().to(own_lse.dtype))
    pairs = [(own_o, s.softmax(-1) @ wide_v), (own_lse, s.logsumexp(-1)), *zip(got, want, strict=True)]
    return all(is_close(g, w, q.dtype) for g, w in pairs)


def choose_fastest(kernels: Sequence[Kernel], measure_seconds: Callable[[Kernel], float | None]) -> Kernel | None:
    """Return the fastest kernel; a later kernel must take less than :data:`MARGIN` times the best earlier time.

    Args:
        kernels: Kernels that agree with the attention formula, the most trusted first.
        measure_seconds: Function that returns the time of a kernel; None if the time could not be measured.
    """
    best, least = None, float("inf")
    for kernel in kernels:
        needed = measure_seconds(kernel) if len(kernels) > 1 else 0.0
        if best is None or (needed is not None and needed < least * MARGIN):
            best, least = kernel, float("inf") if needed is None else needed
    return best


def median_seconds(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: AttentionHeadCounts,
    shapes: Sequence[tuple[int, int]] = TIMED,
) -> float | None:
    """Return a kernel's time for forward and backward in seconds, summed over the (queries, keys) in ``shapes``.

    The time for a shape is the median of :data:`RUNS` runs, plus the first run's time divided by
    :data:`CALLS_OF_SHAPE`. None if a run fails, such as for lack of memory.
    """
    generator, scores = torch.Generator(device).manual_seed(0), Scores(heads.size**-0.5)
    total = 0.0

    def run_once() -> None:
        o, lse = kernel.forward(q, k, v, scores)
        kernel.backward(grad, q, k, v, o, lse, scores)

    with torch.no_grad():
        try:
            for queries, keys in shapes:
                q, grad = (draw_token_major(generator, dtype, 1, heads.queries, queries, heads.size) for _ in range(2))
                k, v = (draw_token_major(generator, dtype, 1, heads.groups, keys, heads.size) for _ in range(2))
                first = median_time(run_once, device, run_count=1)
                total += median_time(run_once, device, RUNS) + first / CALLS_OF_SHAPE
        except RuntimeError:
            return None
    return total
