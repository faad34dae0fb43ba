"""Tokens before the call: prefix tuning of peft, and a suffix that is trained after a cache that was filled earlier."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

import streamtune
from streamtune import Schedule
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, build
from tests.precision_kit import Float64, errors, in_float64

FAMILIES_OF_A_KIND = ("llama", "gemma2", "gemma3_text", "mistral", "gpt_oss", "bloom", "opt", "phi3")
"""Rotary, learnt and no positions, windows, softcaps, sinks, a layer that attends by itself, one matrix for Q, K, V."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "one chunk": {"chunk_size": 64},
    "chunks": {"chunk_size": 4},
    "keys kept": {"chunk_size": 5, "keep_kv": "host"},
    "attention kept": {"chunk_size": 5, "keep_attention": "device"},
    "two levels": {"chunk_size": 5, "levels": 2, "offload": "host"},
    "gradients in place": {"chunk_size": 5, "stream_grads": True},
    "a layer kept": {"chunk_size": 5, "keep_layers": 1},
}


def model_of(family: str) -> Any:
    return in_float64((build if family in FAMILIES else build_any)(family)).train()


def tokens(padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, 23), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 17:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**call).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("family", FAMILIES_OF_A_KIND)
@pytest.mark.parametrize("case", SCHEDULES)
def test_prefix_tuning(family: str, case: str) -> None:
    with Float64():
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        model: Any = get_peft_model(model_of(family), config).double()
        plain = gradients(model, **tokens())
        with streamtune.stream(model, schedule=Schedule(**SCHEDULES[case])):
            streamed = gradients(model, **tokens())
    assert set(plain) == {"loss", "prompt_encoder.default.embedding.weight"}
    assert max(errors(streamed, plain).values()) < 1e-9


def test_prefix_tuning_trains_generates_and_evaluates() -> None:
    """A projection in front, the base trained too; then the model's own cache behind the same prefix."""
    found = []
    for streamed in (False, True):
        with Float64():
            torch.manual_seed(0)
            config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True)
            model: Any = get_peft_model(model_of("qwen3"), config).double().requires_grad_()
            if streamed:
                streamtune.stream(model, chunk_size=6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(3):
                values = gradients(model, **tokens())
                optimizer.step()
            model.eval()
            with torch.no_grad():
                values["evaluated"] = model(**tokens()).loss
            prompt = tokens()["input_ids"][:1, :9]
            with warnings.catch_warnings():
                # peft 0.21 gives the prefix by the old name, and transformers 5.24 takes its own empty cache instead
                warnings.filterwarnings("ignore", "Both `past_key_values` and `cache`", FutureWarning)
                values["generated"] = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False).double()
            found.append(values)
    assert max(errors(found[1], found[0]).values()) < 1e-9


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "bloom"])
@pytest.mark.parametrize("filled_by", ["plain", "streamed"])
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_a_suffix_after_a_prompt_that_was_read(family: str, filled_by: str, chunk_size: int) -> None:
    """The prompt's keys and values come from a call without gradients; only the suffix trains."""
    ids, prompt = tokens()["input_ids"], torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    with Float64():
        model = model_of(family)

        def filled() -> Any:
            with torch.no_grad():
                return model(input_ids=prompt, use_cache=True).past_key_values

        cache = filled()
        plain = gradients(model, input_ids=ids, labels=ids, past_key_values=copy.deepcopy(cache))
        with streamtune.stream(model, chunk_size=chunk_size):
            if filled_by == "streamed":
                cache = filled()
            streamed = gradients(model, input_ids=ids, labels=ids, past_key_values=copy.deepcopy(cache))
            assert max(errors(streamed, plain).values()) < 1e-9
            again = gradients(model, input_ids=ids, labels=ids, past_key_values=cache)
            assert cache.get_seq_length() == 7, "it is read"
            for enabled in (True, False):  # the plain model has written to it
                with (
                    torch.set_grad_enabled(enabled),
                    pytest.raises(UnsupportedModelError, match="without writing to it") as e,
                ):
                    model(input_ids=ids, past_key_values=cache)
                assert "copy.deepcopy(cache)" in e.value.fix
    assert all(torch.equal(streamed[name], again[name]) for name in streamed)


