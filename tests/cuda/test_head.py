"""The head on the device: the sweep against fp64, every installed fused head against the sweep, chunks past 32 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear

from streamtune.ops import linear_cross_entropy
from streamtune.ops.fused import _matmul_accumulates_wide
from streamtune.ops.head import cross_entropy as module
from streamtune.ops.head.kernels import agrees_with_loop, head_candidates
from streamtune.ops.head.sweep import loss_and_grad
from tests.precision_kit import assert_as_precise, relative

from .conftest import LARGE, needs

TOKENS, VOCAB, HIDDEN = 512, 32_000, 1024


def problem(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator, device=device)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, device=device) / HIDDEN**0.5
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator, device=device)
    return h.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize("chunk_size", [100, 512])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_precise_as_torch(device: torch.device, dtype: torch.dtype, frozen: bool, chunk_size: int) -> None:
    """fp64 truth, torch with all logits at once, ours, whichever head was chosen."""
    h, weight, targets = problem(device, dtype)

    def leaves(wide: torch.dtype) -> list[Tensor]:
        return [h.to(wide).clone().requires_grad_(), weight.to(wide).clone().requires_grad_(not frozen)]

    def run(of: list[Tensor], loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [leaf for leaf in of if leaf.requires_grad])]

    truth, theirs, own = leaves(torch.float64), leaves(dtype), leaves(dtype)
    want = run(truth, cross_entropy(linear(truth[0], truth[1]), targets))
    torchs = run(theirs, cross_entropy(linear(theirs[0], theirs[1]).float(), targets))
    ours = run(own, linear_cross_entropy(own[0], own[1], targets, chunk_size=chunk_size))
    for got, other, exact in zip(ours, torchs, want, strict=True):
        assert relative(got, exact) <= 1.5 * relative(other, exact) + 1e-5


def test_a_wide_sum_of_narrow_products(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device) >= (8, 0):
        assert _matmul_accumulates_wide(device, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("wanted", [(True, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_heads_agree_or_are_not_used(device: torch.device, dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    h, weight, targets = problem(device, dtype)
    sweep = partial(module._chunk_loss_and_grads, h, weight, targets, wanted)
    verdicts = {k.name: agrees_with_loop(k, h, weight, targets, wanted, sweep) for k in head_candidates()}
    print(verdicts)
    if dtype == torch.float32 and "torch linear_cross_entropy" in verdicts:
        assert verdicts["torch linear_cross_entropy"]


@LARGE
def test_a_chunk_of_more_than_32_bits_of_logits(device: torch.device) -> None:
    needs(24)
    rows, vocabulary = 16_400, 131_072
    logits = torch.randn(1, vocabulary, device=device, dtype=torch.bfloat16).repeat(rows, 1)
    targets = torch.full((rows,), 7, device=device)
    one, grad_one = loss_and_grad(logits[-1:].clone(), targets[-1:], None, True)
    loss, grad = loss_and_grad(logits, targets, None, True, overwrite_logits=True)  # which takes their memory
    assert grad is not None
    assert grad_one is not None
    assert_as_precise(loss, one.repeat(rows).sum(), rows * one.double())
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(grad[row], grad_one[0])


@LARGE
def test_embeddings_of_more_than_32_bits(device: torch.device) -> None:
    """The gradient of the embedding is torch's own: a million tokens of 4,096 are 2^32 elements."""
    needs(36)
    length, hidden, words = 1 << 20, 4096, 1000
    ids = torch.arange(length, device=device) % words
    weight = torch.zeros(words, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = embedding(ids, weight)
    grad = torch.zeros_like(out)
    grad[-1], grad[3] = 1.0, 2.0
    (got,) = torch.autograd.grad(out, weight, grad)
    want = torch.zeros_like(got)
    want[int(ids[-1])] = 1.0
    want[3] = 2.0
    assert torch.equal(got, want)
