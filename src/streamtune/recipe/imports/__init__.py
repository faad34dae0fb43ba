"""Recipes of other trainers (axolotl, LLaMA-Factory, TRL, ms-swift) in our keys."""

from streamtune.recipe.imports.conversion import FieldFinding, PeerTrainer
from streamtune.recipe.imports.importing import TRAINERS, ImportedRecipe, import_recipe

__all__ = ["TRAINERS", "FieldFinding", "ImportedRecipe", "PeerTrainer", "import_recipe"]
