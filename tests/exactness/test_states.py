"""Layers that carry a state from chunk to chunk, or share keys and values: exact whatever the chunks are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import streamtune
from streamtune import Schedule
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build as build_any
from tests.precision_kit import EXACT, Float64, in_float64

from .families import BATCHES, BOUND, batch, build, evaluation, gradients, reference, worst

STATES = {
    "qwen3_next": "gated delta rule, attention, experts",
    "mamba2": "state space, convolution",
    "mamba": "a scan that knows no initial state",
    "falcon_h1": "state space and attention in one layer",
    "lfm2": "convolution, attention",
    "zamba2": "a second stream of hidden states, shared blocks",
    "zaya": "a convolution over queries and keys, a second output",
    "minimax": "a linear attention with a cache of its own",
    "rwkv": "no attention; a state as an argument, in columns of tensors of all layers",
    "xlstm": "a state as an argument, given back",
}
BY_ARGUMENT = ("rwkv", "xlstm")
SCHEDULES = (
    Schedule(chunk_size=37),
    Schedule(chunk_size=16),
    Schedule(chunk_size=5, keep_kv=True),
    Schedule(chunk_size=1),  # in effect 2: one token alone is the layers' decoding path
)
SHARING: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 3,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 8},
}


def sharing(family: str) -> Any:
    """Four layers, of which the last two read the keys and values of the first two."""
    return build(
        family,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=9,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        **SHARING[family],
    )


def inputs_of(family: str, kind: str) -> dict[str, Any]:
    """A batch without what the family does not take. In training RWKV makes no cache; xLSTM's has larger heads here."""
    inputs: dict[str, Any] = batch(kind)
    if family in ("mamba", "mamba2", *BY_ARGUMENT):
        inputs.pop("position_ids", None)
    if family in BY_ARGUMENT:
        inputs.pop("attention_mask", None)
        inputs["use_cache"] = False
    return inputs


@pytest.mark.quick("mamba2", "lfm2")
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", STATES)
def test_states_are_carried_and_their_gradients_handed_back(
    family: str, kind: str, error_table: dict[str, dict[str, float]]
) -> None:
    model, inputs = build_any(family), inputs_of(family, kind)
    row = error_table.setdefault(family, {})
    want = reference(model, inputs)
    for schedule in SCHEDULES:
        with streamtune.stream(model, schedule=schedule):
            error = want.check(gradients(model, inputs), (family, kind, schedule))
        row[kind] = max(row.get(kind, 0.0), error)


@pytest.mark.quick("qwen3_next", "mamba2")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba", "falcon_h1"])
def test_the_state_matters(family: str) -> None:
    """The longest way a token's influence takes here is through a state: without it the bound is missed by far."""
    model, inputs = build_any(family), batch("plain")
    inputs.pop("position_ids", None)
    _, want = gradients(model, inputs)

    def forgetful(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        parts = [{key: value[:, start : start + 16] for key, value in inputs.items()} for start in (0, 16, 32)]
        return sum(model(**part, num_items_in_batch=3 * 36).loss for part in parts)

    _, got = gradients(model, inputs, forgetful)
    assert worst(got, want) > 100 * BOUND


@pytest.mark.full
@pytest.mark.parametrize("family", STATES)
def test_fp64_leaves_no_doubt(family: str) -> None:
    inputs = inputs_of(family, "left")
    with Float64():
        model = in_float64(build_any(family))  # built here, since minimax makes its tables of decays then
        _, want = gradients(model, inputs)
        with streamtune.stream(model, chunk_size=6):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


@pytest.mark.quick("qwen3_next", "mamba2")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "mamba", "falcon_h1", "lfm2", "zaya"])
def test_under_autocast_they_are_as_precise_as_plain_autograd(family: str) -> None:
    model, inputs = build_any(family), batch("plain")

    def autocast(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**inputs).loss

    truth = reference(model, inputs).truth[1]
    _, plain = gradients(model, inputs, autocast)
    with streamtune.stream(model, chunk_size=8):
        _, ours = gradients(model, inputs, autocast)
    off, own = (sum(float((g[name] - truth[name]).norm()) ** 2 for name in truth) ** 0.5 for g in (ours, plain))
    assert off <= 1.1 * own


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_evaluation_streams_as_well(family: str) -> None:
    model, inputs = build_any(family).eval(), batch("plain")
    want = evaluation(model, inputs)
    with torch.no_grad(), streamtune.stream(model, chunk_size=5):
        want.check((model(**inputs).loss, {}))


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_the_mixers_are_left_as_they_were(family: str) -> None:
    model, inputs = build_any(family), batch("plain")
    with streamtune.stream(model, chunk_size=8):
        model(**inputs).loss.backward()
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_generation_is_the_models_own(family: str) -> None:
    model = build_any(family).eval()
    ids = batch("plain")["input_ids"][:1, :9]
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    with streamtune.stream(model, chunk_size=4):
        got = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "multiturn", "left", "right"])
