"""Recipes written as YAML."""

from __future__ import annotations

import pytest

from streamtune.recipe import Recipe, dump_recipe, load_recipe, shipped_recipes


@pytest.mark.parametrize("shipped", shipped_recipes(), ids=lambda shipped: shipped.name)
def test_a_dumped_recipe_runs_again(shipped, tmp_path):
    recipe = load_recipe(shipped.path).recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe, comment="streamtune 0.1.0\n\nrun again with: streamtune sft recipe.yaml"))
    again = load_recipe(path)
    assert again.recipe == recipe
    assert again.recipe.output_dir == recipe.output_dir
    assert path.read_text().startswith("# streamtune 0.1.0\n#\n# run again")


@pytest.mark.parametrize(
    "text",
    ["1e-5", "no", "yes", "null", "~", "12", "0x10", "true", ".nan", "a: b", "# c", "- d", "'q'", '"', "{x}", "@",
     "é猫", "two\nlines", "trailing\n", "\n\nblank", "  indented\n text", "tab\there", " ", "2024-01-01", "1:30",
     "{% for m in messages %}\n  {{ m['content'] }}\n{% endfor %}\n", "<<", "*a", "&a", "!t", "=", "back\\slash",
     "a" * 300, "line \nend", "\u2028", "\x85", "win\r\nline", "🐈"],
)  # fmt: skip
def test_any_text_comes_back(text, tmp_path):
    recipe = Recipe(
        model_name_or_path="a", datasets=[{"path": "a", "name": text}], sample={"prompt": text}, lora_target=[text]
    )
    path = tmp_path / "recipe.yaml"
    path.write_bytes(dump_recipe(recipe).encode())
    assert load_recipe(path).recipe == recipe


@pytest.mark.parametrize("rate", [1e-5, 2e-3, 1.0, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, 123456789.123])
def test_any_number_comes_back(rate, tmp_path):
    recipe = Recipe(model_name_or_path="a", datasets=[{"path": "x"}], learning_rate=rate)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path).recipe.learning_rate == rate


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"finetuning_type": "lora"},
        {"finetuning_type": "lora", "adapter_type": "ia3"},
        {"finetuning_type": "lora", "adapter_name_or_path": "first/final"},
        {"finetuning_type": "qlora", "adapter_name_or_path": "first/final"},
    ],
)
def test_a_dumped_recipe_names_no_adapter_key_without_effect(keys, tmp_path):
    recipe = Recipe(model_name_or_path="a", datasets=[{"path": "a"}], **keys)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    again = load_recipe(path)
    assert again.recipe == recipe
    assert again.notes == ()
    assert Recipe.model_validate(dict(recipe)) == recipe  # as for a copy with another placement
    assert ("lora_r: 16" in path.read_text()) == (keys == {"finetuning_type": "lora"})


def test_an_adapter_key_that_was_given_is_dumped_though_it_has_no_effect(tmp_path):
    recipe = Recipe(model_name_or_path="a", datasets=[{"path": "a"}], lora_r=8)
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path).recipe == recipe
    assert load_recipe(path).notes == ("'lora_r' has no effect with finetuning_type: full",)


def test_a_default_beside_a_folder_of_adapters_is_noted(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model_name_or_path: a\ndatasets: [a]\nfinetuning_type: lora\nadapter_name_or_path: b\nlora_r: 16\n"
    )
    assert load_recipe(path).notes == ("'lora_r' has no effect with adapter_name_or_path: b",)
