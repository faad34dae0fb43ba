"""Each fused attention kernel on the device against the formula, past 32 bits too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.ops import LazyMask, prefix_attention
from streamtune.ops.attention import attention
from streamtune.ops.attention.flex import FlexView, is_flex_correct
from streamtune.ops.attention.kernel_blocks import split_into_blocks
from streamtune.ops.attention.kernel_trial import AttentionHeadCounts, Kernel, agrees_with_formula, median_seconds
from streamtune.ops.attention.kernels import CUDNN, EFFICIENT, FLASH, Scores, fused_segment_kernel, kernel_names
from streamtune.ops.attention.view_kernels import band_kernel_of_view, is_band_correct
from tests.precision_kit import assert_as_precise

from .conftest import LARGE, needs

HALVES = (torch.bfloat16, torch.float16)


def modern(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_agrees(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    if not modern(device):
        pytest.skip("flash attention needs compute capability 8.0")
    assert agrees_with_formula(FLASH, device, dtype, dim)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_efficient_agrees(device: torch.device, dtype: torch.dtype, dim: int, biased: bool) -> None:
    if dtype == torch.bfloat16 and not modern(device):
        pytest.skip("bf16 needs compute capability 8.0")
    assert agrees_with_formula(EFFICIENT, device, dtype, dim, biased)


@pytest.mark.parametrize("dim", [64, 128])
def test_cudnn_agrees_or_is_not_used(device: torch.device, dim: int) -> None:
    """cuDNN's own releases decide; what matters is that a wrong one is found out. The reason is in the report."""
    if not agrees_with_formula(CUDNN, device, torch.bfloat16, dim):
        pytest.xfail(f"cuDNN {torch.backends.cudnn.version()} does not agree for heads of {dim}")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_kernel_runs_and_has_a_time(device: torch.device, dtype: torch.dtype) -> None:
    names = kernel_names(device, dtype)
    assert "tiled" not in names.values(), names
    for kernel in (FLASH, CUDNN, EFFICIENT):
        if agrees_with_formula(kernel, device, dtype, 128):
            seconds = median_seconds(kernel, device, dtype, AttentionHeadCounts(32, 8, 128))
            assert seconds is None or 0 < seconds < 1
            print(f"{kernel.name} {dtype}: {seconds}")


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_whole_chunk_in_one_flash_call(device: torch.device, dim: int, windowed: bool) -> None:
    if not modern(device):
        pytest.skip("flash attention needs compute capability 8.0")
    assert is_band_correct(device, torch.bfloat16, dim, windowed)


