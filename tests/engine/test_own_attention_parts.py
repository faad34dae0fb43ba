"""The parts around a layer that attends by itself: forms of its mask, what else it returns, what it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MusicgenDecoderConfig, MusicgenForCausalLM
from transformers.masking_utils import create_causal_mask

import streamtune
from streamtune.engine.call_parts import LayerOutputs
from streamtune.engine.inspect_model import decoder_layers
from streamtune.engine.own_attention import DenseOnUseMask, dense_mask_of_view, lazy_mask_attention_name, sees_future
from streamtune.errors import UnsupportedModelError
from streamtune.ops import LazyMask
from tests.conformance.reducer import build
from tests.exactness.families import SMALL, batch, evaluation
from tests.precision_kit import Float64, assert_as_precise, in_float64

LENGTH = 9
PADDING = torch.ones(2, LENGTH, dtype=torch.long)
PADDING[1, 6:] = 0


def mask_of(own: str, dtype: torch.dtype = torch.float32, lazy: bool = True) -> Any:
    config = AutoConfig.for_model("llama", **SMALL)
    config._attn_implementation_internal = lazy_mask_attention_name(own) if lazy else own
    embeds = torch.zeros(2, LENGTH, 32, dtype=dtype)
    return create_causal_mask(config, embeds, attention_mask=PADDING, past_key_values=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_a_tile_is_a_part_of_the_models_own_mask(own: str, dtype: torch.dtype) -> None:
    lazy, dense = mask_of(own, dtype), mask_of(own, dtype, lazy=False)
    assert isinstance(lazy, DenseOnUseMask)
    form = torch.bool if own == "sdpa" else dtype
    for start, stop in ((0, 4), (4, 9), (8, 9)):
        part = dense_mask_of_view(lazy.view_chunk(start, stop, 0), form)
        assert part.dtype == dense.dtype
        assert torch.equal(part, dense[:, :, start:stop, :stop])


def test_a_mask_that_is_computed_with_becomes_the_models_own() -> None:
    lazy, dense = mask_of("eager"), mask_of("eager", lazy=False)
    assert torch.equal(lazy.to(torch.bool), dense.to(torch.bool))
    assert torch.equal(lazy < -1, dense < -1)
    assert torch.equal(lazy == 0, dense == 0)
    assert torch.equal(1.0 - lazy, 1.0 - dense)
    assert torch.equal(lazy[:, :, :4], dense[:, :, :4])
    assert torch.equal(torch.masked_fill(dense, lazy < -1, 3.0), torch.masked_fill(dense, dense < -1, 3.0))
    assert lazy.shape == dense.shape
    assert lazy.dtype == dense.dtype
    assert torch.equal(~mask_of("sdpa"), ~mask_of("sdpa", lazy=False))
    assert not hasattr(lazy, "_something")


@pytest.mark.parametrize("heads", [1, 2])
def test_which_squares_see_the_future(heads: int) -> None:
    allowed = torch.ones(2, heads, 5, 5, dtype=torch.bool).tril()
    bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min) + torch.arange(5.0)
    assert not any(map(sees_future, (allowed, ~allowed, bias)))
    late = allowed.clone()
    late[1, -1, 2, 3] = True
    assert all(map(sees_future, (late, ~late, torch.zeros(allowed.shape), torch.ones_like(allowed))))
    late = bias.clone()
    late[0, 0, 0, 4] = -1.0
    assert sees_future(late)


def test_a_square_that_sees_the_future_is_refused() -> None:
    model = build("bloom")
    inputs: dict[str, Any] = batch("plain")
    layer = model.transformer.h[0]
    hidden, alibi = torch.randn(1, 37, 32), torch.zeros(4, 1, 37)
    with streamtune.stream(model, chunk_size=8):
        with pytest.raises(UnsupportedModelError, match="later tokens"):
            layer(hidden, alibi=alibi, attention_mask=torch.zeros(1, 1, 37, 37))
        model(**inputs).loss.backward()


def test_what_a_layer_returns_is_joined_dropped_or_refused() -> None:
    first, second = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    others = torch.randn(2, 3, 5), torch.randn(2, 2, 5)
    weights = torch.rand(2, 4, 3, 3), torch.rand(2, 4, 2, 5)
    choice = torch.tensor([[[0, 1], [1, 0], [2, 1]]] * 2), torch.tensor([[[3, 1, 0], [4, 2, 1]]] * 2)
    outputs = LayerOutputs("Layer", 1)
    assert outputs.chunk_tensors((first, None, weights[0], choice[0], others[0]), slice(0, 3), keep=True) == [
        first,
        others[0],
    ]
    last = (second, None, weights[1], choice[1], others[1])
    assert outputs.chunk_tensors(last, slice(3, 5), keep=True) == [second, others[1]]
    assert outputs.chunk_tensors(last, slice(3, 5), keep=False) == [second, others[1]]
    assert outputs.along == [1, 1]
    whole = [torch.cat([first, second], 1), torch.cat(others, 1)]
    out = outputs.rebuild_output(whole)
    assert isinstance(out, tuple)
    assert out[0] is whole[0]
    assert out[1] is None
    assert out[2] is None
    assert out[3].tolist() == [[[0, 1, 1], [1, 0, 0], [2, 1, 1], [3, 1, 0], [4, 2, 1]]] * 2
    assert out[4] is whole[1]
    bare = LayerOutputs("Layer", 2)
    streams = torch.randn(4, 2, 3, 8)
    assert bare.chunk_tensors(streams, slice(0, 3), keep=True) == [streams]
    assert bare.rebuild_output([streams]) is streams
    for stranger in (torch.randn(2, 7, 5), torch.ones(3), "text"):
        with pytest.raises(
            UnsupportedModelError, match=r"Layer returns item 1 of type (Tensor|str), whose chunks cannot be joined"
        ):
            outputs.chunk_tensors((first, stranger), slice(0, 3), keep=True)


def test_layers_that_do_not_say_they_are_some() -> None:
    model = build("ctrl")
    assert decoder_layers(model) == list(model.transformer.h)
    assert decoder_layers(build("openai-gpt")) == []


def test_a_choice_between_equals_is_refused_where_it_chooses() -> None:
    model = build("doge", keep_window_size=12)
    with streamtune.stream(model, chunk_size=8), pytest.raises(UnsupportedModelError, match="keep_window_size=12"):
        model(**batch("plain"))
    short = {key: value[:, :12] for key, value in batch("plain").items()}
    with streamtune.stream(model, chunk_size=8):
        model(**short).loss.backward()


def test_an_attention_that_knows_no_tile() -> None:
    model = build("falcon")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"\('flash_attention_2'\), which cannot take the mask of a chunk"):
        streamtune.stream(model)


def test_a_tensor_our_attention_does_not_read_makes_a_layer_keep_its_own() -> None:
    """Nothing is left out in silence: llama's eager attention ignores the tensor, ours does not know that it may."""
    model = build("llama")
    inputs = batch("plain")
    want = evaluation(model, inputs)
    with streamtune.stream(model, chunk_size=8) as handle:
        model(**inputs)
        assert all(layer.forward.own_attention is None for layer in handle.layers)
    with streamtune.stream(model, chunk_size=8) as handle:
        loss = model(**inputs, unheard_of=torch.ones(1)).loss
        assert all(layer.forward.own_attention is not None for layer in handle.layers)
    want.check((loss, {}))


