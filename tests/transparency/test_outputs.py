"""Outputs of a streamed model besides its loss: those of the ordinary call, or refused."""

from __future__ import annotations

import pytest
import torch

import streamtune
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build

IDS = torch.randint(3, 60, (2, 27), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "bloom", "jamba", "falcon_h1", "gemma3n_text"])
@pytest.mark.parametrize("labels", [None, IDS])
def test_hidden_states_are_those_of_the_whole_sequence(family: str, labels: torch.Tensor | None) -> None:
    model = build(family).eval()
    want = model(input_ids=IDS, labels=labels, output_hidden_states=True, use_cache=False).hidden_states
    with streamtune.stream(model, chunk_size=9):
        got = model(input_ids=IDS, labels=labels, output_hidden_states=True, use_cache=False).hidden_states
    assert len(got) == len(want)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_layers_inside_of_layers_record_pieces_which_are_refused(family: str) -> None:
    model = build(family).eval()
    with streamtune.stream(model, chunk_size=9):
        with pytest.raises(UnsupportedModelError, match="records hidden states inside its decoder layers") as caught:
            model(input_ids=IDS, labels=IDS, output_hidden_states=True)
        assert "9 of 27 tokens" in caught.value.what
        model(input_ids=IDS, labels=IDS).loss.backward()  # and the next call is an ordinary one
        assert model(input_ids=IDS).logits.shape == (2, 27, model.config.vocab_size)
