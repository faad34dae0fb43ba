"""The fused kernels take any log-sum-exp, which prefix attention rests on, and a kernel that does not is not used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamtune.ops.attention.kernel_blocks import pad_heads
from streamtune.ops.attention.kernel_trial import Kernel
from streamtune.ops.attention.kernel_trial import agrees_with_formula as _agrees_with_formula
from streamtune.ops.attention.kernels import CPU, CUDNN, EFFICIENT, FLASH, Scores, fused_segment_kernel, kernel_names
from tests.precision_kit import assert_as_precise, relative

HERE = torch.device("cpu")
BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 12, 20, 16
SCALE = 0.3


def problem(dtype: torch.dtype, groups: int, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, QUERIES), (groups, keys), (groups, keys), (HEADS, QUERIES))
    q, k, v, grad = (torch.randn(BATCH, *s, DIM, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v, grad


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    bias: Tensor | None,
    shift: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, dq, dk, dv in fp64, of a softmax whose log-sum-exp is ``shift`` above these keys' own."""
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    s = q @ k.mT * SCALE + (0 if bias is None else bias.to(dtype))
    lse = s.logsumexp(-1) + shift
    p = (s - lse[..., None]).exp()
    o = p @ v
    ds = p * (grad @ v.mT - (grad * o).sum(-1, keepdim=True)) * SCALE
    dk, dv = (x.unflatten(1, (-1, repeats)).sum(2) for x in (ds.mT @ q, p.mT @ grad))
    return o, lse, ds @ k, dk, dv


