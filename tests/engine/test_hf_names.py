"""The names that transformers gives to its inside, which change between its minor versions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

import streamtune
from streamtune.engine.hf_names import cache_argument, cache_by_name
from streamtune.rollout import Sampling, TransformersWriter
from tests.exactness.families import build
from tests.precision_kit import Float64, errors, in_float64

IDS = torch.randint(3, 60, (2, 23), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**call).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def filled(model: Any) -> Any:
    """A cache that has read the first seven tokens."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:, :7], use_cache=True, **cache_by_name(type(model).forward, cache))
    return cache


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_by_its_old_and_by_its_new_name(family: str, name: str) -> None:
    with Float64():
        model = in_float64(build(family)).train()
        rest = {"input_ids": IDS[:, 7:], "labels": IDS[:, 7:]}
        plain = gradients(model, **rest, **cache_by_name(type(model).forward, filled(model)))
        with streamtune.stream(model, chunk_size=4):
            cache = filled(model)
            streamed = gradients(model, **rest, **{name: cache})
    assert max(errors(streamed, plain).values()) < 1e-9
    assert cache.get_seq_length() == 7, "it was read, and not written to"


def test_the_engine_passes_no_argument_by_a_name_that_is_going_away() -> None:
    model = build("qwen3")
    writer = TransformersWriter(model, end_token_ids=[2], pad_token_id=0, prefill_chunk_size=4, max_rows=4)
    with warnings.catch_warnings(), streamtune.stream(model, chunk_size=4):
        warnings.simplefilter("error", FutureWarning)
        gradients(model, input_ids=IDS, labels=IDS)
        writer.write([IDS[0].tolist(), IDS[1, :7].tolist()], 2, Sampling(max_completion_length=3, temperature=1.0))
        with torch.no_grad():
            model(input_ids=IDS, use_cache=True)


class OldModel(LlamaModel):
    """A decoder of a repository, written for an older transformers: it hands its layers their cache by that name."""

    name = "past_key_values"

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        x = self.embed_tokens(input_ids)
        cache = DynamicCache(config=self.config)
        places = torch.arange(x.shape[1])[None]
        around = self.rotary_emb(x, places)
        for layer in self.layers:
            x = layer(x, position_embeddings=around, position_ids=places, **{self.name: cache})
        return x


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_layer_takes_either_name_from_a_model_that_calls_it(name: str) -> None:
    """``transformers`` lets its own layers take the old name for the new one; a streamed layer takes both, always."""
    with Float64():
        model: Any = in_float64(build("llama")).model
        model.__class__ = type("Older", (OldModel,), {"name": name})
        with streamtune.stream(model, chunk_size=4), torch.no_grad():
            got = model(IDS)
        model.name = cache_argument(LlamaDecoderLayer.forward)
        with torch.no_grad():
            want = model(IDS)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_a_table_that_is_called_cache_and_is_none_makes_no_layer() -> None:
    """The attention of xlm and flaubert takes one, and another sequence to attend to."""

    class Attention(nn.Module):
        def forward(self, input: Tensor, mask: Tensor, kv: Any = None, cache: Any = None, **kwargs: Any) -> Tensor:
            return input

    assert cache_argument(Attention.forward) is None
    assert cache_argument(LlamaForCausalLM.forward) in ("cache", "past_key_values")
