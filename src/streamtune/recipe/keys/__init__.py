"""Define the keys of a recipe, in one file for each topic: their descriptions, and rules about combinations of keys."""
