"""The norm behind the layers, chunk by chunk: equal to the norm itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import streamtune
from streamtune import Schedule
from streamtune.engine.memory.placement import Tiers
from streamtune.engine.outside_layers import StreamedNorm, norms_outside_layers
from streamtune.engine.streamed_layer import ModelParts
from streamtune.errors import ArgumentError
from tests.conformance.reducer import build as build_any
from tests.exactness.families import build
from tests.precision_kit import Float64, assert_as_precise, in_float64

WIDTH, LENGTH, CHUNK = 24, 37, 8
NORMS: dict[str, Any] = {"rms": Qwen3RMSNorm, "offset": Gemma2RMSNorm, "layer": nn.LayerNorm}


EXACT: dict[str, Any] = {
    "rms": lambda x, weight: weight * functional.rms_norm(x, (WIDTH,), eps=1e-6),
    "offset": lambda x, weight: (1 + weight) * functional.rms_norm(x, (WIDTH,), eps=1e-6),
    "layer": lambda x, weight, bias: functional.layer_norm(x, (WIDTH,), weight, bias),
}


class RunningNorm(nn.Module):
    """Divides each token by what came before it: no token stands for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (1 + x.abs().cumsum(1))


def streamed(norm: nn.Module, directory: Path, **more: Any) -> tuple[StreamedNorm, Tiers]:
    schedule = Schedule(chunk_size=CHUNK, offload_dir=str(directory), **more)
    tiers = Tiers(schedule)
    return StreamedNorm(norm, ModelParts(schedule, tiers)), tiers


def run(function: Any, norm: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of input and weights."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    return [y, *torch.autograd.grad(y, [x, *norm.parameters()], grad)]


def truth_of(norm: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The same of the norm in fp64."""
    wide = in_float64(norm)
    with Float64(), torch.enable_grad():
        return run(wide, wide, x.double(), grad.double())


def made(kind: str, dtype: torch.dtype, length: int = LENGTH) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    norm = (NORMS[kind](WIDTH) if kind in NORMS else RunningNorm()).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) / 4)
    x, grad = torch.randn(2, 2, length, WIDTH)
    return norm, x.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("offload", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_to_the_norm_itself(dtype: torch.dtype, kind: str, offload: str, tmp_path: Path) -> None:
    norm, x, grad = made(kind, dtype)
    own, tiers = streamed(norm, tmp_path, offload=offload)
    want, got = run(norm, norm, x, grad), run(own, norm, x, grad)
    assert type(got[0].grad_fn).__name__ == "_StreamedNormBackward"
    assert [t.dtype for t in got] == [t.dtype for t in want]
    truth = truth_of(norm, x, grad)
    if dtype is torch.float32:
        for one, other, true in zip(got, want, truth, strict=True):
            assert_as_precise(one, other, true)
    else:
        for one, other in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=2**-8, atol=2**-8)
        for one, other in zip(got[2:], want[2:], strict=True):
            assert float((one - other).double().norm() / other.double().norm()) <= 2**-6  # both are rounded sums
    counted = {"device": None, "host": tiers.host, "disk": tiers.disk}[offload]
    if counted is not None:
        assert (counted.peak_bytes, counted.live_bytes) == (x.nbytes, 0)


@pytest.mark.parametrize("kind", NORMS)
def test_sums_over_chunks_are_as_near_as_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Gradients of weights in bf16, measured against those in fp64."""
    norm, x, grad = made(kind, torch.bfloat16, length=1024)
    parameters = {name: parameter.detach().double().requires_grad_() for name, parameter in norm.named_parameters()}
    y = EXACT[kind](x.double(), **parameters)
    want = torch.autograd.grad(y, list(parameters.values()), grad.double())

    def error(got: list[Tensor]) -> float:
        return max(float((g.double() - w).norm() / w.norm()) for g, w in zip(got[2:], want, strict=True))

    own, _ = streamed(norm, tmp_path)
    assert error(run(own, norm, x, grad)) <= max(2**-7, 1.1 * error(run(norm, norm, x, grad)))


def test_a_norm_that_looks_at_other_tokens_is_left_alone(tmp_path: Path) -> None:
    norm, x, grad = made("running", torch.float32)
    own, _ = streamed(norm, tmp_path)
    want, got = run(norm, norm, x, grad), run(own, norm, x, grad)
    assert own.pointwise is False
    assert type(got[0].grad_fn).__name__ != "_StreamedNormBackward"
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK])
def test_a_sequence_of_one_chunk_is_the_norm_s_own(length: int, tmp_path: Path) -> None:
    norm, x, grad = made("rms", torch.float32, length)
    own, _ = streamed(norm, tmp_path)
    want, got = run(norm, norm, x, grad), run(own, norm, x, grad)
    assert type(got[0].grad_fn).__name__ != "_StreamedNormBackward"
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_what_needs_no_gradient(tmp_path: Path) -> None:
    norm, x, grad = made("rms", torch.float32)
    own, tiers = streamed(norm, tmp_path, offload="host")
    with torch.no_grad():
        assert_as_precise(own(x), norm(x), truth_of(norm, x, grad)[0])
    norm.requires_grad_(False)
    assert own(x).grad_fn is None
    assert tiers.host.peak_bytes == 0
    leaf = x.clone().requires_grad_()
    other = x.clone().requires_grad_()
    own(leaf).backward(grad)
    norm(other).backward(grad)
    assert leaf.grad is not None
    assert other.grad is not None
    assert_as_precise(leaf.grad, other.grad, truth_of(norm.requires_grad_(True), x, grad)[1])


