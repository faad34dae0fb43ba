"""Outputs that a call asks for by name: the plain model's, or one error that names them; never None without a word."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

import streamtune
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.exactness.families import build
from tests.precision_kit import Float64

LENGTH, CHUNK = 27, 8


def tokens() -> Tensor:
    return torch.randint(5, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def eager() -> Any:
    torch.manual_seed(0)
    config = build("llama").config
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config).eval()


def same(ours: Any, plain: Any) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("with_labels", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_attention_weights_without_gradients(eager: Any, with_labels: bool, training: bool) -> None:
    call = {"input_ids": tokens(), "labels": tokens() if with_labels else None}
    model = eager.train(training)
    with torch.no_grad():
        plain = model(**call, output_attentions=True, output_hidden_states=True)
        with streamtune.stream(model, chunk_size=CHUNK):
            ours = model(**call, output_attentions=True, output_hidden_states=True)
            assert same(ours.attentions, plain.attentions)
            assert same(ours.hidden_states, plain.hidden_states)
            assert torch.allclose(ours.logits, plain.logits, atol=1e-5)
            assert [type(x) for x in ours.hidden_states] == [Tensor] * len(plain.hidden_states)
    with streamtune.stream(model, chunk_size=CHUNK), pytest.raises(UnsupportedModelError, match="output_attentions"):
        model(**call, output_attentions=True)


def test_a_plain_call_leaves_the_stream_as_it_was(eager: Any) -> None:
    eager.train()
    ids = tokens()
    with streamtune.stream(eager, chunk_size=CHUNK):
        eager(input_ids=ids, labels=ids).loss.backward()
        before = {name: p.grad.clone() for name, p in eager.named_parameters()}
        eager.zero_grad(set_to_none=True)
        name = eager.config._attn_implementation
        with torch.no_grad():
            eager(ids, output_attentions=True)
            with pytest.raises(RuntimeError):
                eager(ids[:, :, None, None], output_attentions=True)
        assert eager.config._attn_implementation == name
        eager(input_ids=ids, labels=ids).loss.backward()
        assert all(torch.equal(before[name], p.grad) for name, p in eager.named_parameters())


def test_attention_weights_where_weights_wait_on_the_host(eager: Any) -> None:
    schedule = streamtune.Schedule(chunk_size=CHUNK, weights="host")
    with torch.no_grad():
        plain = eager(tokens(), output_attentions=True)
        with streamtune.stream(eager, schedule=schedule):
            assert same(eager(tokens(), output_attentions=True).attentions, plain.attentions)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_router_logits(family: str) -> None:
    model, ids = build(family).eval(), tokens()
    with torch.no_grad():
        plain = model(ids, output_router_logits=True)
        with_labels = model(ids, labels=ids, output_router_logits=True)
    with streamtune.stream(model, chunk_size=CHUNK):
        with torch.no_grad():
            ours = model(ids, output_router_logits=True)
            assert same(ours.router_logits, plain.router_logits)
            model.config.output_router_logits = True
            assert same(model(ids).router_logits, plain.router_logits)
            model.config.output_router_logits = False
            assert torch.allclose(ours.aux_loss, plain.aux_loss)
            with pytest.warns(UserWarning, match="returns aux_loss and loss, but no router_logits"):
                ours = model(ids, labels=ids, output_router_logits=True)
            assert torch.allclose(ours.aux_loss, with_labels.aux_loss)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            model.train()(ids, labels=ids, output_router_logits=True)


def test_logits_of_an_evaluation_with_gradients() -> None:
    """Loss and logits both give gradients, as the plain model's do."""
    model, ids = build("gemma2", dtype=torch.float64).eval(), tokens()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, labels=ids)
        assert out.logits.shape == (2, LENGTH, model.config.vocab_size)
        (out.loss + out.logits.square().mean() + out.logits[:, -1].sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with Float64():
        plain = gradients()
        with streamtune.stream(model, chunk_size=CHUNK):
            ours = gradients()
    assert ours.keys() == plain.keys()
    assert all((ours[name] - grad).norm() <= 1e-12 * grad.norm() for name, grad in plain.items())


def test_such_logits_are_computed_when_they_are_read_and_refused_after_a_step() -> None:
    model, ids = build("qwen3").eval(), tokens()
    with streamtune.stream(model, chunk_size=CHUNK):
        out = model(input_ids=ids, labels=ids)
        assert out.logits.shape[:2] == ids.shape
        assert (out.logits.dtype, out.logits.device) == (torch.float32, ids.device)
        assert object.__getattribute__(out.logits, "logits") is None
        out.loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        with pytest.raises(ArgumentError, match="changed"):
            out.logits.sum()


def test_a_cache_of_an_evaluation_with_gradients_is_refused() -> None:
    model = build("qwen3").eval()
    with streamtune.stream(model, chunk_size=CHUNK):
        with pytest.raises(UnsupportedModelError, match="use_cache=True"):
            model(tokens(), use_cache=True)
        assert model(tokens()).logits.shape[:2] == (2, LENGTH)
        with torch.no_grad():
            assert model(tokens(), use_cache=True).past_key_values.get_seq_length() == LENGTH


CACHES: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "of the configuration": {"generation_config": GenerationConfig(cache_implementation="static", max_new_tokens=5)},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "usual": {},
}


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_generation_is_the_plain_models(eager: Any, options: dict[str, Any]) -> None:
    call = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    if options.get("cache_implementation") == "offloaded":
        call["cache_implementation"] = "offloaded" if torch.cuda.is_available() else "dynamic"
    plain = eager.generate(tokens(), **call)
    with streamtune.stream(eager, chunk_size=CHUNK) as handle:
        ours = eager.generate(tokens(), **call)
        eager.train()(input_ids=tokens(), labels=tokens()).loss.backward()
        other = copy.deepcopy(eager).eval().generate(tokens(), **call)
    for found in (ours, other):
        if "output_attentions" in options:
            assert same(found.attentions[0], plain.attentions[0])
            found = found.sequences
        assert torch.equal(found, plain.sequences if "output_attentions" in options else plain)
    assert "generate" not in vars(handle.model)


