"""Every causal language model of transformers is streamed exactly or refused; none is wrong without saying so."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.conformance import survey as module
from tests.conformance.exceptions import EXCEPTIONS
from tests.conformance.survey import FAULTS, Category, classify, survey

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
KNOWN_VERSION = "5.23."
KNOWN_NOT_BUILT = {
    "cohere_compass_text",
    "dots3_note",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "moss_transcribe_diarize",
    "musicgen",
    "musicgen_melody",
}
if importlib.util.find_spec("timm"):
    KNOWN_NOT_BUILT -= {"gemma3n"}  # its vision tower needs that library


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_exact_or_refused(name: str, record_property) -> None:
    found = survey(name)
    record_property("conformance", {**asdict(found), "category": str(found.category), "notes": list(found.notes)})
    assert found.category not in FAULTS, f"{found.category}: {found.reason}"
    if transformers.__version__.startswith(KNOWN_VERSION):
        not_built = found.category is Category.NOT_BUILT
        assert not_built == (name in KNOWN_NOT_BUILT), f"{found.category}: {found.reason}"


@pytest.mark.skipif(not transformers.__version__.startswith(KNOWN_VERSION), reason="the names differ by version")
def test_the_tables_name_models_that_exist() -> None:
    assert set(NAMES) >= EXCEPTIONS.keys() | KNOWN_NOT_BUILT


def test_an_exact_model_is_found_exact() -> None:
    found = classify("llama")
    assert found.category is Category.EXACT
    assert found.notes == ()
    assert 0 < found.error <= module.BOUND


def test_what_fp32_leaves_open_is_settled_in_fp64(monkeypatch) -> None:
    monkeypatch.setattr(module, "BOUND", 0.0)
    found = classify("llama")
    assert found.category is Category.EXACT
    assert "settled in fp64" in found.notes[0]


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    exact = module.gradients
    calls = iter(range(10**6))

    def one_parameter_off(model, inputs):
        loss, grads = exact(model, inputs)
        if next(calls) % 3:  # of each three, the first is the reference
            grads["model.norm.weight"] = grads["model.norm.weight"] * (1 + 1e-4)
        return loss, grads

    monkeypatch.setattr(module, "gradients", one_parameter_off)
    found = classify("llama")
    assert found.category is Category.SILENTLY_WRONG
    assert "model.norm.weight" in found.reason


def test_a_name_without_an_answer_counts_as_crashed() -> None:
    found = survey("llama", limit=0.001)
    assert found.category is Category.CRASHED
    assert "no answer" in found.reason
