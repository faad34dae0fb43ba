"""Layouts in memory: attention is the same whatever the strides of its tensors, on every way to a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune.ops.attention.attention import prefix_attention
from streamtune.ops.attention.kernel_trial import ODD_LAYOUTS, agrees_with_formula, copy_to_odd_layout, make_readable
from streamtune.ops.attention.kernels import CPU, Scores
from streamtune.ops.attention.mask import LazyMask
from streamtune.ops.devices import simulate_device_type
from streamtune.ops.fused import rms_norm
from tests.exactness.families import build
from tests.precision_kit import Float64

ATTENTION = Path(streamtune.__file__).parent


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
@pytest.mark.parametrize("dim", [1, 2, 16, 80])
def test_the_cpu_kernel_in_each_layout(layout: str, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 20), (2, 20), (2, 20), (4, 20))
    drawn = [torch.randn(2, *shape, dim, generator=generator) for shape in shapes]
    scores = Scores(dim**-0.5, causal=True)
    for place in range(4):
        odd = [copy_to_odd_layout(x, layout) if at == place else x for at, x in enumerate(drawn)]
        even = [x.clone(memory_format=torch.contiguous_format) for x in odd]
        got, want = [], []
        for results, (q, k, v, grad) in ((got, odd), (want, even)):
            o, lse = CPU.forward(q, k, v, scores)
            results += [o, lse, *CPU.backward(grad, q, k, v, o, lse, scores)]
        assert all(torch.allclose(g, w, atol=2e-5) for g, w in zip(got, want, strict=True)), place


@pytest.mark.parametrize("layout", ["channels apart", "every other channel"])
def test_a_mask_output_and_log_sum_exp_in_odd_layouts(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 20, 8, generator=generator) for _ in range(4))
    bias = torch.randn(2, 1, 20, 20, generator=generator)
    o, lse = CPU.forward(q, k, v, Scores(0.3, bias=bias))
    odd_bias = Scores(0.3, bias=copy_to_odd_layout(bias, layout))
    assert torch.equal(CPU.forward(q, k, v, odd_bias)[0], o)
    want = CPU.backward(grad, q, k, v, o, lse, Scores(0.3, bias=bias))
    odd_lse = copy_to_odd_layout(lse[..., None], layout)[..., 0]
    got = CPU.backward(grad, q, k, v, copy_to_odd_layout(o, layout), odd_lse, odd_bias)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_the_trial_finds_a_kernel_that_ignores_strides() -> None:
    def ignoring(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, scores.causal, attn_mask=scores.bias, scale=scores.scale
        )
        return o, lse

    here = torch.device("cpu")
    assert agrees_with_formula(CPU, here, torch.float32, 16)
    kernel = CPU.__class__("ignoring", ignoring, CPU.backward, takes_bias=True)
    assert not agrees_with_formula(kernel, here, torch.float32, 16)


def test_what_an_accelerator_cannot_read_is_copied() -> None:
    """On CUDA channels begin at multiples of 16 bytes; told here by tensors on ``meta``, which stand for such."""
    x = torch.empty(2, 3, 5, 8, dtype=torch.bfloat16, device="meta")
    with simulate_device_type("cuda"):
        assert make_readable(x) is x
        assert make_readable(x[:, :1].expand(-1, 4, -1, -1)).stride(1) == 0
        assert make_readable(x.transpose(1, 2)).stride() == x.transpose(1, 2).stride()
        wide = torch.empty(2, 3, 5, 9, dtype=torch.bfloat16, device="meta")[..., :8]
        assert make_readable(wide).is_contiguous()
        assert make_readable(x.mT).stride(-1) == 1
    with simulate_device_type("cpu"):
        assert make_readable(wide) is wide


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_a_chunk_of_attention_in_each_layout(layout: str) -> None:
    """A window and a prefix, in fp64 and against tensors that are contiguous."""
    generator = torch.Generator().manual_seed(0)
    view = LazyMask(2, 40, 40, window=9).view_queries(24, 40)
    shapes = ((4, 16), (2, 40), (2, 40), (4, 16))
    q, k, v, grad = (
        copy_to_odd_layout(torch.randn(2, *s, 8, generator=generator, dtype=torch.float64), layout) for s in shapes
    )
    k_seen, v_seen = k[:, :, view.k_start : view.k_stop], v[:, :, view.k_start : view.k_stop]

    def run(*tensors: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = prefix_attention(*leaves, view, scale=0.3)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    got = run(q, k_seen, v_seen, grad=grad)
    want = run(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k_seen, v_seen)), grad=grad.clone())
    assert all(torch.allclose(g, w, atol=1e-12) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_the_norm_of_a_device_in_each_layout(layout: str) -> None:
    x = copy_to_odd_layout(torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)), layout)
    weight = torch.arange(16.0)[::2]
    assert torch.allclose(rms_norm(x, weight, 1e-5), rms_norm(x.clone(), weight.clone(), 1e-5), atol=1e-6)


def test_no_attention_kernel_is_called_but_with_readable_tensors() -> None:
    """The operators below ``scaled_dot_product_attention`` are named as arguments, and never called by themselves."""
    called = re.compile(r"aten\._(scaled_dot_product|flash|efficient|cudnn)\w*attention\w*\(")
    rooms = [path for path in ATTENTION.rglob("*.py") if "simulate" not in path.parts]
    assert len(rooms) > 100
    assert not [path.name for path in rooms if called.search(path.read_text())]


class LaidOut(nn.Module):
    """A norm of heads whose result has its channels apart, as a projection laid out ``(d h)`` leaves them."""

    def __init__(self, inner: nn.Module, layout: str) -> None:
        super().__init__()
        self.inner, self.layout = inner, layout

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.layout == "every other channel":
            return torch.stack([y, y], dim=-1).flatten(-2)[..., ::2]
        return y.mT.contiguous().mT


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layout", ["channels apart", "every other channel"])
def test_a_model_whose_heads_have_their_channels_apart(layout: str) -> None:
    model = build("qwen3", dtype=torch.float64).train()
    for layer in model.get_decoder().layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = (
            LaidOut(norm, layout) for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)
        )
    ids = torch.randint(5, 90, (1, 27), generator=torch.Generator().manual_seed(1))
    with Float64():
        plain = gradients(model, ids)
        with streamtune.stream(model, chunk_size=8):
            ours = gradients(model, ids)
    assert ours.keys() == plain.keys()
    assert all((ours[name] - grad).norm() <= 1e-12 * grad.norm() for name, grad in plain.items())


def test_heads_of_two_channels() -> None:
    """The rotary embedding of gpt-oss puts such heads together from halves of one channel, which it lays apart."""
    model = build("gpt_oss", head_dim=2, dtype=torch.float64).train()
    model.set_experts_implementation("eager")  # the grouped matmul has no fp64
    ids = torch.randint(5, 90, (1, 27), generator=torch.Generator().manual_seed(1))
    with Float64():
        plain = gradients(model, ids)
        with streamtune.stream(model, chunk_size=8):
            ours = gradients(model, ids)
    assert all((ours[name] - grad).norm() <= 1e-12 * grad.norm() for name, grad in plain.items())
