"""Batches: which prepared rows a step takes, and the tensors made of them."""
