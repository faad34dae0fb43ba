"""The cost of an operator: products that wait for their matrices, and copies that move nothing.

The FLOPs of a step by count of weights, beside those of a simulated step of plain autograd.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamtune.models import ModelOptions, add_lora, build_meta_model
from streamtune.plan.rates import DEVICES, peak_flops
from streamtune.plan.simulate import Workload, simulate
from streamtune.plan.simulate.costs import FLOPS_PER_BYTE, bandwidth_bound_bytes, is_self_copy, product_flops
from streamtune.plan.simulate.workload import FlopCount
from streamtune.run.listeners import StepFlops
from streamtune.schedule import Schedule
from streamtune.train import MicroBatch
from tests.plan.simulate.cluster_kit import CONFIG


class Seen(TorchDispatchMode):
    """A dispatch mode that records operators with their costs."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.waiting: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copies.append(is_self_copy(func, args))
        if "mm" in func._schema.name:
            flops = product_flops(func, args, kwargs or {}, out)
            self.waiting.append(bandwidth_bound_bytes(func, flops, args, out, "cuda"))
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
    assert seen.waiting == [max(0, bytes_of_all - 2 * tokens * 8192 * 4096 // FLOPS_PER_BYTE["cuda"])]
    assert (seen.waiting[0] > 0) == waits


def test_a_product_that_adds_reads_and_writes_its_sum() -> None:
    x, w = product(8, 512, 256)
    total = torch.zeros(8, 512, dtype=torch.bfloat16, device="meta")
    with Seen() as seen:
        total.addmm_(x, w)
        x.expand(2, -1, -1) @ w.expand(2, -1, -1)
    flops = 2 * 8 * 512 * 256
    assert seen.waiting == [2 * total.nbytes + x.nbytes + w.nbytes - flops // FLOPS_PER_BYTE["cuda"], 0]


LENGTH = 512
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 304}
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def model_of(**changes: Any) -> Any:
    settings = {**CONFIG, **LAYERS, **changes}
    if settings["model_type"] in ("qwen2", "qwen3_moe"):
        del settings["head_dim"]
        settings["num_attention_heads"] = 4
    return build_meta_model(settings, ModelOptions("float32"))


@pytest.mark.quick("untied", "experts")
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}, MOE],
    ids=["untied", "tied", "biases", "experts"],
)
def test_products_are_those_of_plain_autograd(changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    count = FlopCount.from_model(model)
    work = simulate(Workload(lambda: model, LENGTH, mode="plain"), Schedule()).work
    products = count.step_flops([(0, LENGTH)]) - count.step_flops([(0, 1)] * LENGTH) + LENGTH * 6 * 3 * count.width
    assert products == 6 * 3 * count.width * LENGTH * (LENGTH + 1) // 2
    assert LENGTH * 6 * count.weights == pytest.approx(work.matmul_flops, rel=0.02)


def test_frozen_weights_need_no_gradient() -> None:
    model = model_of()
    whole = FlopCount.from_model(model)
    adapted = FlopCount.from_model(add_lora(model, r=4))
    assert adapted.trained == adapted.weights - whole.weights
    assert adapted.step_flops([(0, 1)] * 64) - 6 * 3 * 64 * adapted.width == 64 * (
        4 * adapted.weights + 2 * adapted.trained
    )


def test_windows_and_branches_count_what_is_seen() -> None:
    near = FlopCount.from_model(model_of(model_type="mistral", sliding_window=4))
    count = FlopCount(0, 0, 1, (4, 0))
    assert near.windows == (4, 4, 4)
    seen = [sum(min(i + 1, 4) for i in range(10)), 55]
    assert count.step_flops([(0, 10)]) == 6 * sum(seen)
    assert count.step_flops([(0, 6), (6, 4)]) == count.step_flops([(0, 10)])


def test_packed_rows_and_padding() -> None:
    flops = StepFlops(model_of())
    ids = torch.zeros(1, 8, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    packed = MicroBatch(ids, mask, ids, ("a:1",), torch.tensor([[0, 1, 2, 3, 0, 1, 0, 0]]))
    assert flops.count_flops([packed]) == flops.flop_count.step_flops([(0, 4), (0, 2)])
    assert flops.count_flops([MicroBatch(ids, mask, ids, ("a:1",))]) == flops.flop_count.step_flops([(0, 6)])


def test_devices_are_known_by_the_names_that_drivers_give() -> None:
    named = {
        "NVIDIA H100 80GB HBM3": "h100-80gb",
        "NVIDIA H200": "h200-141gb",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA L40S": "l40s-48gb",
        "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
        "AMD Instinct MI300X": "mi300x-192gb",
        "Tesla T4": "t4-16gb",
        "Tesla V100-SXM2-32GB": "v100-32gb",
        "NVIDIA A10G": "a10g-24gb",
        "NVIDIA GeForce RTX 3060 Ti": "rtx-3060-ti-8gb",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx-4070-ti-super-16gb",
        "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada-48gb",
    }
    for name, device in named.items():
        assert peak_flops(name) == DEVICES[device].matmul_flops
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("this machine's CPU") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None
