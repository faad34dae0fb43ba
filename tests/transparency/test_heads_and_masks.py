"""Models with another head than a language model's, and dense masks that are more than a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import CPTConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)

import streamtune
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build
from tests.precision_kit import Float64, errors

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "num_labels": 3,
}
QWEN3 = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))
HEADS: dict[str, tuple[type, Any, dict[str, Tensor]]] = {
    "sequences": (Qwen3ForSequenceClassification, Qwen3Config(**QWEN3), {"labels": torch.tensor([0, 2])}),
    "tokens": (Qwen3ForTokenClassification, Qwen3Config(**QWEN3), {"labels": IDS % 3}),
    "answers": (
        Qwen3ForQuestionAnswering,
        Qwen3Config(**QWEN3),
        {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 9])},
    ),
    "gpt2": (GPT2ForSequenceClassification, GPT2Config(**SHAPE), {"labels": torch.tensor([0, 2])}),
}


def gradients(model: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(use_cache=False, **call).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_size", [9, 27])
def test_another_head_is_the_models_own(head: str, chunk_size: int) -> None:
    kind, config, labels = HEADS[head]
    with Float64():
        torch.manual_seed(0)
        model = kind(config).double().eval()
        want = gradients(model, input_ids=IDS, **labels)
        with streamtune.stream(model, chunk_size=chunk_size) as handle:
            assert not handle.streams_head
            got = gradients(model, input_ids=IDS, **labels)
            with pytest.raises(ArgumentError, match="log-probabilities need a streamed head"):
                handle.logprobs(IDS, IDS)
        assert max(errors(got, want).values()) < 1e-9
    with streamtune.stream(model.float(), chunk_size=chunk_size) as handle:
        handle.check()


def test_a_reward_model_and_a_bare_decoder() -> None:
    with Float64():
        torch.manual_seed(0)
        for model in (
            Qwen3ForSequenceClassification(Qwen3Config(**{**QWEN3, "num_labels": 1})),
            Qwen3Model(Qwen3Config(**QWEN3)),
        ):
            model = model.double().train()

            def value(model: Any = model) -> dict[str, Tensor]:
                model.zero_grad()
                out = model(input_ids=IDS, use_cache=False)[0].square().sum()
                out.backward()
                return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

            want = value()
            with streamtune.stream(model, chunk_size=9):
                got = value()
            assert max(errors(got, want).values()) < 1e-9


def test_a_wrong_classifier_is_found_by_the_check() -> None:
    """``check()`` has a number to compare where there are no labels of tokens."""
    model = Qwen3ForSequenceClassification(Qwen3Config(**QWEN3))
    norm = model.model.layers[1].mlp
    norm.forward = lambda x, own=norm.forward: own(x) + x.mean(dim=1, keepdim=True)  # sees the whole sequence
    with streamtune.stream(model, chunk_size=9) as handle, pytest.raises(UnsupportedModelError, match="not streamed"):
        handle.check()


def test_prompt_tuning_with_a_loss_of_its_own_keeps_its_head() -> None:
    config = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7, 8], cpt_mask=[1, 1, 1, 1], cpt_tokens_type_mask=[1, 2, 3, 4]
    )
    with Float64():
        torch.manual_seed(0)
        model = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**QWEN3)), config).double()
        call = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
        call["input_type_mask"] = torch.full_like(IDS, 4)
        want = gradients(model, **call)
        with pytest.raises(UnsupportedModelError, match="computes its own loss from full logits") as caught:
            streamtune.stream(model, chunk_size=9)
        assert "head=False" in caught.value.fix
        with streamtune.stream(model, chunk_size=9, head=False):
            got = gradients(model, **call)
    assert max(errors(got, want).values()) < 1e-9


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig])
def test_prompts_that_are_trained(kind: Any) -> None:
    """Virtual tokens before the row (keys and values before it, prefix tuning: ``test_past``)."""
    more = {"encoder_hidden_size": 16} if kind is PromptEncoderConfig else {}
    with Float64():
        torch.manual_seed(0)
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=4, **more)
        model = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**QWEN3)), config).double()
        call = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
        want = gradients(model, **call)
        with streamtune.stream(model, chunk_size=9):
            got = gradients(model, **call)
    assert max(errors(got, want).values()) < 1e-9


def dense(kind: str) -> Tensor:
    """Masks ``[B, H, T, T]`` of causal attention that hold more than 0 and -inf."""
    later = torch.ones(27, 27, dtype=torch.bool).triu(1)
    generator = torch.Generator().manual_seed(1)
    if kind == "bias":
        bias = torch.randn(2, 1, 27, 27, generator=generator, dtype=torch.float64)
        return bias.masked_fill(later, torch.finfo(torch.float32).min)
    if kind == "bias of heads":
        bias = torch.randn(2, 4, 27, 27, generator=generator, dtype=torch.float64)
        return bias.masked_fill(later, torch.finfo(torch.float32).min)
    seen = torch.rand(2, 4, 27, 27, generator=generator) < 0.6  # "mask of heads"
    return (seen | torch.eye(27, dtype=torch.bool)) & ~later


@pytest.mark.parametrize("kind", ["bias", "bias of heads", "mask of heads"])
@pytest.mark.parametrize(("family", "attention"), [("qwen3", "sdpa"), ("qwen3", "eager"), ("llama", "sdpa")])
@pytest.mark.parametrize("chunk_size", [9, 27])
def test_a_dense_mask_that_is_a_bias(family: str, attention: str, kind: str, chunk_size: int) -> None:
    if kind == "mask of heads" and attention == "eager":
        pytest.skip("eager attention would add the booleans of it")
    with Float64():
        model = build(family).double()
        model.set_attn_implementation(attention)
        want = gradients(model, input_ids=IDS, labels=IDS, attention_mask=dense(kind))
        with streamtune.stream(model, chunk_size=chunk_size):
            got = gradients(model, input_ids=IDS, labels=IDS, attention_mask=dense(kind))
            again = gradients(model, input_ids=IDS, labels=IDS)  # and without one as ever
        plain = gradients(model, input_ids=IDS, labels=IDS)
    assert max(errors(got, want).values()) < 1e-9
    assert max(errors(again, plain).values()) < 1e-9


def test_a_bias_that_is_trained_or_sees_the_future_is_refused() -> None:
    model = build("qwen3")
    bias = dense("bias").float()
    with streamtune.stream(model, chunk_size=9):
        with pytest.raises(UnsupportedModelError, match="requires a gradient"):
            model(input_ids=IDS, labels=IDS, attention_mask=bias.clone().requires_grad_())
        with pytest.raises(UnsupportedModelError, match="later tokens"):
            model(input_ids=IDS, labels=IDS, attention_mask=bias.clamp(min=-100.0))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dense_mask_of_all_queries(attention: str) -> None:
    """``[B, 1, 1, T]``: every query sees the same keys, later ones too, so a call is one chunk."""
    seen = torch.ones(2, 1, 1, 27, dtype=torch.bool)
    seen[0, :, :, 20:] = False
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float32).min)
    with Float64():
        model = build("qwen3").double()
        model.set_attn_implementation(attention)
        want = gradients(model, input_ids=IDS, labels=IDS, attention_mask=mask)
        with streamtune.stream(model, chunk_size=27):
            got = gradients(model, input_ids=IDS, labels=IDS, attention_mask=mask)
        with streamtune.stream(model, chunk_size=9), pytest.raises(UnsupportedModelError, match="see later tokens"):
            model(input_ids=IDS, labels=IDS, attention_mask=mask)
    assert max(errors(got, want).values()) < 1e-9


def test_streams_of_hidden_states_are_no_mask() -> None:
    """gemma3n's layers get ``[N, B, T, C]``: with as many tokens as channels, its last two dimensions are equal."""
    with Float64():
        model = build("gemma3n_text").double()
        ids = torch.randint(3, 60, (2, model.config.hidden_size), generator=torch.Generator().manual_seed(0))
        want = gradients(model, input_ids=ids, labels=ids)
        with streamtune.stream(model, chunk_size=9):
            got = gradients(model, input_ids=ids, labels=ids)
    assert max(errors(got, want).values()) < 1e-9
