"""Hooks on a streamed model run as often as on the plain one, and with the same values.

Kinds of hooks by places by numbers of chunks; the plain model is the measure of all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamtune
from streamtune.errors import UnsupportedModelError
from streamtune.models import add_lora
from tests.exactness.families import build
from tests.precision_kit import Float64

LENGTH = 27
PLACES = {
    "embedding": "model.embed_tokens",
    "layer": "model.layers.1.mlp.up_proj",
    "first layer": "model.layers.0.self_attn.q_proj",
    "norm in a layer": "model.layers.0.input_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}
Seen = list[tuple[str, Tensor]]


def tensor_hook(module: nn.Module, seen: Seen) -> None:
    """``Tensor.register_hook``; it changes the gradient too."""

    def hook(grad: Tensor) -> Tensor:
        seen.append(("tensor", grad.clone()))
        return 2 * grad.clamp(-1e-3, 1e-3)

    weight_of(module).register_hook(hook)


def two_tensor_hooks(module: nn.Module, seen: Seen) -> None:
    """Two of them, whose order counts; one that is removed again was between them."""
    weight = weight_of(module)
    weight.register_hook(lambda grad: grad + 1)
    removed = weight.register_hook(lambda grad: grad * 100)
    weight.register_hook(lambda grad: seen.append(("second", grad.clone())) or 3 * grad)
    removed.remove()


def accumulator_hook(module: nn.Module, seen: Seen) -> None:
    """A hook of the node that adds to ``.grad``, as DDP and DeepSpeed have them."""
    weight = weight_of(module)
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(("accumulated", weight.grad.clone())))
    module._node = node  # it lives as long as somebody holds it


def post_accumulate_hook(module: nn.Module, seen: Seen) -> None:
    """``Tensor.register_post_accumulate_grad_hook``, as an optimizer in the backward has it."""
    weight_of(module).register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.clone())))


PARAMETER_HOOKS: list[Callable[[nn.Module, Seen], None]] = [
    tensor_hook, two_tensor_hooks, accumulator_hook, post_accumulate_hook
]  # fmt: skip


def weight_of(module: nn.Module) -> Any:
    return module.weight


def run(model: Any, ids: Tensor, seen: Seen) -> tuple[dict[str, Tensor], Seen]:
    """Two micro-batches of one step: gradients, and what hooks saw."""
    for row in ids[:, None]:
        model(input_ids=row, labels=row).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, seen


def assert_same_calls(hook: Callable[[nn.Module, Seen], None], place: str, chunks: int, at_least: int) -> None:
    """Compare calls, values and gradients of a plain and a streamed model with the same hook."""
    with Float64():
        model = build("qwen3").double()
        plain = copy.deepcopy(model)
        ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        ours, theirs = Seen(), Seen()
        hook(model.get_submodule(place), ours)
        hook(plain.get_submodule(place), theirs)
        want, expected = run(plain, ids, theirs)
        with streamtune.stream(model, chunk_size=LENGTH // chunks):
            got, seen = run(model, ids, ours)
    assert [name for name, _ in seen] == [name for name, _ in expected]
    assert len(expected) >= at_least
    for (_, mine), (_, its) in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", PARAMETER_HOOKS)
def test_hooks_of_parameters(hook: Callable[[nn.Module, Seen], None], place: str, chunks: int) -> None:
    assert_same_calls(hook, PLACES[place], chunks, at_least=1)


@pytest.mark.parametrize("chunks", [1, 9])
def test_hooks_of_adapters(chunks: int) -> None:
    with Float64():
        model = add_lora(build("llama"), r=4, dropout=0.0).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(1))
        plain = copy.deepcopy(model)
        ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        ours, theirs = Seen(), Seen()
        for each, seen in ((model, ours), (plain, theirs)):
            place = next(module for name, module in each.named_modules() if name.endswith("q_proj.lora_A.default"))
            tensor_hook(place, seen)
        want, expected = run(plain, ids, theirs)
        with streamtune.stream(model, chunk_size=LENGTH // chunks):
            got, seen = run(model, ids, ours)
    assert len(seen) == len(expected) == 2
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-9, atol=1e-12)


def test_hooks_of_a_tied_head_see_both_shares_at_once() -> None:
    with Float64():
        model = build("qwen3", tie_word_embeddings=True).double()
        plain = copy.deepcopy(model)
        ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        ours, theirs = Seen(), Seen()
        tensor_hook(model.lm_head, ours)
        tensor_hook(plain.lm_head, theirs)
        want, expected = run(plain, ids, theirs)
        with streamtune.stream(model, chunk_size=3):
            got, seen = run(model, ids, ours)
    assert len(seen) == len(expected)
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-9, atol=1e-12)


def test_hooks_stay_where_a_backward_fails() -> None:
    model = build("qwen3")
    calls: list[int] = []
    weight = model.get_submodule(PLACES["layer"]).weight
    weight.register_hook(lambda grad: calls.append(1))
    ids = torch.randint(1, 60, (1, LENGTH))
    with streamtune.stream(model, chunk_size=3):
        loss = model(input_ids=ids, labels=ids).loss
        down = model.get_submodule("model.layers.0.mlp.down_proj")
        handle = down.register_forward_pre_hook(streamtune.chunkwise(lambda *_: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        calls.clear()
        model(input_ids=ids, labels=ids).loss.backward()
    assert calls == [1]


# Hooks of modules.


def forward_hook(module: nn.Module, seen: Seen) -> None:
    """``register_forward_hook``; it changes the output too."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        seen.append(("forward", first(output).detach().clone()))
        changed = first(output) * 1.5
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    module.register_forward_hook(hook)