def test_several_heads_are_refused() -> None:
    config = MusicgenDecoderConfig(
        vocab_size=20, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, num_codebooks=2
    )
    model = MusicgenForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match=r"a list of heads \(2\), one for each stream"):
        streamtune.stream(model)
    streamtune.stream(model, head=False).remove()


def test_a_cache_filled_before_is_not_written_to_twice() -> None:
    model = AutoModelForCausalLM.from_config(build("doge").config).eval()
    ids = batch("plain")["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :20], use_cache=True).past_key_values
        with streamtune.stream(model, chunk_size=8), pytest.raises(UnsupportedModelError, match="fill the cache after"):
            model(ids[:, 20:22], past_key_values=cache)


def test_what_cannot_be_streamed_may_still_fill_a_cache() -> None:
    """A prompt whose tokens see each other both ways: no chunk of it could be computed before the next."""
    model = build("llama").eval()
    ids, both_ways = batch("plain")["input_ids"], torch.ones(3, 1, 37, 37, dtype=torch.bool)
    with torch.no_grad():
        want = model(ids, attention_mask=both_ways, use_cache=True).logits
        with Float64():
            truth = in_float64(model)(ids, attention_mask=both_ways, use_cache=True).logits
        with streamtune.stream(model, chunk_size=8):
            got = model(ids, attention_mask=both_ways, use_cache=True).logits
            with pytest.raises(UnsupportedModelError, match="later tokens"):
                model(ids, attention_mask=both_ways, labels=ids)
    assert_as_precise(got, want, truth)


def test_lazy_masks_of_other_models_stay_no_tensors() -> None:
    lazy = LazyMask(1, 4, 4)
    for mask in (lazy, lazy.view_queries(0, 2)):
        with pytest.raises(UnsupportedModelError, match="computes with its attention mask"):
            mask[:, :, :, 1:]
        with pytest.raises(UnsupportedModelError, match="computes with its attention mask"):
            _ = mask == 0
        assert mask is not None
        assert mask in [None, mask]


def test_arguments_of_the_loss_do_not_cost_a_layer_our_attention() -> None:
    """Models hand on to their attention what they do not know; these have nothing to do with it."""
    model, inputs = build("qwen3"), batch("plain")
    labels = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
    with streamtune.stream(model, chunk_size=8) as handle:
        model(**{**inputs, "labels": labels}, shift_labels=labels, num_items_in_batch=torch.tensor(93))
        forwards: list[Any] = [layer.forward for layer in handle.layers]
        assert all(forward.own_attention is None for forward in forwards)
