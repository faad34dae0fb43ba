"""The recipe's types and the JSON schema made from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from streamtune.recipe import RECIPES, Recipe, find_schema_file, json_schema, shipped_recipes, with_schema_header
from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.mistakes import describe_accepted_values, leaf_key_paths, schema_at

ROOT = Path(__file__).parent.parent.parent


def test_the_committed_schema_is_current():
    committed = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert committed == json_schema(), "run: streamtune schema > docs/recipe.schema.json"


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from nodes(value)


def test_defaults_are_those_of_the_keys():
    schema = json_schema()["$defs"]
    for kind in (*RECIPES.values(), DatasetSpec):
        plain = kind.model_json_schema()["properties"]
        for name, field in schema[kind.__name__]["properties"].items():
            assert field.get("default") == plain[name].get("default"), name
    assert schema["DatasetSpec"]["properties"]["input_separator"]["default"] == "\n\n"


def test_every_key_is_described():
    schema = json_schema()
    for spec in schema["$defs"].values():
        for name, field in spec["properties"].items():
            assert len(field.get("description", "")) > 5, name


def test_unknown_keys_are_refused_everywhere_but_in_a_model_configuration():
    schema = json_schema()
    specs = [node for node in nodes(schema) if "properties" in node and node.get("type") == "object"]
    open_ = [spec for spec in specs if spec.get("additionalProperties") is not False]
    assert [spec["required"] for spec in open_] == [["model_type"]]


def test_no_title_of_pydantics_is_left():
    titles = [node["title"] for node in nodes(json_schema()) if isinstance(node.get("title"), str)]
    assert titles == ["StreamTune recipe"]


@pytest.mark.parametrize("kind", RECIPES.values())
def test_every_key_can_be_put_in_words(kind):
    for paths in leaf_key_paths(kind).values():
        for path in paths:
            found, fragment = schema_at(path, kind)
            assert found == path
            assert describe_accepted_values(fragment)


@pytest.mark.parametrize("kind", RECIPES.values())
def test_leaf_names_are_unique_but_for_path_like_ones(kind):
    """``--set NAME=...`` works for every leaf; ``train`` and the like are whole groups."""
    assert {name for name, paths in leaf_key_paths(kind).items() if len(paths) > 1} == set()


@pytest.mark.parametrize("objective", RECIPES)
def test_a_file_is_held_to_the_recipe_of_its_objective(objective):
    """Followed by hand, because a JSON schema validator is not a dependency."""
    node = json_schema()
    while "if" in node:
        holds = node["if"]["properties"]["objective"]["const"] == objective
        node = node["then"] if holds else node["else"]
    definition = json_schema()["$defs"][node["$ref"].removeprefix("#/$defs/")]
    assert set(definition["properties"]) == set(RECIPES[objective].model_fields)


def test_a_recipe_is_frozen():
    recipe = Recipe(model_name_or_path="a", datasets=[{"path": "x"}])
    with pytest.raises(pydantic.ValidationError):
        recipe.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("shipped", shipped_recipes(), ids=lambda shipped: shipped.name)
def test_a_shipped_recipe_points_an_editor_to_the_schema(shipped, tmp_path):
    header, _, _ = shipped.text.partition("\n")
    prefix = "# yaml-language-server: $schema="
    assert header.startswith(prefix)
    assert (shipped.path.parent / header.removeprefix(prefix)).resolve() == find_schema_file()
    copied, _, rest = with_schema_header(shipped.text, tmp_path).partition("\n")
    assert (tmp_path / copied.removeprefix(prefix)).resolve() == find_schema_file()
    assert rest == shipped.text.partition("\n")[2]
    assert shipped.summary.endswith(".")
    assert max(len(line) for line in shipped.text.splitlines()) <= 120


def test_eval_sets_may_be_a_list_in_the_schema_too():
    forms = json_schema()["$defs"]["Recipe"]["properties"]["eval_datasets"]["anyOf"]
    assert [form["type"] for form in forms] == ["object", "array"]
    assert forms[1]["items"]["required"] == ["name", "path"]
