"""The embeddings leave the device once the first layer has stored them, and whoever reads them later has them again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import streamtune
from streamtune import Schedule
from streamtune.engine.outside_layers import Embeddings
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.exactness.families import build
from tests.precision_kit import Float64

CHUNK, LENGTH = 8, 27
OFFLOADED = Schedule(chunk_size=CHUNK, offload="host")
STORED = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "granite", "gemma2"]
"""Families whose first layer is handed the embeddings themselves, or numbers made of them under their name."""

SHAPES: dict[str, dict[str, Any]] = {"qwen3_next": {"num_hidden_layers": 4}}


def tokens() -> Tensor:
    return torch.randint(5, 90, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alive_at_second_layer(model: Any, ids: Tensor) -> bool:
    """True if the embeddings have memory when the second layer begins."""
    stored: list[StorageWeakRef] = []
    found: list[bool] = []
    layers = model.get_decoder().layers
    hooks = [
        layers[0].register_forward_pre_hook(lambda _, args: stored.append(StorageWeakRef(args[0].untyped_storage()))),
        layers[1].register_forward_pre_hook(lambda *_: found.append(not stored[-1].expired())),
    ]
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]


@pytest.mark.quick("qwen3", "granite")
@pytest.mark.parametrize("family", STORED)
def test_they_are_freed_when_the_first_layer_has_stored_them(family: str) -> None:
    model, ids = build(family, **SHAPES.get(family, {})).train(), tokens()
    assert alive_at_second_layer(model, ids), "the model keeps them by itself"
    with streamtune.stream(model, schedule=OFFLOADED):
        assert not alive_at_second_layer(model, ids)


@pytest.mark.parametrize("frozen", [False, True])
def test_reading_them_later_computes_them_again(frozen: bool) -> None:
    model, ids = build("qwen3").train(), tokens()
    table = model.get_input_embeddings().weight.requires_grad_(not frozen)
    seen: list[Any] = []
    layers = model.get_decoder().layers
    layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with streamtune.stream(model, schedule=OFFLOADED):
        loss = model(input_ids=ids, labels=ids).loss
        held = seen[0]
        assert isinstance(held, Embeddings)
        assert held.content.value is None
        assert (held.shape, held.dtype, held.device) == ((1, LENGTH, model.config.hidden_size), table.dtype, ids.device)
        assert held.requires_grad != frozen
        assert torch.equal(held, table[ids])
        assert torch.equal(copy.deepcopy(held.detach()), table[ids])
        assert held[0, 3].tolist() == table[ids[0, 3]].tolist()
        (loss + held.square().sum()).backward()
    if not frozen:
        plain = build("qwen3").train()
        plain.load_state_dict(model.state_dict())
        embedded: list[Tensor] = []
        plain.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: embedded.append(args[0]))
        loss = plain(input_ids=ids, labels=ids).loss
        (loss + embedded[0].square().sum()).backward()
        ours, theirs = table.grad, plain.get_input_embeddings().weight.grad
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_reading_them_again_where_weights_wait_on_the_host() -> None:
    model, ids = build("qwen3").train(), tokens()
    seen: list[Any] = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with streamtune.stream(model, schedule=replace(OFFLOADED, weights="host")):
        gradients(model, ids)
        assert isinstance(seen[0], Embeddings)
        assert torch.equal(seen[0], model.get_input_embeddings().weight[ids])


def test_weights_that_are_put_in_for_a_call() -> None:
    model, ids = build("qwen3").train(), tokens()
    name = "model.embed_tokens.weight"
    other = torch.randn_like(model.get_input_embeddings().weight).requires_grad_()

    def run() -> Tensor:
        loss = torch.func.functional_call(model, {name: other}, (), {"input_ids": ids, "labels": ids}).loss
        return torch.autograd.grad(loss, other)[0]

    plain = run()
    with streamtune.stream(model, schedule=OFFLOADED):
        ours = run()
    assert (ours - plain).norm() < 1e-5 * plain.norm()


def test_reading_them_after_a_step_is_refused() -> None:
    model, ids = build("qwen3").train(), tokens()
    seen: list[Any] = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with streamtune.stream(model, schedule=OFFLOADED):
        gradients(model, ids)
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(ArgumentError, match="changed in place"):
            seen[0].sum()


def test_reading_them_after_tokens_were_overwritten_is_refused() -> None:
    """A caller may use one buffer for the tokens of all steps."""
    model, ids = build("qwen3").train(), tokens()
    seen: list[Any] = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with streamtune.stream(model, schedule=OFFLOADED):
        gradients(model, ids)
        ids.fill_(7)
        gradients(model, ids)
        assert torch.equal(seen[1], model.get_input_embeddings().weight[ids])
        with pytest.raises(ArgumentError, match="changed in place"):
            seen[0].sum()


def test_tokens_made_in_inference_mode() -> None:
    """Such tensors count no versions, so whether they were changed is not known: the embeddings are plain."""
    model = build("qwen3").eval()
    with torch.inference_mode():
        ids = tokens()
    with torch.no_grad():
        plain = model(input_ids=ids, labels=ids).loss
        with streamtune.stream(model, schedule=OFFLOADED):
            assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(plain.item(), rel=1e-5)


class Doubled(torch.autograd.Function):
    """A function of the user's own, which no function of torch shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def doubled(x: Tensor) -> Tensor:
    return Doubled.apply(x)


