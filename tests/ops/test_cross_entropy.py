"""Chunked losses and log-probabilities of the head equal the dense ones, which hold all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, log_softmax

from streamtune.ops import (
    linear_cross_entropy,
    project_cross_entropy,
    project_scores,
    token_logprobs,
    token_scores,
)
from streamtune.ops.head.cross_entropy import linear_cross_entropy_reference
from tests.precision_kit import ROUNDING, assert_as_precise, relative

ROWS, LENGTH, VOCAB, HIDDEN = 3, 19, 71, 24
TOLERANCE = 1e-13
"""In fp64; in fp32 it is the dense loss's own error."""
CHUNKS = (1, 7, 19, 1000)


@dataclass(frozen=True)
class Head:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def logits(self) -> Tensor:
        return linear(self.hidden, self.weight, self.bias)

    def to(self, dtype: torch.dtype) -> Head:
        cast = [
            None if x is None else x.detach().to(dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias)
        ]
        return Head(cast[0], cast[1], cast[2], self.targets)  # type: ignore[arg-type]


def make(dtype: torch.dtype = torch.float64, *, bias: bool = True, masked: str = "prompt") -> Head:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    targets[:, -1] = -100
    if masked == "prompt":
        targets[:, :6] = -100
        targets[1, 3:11] = -100
    elif masked == "all":
        targets[:] = -100
    elif masked == "nothing":
        targets = targets.clamp_min(0)
    return Head(leaf(ROWS, LENGTH, HIDDEN), leaf(VOCAB, HIDDEN), leaf(VOCAB) if bias else None, targets)


