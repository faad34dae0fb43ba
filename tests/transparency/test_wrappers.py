"""A model inside of a wrapper is streamed through it; a wrapper that takes its parameters away is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import streamtune
from streamtune.errors import UnsupportedModelError
from streamtune.models import add_lora
from tests.exactness.families import build
from tests.precision_kit import Float64, errors

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gradients(model: Any, call: Any = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "compile in DDP": lambda model: DistributedDataParallel(compiled(model)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("adapters", [False, True])
def test_streamed_through_a_wrapper(wrapper: str, adapters: bool) -> None:
    torch.compiler.reset()
    with Float64():
        model: Any = build("qwen3")
        model = (add_lora(model, r=4) if adapters else model).double()
        want = gradients(model)
        wrapped = WRAPPERS[wrapper](model)
        with streamtune.stream(wrapped, chunk_size=9) as handle:
            got = gradients(model, wrapped)
            handle.check()
        again = gradients(model, wrapped)
    assert max(errors(got, want).values()) < 1e-9
    assert max(errors(again, want).values()) < 1e-9


def call_in_fsdp1(model: Any, use_orig_params: bool, first: str) -> None:
    if first == "stream":
        streamtune.stream(model, chunk_size=9)
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    if first == "FSDP1":
        streamtune.stream(wrapped, chunk_size=9)
    wrapped(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # of one rank
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("first", ["stream", "FSDP1"])
def test_fsdp1_is_refused_by_name(use_orig_params: bool, first: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"\(FSDP1\), whose flat parameters") as caught:
        call_in_fsdp1(build("qwen3"), use_orig_params, first)
    assert "fully_shard" in caught.value.fix


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2))])
def test_what_holds_no_model_of_transformers_is_told_as_that(wrong: nn.Module) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{type(wrong).__name__} is not a transformers model"):
        streamtune.stream(wrong)
