"""Attention of a chunk over the keys before it: kernels, masks, and ranks that share a sequence."""