def precise(got: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor], bound: float | None) -> None:
    """Within the bound, and in fp32, where there is none, as near as the formula is in fp32."""
    for g, p, t in zip(got, plain, truth, strict=True):
        assert g.shape == t.shape
        if bound is None:
            assert_as_precise(g, p, t)
        else:
            assert relative(g, t) <= bound


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, None), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)]
)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "bias", "causal"])
@pytest.mark.parametrize("shift", [0.0, 0.7, 3.0])
def test_cpu_kernel_with_a_foreign_log_sum_exp(
    shift: float, mask: str, groups: int, dtype: torch.dtype, bound: float | None
) -> None:
    q, k, v, grad = problem(dtype, groups, QUERIES if mask == "causal" else KEYS)
    lower = torch.ones(QUERIES, k.shape[2], dtype=torch.bool).tril()
    hidden = ~lower if mask == "causal" else torch.rand(lower.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    low = torch.zeros(hidden.shape).masked_fill(hidden, -1e4)[None, None]
    bias = low.to(dtype) if mask == "bias" else None
    low = None if mask == "none" else low
    o, lse, *grads = formula(q, k, v, grad, low, shift)
    plain_o, plain_lse, *plain = formula(q, k, v, grad, low, shift, torch.float32)

    scores = Scores(SCALE, mask == "causal", bias)
    own_o, own_lse = CPU.forward(q, k, v, scores)
    assert own_o.dtype == dtype
    assert own_lse.dtype == torch.promote_types(dtype, torch.float32)
    own = own_o.double() * math.exp(-shift), own_lse.double() + shift
    got = CPU.backward(grad, q, k, v, o.to(dtype), lse.to(own_lse.dtype), scores)
    precise([*own, *got], [plain_o, plain_lse, *plain], [o, lse, *grads], bound)


def test_a_row_whose_log_sum_exp_is_infinite_gives_no_gradient() -> None:
    """How a query that sees no key at all is taken out of the backward."""
    q, k, v, grad = problem(torch.float32, 2)
    lse = torch.full((BATCH, HEADS, QUERIES), float("inf"))
    for g in CPU.backward(grad, q, k, v, torch.zeros_like(q), lse, Scores(SCALE)):
        assert torch.equal(g, torch.zeros_like(g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 80])
def test_the_cpu_kernel_passes_its_check(dtype: torch.dtype, dim: int) -> None:
    assert _agrees_with_formula(CPU, HERE, dtype, dim)


def recomputed(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scores: Scores) -> object:
    """A backward that ignores the log-sum-exp it is given and takes that of its own keys: right for a whole softmax."""
    return CPU.backward(grad_o, q, k, v, *CPU.forward(q, k, v, scores), scores)


def unscaled(*arguments: object) -> object:
    """A backward that forgets the scale in dq."""
    grad_q, grad_k, grad_v = CPU.backward(*arguments)  # type: ignore[arg-type]
    return grad_q / arguments[-1].scale, grad_k, grad_v  # type: ignore[attr-defined]


def not_a_number(*arguments: object) -> object:
    return tuple(torch.full_like(g, float("nan")) for g in CPU.backward(*arguments))  # type: ignore[arg-type]


def missing(*arguments: object) -> object:
    raise NotImplementedError("no such kernel in this build")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward", [recomputed, unscaled, not_a_number, missing])
def test_a_wrong_backward_is_rejected(backward: Callable[..., object], dtype: torch.dtype) -> None:
    assert not _agrees_with_formula(replace(CPU, backward=backward), HERE, dtype, 32)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_forward_is_rejected(dtype: torch.dtype) -> None:
    """A log-sum-exp in base 2, as some kernels keep it, and an output that is not normalised."""

    def base_two(*arguments: object) -> tuple[Tensor, Tensor]:
        o, lse = CPU.forward(*arguments)  # type: ignore[arg-type]
        return o, lse / torch.tensor(2.0).log()

    def twice(*arguments: object) -> tuple[Tensor, Tensor]:
        o, lse = CPU.forward(*arguments)  # type: ignore[arg-type]
        return o * 2, lse

    for forward in (base_two, twice):
        assert not _agrees_with_formula(replace(CPU, forward=forward), HERE, dtype, 32)


@pytest.mark.parametrize("kernel", [FLASH, CUDNN, EFFICIENT])
def test_a_kernel_of_another_device_is_rejected(kernel: Kernel) -> None:
    assert not _agrees_with_formula(kernel, HERE, torch.float32, 32)


def test_the_check_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    _agrees_with_formula(CPU, HERE, torch.float32, 16)
    assert torch.equal(torch.get_rng_state(), before)


def test_which_kernel_is_chosen() -> None:
    q, k, v, _ = problem(torch.float32, 2)
    assert fused_segment_kernel(q, k, v, biased=True) is CPU
    shorter = fused_segment_kernel(q, k, v[..., :8], biased=False)
    assert shorter is not None
    assert shorter.name == CPU.name
    assert fused_segment_kernel(q, k, v.double(), biased=False) is None, "dtypes differ"
    assert kernel_names(HERE, torch.bfloat16) == {"unmasked": "cpu-flash", "masked": "cpu-flash"}


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, None), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize(("keys", "values"), [(16, 9), (9, 16), (5, 5)])
def test_values_shorter_than_keys_and_the_other_way_round(
    keys: int, values: int, dtype: torch.dtype, bound: float | None
) -> None:
    """Latent attention's heads, by the kernel of heads as long as the longer ones are, or longer."""
    q, k, v, grad = problem(dtype, 2)
    q, k, v, grad = q[..., :keys], k[..., :keys], v[..., :values], grad[..., :values]
    chosen = fused_segment_kernel(q, k, v, biased=False)
    assert chosen is not None
    o, lse, *grads = formula(q, k, v, grad, None, 0.7)
    plain_o, _, *plain = formula(q, k, v, grad, None, 0.7, torch.float32)
    for kernel in (chosen, pad_heads(CPU, 24)):
        own_o, own_lse = kernel.forward(q, k, v, Scores(SCALE))
        assert own_o.shape == grad.shape
        got = kernel.backward(grad, q, k, v, o.to(dtype), lse.to(own_lse.dtype), Scores(SCALE))
        precise([own_o.double() * math.exp(-0.7), *got], [plain_o, *plain], [o, *grads], bound)
