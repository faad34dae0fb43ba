"""Calls in odd surroundings: interrupts, caches, parametrisations, hooks of libraries, buffers that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import streamtune
from streamtune.errors import ArgumentError, UnsupportedModelError
from tests.conformance.reducer import build
from tests.precision_kit import Float64, errors, in_float64

IDS = torch.randint(5, 60, (2, 23), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, *args: Any, **call: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(*args, **call).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("removed", [False, True])
def test_an_interrupt_in_a_call_leaves_the_head_as_it_was(removed: bool) -> None:
    model = build("llama").eval()
    want = model(input_ids=IDS).logits
    handle = streamtune.stream(model, chunk_size=5)
    hook = model.model.layers[0].register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=IDS, labels=IDS)
    hook.remove()
    if removed:
        handle.remove()
        assert "forward" not in model.lm_head.__dict__
        assert "_loss_function" not in model.__dict__
    torch.testing.assert_close(model(input_ids=IDS).logits, want, rtol=1e-4, atol=1e-5)


def test_labels_by_place() -> None:
    with Float64():
        model = build("gemma2").double().eval()
        mask = torch.ones_like(IDS)
        mask[0, :4] = 0
        call = (IDS, mask, None, None, None, IDS.masked_fill(mask == 0, -100))
        want = gradients(model, *call, use_cache=False)
        with streamtune.stream(model, chunk_size=5):
            with pytest.warns(UserWarning, match="predicted from left padding"):
                got = gradients(model, *call, use_cache=False)
            assert model.train()(*call).logits is None
    assert max(errors(got, want).values()) < 1e-9


def test_a_call_with_gradients_returns_no_empty_cache() -> None:
    model = build("llama").eval()
    with streamtune.stream(model, chunk_size=5):
        assert model(input_ids=IDS).past_key_values is None
        with torch.no_grad():
            assert model(input_ids=IDS).past_key_values.get_seq_length() == 23


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_parametrised_weights_are_refused_where_they_are_cached() -> None:
    with Float64():
        model = build("llama").double()
        parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
        want = gradients(model, input_ids=IDS, labels=IDS)
        with streamtune.stream(model, chunk_size=5):
            got = gradients(model, input_ids=IDS, labels=IDS)
            with parametrize.cached(), pytest.raises(UnsupportedModelError, match=r"parametrize\.cached"):
                model(input_ids=IDS, labels=IDS)
    assert max(errors(got, want).values()) < 1e-9


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, torch.nn.utils.spectral_norm])
def test_a_spectral_norm_in_a_layer_is_refused(norm: Any) -> None:
    model = build("llama")
    norm(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModelError, match="spectral norm in its LlamaDecoderLayer"):
        streamtune.stream(model, chunk_size=5)


def test_a_buffer_that_is_changed_in_between_is_named() -> None:
    """Of routers whose bias is moved after the forward: the backward would choose other experts."""
    model = in_float64(build("deepseek_v3"))
    name, bias = next((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    with streamtune.stream(model, chunk_size=5):
        loss = model(input_ids=IDS, labels=IDS).loss
        bias.add_(torch.linspace(-1, 1, bias.numel()))
        with pytest.raises(ArgumentError, match="e_score_correction_bias was changed in place"):
            loss.backward()
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert name


def test_hooks_of_peft_inside_of_layers_are_refused() -> None:
    """They are there for the forward alone, and not for the layers that the backward runs again."""
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(build("llama"), config)
    model.add_adapter("other", config)
    model.eval()
    with (
        streamtune.stream(model, chunk_size=5),
        pytest.raises(UnsupportedModelError, match="adapter_names_pre_forward_hook"),
    ):
        model(input_ids=IDS, labels=IDS, adapter_names=["default", "other"])


def test_a_vector_that_a_chunkwise_hook_brings_later_is_refused() -> None:
    model = build("llama")
    direction = torch.zeros(32)
    model.model.layers[0].mlp.register_forward_hook(streamtune.chunkwise(lambda module, args, out: out + direction))
    with streamtune.stream(model, chunk_size=5):
        model(input_ids=IDS, labels=IDS).loss.backward()
        direction.requires_grad_()
        loss = model(input_ids=IDS, labels=IDS).loss
        with pytest.raises(UnsupportedModelError, match="uses a trainable tensor"):
            loss.backward()


def test_as_many_rows_as_tokens() -> None:
    """Streams of hidden states [N, B, T, C]: which dimension is the sequence does not hang on its size."""
    ids = torch.randint(5, 60, (8, 8), generator=torch.Generator().manual_seed(1))
    with Float64():
        model = build("gemma3n_text").double()
        want = gradients(model, input_ids=ids, labels=ids, use_cache=False)
        with streamtune.stream(model, chunk_size=3):
            got = gradients(model, input_ids=ids, labels=ids)
    assert max(errors(got, want).values()) < 1e-9