@pytest.mark.parametrize("family", ["llama", "bloom", "gptj", "falcon", "codegen"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config)), lambda config: config],
    ids=["deepcopy", "pickle", "itself"],
)
def test_a_model_built_from_the_configuration_is_plain(family: str, copied: Any) -> None:
    model, ids = build_any(family).train(), tokens() % 60
    before = model.config._attn_implementation
    with streamtune.stream(model, chunk_size=CHUNK):
        ours = model(input_ids=ids, labels=ids).loss
        other = AutoModelForCausalLM.from_config(copied(model.config)).train()
        assert other.config._attn_implementation == before
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(input_ids=ids, labels=ids).loss, ours)
        assert not any("forward" in vars(module) for module in other.modules())
        with streamtune.stream(other, chunk_size=CHUNK):
            torch.testing.assert_close(other(input_ids=ids, labels=ids).loss, ours)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, ours)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin(input_ids=ids, labels=ids).loss, ours)
        streamtune.StreamHandle.of(twin).remove()
        assert twin.config._attn_implementation == model.config._attn_implementation == before
    assert model.config._attn_implementation == before


def test_a_config_names_our_attention_in_calls_alone() -> None:
    """Of the model, of the decoder inside that is called by itself, and also where a call fails."""
    model, ids, seen = build_any("llama").train(), tokens() % 60, list[str]()
    before = model.config._attn_implementation
    model.model.norm.register_forward_hook(lambda *given: seen.append(model.config._attn_implementation))
    with streamtune.stream(model, chunk_size=CHUNK):
        model(input_ids=ids, labels=ids).loss.backward()
        model.model(input_ids=ids)
        with pytest.raises(IndexError):
            model(input_ids=ids + 10_000)
        assert seen == ["streamtune"] * 2
        assert model.config._attn_implementation == before
