"""Keys of chats: values, contradictions, and aliases of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamtune.programs.imports.axolotl import EVERY_ROLE
from streamtune.programs.imports.importing import import_recipe
from streamtune.recipe import load_recipe

GRPO = "model_name_or_path: a/b\nobjective: grpo\nreward_funcs: [length]\ndatasets: [{path: a.jsonl}]\n"


def test_keys_and_aliases(write) -> None:
    lines = "roles_to_train: [assistant, tool]\ntrain_on: last\ndefault_system_message: Be brief.\n"
    lines += "chat_template_kwargs: {enable_thinking: false}\nreasoning: keep\non_empty: drop\ntrain_on_eos: none\n"
    recipe = load_recipe(write(lines), []).recipe
    assert recipe.roles_to_train == ("assistant", "tool")
    assert (recipe.train_on, recipe.default_system, recipe.reasoning) == ("last", "Be brief.", "keep")
    assert recipe.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("lines", "what", "fix"),
    [
        (
            "train_on: all\ntrain_on_eos: last\n",
            "'train_on_eos' selects tokens, and 'train_on: all' trains on",
            "delete",
        ),
        ("train_on: all\nroles_to_train: [user]\n", "'roles_to_train' selects tokens", "delete one of the two"),
        ("chat_template_kwargs: {messages: []}\n", "cannot set 'messages'", "delete it"),
        ("roles_to_train: []\n", "'roles_to_train'", ""),
        ("roles_to_train: [gpt]\n", "'roles_to_train", ""),
        ("enable_thinking: false\n", "'enable_thinking' is another trainer's key", "chat_template_kwargs"),
        ("mask_history: true\n", "'mask_history' is another trainer's key", "write train_on: last"),
    ],
)
def test_mistakes(refused, lines: str, what: str, fix: str) -> None:
    error = refused(lines)
    assert what in error.what
    assert fix in error.fix


def test_keys_of_answers_that_are_given_mean_nothing_to_grpo(refused) -> None:
    assert "'on_empty' is not read by grpo" in refused("on_empty: drop\n", before=GRPO).what
    assert "'train_on' is not read by grpo" in refused("train_on: all\n", before=GRPO).what


def test_what_is_trained_of_axolotl_datasets(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    entry = "  - {{path: a.jsonl, type: chat_template, roles_to_train: [gpt, human], train_on_eos: {}, "
    entry += "message_field_training: train}}\n"
    text = "base_model: a/b\nsequence_len: 64\nmicro_batch_size: 1\nchat_template_kwargs: {x: 1}\n"
    text += "default_system_message: Hi.\ndatasets:\n" + entry.format("all") + entry.format("turn")
    path.write_text(text)
    made = import_recipe(path, "axolotl")
    (tmp_path / "ours.yaml").write_text(made.text)
    recipe = load_recipe(tmp_path / "ours.yaml", []).recipe
    assert recipe.roles_to_train == ("assistant", "user")
    assert (recipe.train_on_eos, recipe.default_system, recipe.chat_template_kwargs) == ("all", "Hi.", {"x": 1})
    (lost,) = [found for found in made.changes_training if "train_on_eos" in found.theirs]
    assert lost.note == "StreamTune has one train_on_eos for all datasets"
    path.write_text(text + "train_on_inputs: true\n")
    (tmp_path / "ours.yaml").write_text(import_recipe(path, "axolotl").text)
    recipe = load_recipe(tmp_path / "ours.yaml", []).recipe
    # The messages of every role, and nothing of the template around them, as axolotl trains them.
    assert (recipe.train_on, set(recipe.roles_to_train)) == ("assistant", set(EVERY_ROLE))
