"""Mixtures, eval sets, columns and tokens of other trainers' recipes, and their names in ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamtune.programs.imports.importing import ImportedRecipe, import_recipe
from streamtune.recipe import Recipe, load_recipe

INFO = {
    "chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "turns", "system": "sys"}},
    "openai": {"file_name": "openai.json", "formatting": "sharegpt", "columns": {"messages": "talk"},
               "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                        "assistant_tag": "assistant"}},
    "tasks": {"file_name": "tasks.json", "columns": {"prompt": "question", "query": "context", "response": "answer"}},
    "pairs": {"hf_hub_url": "own/pairs", "num_samples": 50, "columns": {"prompt": "q", "response": "a"}},
    "test": {"file_name": "test set.json"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the datasets' descriptions of LLaMA-Factory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


def imported(text: str, name: str = "theirs.yaml") -> tuple[ImportedRecipe, Recipe]:
    """Return the import, and the recipe that it writes."""
    Path(name).write_text(text)
    found = import_recipe(Path(name))
    Path("ours.yaml").write_text(found.text)
    return found, load_recipe("ours.yaml").recipe


def lost(found: ImportedRecipe) -> list[str]:
    return [each.theirs.partition(":")[0] for each in found.findings_of_kind("lost")]


def test_llamafactory() -> None:
    found, recipe = imported("""
model_name_or_path: own/base
stage: sft
template: qwen3
cutoff_len: 512
dataset: chats,openai,tasks,pairs
eval_dataset: test
mix_strategy: interleave_over
interleave_probs: 0.4,0.3,0.2,0.1
eval_on_each_dataset: true
add_tokens: <think>,</think>
add_special_tokens: [<tool>]
resize_vocab: true
""")
    assert lost(found) == ["template"]
    assert [(each.columns, each.type, each.weight, each.shuffle) for each in recipe.datasets] == [
        ({"conversations": "turns", "system": "sys"}, "sharegpt", 0.4, False),
        ({"messages": "talk"}, "messages", 0.3, False),
        ({"instruction": "question", "input": "context", "output": "answer"}, "alpaca", 0.2, False),
        ({"instruction": "q", "output": "a"}, "alpaca", 0.1, True),
    ]
    assert {name: [each.path for each in sets] for name, sets in recipe.eval_datasets.items()} == {
        "test-set": ["data/test set.json"]
    }
    assert recipe.added_tokens == ("<think>", "</think>")
    assert recipe.special_tokens.additional_special_tokens == ("<tool>",)


def test_axolotl() -> None:
    found, recipe = imported("""
base_model: own/base
sequence_len: 512
datasets:
  - {path: a.jsonl, type: chat_template, field_messages: talk}
  - {path: b.jsonl, type: completion, field: body}
test_datasets:
  - {path: eval/code.jsonl, type: completion, split: train}
special_tokens: {pad_token: <pad>, eos_token: <|im_end|>}
tokens: [<|im_start|>]
evals_per_epoch:
eval_steps: 10
""")
    assert lost(found) == ["excess_length_strategy"]  # rows of text are cut into pieces there, chats are left out
    assert (recipe.overlength, recipe.split_at) == ("split", "token")
    assert [each.columns for each in recipe.datasets] == [{"messages": "talk"}, {"text": "body"}]
    assert [(name, sets[0].path, sets[0].type) for name, sets in recipe.eval_datasets.items()] == [
        ("code", "eval/code.jsonl", "text")
    ]
    assert recipe.eval_steps == 10
    assert (recipe.special_tokens.pad_token, recipe.special_tokens.eos_token) == ("<pad>", "<|im_end|>")
    assert recipe.added_tokens == ("<|im_start|>",)


def test_trl() -> None:
    found, recipe = imported("""
model_name_or_path: own/base
dataset_name: own/rows
dataset_config: en
dataset_test_split: validation
eval_strategy: steps
eval_steps: 20
eos_token: <|im_end|>
shuffle_dataset: false
completion_only_loss: true
""")
    assert lost(found) == []
    [spec] = recipe.eval_datasets["test"]
    assert (spec.path, spec.split, spec.name) == ("own/rows", "validation", "en")
    assert (recipe.eval_steps, recipe.shuffle, recipe.special_tokens.eos_token) == (20, True, "<|im_end|>")


def test_swift() -> None:
    found, recipe = imported(
        """swift sft --model own/base --use_hf true --max_length 512 --dataset own/a#500 rows.jsonl
--val_dataset eval/code.jsonl --interleave_prob 0.7 0.3 --new_special_tokens '<a>' '<b>'
--columns '{"question": "query", "answer": "response"}'
""".replace("\n", " "),
        "s.sh",
    )
    assert lost(found) == ["template"]
    columns = {"instruction": "question", "output": "answer"}
    assert [(each.max_rows, each.shuffle, each.weight, each.columns) for each in recipe.datasets] == [
        (500, True, 0.7, columns), (None, False, 0.3, columns),
    ]  # fmt: skip
    assert list(recipe.eval_datasets) == ["code"]
    assert recipe.special_tokens.additional_special_tokens == ("<a>", "<b>")


@pytest.mark.parametrize(
    ("lines", "lost_field"),
    [("mix_strategy: interleave_under\ninterleave_probs: 0.5\n", "interleave_probs"),
     ("special_tokens: {cls_token: x}\n", "special_tokens")],
    ids=["another-number", "another-token"],
)  # fmt: skip
def test_what_cannot_be_said_is_lost(lines: str, lost_field: str) -> None:
    peer = "stage: sft\nmodel_name_or_path: own/base\ncutoff_len: 9\ndataset: chats,openai\n"
    if lost_field == "special_tokens":
        peer = "base_model: own/base\nsequence_len: 9\ndatasets: [{path: a.jsonl}]\n"
    found, _ = imported(peer + lines)
    assert lost_field in lost(found)
