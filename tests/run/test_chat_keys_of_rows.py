"""Keys of chats that have no effect on the rows of a recipe are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.recipe import load_recipe
from streamtune.run.data import make_sources, unread_chat_keys_note


@pytest.mark.parametrize(
    ("row", "objective", "is_chat"),
    [
        ({"text": "Two."}, "sft", False),
        ({"prompt": "One?", "completion": "Two."}, "sft", False),
        ({"instruction": "One?", "output": "Two."}, "sft", True),
        ({"prompt": "One?", "chosen": "Two.", "rejected": "No."}, "dpo", False),
        ({"prompt": "One?", "answer": "Two."}, "grpo", False),
        ({"prompt": [{"role": "user", "content": "One?"}], "answer": "Two."}, "grpo", True),
    ],
)
def test_keys_of_chats_are_named_if_no_dataset_is_one(
    tmp_path: Path, row: dict[str, Any], objective: str, is_chat: bool
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys: dict[str, Any] = {"default_system": "Be brief.", "model_name_or_path": "none", "datasets": ["rows.jsonl"]}
    keys |= {"objective": objective} | ({"reward_funcs": ["length"]} if objective == "grpo" else {})
    (tmp_path / "recipe.yaml").write_text(json.dumps(keys))
    loaded = load_recipe(tmp_path / "recipe.yaml")
    note = unread_chat_keys_note(loaded.recipe, make_sources(loaded))
    assert (note is None) == is_chat
    assert is_chat or "'default_system' has no effect on rows of plain text" in str(note)
    loaded = load_recipe(tmp_path / "recipe.yaml", ["default_system=x", "eval_datasets.chats=chats.jsonl"])
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "One?"}]}) + "\n")
    assert (unread_chat_keys_note(loaded.recipe, make_sources(loaded)) is None) == is_chat