def test_a_second_backward_through_a_kept_graph(tmp_path: Path) -> None:
    norm, x, grad = made("rms", torch.float32)
    own, _ = streamed(norm, tmp_path)
    y = own(x.requires_grad_())
    y.backward(grad, retain_graph=True)
    first = x.grad.clone()
    y.backward(grad)
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises((ArgumentError, RuntimeError), match="a second time"):
        y.backward(grad)


@pytest.mark.parametrize(
    ("family", "names"), [("qwen3", ["norm"]), ("gpt2", ["ln_f"]), ("bloom", ["word_embeddings_layernorm", "ln_f"])]
)
def test_norms_outside_the_layers(family: str, names: list[str]) -> None:
    """By their type's name: of the decoder itself, and none of a layer's."""
    model: Any = build(family) if family != "bloom" else build_any(family)
    decoder = model.base_model
    layers = list(decoder.layers if hasattr(decoder, "layers") else decoder.h)
    assert norms_outside_layers(decoder, layers) == [getattr(decoder, name) for name in names]


class TwiceNormed(LlamaModel):
    """Norms what its layers return twice, as dory does: their output has two readers."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        x = self.embed_tokens(input_ids)
        places = torch.arange(x.shape[1])[None]
        given = {"position_ids": places, "position_embeddings": self.rotary_emb(x, places)}
        for layer in self.layers[:1]:
            x = layer(x, **given)
        x = self.norm(x) + torch.sin(self.norm(x))
        for layer in self.layers[1:]:
            x = layer(x, **given)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x) * torch.sigmoid(self.norm(x)))


@pytest.mark.parametrize("offload", ["device", "host"])
@pytest.mark.parametrize("levels", [1, 2])
def test_a_gradient_that_is_left_at_a_layer_has_all_readers(offload: Any, levels: Any) -> None:
    with Float64():
        plain = build("llama")
        config = copy.deepcopy(plain.config)
        config._attn_implementation = "sdpa"
        plain.model = TwiceNormed(config)
        model, ids = in_float64(plain).train(), torch.randint(3, 60, (2, LENGTH))
        call = {"input_ids": ids, "labels": ids, "use_cache": False}
        model(**call).loss.backward()
        want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        segments: dict[str, Any] = {"levels": 2, "segment_size": 2} if levels == 2 else {}
        schedule = Schedule(chunk_size=CHUNK, stream_grads=True, offload=offload, **segments)
        with streamtune.stream(model, schedule=schedule):
            model(**call).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert (p.grad - want[name]).norm() <= 1e-10 * want[name].norm(), name
