"""Recipes: their types, the strict reader, aliases of other trainers' keys, and writing recipes as YAML.

Importing this package loads neither torch nor transformers.
"""

from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.keys.engine import EngineSpec
from streamtune.recipe.keys.model_and_tokenizer import ModelInit, TokenizerSpec, TokenizerTrain
from streamtune.recipe.keys.run import SampleSpec
from streamtune.recipe.loader import LoadedRecipe, code_of, load_recipe, names_a_hub, path_exists
from streamtune.recipe.schema import RECIPES, DpoRecipe, GrpoRecipe, Recipe, json_schema
from streamtune.recipe.shipped import (
    ShippedRecipe,
    read_shipped,
    schema_file,
    shipped_names,
    shipped_recipes,
    with_schema,
)
from streamtune.recipe.yaml import dump_recipe

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
    "path_exists",
    "read_shipped",
    "schema_file",
    "shipped_names",
    "shipped_recipes",
    "with_schema",
]