def test_segments_through_one_cache_are_refused() -> None:
    """Each would see the first cache alone."""
    ids = tokens()["input_ids"]
    model = model_of("qwen3")
    with Float64(), streamtune.stream(model, chunk_size=4):
        out = model(input_ids=ids[:, :9], labels=ids[:, :9], past_key_values=DynamicCache(config=model.config))
        with pytest.raises(UnsupportedModelError, match="lacks the tokens of an earlier call"):
            model(input_ids=ids[:, 9:], labels=ids[:, 9:], past_key_values=out.past_key_values)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_left_padding_that_reaches_behind_the_cache(family: str) -> None:
    """Under eager attention a padded token with padding alone before it sees everything: in one chunk, as without."""
    ids, mask = tokens()["input_ids"], torch.ones(2, 30, dtype=torch.long)
    mask[1, :11] = 0
    call = {"input_ids": ids, "labels": ids.masked_fill(mask[:, 7:] == 0, -100), "attention_mask": mask}
    with Float64():
        model = model_of(family)
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            cache = model(input_ids=ids[:, :7], use_cache=True).past_key_values
        plain = gradients(model, **call, past_key_values=copy.deepcopy(cache))
        with streamtune.stream(model, chunk_size=4), pytest.warns(UserWarning, match="left padding"):
            streamed = gradients(model, **call, past_key_values=cache)
    assert max(errors(streamed, plain).values()) < 1e-9


def test_scores_after_a_prompt() -> None:
    ids = tokens()["input_ids"]
    with Float64():
        model = model_of("qwen3")
        with torch.no_grad():
            cache = model(input_ids=ids[:, :9], use_cache=True).past_key_values
        with streamtune.stream(model, chunk_size=4) as handle:
            scores = handle.logprobs(ids[:, 9:-1], ids[:, 10:], past_key_values=cache).logprobs
            want = model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids.roll(-1, 1)[..., None])[:, 9:-1, 0]
        torch.testing.assert_close(scores, want, rtol=1e-9, atol=1e-12)


def test_what_is_refused() -> None:
    ids = tokens()["input_ids"]
    model = model_of("gemma3_text")  # keeps a window of 9
    with Float64(), streamtune.stream(model, chunk_size=4):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(UnsupportedModelError, match=r"the cache holds 8 keys for 23 tokens"):
            model(input_ids=ids, labels=ids, past_key_values=cache)
    model = model_of("qwen3")
    with Float64(), streamtune.stream(model, chunk_size=4):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        dense = torch.ones(2, 1, 23, 46, dtype=torch.bool).tril(23)
        with pytest.raises(UnsupportedModelError, match="'attention_mask' is a dense mask"):
            model(input_ids=ids, labels=ids, past_key_values=copy.deepcopy(cache), attention_mask=dense)
        loss = model(input_ids=ids, labels=ids, past_key_values=cache).loss
        cache.layers[0].keys.mul_(2)
        with pytest.raises(ArgumentError, match="the cache that was passed was changed in place"):
            loss.backward()
        model(input_ids=ids, labels=ids, past_key_values=DynamicCache()).loss.backward()


def test_a_state_that_was_left_is_refused() -> None:
    ids = tokens()["input_ids"]
    model = model_of("qwen3_next")
    with Float64(), streamtune.stream(model, chunk_size=4):
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(UnsupportedModelError, match="a cache was passed while gradients are on"):
            model(input_ids=ids, labels=ids, past_key_values=cache)


def test_caches_that_are_refused_by_name() -> None:
    """States in the place of keys; another number of rows; keys under another number than the layer's own."""
    ids = tokens()["input_ids"]
    for family, rows, said in (
        ("mamba2", 2, "a cache of recurrent states was passed"),
        ("qwen3", 1, "the cache holds 1 rows for a call of 2 rows"),
        ("minimax", 2, "holds no keys and values under this layer's index"),
        ("hrm_text", 2, "layer 0 writes its keys to index 1 of the cache"),
    ):
        model = model_of(family)
        name = "cache_params" if family == "mamba2" else "past_key_values"
        with Float64(), streamtune.stream(model, chunk_size=4):
            with torch.no_grad():
                cache = model(input_ids=ids[:rows], use_cache=True)[name]
            with pytest.raises(UnsupportedModelError, match=said):
                model(input_ids=ids, labels=ids, **{name: cache})


def test_labels_do_not_keep_a_cache_from_being_returned() -> None:
    ids = tokens()["input_ids"]
    model = model_of("qwen3")
    with Float64(), torch.no_grad():
        want = model(input_ids=ids, labels=ids, use_cache=True).past_key_values
        with streamtune.stream(model, chunk_size=4):
            got = model(input_ids=ids, labels=ids, use_cache=True).past_key_values
            assert model(input_ids=ids, labels=ids).past_key_values is None
    torch.testing.assert_close(got.layers[1].keys, want.layers[1].keys, rtol=1e-9, atol=1e-12)
