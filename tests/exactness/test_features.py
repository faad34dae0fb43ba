"""Everything around a layer that could break the sum over chunks: adapters, ties, dropout, jitter, masks, dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import streamtune
from streamtune import Schedule
from tests.precision_kit import EXACT, Float64, in_float64, reference_of

from .families import batch, build, gradients, reference


def streamed_equals_plain(model: torch.nn.Module, inputs: dict[str, Any], chunk_size: int = 8) -> None:
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=chunk_size):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_tied_and_untied_heads(family: str, tied: bool) -> None:
    model = build(family, tie_word_embeddings=tied)
    names = dict(model.named_parameters())
    assert ("lm_head.weight" in names) != tied
    streamed_equals_plain(model, batch("masked"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_frozen_parameters_get_no_gradient(family: str) -> None:
    model = build(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name and "proj" in name)
    streamed_equals_plain(model, batch("right"))


def test_frozen_head_and_embedding() -> None:
    model = build("llama", tie_word_embeddings=False)
    model.get_input_embeddings().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    streamed_equals_plain(model, batch("plain"))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["k_proj", "lm_head"]])
@pytest.mark.parametrize("input_grads", [False, True])
def test_lora(targets: Any, input_grads: bool) -> None:
    model = build("llama", tie_word_embeddings=False)
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    if input_grads:
        peft_model.enable_input_require_grads()
    streamed_equals_plain(peft_model, batch("masked"))


def test_trained_copies_of_the_head_and_embedding() -> None:
    model = build("qwen3", tie_word_embeddings=False)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], task_type="CAUSAL_LM"
    )
    streamed_equals_plain(get_peft_model(model, config), batch("multiturn"))


@pytest.mark.parametrize("kind", ["rows", "dense", "packed", "inputs_embeds"])
def test_other_ways_to_call(kind: str) -> None:
    model = build("llama")
    inputs: dict[str, Any] = batch("plain")
    length = inputs["input_ids"].shape[1]
    if kind == "rows":
        inputs["position_ids"] = torch.arange(3, 3 + length).repeat(3, 1)
    elif kind == "dense":  # a mask of the caller's own: attention to every second token
        allowed = torch.ones(length, length).tril().bool() & (torch.arange(length)[None] % 2 == 0)
        inputs["attention_mask"] = (allowed | torch.eye(length).bool()).expand(3, 1, -1, -1)
    elif kind == "packed":
        inputs = {key: value[:1] for key, value in inputs.items()}
        inputs["position_ids"] = torch.cat([torch.arange(11), torch.arange(19), torch.arange(length - 30)])[None]
        inputs["use_cache"] = False  # transformers looks for packed rows only where there is no cache
    else:
        torch.manual_seed(2)
        inputs["inputs_embeds"] = torch.randn(3, length, 32, requires_grad=True)
        del inputs["input_ids"]
    streamed_equals_plain(model, inputs, chunk_size=7)


def test_gradient_reaches_the_inputs() -> None:
    model = build("mistral")
    labels = batch("plain")["labels"]
    embeds = torch.randn(3, 37, 32, generator=torch.Generator().manual_seed(2))

    def of_inputs(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        leaf = embeds.to(next(model.parameters()).dtype).requires_grad_()
        loss = model(inputs_embeds=leaf, labels=labels).loss
        return loss.detach(), {"inputs": torch.autograd.grad(loss, leaf)[0]}

    want = reference_of(model, of_inputs)
    with streamtune.stream(model, chunk_size=6):
        want.check(of_inputs(model))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt2", {"resid_pdrop": 0.2, "attn_pdrop": 0.0}),
        ("gpt2", {"resid_pdrop": 0.1, "attn_pdrop": 0.3}),
        ("mistral", {"attention_dropout": 0.25}),
        ("gpt_oss", {"attention_dropout": 0.25}),
        ("mixtral", {"router_jitter_noise": 0.2}),
    ],
)
@pytest.mark.parametrize("keep_kv", [False, True])
def test_random_layers_are_replayed(family: str, settings: dict[str, Any], keep_kv: bool) -> None:
    """The gradient is that of the function the forward drew: compared with a difference quotient under the same seed.

    All is computed in fp64; how far a router may be moved before it chooses another expert bounds the agreement.
    """
    model = in_float64(build(family, **settings))
    inputs = batch("right")
    names = [name for name, p in model.named_parameters() if "router" not in name and "mlp.gate" not in name]
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    direction = {name: torch.randn(parameters[name].shape, generator=generator, dtype=torch.float64) for name in names}
    step, tolerance = {"gpt_oss": (1e-5, 1e-3), "mixtral": (1e-5, 1e-3)}.get(family, (3e-4, 1e-5))

    def loss_at(distance: float, seed: int = 11) -> float:
        with torch.no_grad():
            for name in names:
                parameters[name].add_(direction[name], alpha=distance)
            torch.manual_seed(seed)
            value = float(model(**inputs).loss)
            for name in names:
                parameters[name].sub_(direction[name], alpha=distance)
        return value

    with Float64(), streamtune.stream(model, schedule=Schedule(chunk_size=8, keep_kv=keep_kv)):
        torch.manual_seed(11)
        loss, grads = gradients(model, inputs)
        assert float(loss) == pytest.approx(loss_at(0.0), rel=EXACT)
        assert loss_at(0.0, seed=12) != pytest.approx(float(loss), rel=1e-6)
        near, far = ((loss_at(size) - loss_at(-size)) / (2 * size) for size in (step, 2 * step))
    slope = (4 * near - far) / 3  # Richardson: the cubic term is gone
    along = sum(float((grads[name] * direction[name]).sum()) for name in names)
    assert along == pytest.approx(slope, rel=tolerance)


def test_recompute_leaves_the_random_state_alone() -> None:
    model = build("gpt2", resid_pdrop=0.5)
    with streamtune.stream(model, chunk_size=8):
        torch.manual_seed(1)
        loss = model(**batch("plain")).loss
        state = torch.get_rng_state()
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_neox"])
def test_hooks_on_parameters_fire_once(family: str) -> None:
    """DDP, ZeRO and optimizers inside the backward hang on these: once per step, whatever the chunk count."""
    model = build(family, tie_word_embeddings=False)
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired.get(name, 0) + 1}))
    for chunk_size in (37, 10, 2):
        fired.clear()
        with streamtune.stream(model, chunk_size=chunk_size):
            model(**batch("plain")).loss.backward()
        assert fired == dict.fromkeys(dict(model.named_parameters()), 1)


def test_checkpointing_left_on_changes_nothing() -> None:
    model = build("llama")
    inputs = batch("plain")
    want = reference(model, inputs)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=torch.utils.checkpoint.checkpoint)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))
    assert model.model.layers[0].gradient_checkpointing


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_remove_restores_the_model_exactly(family: str) -> None:
    model = build(family)
    modules = [(m, dict(m.__dict__)) for m in model.modules()]
    implementation = model.config._attn_implementation
    before = copy.deepcopy(model.state_dict())
    loss, want = gradients(model, batch("plain"))
    handle = streamtune.stream(model, chunk_size=8)
    gradients(model, batch("plain"))
    handle.remove()
    handle.remove()
    assert model.config._attn_implementation == implementation
    for module, attributes in modules:
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items() if not key.startswith("_"))
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again, got = gradients(model, batch("plain"))
    assert torch.equal(again, loss)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_backward_twice_over_two_batches_is_the_sum() -> None:
    model = build("qwen2")
    first, second = batch("masked"), batch("right")

    def both(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = [model(**inputs).loss for inputs in (first, second)]
        return losses[0] + losses[1]

    want = reference(model, {}, both)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, {}, both))
