"""Models whose checkpoints have layers for multi-token prediction: the causal model is exact, the draft model refused.

``transformers`` builds the causal model without those layers, whatever the configuration says.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers.modeling_layers import MtpModel

import streamtune
from streamtune.engine import decoder_layers
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build

from .families import batch, gradients, reference

COUNTS = {"deepseek_v3": "num_nextn_predict_layers", "glm4_moe": "num_nextn_predict_layers"}


def with_draft_layers(family: str) -> Any:
    model: Any = build(family)
    assert getattr(model.config, COUNTS[family]) == 1
    return model


@pytest.mark.parametrize("kind", ["plain", "masked", "right"])
@pytest.mark.parametrize("family", COUNTS)
def test_the_causal_model_streams_exactly(family: str, kind: str) -> None:
    model, inputs = with_draft_layers(family), batch(kind)
    assert len(decoder_layers(model)) == model.config.num_hidden_layers
    want = reference(model, inputs)
    for keep_kv in (False, True):
        with streamtune.stream(model, schedule=streamtune.Schedule(chunk_size=8, keep_kv=keep_kv)):
            want.check(gradients(model, inputs))


@pytest.mark.parametrize("family", COUNTS)
def test_the_model_that_drafts_is_refused(family: str) -> None:
    model = with_draft_layers(family)
    with pytest.raises(UnsupportedModelError, match="MtpModel holds multi-token prediction layers"):
        streamtune.stream(MtpModel(model, 1))
    streamtune.stream(model).remove()
