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
