"""Folders that models save are loaded: configuration, sizes, tensors pass the checks that refuse damaged folders.

Recipes train exact families, but for a few that they refuse by name. Of other families, one error says what is wrong.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from streamtune.errors import StreamTuneError
from streamtune.models import find_deferred_weights, load_model, load_model_deferred
from streamtune.models.model_class import frozen_modules, is_inside
from tests.conformance.reducer import IMAGE_TEXT, build, family_names
from tests.conformance.table import outcomes
from tests.conformance.test_conformance import FAMILIES

NAMES = family_names()
FEW = ("gemma4_text", "gpt2", "mamba2", "mixtral", "qwen3_next", "qwen3_vl/image-text")
"""Layers that differ, buffers of old checkpoints, a state, stacked experts, two kinds of layers, a vision tower."""

REFUSED = {
    "molmo2/image-text": "trained only with the type of each token",
    "shieldgemma2/image-text": "has no weights for .* parameters of Gemma3ForConditionalGeneration",
}
"""Exact families that recipes refuse -> the error. ShieldGemma 2 is a classifier around Gemma 3."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in NAMES])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    try:
        model = build(name)
        model.save_pretrained(tmp_path)
        (AutoModelForImageTextToText if name.endswith(IMAGE_TEXT) else AutoModelForCausalLM).from_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"transformers alone does not build, save and load it: {type(error).__name__}")
    if name in REFUSED:
        with pytest.raises(StreamTuneError, match=REFUSED[name]):
            load_model(str(tmp_path))
        return
    is_exact = outcomes(FAMILIES.read_text(encoding="utf-8")).get(name) == "exact"
    try:
        loaded = load_model(str(tmp_path))
    except StreamTuneError:
        assert not is_exact
        return
    frozen = frozen_modules(loaded)
    for (key, ours), theirs in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), key
        assert ours.requires_grad == (theirs.requires_grad and not is_inside(key, frozen)) or not is_exact, key
    if is_exact:
        assert find_deferred_weights(load_model_deferred(str(tmp_path))) is not None
