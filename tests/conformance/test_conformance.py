"""Every causal language model of transformers is streamed exactly or refused; none is wrong without saying so."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import transformers

from tests.conformance import survey as module
from tests.conformance.exceptions import EXCEPTIONS, NOT_CAUSAL
from tests.conformance.reducer import family_names
from tests.conformance.survey import FAULTS, Category, classify, survey
from tests.conformance.table import outcomes, render

NAMES = family_names()
KNOWN_VERSION = "5.24."
KNOWN_NOT_BUILT = {
    f"{name}/image-text" for name in ("fast_vlm", "inkling_mm_model", "perception_lm", "pi0", "t5gemma2")
}
"""Three need packages that are not installed, two have parts that their keys do not describe."""

REPRESENTATIVE = {
    "bart": "its own loss",
    "bloom": "alibi, dense tiles",
    "ctrl": "layers that do not say they are some",
    "deepseek_v3": "multi-head latent attention",
    "doge": "a mask with a gradient",
    "falcon": "its own attention, by sdpa",
    "glm_moe_dsa": "an indexer whose choice goes from layer to layer",
    "gptj": "position numbers instead of rotations",
    "hy_v4": "several residual streams",
    "inkling2_text": "distances of tokens to keys",
    "moss_transcribe_diarize": "a model of several parts",
    "mpt": "a mask the model computes with",
    "prophetnet": "refused by check()",
    "rwkv": "a state in the place of a cache",
    "xlm": "not a causal decoder",
}
"""One name for each way through the engine and the survey; the others only where slow tests are asked for."""
FAMILIES = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


@pytest.mark.quick("mpt", "prophetnet", "xlm")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.slow) for name in NAMES]
)
def test_exact_or_refused(name: str, record_property) -> None:
    found = survey(name)
    record_property("conformance", {**asdict(found), "category": str(found.category), "notes": list(found.notes)})
    assert found.category not in FAULTS, f"{found.category}: {found.reason}"
    if transformers.__version__.startswith(KNOWN_VERSION):
        not_built = found.category is Category.NOT_BUILT
        assert not_built == (name in KNOWN_NOT_BUILT), f"{found.category}: {found.reason}"
        if outcomes(FAMILIES.read_text(encoding="utf-8")).get(name) == "exact":
            assert found.category is Category.EXACT, f"no longer exact; {found.category}: {found.reason}"


@pytest.mark.skipif(not transformers.__version__.startswith(KNOWN_VERSION), reason="the names differ by version")
def test_the_committed_table_is_whole() -> None:
    text = FAMILIES.read_text(encoding="utf-8")
    assert sorted(outcomes(text)) == NAMES
    assert f"`transformers` {KNOWN_VERSION}" in text
    assert not {"crashed", "silently wrong"} & set(outcomes(text).values())


def test_the_table_is_sorted_counted_and_read_back() -> None:
    rows = [
        {"name": "b", "category": "refused by check()", "reason": "x | y\nat z", "error": 1.0, "notes": ["n"]},
        {"name": "c", "category": "not a causal decoder", "reason": "why", "error": None, "notes": []},
        {"name": "a", "category": "exact", "reason": "", "error": 4.2e-7, "notes": ["dense tiles"]},
    ]
    text = render(rows, "5.0")
    assert text == render(rows[::-1], "5.0")
    assert outcomes(text) == {"a": "exact", "b": "refused", "c": "not a causal decoder"}
    assert "**50.0%** of the 2 causal decoder families are exact" in text
    assert text.splitlines()[-3:] == [
        "| `a` | exact | 4e-07 | dense tiles |",
        "| `b` | refused |  | x \\| y; n |",
        "| `c` | not a causal decoder |  | why |",
    ]


@pytest.mark.skipif(not transformers.__version__.startswith(KNOWN_VERSION), reason="the names differ by version")
def test_the_tables_name_models_that_exist() -> None:
    assert set(NAMES) >= EXCEPTIONS.keys() | KNOWN_NOT_BUILT | NOT_CAUSAL.keys() | REPRESENTATIVE.keys()


def test_an_exact_model_is_found_exact() -> None:
    found = classify("llama")
    assert found.category is Category.EXACT
    assert found.notes == ()
    assert 0 < found.error <= module.BOUND


@pytest.mark.full
def test_what_fp32_leaves_open_is_settled_in_fp64(monkeypatch) -> None:
    monkeypatch.setattr(module, "BOUND", 0.0)
    found = classify("llama")
    assert found.category is Category.EXACT
    assert "settled in fp64" in found.notes[0]


@pytest.mark.full
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
