"""Copies of a streamed model are streamed by themselves: their own weights, their own hooks, their own handle."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import streamtune
from streamtune.errors import ArgumentError
from streamtune.models import add_lora
from tests.conformance.reducer import build
from tests.precision_kit import Float64, errors, in_float64

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: Any) -> Any:
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    ema.update_parameters(model)
    ema.update_parameters(model)
    return ema.module


COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved, averaged
]  # fmt: skip


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "family",
    ["qwen3", "mixtral", *(pytest.param(x, marks=pytest.mark.full) for x in ("bloom", "qwen3_next", "gemma2"))],
)
@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch.save", "AveragedModel"])
def test_a_copy_has_gradients_of_its_own(family: str, duplicate: Callable[[Any], Any]) -> None:
    with Float64():
        model = in_float64(build(family))
        want = gradients(model)
        handle = streamtune.stream(model, chunk_size=9)
        gradients(model)
        other = duplicate(model)
        assert max(errors(gradients(other), want).values()) < 1e-9
        with torch.no_grad():
            for parameter in model.parameters():  # the copy does not look at the original's weights
                parameter.add_(1.0)
        assert max(errors(gradients(other), want).values()) < 1e-9
        handle.remove()
        assert max(errors(gradients(other), want).values()) < 1e-9
        own = streamtune.StreamHandle.of(other)
        assert own.model is other
        own.remove()
        assert max(errors(gradients(other), want).values()) < 1e-9
        assert not any("forward" in module.__dict__ for module in other.modules())
    with pytest.raises(ArgumentError, match="is not streamed"):
        streamtune.StreamHandle.of(other)


def test_a_copy_of_a_model_with_adapters() -> None:
    with Float64():
        model = add_lora(build("qwen3"), r=4).double()
        want = gradients(model)
        with streamtune.stream(model, chunk_size=9):
            other = copy.deepcopy(model)
        assert max(errors(gradients(other), want).values()) < 1e-9
        streamtune.StreamHandle.of(other).remove()
        assert max(errors(gradients(other), want).values()) < 1e-9


def test_a_copy_hears_its_own_routers() -> None:
    """The balance loss of a mixture is made of what the copy's routers chose, not the original's."""
    with Float64():
        model = in_float64(build("mixtral", output_router_logits=True))
        want = gradients(model)
        with streamtune.stream(model, chunk_size=9):
            other = copy.deepcopy(model)
        assert max(errors(gradients(other), want).values()) < 1e-9


@pytest.mark.full
def test_a_saved_model_is_loaded_by_another_process(tmp_path: Path) -> None:
    model = build("qwen3").eval()
    with streamtune.stream(model, chunk_size=9):
        torch.save(model, tmp_path / "model.pt")
        want = float(model(input_ids=IDS, labels=IDS).loss.detach())
    read = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "ids = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))\n"
        "print(float(model(input_ids=ids, labels=ids).loss.detach()))\n"
    )
    done = subprocess.run([sys.executable, "-c", read, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(want, rel=1e-5)


def test_a_removed_stream_holds_no_model() -> None:
    gc.collect()
    gc.disable()
    try:
        model = build("qwen3")
        handle = streamtune.stream(model, chunk_size=9)
        handle.remove()
        gone = weakref.ref(handle)
        del handle
        assert gone() is None
    finally:
        gc.enable()
