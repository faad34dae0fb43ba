"""The cost of an operator: products that wait for their matrices, and copies that move nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamtune.plan.simulate.costs import BALANCE, copies_itself, product_flops, waiting_bytes


class Seen(TorchDispatchMode):
    """The operators that run, with what is asked of each."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.waiting: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copies.append(copies_itself(func, args))
        if "mm" in func._schema.name:
            flops = product_flops(func, args, kwargs or {}, out)
            self.waiting.append(waiting_bytes(func, flops, args, out, "cuda"))
        return out


def test_a_sum_in_place_copies_nothing_more() -> None:
    a, b = torch.zeros(4, 6), torch.ones(2, 6)
    with Seen() as seen:
        a[1:3] += b
        a[:2] = a[2:]
        a.mT.copy_(a.clone().mT)
    assert seen.copies == [True, False, False]


def product(tokens: int, out: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.empty(tokens, width, dtype=dtype, device="meta"), torch.empty(width, out, dtype=dtype, device="meta")


@pytest.mark.parametrize(("tokens", "waits"), [(16, True), (64, True), (1024, False), (8192, False)])
def test_a_product_of_few_rows_waits_for_its_weight(tokens: int, waits: bool) -> None:
    x, w = product(tokens, 8192, 4096)
    with Seen() as seen:
        y = x @ w
    bytes_of_all = x.nbytes + w.nbytes + y.nbytes
    assert seen.waiting == [max(0, bytes_of_all - 2 * tokens * 8192 * 4096 // BALANCE["cuda"])]
    assert (seen.waiting[0] > 0) == waits


def test_a_product_that_adds_reads_and_writes_its_sum() -> None:
    x, w = product(8, 512, 256)
    total = torch.zeros(8, 512, dtype=torch.bfloat16, device="meta")
    with Seen() as seen:
        total.addmm_(x, w)
        x.expand(2, -1, -1) @ w.expand(2, -1, -1)
    flops = 2 * 8 * 512 * 256
    assert seen.waiting == [2 * total.nbytes + x.nbytes + w.nbytes - flops // BALANCE["cuda"], 0]
