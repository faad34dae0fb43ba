"""Folders that models save are loaded: configuration, sizes, tensors pass the checks that refuse damaged folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from streamtune.models import find_deferred_weights, load_model, load_model_deferred
from streamtune.models.model_class import frozen_modules, is_inside
from tests.conformance.reducer import IMAGE_TEXT, build, family_names

NAMES = family_names()
FEW = ("gemma4_text", "gpt2", "mamba2", "mixtral", "qwen3_next", "qwen3_vl/image-text")
"""Layers that differ, buffers of old checkpoints, a state, stacked experts, two kinds of layers, a vision tower."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in NAMES])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    try:
        model = build(name)
        model.save_pretrained(tmp_path)
        (AutoModelForImageTextToText if name.endswith(IMAGE_TEXT) else AutoModelForCausalLM).from_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"transformers alone does not build, save and load it: {type(error).__name__}")
    loaded = load_model(str(tmp_path))
    frozen = frozen_modules(loaded)
    for (key, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
        assert ours.requires_grad != is_inside(key, frozen), key
    assert find_deferred_weights(load_model_deferred(str(tmp_path))) is not None