@pytest.mark.parametrize("softcapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flex_agrees(device: torch.device, dtype: torch.dtype, softcapped: bool) -> None:
    pytest.importorskip("triton")
    assert is_flex_correct.__wrapped__(device, dtype, AttentionHeadCounts(8, 2, 64), softcapped)


def test_flex_is_not_compiled_again_for_each_chunk(device: torch.device) -> None:
    pytest.importorskip("triton")
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    mask = LazyMask(1, 4096, 4096, row_start=(torch.arange(4096, device=device) // 300 * 300)[None], device=device)
    compiled = []
    for chunk in range(8):
        view = mask.view_chunk(512 * chunk, 512 * chunk + 512, 0)
        q = torch.randn(1, 8, 512, 64, device=device, dtype=torch.bfloat16)
        k = torch.randn(1, 2, view.shape[3], 64, device=device, dtype=torch.bfloat16)
        flex = FlexView(view, 0.125, None)
        flex.backward(q, q, k, k, *flex.forward(q, k, k, for_backward=True))
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[-1] <= compiled[2] + 1, compiled


def long_problem(device: torch.device, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, 128, generator=generator, device=device, dtype=dtype)

    return draw(32, 64), draw(8, keys), draw(8, keys), draw(32, 64)


@LARGE
@pytest.mark.parametrize("kernel", [FLASH, CUDNN, EFFICIENT], ids=lambda kernel: kernel.name)
def test_more_than_32_bits_of_keys(device: torch.device, kernel: Kernel) -> None:
    """2^19 keys and more at 32 heads of 128 are over 2^31 elements; the blocks give what plain parts of them give."""
    needs(24)
    if not agrees_with_formula(kernel, device, torch.bfloat16, 128):
        pytest.skip("not used on this device")
    keys = (1 << 19) + 640
    q, k, v, grad = long_problem(device, keys, torch.bfloat16)
    whole = split_into_blocks(kernel, q, k)
    assert whole is not kernel
    o, lse = whole.forward(q, k, v, Scores(0.1))
    parts = [slice(start, min(start + 16384, keys)) for start in range(0, keys, 16384)]
    lses = torch.stack([EFFICIENT.forward(q, k[:, :, s], v[:, :, s], Scores(0.1))[1] for s in parts])
    torch.testing.assert_close(lse, lses.logsumexp(0), rtol=1e-4, atol=1e-4)
    grads = whole.backward(grad, q, k, v, o, lse, Scores(0.1))
    for s in (parts[0], parts[-1]):
        _, grad_k, grad_v = EFFICIENT.backward(grad, q, k[:, :, s], v[:, :, s], o, lse, Scores(0.1))
        for g, w in ((grads[1][:, :, s], grad_k), (grads[2][:, :, s], grad_v)):
            assert (g - w).float().norm() <= 2e-2 * w.float().norm()


@LARGE
@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=lambda kernel: kernel.name)
def test_strides_beyond_32_bits(device: torch.device, kernel: Kernel) -> None:
    """A cache whose heads, or whose rows, lie more than 2^31 elements apart."""
    needs(12)
    if not agrees_with_formula(kernel, device, torch.bfloat16, 64):
        pytest.skip("not used on this device")
    memory = torch.empty((1 << 32) + (1 << 20), device=device, dtype=torch.bfloat16)
    for strides in ((0, 1 << 31, 64, 1), (0, 64, 1 << 25, 1)):
        k = memory.as_strided((1, 2, 128, 64), strides)
        k.normal_(generator=torch.Generator(device).manual_seed(0))
        q = torch.randn(1, 4, 64, 64, device=device, dtype=torch.bfloat16)
        o, lse = kernel.forward(q, k, k, Scores(0.125))
        near = k.contiguous()
        want_o, want_lse = kernel.forward(q, near, near, Scores(0.125))
        torch.testing.assert_close(o, want_o, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
        got, want = (kernel.backward(q, q, x, x, o, lse, Scores(0.125)) for x in (k, near))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=2e-2, atol=2e-2)


@LARGE
def test_the_efficient_kernel_past_its_16_bits(device: torch.device) -> None:
    """Causal and 70,000 long, where one call of it is wrong."""
    needs(8)
    q = torch.randn(1, 2, 70_000, 64, device=device, dtype=torch.bfloat16)
    o, lse = split_into_blocks(EFFICIENT, q, q).forward(q, q, q, Scores(0.125, causal=True))
    rows = slice(69_900, 70_000)
    s = (q[:, :, rows].float() @ q.float().mT) * 0.125
    s = s.masked_fill(torch.arange(70_000, device=device) > torch.arange(*rows.indices(70_000), device=device)[:, None],
                      float("-inf"))  # fmt: skip
    torch.testing.assert_close(lse[:, :, rows], s.logsumexp(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(o[:, :, rows].float(), s.softmax(-1) @ q.float(), rtol=2e-2, atol=2e-2)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks_H": [0.5, -1.0, 2.0, 0.0]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, None)])
def test_prefix_attention(
    device: torch.device, case: str, window: int | None, padded: bool, dtype: torch.dtype, bound: float | None
) -> None:
    length, start = 500, 200
    padding = torch.ones(2, length, dtype=torch.bool, device=device)
    padding[1, :120] = False
    mask = LazyMask(2, length, length, window=window, padding=padding if padded else None, device=device)
    view = mask.view_chunk(start, length, 0)
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, heads, n, 64, generator=generator, device=device, dtype=dtype)
        for heads, n in ((4, length - start), (2, length), (2, length), (4, length - start))
    )
    how = {name: torch.tensor(x, device=device) if name == "sinks_H" else x for name, x in CASES[case].items()}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = prefix_attention(leaves[0], leaves[1], leaves[2], view, scale=0.125, **how)
    got = [o, *torch.autograd.grad(o, leaves, grad)]
    allowed = mask.tile(start, length, 0, length)

    def formula(dtype: torch.dtype) -> list[Tensor]:
        q_, k_, v_ = inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        given = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in how.items()}
        o = attention.prefix_attention_reference(q_, k_, v_, allowed, scale=0.125, **given)
        return [o, *torch.autograd.grad(o, inputs, grad.to(dtype))]

    for g, p, w in zip(got, formula(torch.float32), formula(torch.float64), strict=True):
        if bound is None:
            assert_as_precise(g, p, w)
        else:
            assert (g.double() - w).norm() <= bound * w.norm()


def test_the_choice_is_kept(device: torch.device) -> None:
    q = torch.randn(1, 8, 32, 64, device=device, dtype=torch.bfloat16)
    k = q[:, :2]
    first = fused_segment_kernel(q, k, k, biased=False)
    assert first is fused_segment_kernel(q, k, k, biased=False)
    assert band_kernel_of_view(LazyMask(1, 32, 32, device=device).rows(0, 32), 0.1) is not None
