"""Recipes: the types, the strict reader, the names other trainers use, and the way back to YAML.

Importing this package loads neither torch nor transformers; ``recipe.build``, which makes the objects of a run, does
and is imported by name.
"""

from streamtune.recipe.code import code_of
from streamtune.recipe.dpo import DpoRecipe
from streamtune.recipe.dump import dump_recipe
from streamtune.recipe.grpo import GrpoRecipe
from streamtune.recipe.jsonschema import json_schema
from streamtune.recipe.kinds import RECIPES
from streamtune.recipe.loader import LoadedRecipe, load_recipe, names_a_hub
from streamtune.recipe.schema import (
    DatasetSpec,
    EngineSpec,
    ModelInit,
    Recipe,
    SampleSpec,
    TokenizerSpec,
    TokenizerTrain,
)
from streamtune.recipe.shipped import (
    ShippedRecipe,
    read_shipped,
    schema_file,
    shipped_names,
    shipped_recipes,
    with_schema,
)

__all__ = [
    "RECIPES",
    "DatasetSpec",
    "DpoRecipe",
    "EngineSpec",
    "GrpoRecipe",
    "LoadedRecipe",
    "ModelInit",
    "Recipe",
    "SampleSpec",
    "ShippedRecipe",
    "TokenizerSpec",
    "TokenizerTrain",
    "code_of",
    "dump_recipe",
    "json_schema",
    "load_recipe",
    "names_a_hub",
    "read_shipped",
    "schema_file",
    "shipped_names",
    "shipped_recipes",
    "with_schema",
]
