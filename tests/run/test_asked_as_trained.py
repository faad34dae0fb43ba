"""Prompts of samples and answers are rendered as in training: with the recipe's system message and variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.programs.generate.answer import GenerateOptions, load_answerer
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' aloud' if shout and m.role == 'user' else '' }} "
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    options = {
        "chat_template": "template.jinja",
        "default_system": "Be brief.",
        "chat_template_kwargs": {"shout": True},
        "sample": {"prompt": "hello", "max_new_tokens": 4},
        "max_steps": 1,
        "output_dir": "trained",
    }
    write_rows(tmp_path, 8)
    write_recipe(tmp_path, {**RECIPE, "model": {"init": QWEN3}, "engine": FIXED, **options})
    assert run() == 0
    return tmp_path / "trained"


def test_a_run_answers_as_it_was_asked_in_training(trained: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_new_tokens": 4}
    answerer = load_answerer(str(trained), GenerateOptions(**options))
    asked = "<|im_start|>system Be brief.<|im_end|><|im_start|>user aloud hello<|im_end|><|im_start|>assistant "
    assert answerer.tokenizer.decode(answerer.encode("hello")) == asked
    other = load_answerer(str(trained), GenerateOptions(**options, system="Be long.", variables={"shout": False}))
    assert "Be long.<|im_end|><|im_start|>user hello" in other.tokenizer.decode(other.encode("hello"))
    assert json.loads((trained / "samples.jsonl").read_text().splitlines()[-1])["prompt"] == "hello"
