"""``third_party_code_of``: Python code of a model is named if the model can bring any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamtune.recipe import Recipe, third_party_code_of


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": {"model_type": "llama"}}, False),
        ({"config.json": {"model_type": "llama"}, "modeling_own.py": {}}, True),
        ({"config.json": {"auto_map": {"AutoModelForCausalLM": "own/repo--modeling.Own"}}}, True),
        ({"config.json": {}, "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["own/repo--t.T", None]}}}, True),
        ({"adapter_config.json": {"base_model_name_or_path": "own/model"}}, True),
        ({}, False),
    ],
)
def test_a_folder_without_python_runs_none(files: dict[str, object], said: bool, tmp_path: Path) -> None:
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    recipe = Recipe.model_validate(
        {"model_name_or_path": str(tmp_path), "trust_remote_code": True, "datasets": [{"path": "a"}]}
    )
    assert bool(third_party_code_of(recipe)) is said


def test_a_configuration_in_other_letters_is_read(tmp_path: Path) -> None:
    """JSON keys may have escapes; a file that is not JSON counts as naming code."""
    for text in ('{"\\u0061uto_map": {}}', "{"):
        (tmp_path / "config.json").write_text(text)
        recipe = Recipe.model_validate(
            {"model_name_or_path": str(tmp_path), "trust_remote_code": True, "datasets": [{"path": "a"}]}
        )
        assert third_party_code_of(recipe)


def test_a_name_on_a_hub_may_bring_python() -> None:
    named = {"model_name_or_path": "own/model", "tokenizer": {"path": "own/tokenizer"}, "datasets": [{"path": "a"}]}
    assert third_party_code_of(Recipe.model_validate(named)) == []
    (said,) = third_party_code_of(Recipe.model_validate({**named, "trust_remote_code": True}))
    assert said == "Python code of own/model and own/tokenizer (trust_remote_code)"