def checkpointed(x: Tensor) -> Tensor:
    """Reentrant checkpointing runs its function without a graph, inside of a custom autograd function."""
    return checkpoint(lambda x: x * 2.0, x, use_reentrant=True)


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def by_index(x: Tensor) -> Tensor:
    x[:, 3:5] = x[:, 4:6] * 2
    return x


def scattered(x: Tensor) -> Tensor:
    return x.masked_scatter(torch.arange(LENGTH)[None, :, None] < 3, torch.ones(1000))


def asked_for_gradient(x: Tensor) -> Tensor:
    """Adapters do this where the embeddings are frozen and layers are checkpointed."""
    return x.requires_grad_(True)


@pytest.mark.parametrize(
    "change", [doubled, checkpointed, in_place, by_index, scattered, asked_for_gradient, torch.clone, nn.ReLU()]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_model_does_with_them_before_its_layers(change: Callable[[Tensor], Tensor], frozen: bool) -> None:
    if frozen and change is checkpointed:
        pytest.skip("torch computes no gradient of a checkpointed function none of whose inputs needs one")
    model, ids = build("qwen3", dtype=torch.float64).train(), tokens()
    model.get_input_embeddings().weight.requires_grad_(not frozen)
    first = model.get_decoder().layers[0]
    first.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    with Float64():
        plain = gradients(model, ids)
        with streamtune.stream(model, schedule=OFFLOADED):
            ours = gradients(model, ids)
    assert ours.keys() == plain.keys()
    assert all((ours[name] - grad).norm() <= 1e-12 * grad.norm() for name, grad in plain.items())


def test_changed_in_place_and_then_given_to_an_own_function_is_refused() -> None:
    model, ids = build("qwen3").train(), tokens()

    def change(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args[0].mul_(2)
        return doubled(args[0]), *args[1:]

    model.get_decoder().layers[0].register_forward_pre_hook(change)
    with streamtune.stream(model, schedule=OFFLOADED), pytest.raises(UnsupportedModelError, match="changed in place"):
        gradients(model, ids)


def test_an_embedding_that_is_checkpointed_by_itself() -> None:
    model, ids = build("qwen3", dtype=torch.float64).train(), tokens()
    decoder = model.get_decoder()
    with Float64():
        plain = gradients(model, ids)
        with streamtune.stream(model, schedule=OFFLOADED):
            inner = decoder.embed_tokens.forward
            on = torch.ones((), requires_grad=True)  # without an input that needs a gradient it would compute none
            decoder.embed_tokens.forward = lambda ids: checkpoint(
                lambda ids, _: inner(ids), ids, on, use_reentrant=True
            )
            ours = gradients(model, ids)
            decoder.embed_tokens.forward = inner
    assert ours.keys() == plain.keys()
    assert all((ours[name] - grad).norm() <= 1e-12 * grad.norm() for name, grad in plain.items())


def test_a_hook_on_the_embedding_is_given_the_plain_tensor() -> None:
    model, ids = build("qwen3").train(), tokens()
    seen: list[type] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *args: seen.append(type(args[2])))
    with streamtune.stream(model, schedule=OFFLOADED):
        gradients(model, ids)
        hook.remove()
        model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(type(args[0])))
        gradients(model, ids)
    assert seen == [Tensor, Embeddings]


def test_hidden_states_that_are_returned_are_plain_tensors() -> None:
    model, ids = build("qwen3").train(), tokens()
    plain = model(input_ids=ids, output_hidden_states=True).hidden_states
    with streamtune.stream(model, schedule=OFFLOADED):
        ours = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert [type(x) for x in ours] == [Tensor] * len(plain)
    assert torch.equal(ours[0], plain[0])


def test_a_removed_stream_leaves_the_embedding_as_it_was() -> None:
    model, ids = build("qwen3").train(), tokens()
    before = gradients(model, ids)
    streamtune.stream(model, schedule=OFFLOADED).remove()
    assert "forward" not in vars(model.get_input_embeddings())
    after = gradients(model, ids)
    assert all(torch.equal(after[name], grad) for name, grad in before.items())