@pytest.mark.parametrize("family", SHARING)
def test_shared_keys_and_values_get_the_gradients_of_all_their_readers(family: str, kind: str) -> None:
    model, inputs = sharing(family), batch(kind)
    want = reference(model, inputs)
    for schedule in SCHEDULES:
        with streamtune.stream(model, schedule=schedule):
            want.check(gradients(model, inputs), schedule)
    with streamtune.stream(model) as handle:
        handle.check()


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma4_unified_text", "gemma4_text", "gemma3n_text"])
def test_keys_of_a_layer_that_runs_again_for_its_segment(family: str) -> None:
    """The layer behind it in the segment was handed them: they are written once more before its own backward."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with Float64():
        model, inputs = in_float64(build_any(family)), batch("plain")
        _, want = gradients(model, inputs)
        for segment in (2, 3):
            schedule = Schedule(chunk_size=6, levels=2, segment_size=segment, offload="host", stream_grads=True)
            with streamtune.stream(model, schedule=schedule):
                _, got = gradients(model, inputs)
            assert worst(got, want) <= EXACT


@pytest.mark.parametrize("family", SHARING)
def test_shared_keys_and_values_in_fp64(family: str) -> None:
    model, inputs = in_float64(sharing(family)), batch("left")
    with Float64():
        _, want = gradients(model, inputs)
        with streamtune.stream(model, chunk_size=6):
            _, got = gradients(model, inputs)
    assert worst(got, want) <= EXACT


@pytest.mark.parametrize("frozen", ["producer", "reader"])
def test_shared_keys_and_values_with_frozen_layers(frozen: str) -> None:
    model, inputs = sharing("gemma4_text"), batch("plain")
    layers = model.model.layers
    for layer in layers[:2] if frozen == "producer" else layers[2:]:
        layer.requires_grad_(False)
    if frozen == "producer":
        model.get_input_embeddings().requires_grad_(False)
        model.model.embed_tokens_per_layer.requires_grad_(False)
        model.model.per_layer_model_projection.requires_grad_(False)
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("family", BY_ARGUMENT)
def test_a_state_that_is_passed(family: str) -> None:
    """Generation goes on from it as without streaming; with gradients on it is refused."""
    model = build_any(family).eval()
    ids = batch("plain")["input_ids"][:, :12]
    if family == "xlstm":  # its cache has heads of the size that the configuration says
        model.config.max_inference_chunksize = 64
    with torch.no_grad(), Float64():
        model = in_float64(model).eval()
        want = model(ids, use_cache=False).logits
        one = model(ids[:, :1], use_cache=False).logits
        with streamtune.stream(model, chunk_size=5):
            torch.testing.assert_close(model(ids, use_cache=False).logits, want, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(model(ids[:, :1], use_cache=False).logits, one, rtol=1e-9, atol=1e-12)
    if family == "rwkv":
        with torch.no_grad(), Float64():
            first = model(ids[:, :7], use_cache=True)
            wanted = model(ids[:, 7:8], state=[part.clone() for part in first.state], use_cache=True).logits
        with Float64(), streamtune.stream(model, chunk_size=5):
            with torch.no_grad():
                state = model(ids[:, :7], use_cache=True).state
                got = model(ids[:, 7:8], state=[part.clone() for part in state], use_cache=True).logits
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
            with pytest.raises(UnsupportedModelError, match="the layer takes a recurrent state"):
                model(ids[:, 7:], state=state)
