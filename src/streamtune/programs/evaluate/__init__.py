"""Evaluate a trained model on the rows of a recipe, with the chunked forward pass of training."""