def precise(got: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """In fp64 ours is the dense one's, in fp32 as near to that of fp64 as the dense one is."""
    for g, p, t in zip(got, plain, truth, strict=True):
        assert g.dtype == p.dtype
        assert_as_precise(g, p, t, constant=TOLERANCE if g.dtype == torch.float64 else ROUNDING)


def softcap(x: Tensor) -> Tensor:
    return torch.tanh(x / 3) * 3


def dense_sum(head: Head, transform: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    logits = head.logits() if transform is None else transform(head.logits())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits.flatten(0, 1), head.targets.flatten(), reduction="sum")


def projected(head: Head, transform: Callable[[Tensor], Tensor] | None = None, **how: Any) -> Tensor:
    def project(h: Tensor) -> Tensor:
        logits = linear(h, head.weight, head.bias)
        return logits if transform is None else transform(logits)

    return project_cross_entropy(head.hidden, project, head.leaves[1:], head.targets, **how)


def fused(head: Head, transform: Callable[[Tensor], Tensor] | None = None, **how: Any) -> Tensor:
    return linear_cross_entropy(head.hidden, head.weight, head.targets, bias_V=head.bias, transform=transform, **how)


LOSSES = {"fused": fused, "projected": projected}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("transform", [None, softcap], ids=["", "softcap"])
@pytest.mark.parametrize("masked", ["prompt", "last", "nothing"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_dense_loss(loss: str, bias: bool, masked: str, transform: Any, dtype: torch.dtype) -> None:
    head = make(dtype, bias=bias, masked=masked)
    count = int((head.targets != -100).sum())

    def dense(head: Head) -> list[Tensor]:
        value = dense_sum(head, transform) / count
        return [value, *torch.autograd.grad(value, head.leaves)]

    want, truth = dense(head), dense(head.to(torch.float64))
    for chunk_size in CHUNKS:
        got = LOSSES[loss](head, transform, chunk_size=chunk_size)
        precise([got, *torch.autograd.grad(got, head.leaves)], want, truth)


def test_the_reference_is_torchs_mean() -> None:
    head = make()
    want = cross_entropy(head.logits().flatten(0, 1), head.targets.flatten())
    got = linear_cross_entropy_reference(head.hidden, head.weight, head.targets, bias_V=head.bias)
    assert relative(got, want) <= 1e-14


@pytest.mark.parametrize("num_items", [7, 7.0, torch.tensor(7), torch.tensor(7.0), torch.tensor([7])])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_divisor_is_the_callers(loss: str, num_items: Any) -> None:
    """The target tokens of the whole global step, as an int or as a tensor, whatever is in this batch."""
    head = make()
    want = dense_sum(head) / 7
    got = LOSSES[loss](head, num_items=num_items).sum()
    assert relative(got, want) <= 1e-13
    for g, w in zip(torch.autograd.grad(got, head.leaves), torch.autograd.grad(want, head.leaves), strict=True):
        assert relative(g, w) <= 1e-13


@pytest.mark.parametrize("scale", [1e-6, 1.0, -2.5, 65536.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_upstream_gradient_scales_ours(loss: str, scale: float) -> None:
    head = make()
    want = torch.autograd.grad(dense_sum(head) * scale, head.leaves)
    got = torch.autograd.grad(LOSSES[loss](head, num_items=1) * scale, head.leaves)
    assert all(relative(g, w) <= 1e-13 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up_to_the_batch(loss: str) -> None:
    head = make()
    items = (head.targets != -100).sum()
    want = torch.autograd.grad(LOSSES[loss](head, num_items=items), head.leaves)
    parts = [
        LOSSES[loss](
            Head(head.hidden[row : row + 1], head.weight, head.bias, head.targets[row : row + 1]), num_items=items
        )
        for row in range(ROWS)
    ]
    got = torch.autograd.grad(torch.stack(parts).sum(), head.leaves)
    assert all(relative(g, w) <= 1e-13 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("num_items", [None, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_target_at_all_is_a_zero_with_zero_gradients(loss: str, num_items: int | None) -> None:
    head = make(torch.float32, masked="all")
    got = LOSSES[loss](head, num_items=num_items)
    assert got.item() == 0.0
    for g in torch.autograd.grad(got, head.leaves):
        assert torch.equal(g, torch.zeros_like(g))
    logprobs = token_logprobs(head.hidden, head.weight, head.targets)
    assert torch.equal(logprobs, torch.zeros(ROWS, LENGTH))
    assert torch.equal(torch.autograd.grad(logprobs.sum(), head.weight)[0], torch.zeros(VOCAB, HIDDEN))


@pytest.mark.parametrize("ignore_index", [-100, -1, 3])
def test_any_ignore_index(ignore_index: int) -> None:
    head = make()
    targets = head.targets.masked_fill(head.targets == -100, ignore_index)
    want = cross_entropy(head.logits().flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    got = linear_cross_entropy(head.hidden, head.weight, targets, bias_V=head.bias, ignore_index=ignore_index)
    assert relative(got, want) <= 1e-13
    logprobs = token_logprobs(head.hidden, head.weight, targets, lm_head_bias=head.bias, ignore_index=ignore_index)
    assert relative(-logprobs.sum() / (targets != ignore_index).sum(), want) <= 1e-13


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("how", [*LOSSES, "logprobs"])
def test_only_what_is_wanted_gets_a_gradient(how: str, wanted: str) -> None:
    """A frozen head, or a head on frozen layers (LoRA, embeddings alone)."""
    head = make()
    leaf = getattr(head, wanted)
    for x in head.leaves:
        x.requires_grad_(x is leaf)
    if how == "logprobs":
        got = -token_logprobs(head.hidden, head.weight, head.targets, lm_head_bias=head.bias, chunk_size=7).sum()
    else:
        got = LOSSES[how](head, num_items=1, chunk_size=7)
    got.backward()
    (want,) = torch.autograd.grad(dense_sum(head), leaf)
    assert relative(leaf.grad, want) <= 1e-13
    assert all(x.grad is None for x in head.leaves if x is not leaf)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients(loss: str, context: Any) -> None:
    head = make()
    want = dense_sum(head, softcap) / int((head.targets != -100).sum())
    with context():
        got = LOSSES[loss](head, softcap, chunk_size=7)
    assert not got.requires_grad
    assert relative(got.clone(), want) <= 1e-13


@pytest.mark.parametrize("loss", LOSSES)
def test_no_leaf_needs_a_gradient(loss: str) -> None:
    head = make()
    for x in head.leaves:
        x.requires_grad_(False)
    got = LOSSES[loss](head, softcap, num_items=1)
    assert not got.requires_grad
    assert relative(got, dense_sum(head, softcap)) <= 1e-13


def test_a_chunk_is_all_that_is_projected() -> None:
    """Masked tokens are not projected, and no more than ``chunk_size`` of the others at once."""
    head = make()
    sizes: list[int] = []

    def project(h: Tensor) -> Tensor:
        sizes.append(len(h))
        return linear(h, head.weight, head.bias)

    project_cross_entropy(head.hidden, project, head.leaves[1:], head.targets, chunk_size=5)
    assert sum(sizes) == int((head.targets != -100).sum())
    assert max(sizes) == 5


def test_parameters_behind_a_projection_of_several_steps() -> None:
    """An adapter on the head: base weight frozen, two small factors trained."""
    head = make()
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(4, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    b = torch.randn(VOCAB, 4, generator=generator, dtype=torch.float64).requires_grad_()
    base = head.weight.detach()

    def project(h: Tensor) -> Tensor:
        return softcap(linear(h, base) + linear(linear(h, a), b))

    want = cross_entropy(project(head.hidden.flatten(0, 1)), head.targets.flatten())
    got = project_cross_entropy(head.hidden, project, [a, b], head.targets, chunk_size=7)
    leaves = [head.hidden, a, b]
    for g, w in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert relative(g, w) <= 1e-13


@pytest.mark.parametrize("how", [*LOSSES, "logprobs"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
def test_as_precise_as_torch_in_bf16(how: str, autocast: bool) -> None:
    """Three ways: fp64 truth, torch with all logits at once, ours. Many small chunks do not add rounding."""
    rounded = make(torch.bfloat16)
    truth, head = rounded.to(torch.float64), rounded.to(torch.float32 if autocast else torch.bfloat16)
    want = torch.autograd.grad(dense_sum(truth) / 30, truth.leaves)

    def run(loss: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = loss()
        return value, torch.autograd.grad(value, head.leaves)

    def ours(chunk_size: int) -> Tensor:
        if how == "logprobs":
            return (
                -token_logprobs(
                    head.hidden, head.weight, head.targets, lm_head_bias=head.bias, chunk_size=chunk_size
                ).sum()
                / 30
            )
        return LOSSES[how](head, num_items=30, chunk_size=chunk_size)

    torch_value, torch_grads = run(lambda: dense_sum(head) / 30)
    for chunk_size in CHUNKS:
        value, grads = run(lambda size=chunk_size: ours(size))
        assert value.dtype == torch.float32
        exact = dense_sum(truth) / 30
        assert relative(value, exact) <= relative(torch_value, exact) + 1e-5
        for g, t, w, leaf in zip(grads, torch_grads, want, head.leaves, strict=True):
            assert g.dtype == leaf.dtype
            assert relative(g, w) <= 1.1 * relative(t, w) + 1e-4


@pytest.mark.parametrize("kind", ["confident", "large activations"])
@pytest.mark.parametrize("how", LOSSES)
def test_as_precise_as_torch_in_float16(how: str, kind: str) -> None:
    """Probabilities below 6e-8 count, and a sum over tokens above 65,504 is finite; the loss is scaled after it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(500, 64, generator=generator) * 0.125
    targets = torch.randint(0, 500, (1, 1024), generator=generator)
    hidden, scale = weight[targets] * 32, 65536.0
    if kind == "large activations":
        hidden, scale, targets = torch.randn(1, 1024, 64, generator=generator) + 80, 64.0, torch.full_like(targets, 3)
        weight = weight * 0.01
    hidden, weight = (x.half().float() for x in (hidden, weight))

    def gradients(loss: Callable[[Head], Tensor], dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
        head = Head(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), None, targets)
        with torch.autocast("cpu", dtype=torch.float16, enabled=scale != 1.0):
            value = loss(head) * scale
        return tuple(g.double() / scale for g in torch.autograd.grad(value, (head.hidden, head.weight)))

    truth = gradients(lambda head: dense_sum(head) / 1024, torch.float64, 1.0)
    theirs = gradients(lambda head: dense_sum(head) / 1024, torch.float32, scale)
    ours = gradients(lambda head: LOSSES[how](head, num_items=1024, chunk_size=1024), torch.float32, scale)
    for g, t, w in zip(ours, theirs, truth, strict=True):
        assert relative(g, w) <= 1.1 * relative(t, w) + 1e-5


@pytest.mark.parametrize("loss", ["mean", "logprobs"])
def test_few_rows_at_a_time_add_no_rounding(loss: str) -> None:
    """A matmul of few rows may sum a large vocabulary in one running sum; up to 10 times the error."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 60, 64, generator=generator).requires_grad_()
    weight = torch.randn(49_152, 64, generator=generator).mul_(0.1)
    targets = torch.randint(0, 49_152, (1, 60), generator=generator)

    def gradient(hidden: Tensor, weight: Tensor, chunk_size: int) -> Tensor:
        if loss == "mean":
            value = linear_cross_entropy(hidden, weight, targets, chunk_size=chunk_size)
        else:
            value = -token_logprobs(hidden, weight, targets, chunk_size=chunk_size).mean()
        return torch.autograd.grad(value, hidden)[0]

    truth = gradient(hidden.detach().double().requires_grad_(), weight.double(), 60)
    at_once = relative(gradient(hidden, weight, 60), truth)
    for few in (1, 3, 7, 11):
        assert relative(gradient(hidden, weight, few), truth) <= 2 * at_once, few


def dense_logprobs(head: Head) -> Tensor:
    logits = head.logits()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = log_softmax(logits, -1).gather(-1, head.targets.clamp_min(0)[..., None]).squeeze(-1)
    return picked.masked_fill(head.targets == -100, 0.0)


def dpo(logprobs: Tensor) -> Tensor:
    """A loss of differences between rows, as preference training has."""
    per_row = logprobs.sum(-1)
    return -torch.nn.functional.logsigmoid(0.3 * (per_row[0] - per_row[1])) + per_row[2].square()


def clipped_ratio(logprobs: Tensor) -> Tensor:
    """A loss of clipped ratios, as policy gradients have."""
    ratio = (logprobs - logprobs.detach() + 0.1).exp()
    advantage = torch.linspace(-1, 1, LENGTH, dtype=logprobs.dtype)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("loss", [torch.sum, dpo, clipped_ratio, lambda x: (x.exp() * x.cos()).mean()])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_token_logprobs_under_any_loss(bias: bool, loss: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    head = make(dtype, bias=bias)

    def dense(head: Head) -> list[Tensor]:
        logprobs = dense_logprobs(head)
        return [logprobs, *torch.autograd.grad(loss(logprobs), head.leaves)]

    want, truth = dense(head), dense(head.to(torch.float64))
    for chunk_size in CHUNKS:
        got = token_logprobs(head.hidden, head.weight, head.targets, lm_head_bias=head.bias, chunk_size=chunk_size)
        assert torch.equal(got == 0, head.targets == -100)
        precise([got, *torch.autograd.grad(loss(got), head.leaves)], want, truth)


def test_extreme_logits_stay_finite() -> None:
    head = make(torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    got = fused(head, chunk_size=7)
    count = int((head.targets != -100).sum())
    assert torch.isfinite(got)
    precise([got], [dense_sum(head) / count], [dense_sum(head.to(torch.float64)) / count])
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(got, head.leaves))


@pytest.mark.parametrize("accumulate", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_summed_in_the_asked_dtype(accumulate: torch.dtype) -> None:
    """In fp32 the chunk count does not matter; in the dtype of the weight it costs precision but no memory."""
    rounded = make(torch.bfloat16, bias=False)
    truth = rounded.to(torch.float64)
    (want,) = torch.autograd.grad(dense_sum(truth), truth.weight)
    (got,) = torch.autograd.grad(fused(rounded, num_items=1, chunk_size=1, accumulate_dtype=accumulate), rounded.weight)
    assert got.dtype == torch.bfloat16
    assert relative(got, want) <= (5e-3 if accumulate == torch.float32 else 3e-2)


def with_entropy(head: Head, transform: Callable[[Tensor], Tensor] | None, chunk_size: int) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_scores(
        head.hidden,
        head.weight,
        head.targets,
        bias_V=head.bias,
        transform=transform,
        entropy=True,
        chunk_size=chunk_size,
    )
    assert entropy is not None
    return logprobs, entropy


def projected_with_entropy(
    head: Head, transform: Callable[[Tensor], Tensor] | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    def project(h: Tensor) -> Tensor:
        logits = linear(h, head.weight, head.bias)
        return logits if transform is None else transform(logits)

    logprobs, entropy = project_scores(
        head.hidden, project, head.leaves[1:], head.targets, entropy=True, chunk_size=chunk_size
    )
    assert entropy is not None
    return logprobs, entropy


SCORES = {"fused": with_entropy, "projected": projected_with_entropy}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("transform", [None, softcap], ids=["", "softcap"])
@pytest.mark.parametrize("part", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("how", SCORES)
def test_scores_and_their_gradients(how: str, part: str, transform: Any, dtype: torch.dtype) -> None:
    """An objective may read log-probabilities, entropies (a bonus), or both."""
    head = make(dtype)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.linspace(-1, 1, LENGTH, dtype=logprobs.dtype)
        total = torch.zeros((), dtype=logprobs.dtype)
        if part != "entropy":
            total = total + clipped_ratio(logprobs)
        if part != "logprobs":
            total = total + (weights * entropy.square()).sum()
        return total

    def dense(head: Head) -> list[Tensor]:
        logits = head.logits() if transform is None else transform(head.logits())
        whole = log_softmax(logits, -1)
        chosen = head.targets != -100
        logprobs = whole.gather(-1, head.targets.clamp_min(0)[..., None]).squeeze(-1).masked_fill(~chosen, 0.0)
        entropy = -(whole.exp() * whole).sum(-1).masked_fill(~chosen, 0.0)
        return [logprobs, entropy, *torch.autograd.grad(loss(logprobs, entropy), head.leaves)]

    want, truth = dense(head), dense(head.to(torch.float64))
    for chunk_size in CHUNKS:
        logprobs, entropy = SCORES[how](head, transform, chunk_size)
        precise([logprobs, entropy, *torch.autograd.grad(loss(logprobs, entropy), head.leaves)], want, truth)


def test_entropy_of_tokens_that_cannot_be() -> None:
    """A vocabulary whose end is ruled out by -inf, as models with a padded head do."""
    head = make(torch.float64)

    def without_end(logits: Tensor) -> Tensor:
        mask = torch.arange(VOCAB) >= VOCAB - 5
        return logits.masked_fill(mask, -torch.inf)

    targets = head.targets.masked_fill(head.targets >= VOCAB - 5, -100)
    _, entropy = token_scores(head.hidden, head.weight, targets, bias_V=head.bias, transform=without_end, entropy=True)
    assert entropy is not None
    kept = log_softmax(head.logits()[..., : VOCAB - 5], -1)
    want = -(kept.exp() * kept).sum(-1).masked_fill(targets == -100, 0.0)
    assert relative(entropy, want) <= 1e-12
    grads = torch.autograd.grad(entropy.sum(), head.leaves)
    for g, w in zip(grads, torch.autograd.grad(want.sum(), head.leaves), strict=True):
        assert relative(g, w) <= 1e-12
