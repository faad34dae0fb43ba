"""Folders that models save are loaded: configuration, sizes, tensors pass the checks that refuse damaged folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from streamtune.models import find_deferred_weights, load_model, load_model_deferred
from tests.conformance.reducer import build

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FEW = ("gemma4_text", "gpt2", "mamba2", "mixtral", "qwen3_next")
"""Layers that differ, buffers of old checkpoints, a state, stacked experts, two kinds of layers."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in NAMES])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    try:
        model = build(name)
        model.save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"transformers alone does not build, save and load it: {type(error).__name__}")
    loaded = load_model(str(tmp_path))
    for (key, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
    assert find_deferred_weights(load_model_deferred(str(tmp_path))) is not None
