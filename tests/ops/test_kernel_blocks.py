"""A kernel in blocks gives what it gives in one call, and no call is larger than it may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.ops.attention.kernel_blocks import split_into_blocks
from streamtune.ops.attention.kernels import CPU, Scores, fused_segment_kernel
from streamtune.ops.devices import MAX_ELEMENTS, block_slices


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def problem(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, grad = ((4, queries), (2, keys), (2, keys), (4, queries))
    return (
        draw(2, *q, 16, dtype=dtype),
        draw(2, *k, 16, dtype=dtype),
        draw(2, *v, 16, dtype=dtype),
        draw(2, *grad, 16, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [(40, 100, "none"), (40, 40, "causal"), (33, 33, "causal"), (5, 64, "none"), (40, 100, "bias"), (1, 1, "none")],
)
@pytest.mark.parametrize("longest", [7, 16, 64])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 6e-3)])
def test_blocks_are_the_whole(
    longest: int, queries: int, keys: int, mask: str, dtype: torch.dtype, bound: float
) -> None:
    q, k, v, grad = problem(queries, keys, dtype)
    hidden = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(0)) < 0.3
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -1e4) if mask == "bias" else None
    sizes: list[tuple[int, int]] = []

    def forward(q: Tensor, k: Tensor, *rest: Any) -> Any:
        sizes.append((q.shape[2], k.shape[2]))
        return CPU.forward(q, k, *rest)

    def backward(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> Any:
        sizes.append((q.shape[2], k.shape[2]))
        return CPU.backward(grad, q, k, *rest)

    counted = replace(CPU, forward=forward, backward=backward, longest=longest)
    split = split_into_blocks(counted, q, k)
    assert (split is counted) == (max(queries, keys) <= longest)
    scores = Scores(0.3, mask == "causal", bias)
    exact = [x.double() for x in (q, k, v)]
    wide = replace(scores, bias=None if bias is None else bias.double())
    want_o, want_lse = CPU.forward(*exact, wide)
    o, lse = split.forward(q, k, v, scores)
    assert (o.dtype, o.shape) == (dtype, q.shape)
    foreign = want_lse + 0.5
    foreign_o = (want_o * torch.exp(torch.tensor(-0.5))).to(dtype)
    want = CPU.backward(grad.double(), *exact, foreign_o.double(), foreign, wide)
    got = split.backward(grad, q, k, v, foreign_o, foreign.to(lse.dtype), scores)
    for g, w in zip((o, lse, *got), (want_o, want_lse, *want), strict=True):
        assert g.shape == w.shape
        assert (g.double() - w).norm() <= bound * w.norm()
    assert all(size <= longest for pair in sizes for size in pair)


def test_elements_are_counted_at_all_heads() -> None:
    q, k, v, _ = problem(8, 4096, torch.float64)
    kernel = split_into_blocks(CPU, q, k, max_elements=2 * 4 * 16 * 1000)
    assert kernel is not CPU
    assert split_into_blocks(CPU, q, k, max_elements=2 * 4 * 16 * 4096) is CPU
    o, lse = kernel.forward(q, k, v, Scores(0.25))
    want_o, want_lse = CPU.forward(q, k, v, Scores(0.25))
    torch.testing.assert_close(o, want_o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=0)


def test_a_cache_of_more_than_32_bits_is_cut() -> None:
    """64 heads of 128 over 2^19 keys are 2^32 elements; a stride of zero makes them out of one."""
    q = torch.zeros(1, 1, 1, 1).expand(1, 64, 4, 128)
    k = torch.zeros(1, 1, 1, 1).expand(1, 8, 1 << 19, 128)
    kernel = fused_segment_kernel(q, k, k, biased=False)
    assert kernel is not None
    calls: list[int] = []

    def forward(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(k.shape[2])
        return q, q[..., 0].float()

    split_into_blocks(replace(CPU, forward=forward), q, k).forward(q, k, k, Scores(1.0))
    assert sum(calls) == 1 << 19
    assert len(calls) == 3
    assert all(keys * 64 * 128 <= MAX_ELEMENTS for keys in calls)
    assert all(keys % 128 == 0 for keys in calls)


def test_strides_beyond_32_bits_on_the_cpu() -> None:
    """Keys that lie 2^31 elements apart in a longer cache (of which only the touched pages exist)."""
    dtype, step = torch.bfloat16, 1 << 27
    memory = torch.empty(17 * step, dtype=dtype)
    shape, strides = (1, 2, 17, 16), (0, 64, step, 1)
    k = memory.as_strided(shape, strides)
    v = memory.as_strided(shape, strides, 1024)
    q, grad = draw(1, 4, 5, 16, dtype=dtype), draw(1, 4, 5, 16, dtype=dtype)
    k.copy_(draw(1, 2, 17, 16)), v.copy_(draw(1, 2, 17, 16).flip(2))
    o, lse = CPU.forward(q, k, v, Scores(0.25))
    got = CPU.backward(grad, q, k, v, o, lse, Scores(0.25))
    want_o, want_lse = CPU.forward(q, k.contiguous(), v.contiguous(), Scores(0.25))
    want = CPU.backward(grad, q, k.contiguous(), v.contiguous(), o, lse, Scores(0.25))
    for g, w in zip((o, lse, *got), (want_o, want_lse, *want), strict=True):
        torch.testing.assert_close(g, w)


def test_blocks_of_nothing_and_of_less_than_one() -> None:
    assert list(block_slices(0, 5)) == []
    assert list(block_slices(3, 0)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(block_slices(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
