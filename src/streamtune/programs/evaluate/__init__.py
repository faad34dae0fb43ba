"""Evaluate a trained model on the rows of a recipe, streamed as in training."""
