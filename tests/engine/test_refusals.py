"""A model or a call that cannot be streamed exactly is refused by name, and the model is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import streamtune
from streamtune import Schedule
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.exactness.families import SMALL, batch, build, gradients, reference


def untouched(model: torch.nn.Module) -> bool:
    return not any("forward" in module.__dict__ for module in model.modules()) and not model._forward_pre_hooks


def test_not_a_transformers_model() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear is not a transformers model"):
        streamtune.stream(torch.nn.Linear(2, 2))


def test_encoder_decoder() -> None:
    config = AutoConfig.for_model("t5", vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        streamtune.stream(model)
    assert untouched(model)


def test_a_state_outside_the_cache() -> None:
    config = AutoConfig.for_model("recurrent_gemma", **{**SMALL, "num_hidden_layers": 3, "attention_window_size": 9})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="RecurrentGemmaRecurrentBlock stores a state in the module"):
        streamtune.stream(model)
    assert untouched(model)


def test_a_forward_replaced_on_the_instance() -> None:
    model = build("llama")
    layer = model.model.layers[0]
    layer.forward = lambda *args, **kwargs: 2 * type(layer).forward(layer, *args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer whose forward was replaced on the instance"):
        streamtune.stream(model)


def test_attention_weights_are_not_returned() -> None:
    model = build("llama")
    with streamtune.stream(model), pytest.raises(UnsupportedModelError, match="never built"):
        model(**batch("plain"), output_attentions=True)


def test_attention_weights_that_a_configuration_asks_for() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(
        UnsupportedModelError, match="has output_attentions=True, but attention weights are never built"
    ):
        streamtune.stream(model)
    assert model.config._attn_implementation == "eager"


def test_a_mask_that_sees_the_future() -> None:
    model = build("llama")
    inputs: dict[str, Any] = batch("plain")
    inputs["attention_mask"] = torch.ones(3, 1, 37, 37, dtype=torch.bool)
    with streamtune.stream(model, chunk_size=8), pytest.raises(UnsupportedModelError, match="later tokens"):
        model(**inputs)


def test_a_run_of_tokens_that_see_later_ones_fills_two_chunks_and_no_more() -> None:
    model, inputs = build("llama"), batch("plain")
    allowed = torch.ones(3, 1, 37, 37, dtype=torch.bool).tril()
    allowed[..., 5:21, 5:21] = True
    given: dict[str, Any] = {**inputs, "attention_mask": allowed}
    want = reference(model, given)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, given))
    with (
        streamtune.stream(model, chunk_size=7),
        pytest.raises(UnsupportedModelError, match="16 consecutive tokens") as caught,
    ):
        model(**given)
    assert "set chunk_size to 8 or more" in caught.value.fix


def test_a_trainable_tensor_from_outside_the_layer_is_noticed() -> None:
    model = build("llama")
    stranger = torch.nn.Parameter(torch.ones(32))
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(streamtune.chunkwise(lambda module, args: (args[0] * stranger,)))
    with streamtune.stream(model, chunk_size=8):
        loss = model(**batch("plain")).loss
        with pytest.raises(UnsupportedModelError, match="not one of its parameters"):
            loss.backward()


def test_streamed_twice_and_contradicting_arguments() -> None:
    model = build("llama")
    with streamtune.stream(model), pytest.raises(ArgumentError, match="streamed already"):
        streamtune.stream(model)
    with pytest.raises(ArgumentError, match="not both"):
        streamtune.stream(model, 8, schedule=Schedule())
    assert untouched(model)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_schedule_rejects_what_is_no_chunk(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="chunk_size must be a number of tokens, at least 1"):
        Schedule(chunk_size=bad)


def test_a_failed_forward_leaves_the_head_in_place() -> None:
    model = build("llama")
    inputs = batch("plain")
    with streamtune.stream(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 4), 10_000), labels=torch.zeros(1, 4, dtype=torch.long))
        assert "forward" not in model.lm_head.__dict__
        assert torch.isfinite(model(**inputs).loss)


@pytest.mark.parametrize(("before", "implementation"), [("sdpa", "eager"), ("eager", "sdpa")])
@pytest.mark.parametrize("kind", ["plain", "right"])
def test_another_attention_set_while_streamed(before: str, implementation: str, kind: str) -> None:
    """It would align a chunk's causal mask with the first keys, and train wrongly without a word."""
    model = build("qwen3")
    model.set_attn_implementation(before)
    with streamtune.stream(model, chunk_size=8):
        loss = model(**batch(kind)).loss
        model.set_attn_implementation(before)  # the one that it has
        assert torch.equal(model(**batch(kind)).loss, loss)
        model.set_attn_implementation(implementation)
        with pytest.raises(UnsupportedModelError, match=f"set to '{implementation}' while the model is streamed"):
            model(**batch(kind))
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="while the model is streamed"):
            model(**batch(kind))


@pytest.mark.parametrize("head", [False, True])
def test_a_second_backward_through_the_same_forward(head: bool) -> None:
    """Said plainly, and nothing is added to the gradients (with retain_graph: tests/transparency)."""
    model = build("qwen3")
    with streamtune.stream(model, chunk_size=8, head=head):
        loss = model(**batch("plain")).loss
        loss.backward()
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        with pytest.raises((ArgumentError, RuntimeError), match=r"through the graph a second time"):
            loss.backward()
    layers = {name: p.grad for name, p in model.named_parameters() if "layers" in name}
    assert all(torch.equal(grad, before[name]) for name, grad in layers.items())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("again", [False, True])
def test_a_backward_after_the_stream_was_removed(family: str, again: bool) -> None:
    model = build(family)
    want = reference(model, batch("plain"))
    handle = streamtune.stream(model, chunk_size=8)
    loss = model(**batch("plain")).loss
    handle.remove()
    if again:
        handle = streamtune.stream(model, chunk_size=8)
    with pytest.raises(ArgumentError, match="removed between a forward and its backward") as caught:
        loss.backward()
    assert "before handle.remove()" in caught.value.fix
    want.check(gradients(model, batch("plain")))


def test_another_attention_set_before_the_backward() -> None:
    model = build("llama")
    with streamtune.stream(model, chunk_size=8):
        loss = model(**batch("plain")).loss
        model.set_attn_implementation("eager")
        with pytest.raises(UnsupportedModelError, match="set to 'eager' while the model is streamed"):
            loss.backward()
