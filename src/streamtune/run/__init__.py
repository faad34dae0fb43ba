"""Build a run from a recipe, and train it."""
