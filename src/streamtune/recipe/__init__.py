"""Read, check and write recipes, the YAML files that describe a run.

Importing this package loads neither torch nor transformers.
"""

from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.keys.engine import EngineSpec
from streamtune.recipe.keys.model_and_tokenizer import ModelInit, TokenizerSpec, TokenizerTrain
from streamtune.recipe.keys.run import SampleSpec
from streamtune.recipe.loader import LoadedRecipe, load_recipe, may_name_hub, path_exists, third_party_code_of
from streamtune.recipe.schema import RECIPES, DpoRecipe, GrpoRecipe, Recipe, json_schema
from streamtune.recipe.shipped import (
    ShippedRecipe,
    find_schema_file,
    read_shipped,
    shipped_names,
    shipped_recipes,
    with_schema_header,
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
    "dump_recipe",
    "find_schema_file",
    "json_schema",
    "load_recipe",
    "may_name_hub",
    "path_exists",
    "read_shipped",
    "shipped_names",
    "shipped_recipes",
    "third_party_code_of",
    "with_schema_header",
]
