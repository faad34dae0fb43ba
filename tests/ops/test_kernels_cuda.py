"""The code around torch's CUDA operators, run on operators that do what torch's are documented to do.

What the real ones do is in ``tests/cuda``. Their names and signatures are those of the installed torch: on the meta
device its own operators run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune.ops.attention import kernels
from streamtune.ops.attention.kernel_trial import AttentionHeadCounts, Kernel, agrees_with_formula, choose_fastest
from streamtune.ops.attention.kernels import CPU, CUDNN, EFFICIENT, FLASH, Scores
from tests.ops.cuda_operators import cuda_operators

__all__ = ["cuda_operators"]

HERE = torch.device("cpu")
ALL = [FLASH, CUDNN, EFFICIENT]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize(
    "kernel", [FLASH, EFFICIENT, pytest.param(CUDNN, marks=pytest.mark.full)], ids=lambda kernel: kernel.name
)
@pytest.mark.usefixtures("cuda_operators")
def test_around_right_operators_the_kernels_agree(kernel: Kernel, dim: int, dtype: torch.dtype) -> None:
    assert agrees_with_formula(kernel, HERE, dtype, dim)
    assert agrees_with_formula(kernel, HERE, dtype, dim, biased=True) == kernel.takes_bias


@pytest.mark.parametrize("kernel", ALL, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_the_operators_of_this_torch_take_what_they_are_given(kernel: Kernel, layout: str) -> None:
    def make(heads: int, length: int) -> Tensor:
        shape = (2, heads, length, 64) if layout == "heads first" else (2, length, heads, 64)
        made = torch.empty(shape, device="meta", dtype=torch.bfloat16)
        return made if layout == "heads first" else made.transpose(1, 2)

    q, k, v = make(8, 40), make(2, 72), make(2, 72)
    for bias in (None, torch.empty(2, 1, 40, 72, device="meta", dtype=q.dtype)) if kernel.takes_bias else (None,):
        o, lse = kernel.forward(q, k, v, Scores(0.1, bias=bias))
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 8, 40), torch.float32)
        grads = kernel.backward(q, q, k, v, o, lse, Scores(0.1, bias=bias))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.usefixtures("cuda_operators")
def test_keys_and_values_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the efficient operator is given of a group's keys is one copy, read with a stride of zero."""
    seen: list[Tensor] = []
    inner: Any = torch.ops.aten._scaled_dot_product_efficient_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
        seen.extend((k, v))
        return inner(q, k, v, *rest, **more)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", spy)
    q, k, v = torch.randn(1, 8, 6, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    EFFICIENT.forward(q, k, v, Scores(0.25))
    assert [x.untyped_storage().data_ptr() for x in seen] == [x.untyped_storage().data_ptr() for x in (k, v)]
    assert all(x.stride(1) == 0 for x in seen)


def named(name: str) -> Kernel:
    return replace(CPU, name=name)


def test_the_fastest_is_chosen_and_hardly_faster_is_not_enough() -> None:
    a, b, c = named("a"), named("b"), named("c")
    seconds: dict[str, float | None] = {"a": 1.0, "b": 0.97, "c": 0.5}
    assert choose_fastest([a, b], lambda kernel: seconds[kernel.name]) is a
    assert choose_fastest([a, b, c], lambda kernel: seconds[kernel.name]) is c
    assert choose_fastest([c, a, b], lambda kernel: seconds[kernel.name]) is c
    assert choose_fastest([], lambda kernel: seconds[kernel.name]) is None


def test_without_a_time_the_most_trusted_one_stays() -> None:
    assert choose_fastest([named("a"), named("b")], lambda kernel: None) == named("a")
    assert choose_fastest([named("a"), named("b")], lambda kernel: None if kernel.name == "a" else 1.0) == named("b")


def here(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """The trial of a device, on the CPU, with these times."""
    monkeypatch.setattr(kernels, "_cuda_device", lambda index: HERE)
    monkeypatch.setattr(kernels, "median_seconds", lambda kernel, *rest: seconds[kernel.name])


@pytest.mark.full
@pytest.mark.usefixtures("cuda_operators")
def test_a_wrong_kernel_is_not_chosen_however_fast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forgets(*arguments: Any) -> Any:
        grads = CUDNN.backward(*arguments)
        return grads[0], grads[1] * 1.1, grads[2]

    here(monkeypatch, {"cuda-flash": 2.0, "cudnn": 1.0, "cuda-efficient": 3.0})
    caplog.set_level("INFO")
    heads = AttentionHeadCounts(4, 2, 16)
    for cudnn, want in ((CUDNN, "cudnn"), (replace(CUDNN, backward=forgets), "cuda-flash")):
        chosen = kernels._fastest_agreeing_kernel([FLASH, cudnn, EFFICIENT], 0, torch.bfloat16, heads, biased=False)
        assert chosen is not None
        assert chosen.name == want
        assert caplog.messages[-1] == f"attention torch.bfloat16, 4 query heads, 2 key heads of 16: {want}"


def test_where_nothing_works_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, {})
    with pytest.warns(UserWarning, match="cuda-flash and cudnn and cuda-efficient failed the self-check"):
        assert (
            kernels._fastest_agreeing_kernel(ALL, 0, torch.bfloat16, AttentionHeadCounts(4, 2, 16), biased=False)
            is None
        )