def forward_pre_hook(module: nn.Module, seen: Seen) -> None:
    """``register_forward_pre_hook``; it changes what is a tensor of numbers."""

    def hook(module: nn.Module, args: Any) -> Any:
        seen.append(("forward-pre", args[0].detach().clone()))
        return (args[0] * 1.5, *args[1:]) if args[0].is_floating_point() else None

    module.register_forward_pre_hook(hook)


def full_backward_hook(module: nn.Module, seen: Seen) -> None:
    """``register_full_backward_hook``; it changes the gradient of the input where there is one."""

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(("backward", grad_output[0].clone()))
        seen.extend(("backward, input", grad.clone()) for grad in grad_input[:1] if grad is not None)
        return tuple(None if grad is None else grad * 1.5 for grad in grad_input)

    module.register_full_backward_hook(hook)


def backward_pre_hook(module: nn.Module, seen: Seen) -> None:
    """``register_full_backward_pre_hook``; it changes the gradient of the output."""

    def hook(module: nn.Module, grad_output: Any) -> Any:
        seen.append(("backward-pre", grad_output[0].clone()))
        return tuple(None if grad is None else grad * 1.5 for grad in grad_output)

    module.register_full_backward_pre_hook(hook)


MODULE_HOOKS: list[Callable[[nn.Module, Seen], None]] = [
    forward_hook, forward_pre_hook, full_backward_hook, backward_pre_hook
]  # fmt: skip
CALLED_ONCE = {
    "embedding": "model.embed_tokens",
    "layer": "model.layers.1",
    "first layer": "model.layers.0",
    "norm": "model.norm",
}
REFUSED = {"module in a layer": "model.layers.1.mlp.up_proj", "norm in a layer": "model.layers.0.input_layernorm"}


def first(output: Any) -> Tensor:
    """Return the first output of a module."""
    return output[0] if isinstance(output, tuple | dict) else output


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of an embedding, by torch
@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize("place", CALLED_ONCE)
@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_hooks_of_modules(hook: Callable[[nn.Module, Seen], None], place: str, chunks: int) -> None:
    assert_same_calls(hook, CALLED_ONCE[place], chunks, at_least=2)


@pytest.mark.parametrize("chunks", [1, 9])
@pytest.mark.parametrize("place", REFUSED)
@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_hooks_inside_of_layers_are_refused(hook: Callable[[nn.Module, Seen], None], place: str, chunks: int) -> None:
    model = build("qwen3")
    ids = torch.randint(1, 60, (1, LENGTH))
    hook(model.get_submodule(REFUSED[place]), seen := Seen())
    with streamtune.stream(model, chunk_size=LENGTH // chunks):
        with pytest.raises(UnsupportedModelError, match="would be called for each chunk") as caught:
            model(input_ids=ids, labels=ids)
        assert REFUSED[place].split(".", 3)[3] in caught.value.what
        assert hook.__name__ in caught.value.what
        assert "on the decoder layer" in caught.value.fix
    assert not seen


@pytest.mark.parametrize("hook", MODULE_HOOKS)
def test_hooks_of_a_streamed_head_are_refused(hook: Callable[[nn.Module, Seen], None]) -> None:
    model = build("qwen3")
    ids = torch.randint(1, 60, (1, LENGTH))
    hook(model.lm_head, Seen())
    with (
        streamtune.stream(model, chunk_size=9),
        pytest.raises(UnsupportedModelError, match="which would not run: loss and gradient"),
    ):
        model(input_ids=ids, labels=ids)
    with streamtune.stream(model, chunk_size=9, head=False):
        model(input_ids=ids, labels=ids).loss.backward()


def test_hooks_of_adapters_are_refused_and_those_of_all_modules() -> None:
    model = add_lora(build("llama"), r=4, dropout=0.0)
    ids = torch.randint(1, 60, (1, LENGTH))
    with streamtune.stream(model, chunk_size=9):
        place = next(module for name, module in model.named_modules() if name.endswith("q_proj.lora_A.default"))
        handle = place.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"q_proj\.lora_A\.default"):
            model(input_ids=ids, labels=ids)
        handle.remove()
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            with pytest.raises(UnsupportedModelError, match="global forward hook"):
                model(input_ids=ids, labels=ids)
        finally:
            handle.remove()
        model(input_ids=ids, labels=ids).loss.backward()


def test_a_hook_that_comes_between_forward_and_backward_is_refused() -> None:
    """The plain model would not call it any more."""
    model = build("qwen3")
    ids = torch.randint(1, 60, (1, LENGTH))
    with streamtune.stream(model, chunk_size=9):
        loss = model(input_ids=ids, labels=ids).loss
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="would be called for each chunk"):
            loss.backward()


@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_a_hook_that_treats_every_token_by_itself_may_be_inside(chunks: int) -> None:
    """Steering: a direction is added to what a module returns, whichever chunk it is."""
    with Float64():
        model = build("qwen3").double()
        plain = copy.deepcopy(model)
        ids = torch.randint(1, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        direction = torch.linspace(-1, 1, 32, dtype=torch.float64)
        for each in (model, plain):
            each.model.layers[1].mlp.register_forward_hook(
                streamtune.chunkwise(lambda module, args, output: output + direction * output.sigmoid())
            )
        want, _ = run(plain, ids, [])
        with streamtune.stream(model, chunk_size=LENGTH // chunks):
            got, _ = run(model, ids, [])
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-9, atol=1e-12)
