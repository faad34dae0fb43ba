"""``retain_graph=True``: the second backward of a streamed model gives the plain model's gradient again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import streamtune
from streamtune import Schedule
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, build
from tests.precision_kit import Float64, errors, in_float64

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))
CALL: dict[str, Any] = {"input_ids": IDS, "labels": IDS, "use_cache": False}
OF_A_KIND = ("qwen3", "gemma3_text", "gpt_oss", "mamba2", "qwen3_next", "bloom", "gemma3n_text", "mixtral")
SCHEDULES: dict[str, dict[str, Any]] = {
    "one chunk": {"chunk_size": 27},
    "chunks": {"chunk_size": 8},
    "keys on the host": {"chunk_size": 8, "keep_kv": "host"},
    "attention kept": {"chunk_size": 8, "keep_attention": "device"},
    "two levels on the host": {"chunk_size": 8, "levels": 2, "offload": "host", "keep_attention": "host"},
    "two levels on disk": {"chunk_size": 8, "levels": 2, "offload": "disk", "keep_kv": "device"},
    "gradients in place": {"chunk_size": 8, "stream_grads": True, "offload": "host"},
    "layers kept": {"chunk_size": 8, "keep_layers": 1},
}


def grown(model: Any, losses: list[Tensor]) -> dict[str, Tensor]:
    """Gradients after a backward of each loss, and after the last one again: ``sum(losses) + losses[-1]``."""
    model.zero_grad()
    for loss in losses:
        loss.backward(retain_graph=True)
    losses[-1].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.full
@pytest.mark.parametrize("family", OF_A_KIND)
@pytest.mark.parametrize("case", SCHEDULES)
def test_the_same_loss_three_times(family: str, case: str, tmp_path: Path) -> None:
    on_disk = {"offload_dir": tmp_path} if SCHEDULES[case].get("offload") == "disk" else {}
    with Float64():
        model = in_float64((build if family in FAMILIES else build_any)(family))
        loss = model(**CALL).loss
        plain = grown(model, [loss, loss])
        with streamtune.stream(model, schedule=Schedule(**SCHEDULES[case], **on_disk)):
            loss = model(**CALL).loss
            streamed = grown(model, [loss, loss])
    assert max(errors(streamed, plain).values()) < 1e-9


@pytest.mark.parametrize("head", [True, False])
def test_several_losses_of_one_forward(head: bool) -> None:
    """As methods do that weigh the gradients of several tasks (PCGrad, GradNorm)."""
    found = []
    for streamed in (False, True):
        with Float64():
            model: Any = build("qwen3").double()
            if streamed:
                streamtune.stream(model, chunk_size=8, head=head)
            states = model(input_ids=IDS, labels=IDS, use_cache=False, output_hidden_states=True)
            found.append(grown(model, [states.loss, states.hidden_states[1].square().mean()]))
    assert max(errors(found[1], found[0]).values()) < 1e-9


def test_log_probs() -> None:
    with Float64():
        model: Any = build("qwen3").double()
        scores = model(input_ids=IDS).logits.log_softmax(-1).gather(-1, IDS[..., None])[..., 0]
        plain = grown(model, [scores.mean(), scores.square().mean()])
        with streamtune.stream(model, chunk_size=8) as handle:
            scores = handle.logprobs(IDS, IDS).logprobs
            streamed = grown(model, [scores.mean(), scores.square().mean()])
    assert max(errors(streamed, plain).values()) < 1e-9


def test_a_graph_that_was_not_kept_is_refused() -> None:
    model: Any = build("qwen3")
    with streamtune.stream(model, chunk_size=9):
        loss = model(**CALL).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):  # torch's own, as of the plain model
            loss.backward()
        hidden = model(**CALL, output_hidden_states=True).hidden_states[1]
        whole, half = hidden.sum(), hidden.sum() / 2
        whole.backward()
        model.zero_grad()
        with pytest.raises(ArgumentError, match="a second time") as caught:
            half.backward()
        assert "retain_graph=True" in caught.value.fix
        assert all(p.grad is None for p in model.parameters())


def test_weights_stepped_in_between_are_named() -> None:
    model: Any = build("qwen3")
    with streamtune.stream(model, chunk_size=9):
        loss = model(**CALL).loss
        loss.backward(retain_graph=True)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(ArgumentError, match="changed in place"):
            loss.backward()


@pytest.mark.parametrize("stream_grads", [False, True])
@pytest.mark.parametrize("asked", ["a later layer", "the norm behind the layers"])
def test_a_gradient_of_a_part_leaves_nothing_behind(stream_grads: bool, asked: str) -> None:
    """Autograd leaves out the layers before it; what was meant for them is of no use in the next backward."""
    found = []
    for streamed in (False, True):
        with Float64():
            model: Any = build("qwen3", num_hidden_layers=3).double()
            if streamed:
                streamtune.stream(model, schedule=Schedule(chunk_size=8, stream_grads=stream_grads))
            out = model(**CALL, output_hidden_states=True)
            part = model.model.layers[2] if asked == "a later layer" else model.model.norm
            torch.autograd.grad(out.loss, list(part.parameters()))
            out.hidden_states[2].square().mean().backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert max(errors(found[1], found[0]).values()) < 1e-9


@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
@pytest.mark.parametrize("case", ["chunks", "gradients in place", "two levels on the host"])
def test_an_interrupted_backward_may_be_repeated(family: str, case: str) -> None:
    """Ctrl-C, or too little memory, in the middle of a layer's chunks."""
    with Float64():
        model = in_float64((build if family in FAMILIES else build_any)(family))
        plain = grown(model, [model(**CALL).loss])
        calls, stop_at = [0], -1

        def stop(*_: Any) -> None:
            calls[0] += 1
            if calls[0] == stop_at:
                raise KeyboardInterrupt

        with streamtune.stream(model, schedule=Schedule(**SCHEDULES[case])):
            model.base_model.layers[0].get_submodule("mixer" if family == "mamba2" else "mlp").register_forward_hook(
                streamtune.chunkwise(stop)
            )
            loss = model(**CALL).loss
            stop_at = calls[0] + 3
            with pytest.raises(KeyboardInterrupt):
                loss.backward(retain_graph=True)
            stop_at = -1
            streamed = grown(model, [loss])
    assert max(errors(streamed, plain).values()) < 1e-9


def test_several_gradients_at_once_are_refused() -> None:
    model: Any = build("qwen3")
    with streamtune.stream(model, chunk_size=9):
        loss = model(**CALL).loss
        with pytest.raises(UnsupportedModelError, match="is_grads_batched") as caught:
            torch.autograd.grad(loss, list(model.parameters()), torch.tensor([1.0, 2.0]), is_grads_batched=True)
        assert "one by one" in caught.value.fix
