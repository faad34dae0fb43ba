"""Evaluate a trained model on a recipe's data, streamed as training streams."""
