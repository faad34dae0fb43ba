"""Fused heads take the sweep's place only where they agree with it, sum as exactly and need no more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from streamtune.ops import linear_cross_entropy
from streamtune.ops.head import cross_entropy as module
from streamtune.ops.head import kernels as head_kernels
from streamtune.ops.head.kernels import HeadKernel, HeadShape, agrees_with_loop, head_candidates, run_head_kernel
from streamtune.ops.head.sweep import loss_and_grad
from tests.precision_kit import ROUNDING, assert_as_precise

TOKENS, VOCAB, HIDDEN = 24, 71, 16


def plain(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, as a candidate."""
    return cross_entropy(linear(h, weight).float(), targets, reduction="sum")


PLAIN = HeadKernel("plain", plain, exact_sum=True, workspace=lambda shape: 0)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return h, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def shape_of(
    dtype: torch.dtype, weight: bool = True, accumulate: torch.dtype = torch.float32, tokens: int = TOKENS
) -> HeadShape:
    return HeadShape(tokens, VOCAB, HIDDEN, dtype, (True, weight), accumulate)


def agrees(kernel: HeadKernel, dtype: torch.dtype, wanted: tuple[bool, bool] = (True, True)) -> bool:
    h, weight, targets = problem(dtype)
    return agrees_with_loop(
        kernel, h, weight, targets, wanted, partial(module._chunk_loss_and_grads, h, weight, targets, wanted)
    )


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_head_agrees(dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    assert agrees(PLAIN, dtype, wanted)


def scaled(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return plain(h, weight, targets) * 1.02


def mean(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return plain(h, weight, targets) / TOKENS


def filtered(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The right loss, but small probabilities give no gradient."""
    logits = linear(h, weight).float()
    probable = logits.softmax(-1) > 0.05
    return cross_entropy(torch.where(probable, logits, logits.detach()), targets, reduction="sum")


def rounded(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return plain(h, weight, targets).to(h.dtype)


def missing(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    raise ImportError("no compiler")


@pytest.mark.parametrize("wrong", [scaled, mean, filtered, rounded, missing])
def test_a_wrong_head_does_not(wrong: Callable[..., Tensor]) -> None:
    assert not agrees(replace(PLAIN, loss=wrong), torch.bfloat16)


def test_torchs_own_is_right_in_fp32_and_no_candidate_in_half() -> None:
    found = {kernel.name: kernel for kernel in head_candidates()}
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        assert "torch linear_cross_entropy" not in found
        return
    kernel = found["torch linear_cross_entropy"]
    assert agrees(kernel, torch.float32)
    assert agrees(kernel, torch.float32, (True, False))
    assert not agrees(kernel, torch.bfloat16), "its loss is rounded to bf16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_is_not_exact_serves_what_is_not_summed_wide(dtype: torch.dtype) -> None:
    kernel = replace(PLAIN, exact_sum=False)
    half = dtype == torch.bfloat16
    assert kernel.is_eligible(shape_of(dtype)) == (not half)
    assert kernel.is_eligible(shape_of(dtype, accumulate=dtype))
    assert kernel.is_eligible(shape_of(dtype, weight=False))
    assert PLAIN.is_eligible(shape_of(dtype))


def test_more_memory_than_the_sweeps_is_too_much() -> None:
    shape = shape_of(torch.bfloat16)
    sweep = TOKENS * VOCAB * 6
    assert replace(PLAIN, workspace=lambda shape: sweep).is_eligible(shape)
    assert not replace(PLAIN, workspace=lambda shape: sweep + 1).is_eligible(shape)


def test_workspaces_of_an_8b_head() -> None:
    """With a frozen head, all of them fit; with a trained one, the gradient of a call's weight is one too many."""
    for kernel in head_candidates():
        frozen = HeadShape(1024, 151_936, 4096, torch.bfloat16, (True, False), torch.float32)
        assert kernel.is_eligible(frozen)
        assert not kernel.is_eligible(replace(frozen, wanted=(True, True)))


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The choice of a device, made on the CPU with candidates and times of one's own."""

    def put(seconds: dict[str, float], *candidates: HeadKernel) -> None:
        def time_of(run: Any, device: torch.device, runs: int) -> float:
            run()
            return seconds[run.args[0].name if run.func is run_head_kernel else "sweep"]

        def choose(h: Tensor, weight: Tensor, targets: Tensor, shape: HeadShape, sweep: Any) -> HeadKernel | None:
            return head_kernels._fastest_agreeing_kernel(candidates, h, weight, targets, shape, sweep)

        monkeypatch.setattr(head_kernels, "median_time", time_of)
        monkeypatch.setattr(module, "choose_head_kernel", choose)

    return put


@pytest.mark.parametrize("chunk_size", [5, 24, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_loss_through_a_fused_head(
    on_a_device: Callable[..., None], frozen: bool, dtype: torch.dtype, chunk_size: int
) -> None:
    calls: list[int] = []

    def counted(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(h))
        return plain(h, weight, targets)

    h, weight, targets = problem(dtype)
    targets[3:7] = -100

    def run(dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
        leaves = [h.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_(not frozen)]
        loss = linear_cross_entropy(leaves[0], leaves[1], targets, chunk_size=chunk_size)
        return loss.detach(), *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])

    want, truth = run(), run(torch.float64)
    on_a_device({"sweep": 2.0, "plain": 1.0}, replace(PLAIN, loss=counted))
    got = run()
    assert calls
    assert max(calls) == min(chunk_size, TOKENS - 4)
    for g, w, t in zip(got, want, truth, strict=True):
        assert g.dtype == w.dtype
        assert_as_precise(g, w, t, constant=ROUNDING if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        ({"sweep": 1.0, "plain": 2.0, "other": 3.0}, None),
        ({"sweep": 3.0, "plain": 2.0, "other": 1.0}, "other"),
        ({"sweep": 3.0, "plain": 1.0, "other": 2.0}, "plain"),
    ],
)
def test_the_fastest_head_is_chosen_and_said(
    on_a_device: Callable[..., None], caplog: pytest.LogCaptureFixture, seconds: dict[str, float], want: str | None
) -> None:
    caplog.set_level("INFO")
    wrong = replace(PLAIN, name="wrong", loss=scaled)
    on_a_device({**seconds, "wrong": 0.1}, wrong, PLAIN, replace(PLAIN, name="other"))
    h, weight, targets = problem(torch.float32)
    sweep = partial(module._chunk_loss_and_grads, h, weight, targets, (True, True))
    chosen = module.choose_head_kernel(h, weight, targets, shape_of(torch.float32), sweep)
    assert (chosen.name if chosen else None) == want
    assert caplog.messages[-1] == f"head in torch.float32, 24 tokens, vocabulary of 71: {want or 'streamed'}"


def test_on_cpu_the_sweep_is_the_head() -> None:
    h, weight, targets = problem(torch.float32)
    assert (
        head_kernels.choose_head_kernel(h, weight, targets, shape_of(torch.float32), lambda: pytest.fail("ran")) is None
    )


@pytest.mark.parametrize("most", [VOCAB, 5 * VOCAB, 5 * VOCAB + 3])
@pytest.mark.parametrize("softcapped", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_a_chunk_with_too_many_logits_is_done_in_parts(most: int, softcapped: bool, factors: bool) -> None:
    h, weight, targets = problem(torch.float64)
    factor = torch.linspace(0.5, 2, TOKENS, dtype=torch.float64) if factors else None
    transform = (lambda x: (x / 3).tanh() * 3) if softcapped else None
    loss, grad = loss_and_grad(linear(h, weight), targets, transform, True, factor_n=factor)
    parts, grad_parts = loss_and_grad(linear(h, weight), targets, transform, True, factor_n=factor, max_elements=most)
    torch.testing.assert_close(parts, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_parts, grad, rtol=1e-13, atol=1e-15)
    assert loss_and_grad(linear(h, weight), targets, transform, False, max_elements=most)[1] is None


def test_the_probabilities_take_the_place_of_the_logits() -> None:
    logits = torch.randn(6, VOCAB)
    kept = logits.clone()
    _, grad = loss_and_grad(logits, torch.arange(6), None, True)
    assert torch.equal(logits, kept)
    _, grad = loss_and_grad(logits, torch.arange(6), None, True, overwrite_logits=True)
    assert grad is not None
    assert grad.data_ptr() == logits.data_ptr()
