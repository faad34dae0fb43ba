"""Keys of a recipe, with one file for each topic: their descriptions, and rules about combinations of keys."""
