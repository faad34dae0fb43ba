"""Build a training run from a recipe, and train it."""
